// Panels of charts: one persistent plotly drawing each. A figure comes from the server with names of CSS variables for colours; they are
// looked up here, so that a chart follows the page's theme.
(() => {
  "use strict";
  const { define, make } = window.eagle3;
  const CONFIG = { displaylogo: false, displayModeBar: false, modeBarButtonsToRemove: ["sendChartToCloud"], doubleClick: false };

  function coloured(node, style) {
    if (typeof node === "string") {
      const found = /^var\((--e3-[a-z0-9-]+)\)$/.exec(node);
      return found ? style.getPropertyValue(found[1]).trim() : node;
    }
    if (Array.isArray(node)) return node.map((part) => coloured(part, style)); // new arrays: plotly ignores ones changed in place
    if (node && typeof node === "object") return Object.fromEntries(Object.entries(node).map(([key, part]) => [key, coloured(part, style)]));
    return node;
  }

  define("charts", (root) => {
    const panels = [];
    let value = "";
    const panel = () => {
      const section = make("section", "e3-panel");
      const title = make("h3", "e3-panel-title");
      const plot = make("div", "e3-plot", null, { role: "img" });
      section.append(title, plot);
      root.append(section);
      return { title, plot, json: "", theme: "" };
    };
    function draw() {
      if (!value || !root.offsetWidth) return; // in a hidden tab: drawn when the tab is shown
      if (!window.Plotly) {
        setTimeout(draw, 50); // its script is still on the way
        return;
      }
      const theme = document.body.classList.contains("dark") ? "dark" : "light";
      const style = getComputedStyle(document.body);
      const wanted = JSON.parse(value);
      while (panels.length < wanted.length) panels.push(panel()); // all of them first: each drawing takes its size from the grid
      wanted.forEach(([title, figure], place) => {
        const one = panels[place];
        const json = JSON.stringify(figure);
        if (one.json === json && one.theme === theme) return;
        one.json = json;
        one.theme = theme;
        one.title.textContent = title;
        one.plot.setAttribute("aria-label", (figure.layout.meta && figure.layout.meta.summary) || title);
        const shown = coloured(figure, style);
        window.Plotly.react(one.plot, shown.data, { ...shown.layout, autosize: true }, CONFIG);
      });
    }
    new ResizeObserver(() => {
      draw();
      for (const one of panels) if (one.json && one.plot.offsetHeight) window.Plotly.Plots.resize(one.plot);
    }).observe(root);
    new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    return (next) => {
      value = next;
      draw();
    };
  });
})();
