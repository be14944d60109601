// The duel: one sentence, a table, and the answers with a mark at every place where only one draft's token was accepted.
// The value is the whole report each time; text travels as runs (own text and signs in turn) and enters by textContent alone.
(() => {
  "use strict";
  const { define, make, fill, pin, plain } = window.eagle3;
  const SIGNS = { "better": "▲ ", "worse": "▼ ", "no difference shown": "≈ ", "too few prompts": "? " };

  define("duel", (root) => {
    const head = make("div", "e3-duel-head");
    const sentence = make("p", "e3-sentence", "", { role: "status" });
    const choose = make("div", "e3-duel-choose", null, { role: "group", "aria-label": "Which comparison" });
    const tools = make("div", "e3-duel-tools");
    const previous = make("button", "e3-play", "◀", { type: "button", "aria-label": "Previous place where the drafts differ" });
    const next = make("button", "e3-play", "▶", { type: "button", "aria-label": "Next place where the drafts differ" });
    const count = make("output", "e3-muted e3-duel-count");
    const names = make("span", "e3-legend");
    names.append(make("span", "e3-muted", "accepted from:"));
    tools.append(previous, next, count, names);
    head.append(sentence, choose, tools);
    const body = make("div", "e3-duel-body");
    const list = make("div", "e3-list e3-duel-list", null, { tabindex: "0", role: "region", "aria-label": "The answers, place by place" });
    const side = make("div", "e3-duel-side", null, { tabindex: "0", role: "region", "aria-label": "Numbers and warnings" });
    const card = make("div", "e3-card", null, { role: "note", "aria-live": "polite" });
    card.hidden = true;
    body.append(list, side);
    root.append(head, body, card);
    names.hidden = true;
    let report = null;
    let shown = 0;
    let selected = null;
    let last = null; // the place that stepping goes on from, also when its card was closed

    const marked = () => [...list.querySelectorAll(".e3-place-one, .e3-place-other")];

    function table(header, rows) {
      const made = make("table", "e3-table");
      const first = make("tr");
      for (const cell of header) first.append(make("th", "", cell, { scope: "col" }));
      const top = make("thead");
      top.append(first);
      const rest = make("tbody");
      for (const row of rows) {
        const line = make("tr");
        row.forEach((cell, place) => line.append(make(place ? "td" : "th", "", cell, place ? {} : { scope: "row" })));
        rest.append(line);
      }
      made.append(top, rest);
      return made;
    }

    function relation(key, comparison) {
      return {
        both: "accepted from both",
        one: `accepted only from ${comparison.one}`,
        other: `accepted only from ${comparison.other}`,
        neither: "rejected from both",
        apart: "accepted from one; the other had no draft token there",
        alone: "accepted from nobody, and at least one had no draft token there",
      }[key];
    }

    const brief = (key, comparison) =>
      ({ both: "both", one: `only ${comparison.one}`, other: `only ${comparison.other}`, neither: "neither", apart: "one had no draft token" })[key];

    function decision(name, [verdict, step, position, proposed, probability]) {
      const line = make("div");
      line.append(make("b", "", name), document.createTextNode(": "));
      if (proposed === null) {
        line.append(document.createTextNode(`no draft token stood here (step ${step})`));
        return line;
      }
      line.append(document.createTextNode(`${verdict} `), fill(make("bdi", `e3-chip e3-${verdict}`), proposed));
      const sure = probability === null ? "" : `, draft probability ${(probability * 100).toFixed(1)}%`;
      line.append(document.createTextNode(` at draft position ${position} of step ${step}${sure}`));
      return line;
    }

    function close(focus) {
      card.hidden = true;
      if (selected) {
        selected.classList.remove("e3-selected");
        selected.setAttribute("aria-expanded", "false");
        if (focus) selected.focus();
      }
      selected = null;
    }

    function open(place) {
      if (!place) return;
      close(false);
      selected = last = place;
      place.classList.add("e3-selected");
      place.setAttribute("aria-expanded", "true");
      place.focus({ preventScroll: true });
      place.scrollIntoView({ block: "nearest" });
      const comparison = report.comparisons[shown];
      const { text, index, one, other } = place.facts;
      const title = make("div", "e3-card-title");
      title.append(make("b", "", `Token ${index + 1} of the answer: `), fill(make("bdi", "e3-chip e3-candidate"), text));
      card.replaceChildren(title, decision(comparison.one, one), decision(comparison.other, other));
      pin(card, place, list, root);
      tell();
    }

    function tell() {
      const all = marked();
      const at = all.indexOf(last);
      count.textContent = !all.length ? "no place where they differ" : at < 0 ? `${all.length} places where they differ` : `place ${at + 1} of ${all.length} where they differ`;
      previous.disabled = next.disabled = !all.length;
    }

    function step(direction, from = last) {
      const all = marked();
      const before = all.indexOf(from);
      const at = before >= 0 ? before + direction : direction > 0 ? 0 : all.length - 1;
      open(all[Math.max(0, Math.min(at, all.length - 1))]);
    }

    function word([run, key, one, other], index, comparison) {
      const name = relation(key, comparison);
      if (!one) {
        const made = fill(make("span", `e3-place e3-place-${key}`, null, { "data-is": key, title: name }), run);
        return made;
      }
      const made = fill(make("span", `e3-place e3-place-${key}`, null, { role: "button", tabindex: "0", "aria-expanded": "false", "data-is": key, title: name }), run);
      made.setAttribute("aria-label", `${plain(run) || "nothing"}: ${name}`);
      made.facts = { text: run, index, one, other };
      return made;
    }

    function prompt(entry, comparison) {
      const section = make("section", "e3-duel-prompt", null, { "data-prompt": entry.name });
      const title = make("h3", "e3-panel-title", entry.name);
      const asked = fill(make("bdi", "e3-muted e3-duel-asked"), entry.text);
      const rates = make("div", "e3-muted", `accepted: ${comparison.one} ${entry.accepted[0]}, ${comparison.other} ${entry.accepted[1]}`);
      const text = make("p", "e3-places");
      entry.places.forEach((place, index) => text.append(word(place, index, comparison)));
      section.append(title, asked, rates, text);
      if (entry.parted !== null) {
        section.append(make("p", "e3-warning", `From token ${entry.parted + 1} on the two answers differ:`));
        [comparison.one, comparison.other].forEach((name, which) => {
          const line = make("p", "e3-places");
          line.append(make("b", "", `${name}: `));
          for (const run of entry.rest[which]) fill(line, run);
          section.append(line);
        });
      }
      return section;
    }

    // What did not change stays as it is: while a duel runs, somebody reads the prompts that are done, with a card open or a finger down.
    function draw() {
      const comparison = report.comparisons[shown];
      root.dataset.one = comparison.kinds[0];
      root.dataset.other = comparison.kinds[1];
      root.dataset.outcome = comparison.outcome;
      root.dataset.state = report.state;
      sentence.textContent = (report.state === "running" ? "So far: " : SIGNS[comparison.outcome]) + comparison.sentence;
      choose.hidden = report.comparisons.length < 2;
      const others = JSON.stringify(report.comparisons.map((each) => each.other));
      if (choose.dataset.others !== others) {
        choose.dataset.others = others;
        choose.replaceChildren();
        report.comparisons.forEach((each, place) => {
          const button = make("button", "e3-duel-tab", `against ${each.other}`, { type: "button" });
          button.addEventListener("click", () => {
            shown = place;
            draw();
          });
          choose.append(button);
        });
      }
      [...choose.children].forEach((button, place) => button.setAttribute("aria-pressed", String(place === shown)));
      names.replaceChildren(make("span", "e3-muted", "accepted from:"));
      for (const key of ["both", "one", "other", "neither", "apart"]) {
        names.append(make("span", `e3-place e3-place-${key}`, `${brief(key, comparison)} ${comparison.counts[key]}`, { title: relation(key, comparison) }));
      }
      comparison.prompts.forEach((entry, place) => {
        const old = list.children[place];
        const drawn = JSON.stringify([comparison.one, comparison.other, entry]);
        if (old && old.drawn === drawn) return;
        const section = prompt(entry, comparison);
        section.drawn = drawn;
        if (old) old.replaceWith(section);
        else list.append(section);
      });
      while (list.children.length > comparison.prompts.length) list.lastElementChild.remove();
      if (selected && !selected.isConnected) close(false);
      side.replaceChildren(make("h3", "e3-panel-title", report.title));
      for (const warning of comparison.warnings) side.append(make("p", "e3-warning", `⚠ ${warning}`));
      if (report.overview) side.append(table(report.overview[0], report.overview[1]));
      side.append(table(["", comparison.one, comparison.other, "difference [95%]"], comparison.rows));
      side.append(make("p", "", comparison.places));
      for (const note of report.notes) side.append(make("p", "e3-muted", note));
      tell();
    }

    previous.addEventListener("click", () => step(-1));
    next.addEventListener("click", () => step(1));
    list.addEventListener("click", (event) => {
      const place = event.target.closest(".e3-place-one, .e3-place-other");
      if (place) open(place);
      else close(false);
    });
    root.addEventListener("keydown", (event) => {
      const place = event.target.closest(".e3-places .e3-place-one, .e3-places .e3-place-other");
      if (event.key === "Escape") close(true);
      else if (place && (event.key === "Enter" || event.key === " ")) open(place);
      else if (place && event.key === "ArrowRight") step(1, place);
      else if (place && event.key === "ArrowLeft") step(-1, place);
      else return;
      event.preventDefault();
    });
    list.addEventListener("scroll", () => {
      if (selected) pin(card, selected, list, root);
    });
    document.addEventListener("click", (event) => {
      if (selected && !root.contains(event.target)) close(false);
    });
    list.append(make("p", "e3-empty", "Press “Run the duel”: both drafts answer the same prompts in turn, and only the draft differs. Or open two saved traces of the same prompts."));
    previous.disabled = next.disabled = true;
    return (value) => {
      if (!value) return;
      const before = report;
      names.hidden = false;
      report = JSON.parse(value);
      if (!before || before.title !== report.title || shown >= report.comparisons.length) shown = 0;
      draw();
      if (!before || before.title !== report.title || before.state !== "running") list.scrollTop = 0; // another report, from its beginning
    };
  });
})();
