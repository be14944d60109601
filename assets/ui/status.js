// The status line, the tiles with the numbers, and the provenance box.
(() => {
  "use strict";
  const { define, make, on } = window.eagle3;

  define("status", (root) => {
    const bar = make("progress", "e3-progress", null, { "aria-label": "Progress", max: "1" });
    const text = make("span", "e3-status-text", "", { role: "status" });
    const detail = make("span", "e3-status-detail");
    const clock = make("span", "e3-status-clock");
    const more = make("details", "e3-status-more");
    const inside = make("div", "e3-popover");
    more.append(make("summary", "", "Details"), inside);
    root.append(bar, text, detail, clock, more);
    return (value) => {
      if (!value) return;
      const status = JSON.parse(value);
      root.dataset.level = status.level;
      bar.hidden = status.level !== "busy";
      if (status.fraction === null || status.fraction === undefined) bar.removeAttribute("value");
      else bar.value = status.fraction;
      if (text.textContent !== status.text) text.textContent = status.text;
      detail.textContent = status.detail || "";
      detail.title = status.detail || "";
      clock.textContent = status.elapsed ? `${status.elapsed.toFixed(status.elapsed < 10 ? 1 : 0)} s` : "";
      more.hidden = !(status.more && status.more.length);
      if (more.hidden) more.open = false;
      inside.replaceChildren(...(status.more || []).map((part) => make("pre", "", part)));
    };
  });

  define("tiles", (root) => {
    const names = ["mean acceptance length", "acceptance rate", "output tok/s", "target passes saved", "time to first token", "tokens / steps"];
    const made = names.map((name) => {
      const tile = make("div", "e3-tile", null, { "data-tile": name });
      tile.append(make("b", "", "–"), make("span", "", name), make("span", "e3-hidden"));
      root.append(tile);
      return tile;
    });
    // `[name, value, explanation]` of the whole run, or the values alone on the way there
    // null: nothing is shown yet, and what was shown before is not of this run
    on("tiles", (tiles) =>
      (tiles || names.map((name) => [name, "–", ""])).forEach((tile, place) => {
        const [value, why] = Array.isArray(tile) ? [tile[1], tile[2]] : [tile, "Up to the last step shown."];
        made[place].children[0].textContent = value;
        made[place].children[2].textContent = why;
        made[place].title = why;
      }),
    );
    return () => {};
  });

  define("about", (root) => {
    const line = make("span", "e3-about-line");
    const more = make("details", "e3-about-more");
    const list = make("dl", "e3-popover");
    more.append(make("summary", "", "Provenance"), list);
    root.append(line, more);
    const write = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));
    return (value) => {
      if (!value) return;
      const about = JSON.parse(value);
      line.textContent = line.title = about.line;
      list.replaceChildren();
      for (const [key, field] of Object.entries(about.fields)) {
        if (typeof field === "object" && field !== null && !Array.isArray(field)) {
          for (const [inner, text] of Object.entries(field)) list.append(make("dt", "", `${key}: ${inner}`), make("dd", "", write(text)));
        } else list.append(make("dt", "", key), make("dd", "", write(field)));
      }
    };
  });

  // Esc and a click elsewhere close an open box.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const open of document.querySelectorAll(".e3-status-more[open], .e3-about-more[open]")) {
      open.open = false;
      open.querySelector("summary").focus();
    }
  });
  document.addEventListener("click", (event) => {
    for (const open of document.querySelectorAll(".e3-status-more[open], .e3-about-more[open]")) if (!open.contains(event.target)) open.open = false;
  });
})();
