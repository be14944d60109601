// The report of a quantisation: a table of tensors, what was left alone and why, and what the saved memory buys.
(() => {
  "use strict";
  const { define, make } = window.eagle3;

  define("quantise", (root) => {
    const said = make("p", "e3-sentence", "", { role: "status" });
    const body = make("div", "e3-list e3-quantise-body", null, { tabindex: "0", role: "region", "aria-label": "What quantising did to each tensor" });
    root.append(said, body);
    return (value) => {
      if (!value) return;
      const report = JSON.parse(value);
      said.textContent = report.said;
      body.replaceChildren();
      if (!report.rows.length) return;
      const table = make("table", "e3-table");
      const head = make("tr");
      for (const cell of report.header) head.append(make("th", "", cell, { scope: "col" }));
      const top = make("thead");
      top.append(head);
      const rest = make("tbody");
      for (const row of report.rows) {
        const line = make("tr", row[0] === "total" ? "e3-total" : "");
        row.forEach((cell, place) => line.append(make(place ? "td" : "th", "", cell, place ? {} : { scope: "row" })));
        rest.append(line);
      }
      table.append(top, rest);
      for (const line of report.buys) body.append(make("p", "e3-buys", line));
      body.append(table, make("h3", "e3-panel-title", "How it was made and checked"));
      for (const note of report.notes) body.append(make("p", "", note));
      body.append(make("h3", "e3-panel-title", "Left as they are"));
      for (const line of report.kept) body.append(make("p", "", line));
    };
  });
})();
