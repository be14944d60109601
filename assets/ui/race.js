// The race's table: one row a lane, sent whole each time; cells are updated in place, so that a reader's place is not lost.
(() => {
  "use strict";
  const { define, make } = window.eagle3;
  const HEAD = ["lane", "tok/s [95%]", "speed-up so far [95%]", "acceptance length", "rounds", "same text", "now"];

  define("race", (root) => {
    const table = make("table", "e3-table e3-race-table");
    const head = make("tr");
    for (const name of HEAD) head.append(make("th", "", name, { scope: "col" }));
    const top = make("thead");
    top.append(head);
    const body = make("tbody");
    table.append(top, body);
    const notes = make("ul", "e3-race-notes");
    root.append(table, notes);

    function row() {
      const made = make("tr");
      made.append(make("th", "", "", { scope: "row" }), ...HEAD.slice(1).map(() => make("td", "")));
      for (const cell of [made.children[1], made.children[2]]) cell.append(make("b", ""), make("span", "e3-race-spread"));
      body.append(made);
      return made;
    }

    function span(cell, value, other) {
      cell.children[0].textContent = value ? value[0] : other;
      cell.children[1].textContent = value ? ` ${value[1]}` : "";
    }

    return (value) => {
      if (!value) return;
      const race = JSON.parse(value);
      table.hidden = !race.rows.length;
      while (body.children.length > race.rows.length) body.lastElementChild.remove();
      race.rows.forEach((one, place) => {
        const line = body.children[place] || row();
        const cells = line.children;
        line.dataset.kind = one.kind;
        line.dataset.state = one.state;
        cells[0].textContent = one.label;
        span(cells[1], one.rate, "–");
        span(cells[2], one.ratio, one.base ? "1 (base)" : "–");
        cells[2].title = one.single;
        cells[3].textContent = one.length;
        cells[4].textContent = one.rounds;
        cells[5].textContent = one.same;
        cells[6].textContent = { out: "✕ out", running: "▶ runs", over: "over" }[one.state] || one.state;
        cells[6].title = one.why;
      });
      const lines = [...race.rows.filter((one) => one.why).map((one) => `✕ ${one.label}: ${one.why}`), ...race.notes];
      notes.replaceChildren(...lines.map((text) => make("li", /^[⚠✕]/u.test(text) ? "e3-warning" : "", text)));
    };
  });
})();
