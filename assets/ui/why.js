// Why this speed: a sentence, tables, notes, and a line to copy. Everything enters by textContent.
(() => {
  "use strict";
  const { define, make } = window.eagle3;

  define("why", (root) => {
    function table(one) {
      const made = make("table", "e3-table e3-why-table");
      made.append(make("caption", "e3-muted", one.caption));
      const head = make("tr");
      for (const cell of one.header) head.append(make("th", "", cell, { scope: "col" }));
      const top = make("thead");
      top.append(head);
      const body = make("tbody");
      for (const row of one.rows) {
        const line = make("tr");
        row.forEach((cell, place) => line.append(make(place ? "td" : "th", "", cell, place ? {} : { scope: "row" })));
        body.append(line);
      }
      made.append(top, body);
      return made;
    }
    return (value) => {
      if (!value) return;
      const why = JSON.parse(value);
      root.tabIndex = 0;
      root.setAttribute("role", "region");
      root.setAttribute("aria-label", "Why this speed");
      const notes = make("ul", "e3-race-notes");
      for (const note of why.notes) notes.append(make("li", note.startsWith("⚠") ? "e3-warning" : "", note));
      root.replaceChildren(make("p", "e3-sentence", why.sentence, { role: "status" }), ...why.tables.map(table), notes);
      if (why.code) root.append(make("pre", "e3-why-code", why.code));
    };
  });
})();
