// The sweep's table: warnings, results, and every cell with what became of it. The value is JSON; all of it enters as text.
(() => {
  "use strict";
  const { define, make } = window.eagle3;

  define("sweep", (root) => {
    const warnings = make("details", "e3-sweep-warnings");
    const summary = make("summary", "");
    const list = make("ul", "");
    warnings.append(summary, list);
    const scroll = make("div", "e3-sweep-scroll", null, { tabindex: "0", role: "region", "aria-label": "Results of the sweep" });
    const results = make("table", "e3-sweep-table");
    const note = make("p", "e3-muted e3-sweep-note");
    const cells = make("table", "e3-sweep-table e3-sweep-cells");
    const empty = make("p", "e3-empty", "No result yet: press Start, open files, or show what was published.");
    scroll.append(empty, results, note, cells);
    root.append(warnings, scroll);

    const line = (tag, texts) => {
      const row = make("tr");
      for (const text of texts) row.append(make(tag, "", text));
      return row;
    };
    return (value) => {
      if (!value) return;
      const shown = JSON.parse(value);
      warnings.hidden = !shown.warnings.length;
      summary.textContent = `${shown.warnings.length} thing${shown.warnings.length > 1 ? "s" : ""} to know before comparing`;
      list.replaceChildren(...shown.warnings.map((text) => make("li", "", text)));
      const any = shown.rows.length > 0;
      empty.hidden = any || shown.cells.length > 0;
      results.hidden = note.hidden = !any;
      results.replaceChildren(
        line("th", shown.header),
        ...shown.rows.map(([kind, sign, ...texts]) => {
          const row = line("td", texts);
          row.firstChild.prepend(make("span", "e3-sweep-sign", `${sign} `, { "data-kind": kind, "aria-hidden": "true" }));
          return row;
        }),
      );
      note.textContent = shown.note;
      cells.hidden = !shown.cells.length;
      cells.replaceChildren(
        line("th", ["", "cell", "state", "output", "reason or check"]),
        ...shown.cells.map(([state, ...texts]) => {
          const row = line("td", texts);
          row.dataset.state = state;
          return row;
        }),
      );
    };
  });
})();
