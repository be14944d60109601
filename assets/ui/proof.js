// The proof: a verdict in tiles, the counts behind it, and every place where two answers part. And the badge above the tabs.
(() => {
  "use strict";
  const { define, make, fill } = window.eagle3;

  define("badge", (root) => (value) => {
    const shown = value ? JSON.parse(value) : { kind: "none", words: "", detail: "" };
    root.replaceChildren();
    root.dataset.kind = shown.kind;
    root.dataset.hash = shown.hash || "";
    root.title = shown.label ? `${shown.label}. ${shown.detail}` : shown.detail;
    if (!shown.words) return;
    root.append(make(shown.kind === "absent" ? "span" : "b", "e3-badge-words", shown.words));
    if (shown.kind !== "absent") root.append(make("span", "e3-badge-detail", shown.short));
  });

  define("proof", (root) => {
    const tiles = make("div", "e3-verdict");
    const scroll = make("div", "e3-proof-scroll", null, { tabindex: "0", role: "region", "aria-label": "What was verified" });
    const counts = make("table", "e3-sweep-table");
    const notes = make("ul", "e3-proof-notes");
    const places = make("table", "e3-sweep-table e3-proof-places");
    const empty = make("p", "e3-empty");
    const why = make("p", "e3-proof-why");
    scroll.append(empty, counts, notes, places, why);
    root.append(tiles, scroll);

    const line = (tag, texts) => {
      const row = make("tr");
      for (const text of texts) row.append(make(tag, "", text));
      return row;
    };
    const token = (parts) => {
      const cell = make("td");
      const chip = make("bdi", "e3-proof-token");
      cell.append(fill(chip, parts));
      return cell;
    };
    return (value) => {
      const shown = value ? JSON.parse(value) : { empty: "" };
      const any = !!shown.rows;
      empty.hidden = any;
      empty.textContent = shown.empty || "";
      why.textContent = shown.why || "";
      tiles.hidden = counts.hidden = notes.hidden = places.hidden = !any;
      if (!any) return;
      tiles.replaceChildren(
        ...shown.tiles.map(([name, text, why, kind]) => {
          const tile = make("div", "e3-tile", null, { title: why, "data-tile": name });
          if (kind) tile.dataset.kind = kind;
          tile.append(make("b", "", text), make("span", "", name));
          return tile;
        }),
      );
      counts.replaceChildren(line("th", shown.header), ...shown.rows.map((row) => line("td", row)));
      notes.replaceChildren(...shown.notes.map((text) => make("li", "", text)));
      places.hidden = !shown.differences.length;
      places.replaceChildren(
        line("th", ["prompt", "at a time", "where", "the baseline's token", "this lane's token", "below the best, nats", "verdict"]),
        ...shown.differences.map((one) => {
          const row = make("tr", "", null, { "data-verdict": one.verdict });
          row.append(make("td", "", one.prompt), make("td", "", String(one.at_once)), make("td", "", one.where));
          row.append(token(one.theirs), token(one.ours), make("td", "", one.margin || "–"), make("td", "", one.said));
          return row;
        }),
      );
    };
  });
})();
