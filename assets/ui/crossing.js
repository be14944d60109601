// The barrier in a running engine: the error of the engine without the fix, or the answer of the one with it, and why.
(() => {
  "use strict";
  const { define, make, fill } = window.eagle3;

  define("crossing", (root) => {
    const title = make("h3", "e3-crossing-title", "", { role: "status" });
    const message = make("p", "e3-crossing-message");
    const words = make("div", "e3-crossing-words");
    const facts = make("p", "e3-crossing-facts");
    const answer = make("p", "e3-crossing-answer", null, { "aria-label": "The answer, each token marked by where it came from" });
    const rows = make("div", "e3-crossing-rows", null, { "aria-label": "Engine steps: one row a step" });
    const log = make("details", "e3-crossing-log");
    const tail = make("pre");
    const at = make("p", "e3-muted");
    log.append(make("summary", "", "The last lines of the engine’s log"), tail, at);
    const cache = make("p", "e3-crossing-cache e3-muted");
    root.append(title, message, facts, words, answer, rows, log, cache);
    root.tabIndex = 0;
    root.setAttribute("role", "region");
    root.setAttribute("aria-label", "The barrier in a running engine");

    return (value) => {
      if (!value) return;
      const found = JSON.parse(value);
      root.dataset.state = found.state;
      title.textContent = found.title;
      message.replaceChildren();
      fill(message, found.message);
      message.hidden = !found.message.join("");
      words.replaceChildren(...found.words.map((text) => make("p", "", text)));
      facts.textContent = found.facts;
      facts.hidden = !found.facts;
      answer.replaceChildren(...found.answer.map(([mark, run]) => fill(make("span", `e3-word e3-word-${mark}`), run)));
      answer.hidden = !found.answer.length;
      rows.replaceChildren(
        ...found.rows.map(([step, chips]) => {
          const row = make("div", "e3-row");
          row.append(make("span", "e3-number", step), ...chips.map(([mark, run]) => fill(make("bdi", `e3-chip e3-${mark}`, null, { "data-mark": mark, title: mark }), run)));
          return row;
        }),
      );
      rows.hidden = !found.rows.length;
      tail.replaceChildren();
      for (const line of found.log) {
        fill(tail, line);
        tail.append("\n");
      }
      at.textContent = found.log_at;
      log.hidden = !found.log.length;
      cache.textContent = found.cache;
    };
  });
})();
