// The microscope: rows of chips, the answer, a player over the steps, and the card of the selected token.
// The server sends every step once; what is on screen is the first `shown` of them, so scrubbing and playing need no server.
(() => {
  "use strict";
  const { define, reader, make, fill, pin, plain, emit } = window.eagle3;
  const NAMES = {
    accepted: "accepted draft token",
    rejected: "rejected draft token",
    unreached: "draft token never reached",
    recovered: "target's own token, in place of the rejected one",
    bonus: "target's own token, a bonus: the whole draft was accepted",
    plain: "target's own token",
  };
  const LEGEND = [
    ["accepted", "✓ accepted"],
    ["rejected", "rejected"],
    ["unreached", "never reached"],
    ["recovered", "target’s own"],
  ];

  define("steps", (root, trigger) => {
    // ---- what is there
    const head = make("div", "e3-head");
    for (const [mark, name] of LEGEND) head.append(make("span", `e3-chip e3-${mark}`, name));
    const label = make("span", "e3-run-label");
    head.append(label);
    const list = make("div", "e3-list", null, { role: "grid", "aria-label": "Engine steps: one row a step, arrow keys move among tokens" });
    const text = make("div", "e3-answer", null, { "aria-label": "The answer, each token marked by where it came from", tabindex: "0", role: "region" });
    const card = make("div", "e3-card", null, { role: "note", "aria-live": "polite" });
    card.hidden = true;
    const player = make("div", "e3-player");
    const play = make("button", "e3-play", "▶", { type: "button", "aria-label": "Play the steps" });
    const slider = make("input", "e3-slider", null, { type: "range", min: "0", max: "0", value: "0", "aria-label": "Step" });
    const count = make("output", "e3-count", "no steps yet", { "aria-live": "off" }); // the slider says it; at every step it would be told on and on
    const speed = make("input", "e3-speed", null, { type: "range", min: "-5", max: "4", step: "0.5", value: "0", "aria-label": "Speed of play" });
    const factor = make("output", "e3-factor", "1×");
    player.append(play, slider, count, make("span", "e3-muted", "speed"), speed, factor);
    root.append(head, list, text, player, card);

    let steps, rows, words, alternatives, shown, live, final, state, selected, timer, followed, trailed;
    let held; // somebody looks at an earlier step: what arrives meanwhile waits for the slider or the player

    function reset() {
      stop();
      steps = [];
      rows = [];
      words = [];
      alternatives = [];
      shown = 0;
      live = true;
      final = null;
      state = "";
      selected = null;
      held = false;
      followed = trailed = true;
      list.replaceChildren();
      text.replaceChildren();
      card.hidden = true;
      emit("tiles", null);
      bounds();
    }

    // ---- records
    const apply = (record) => {
      if (record.t === "run") {
        label.textContent = record.label;
        root.dataset.run = record.id;
        root.dataset.kind = record.kind;
        state = record.state;
        live = state === "running";
      } else if (record.t === "step") {
        if (!steps.length) text.replaceChildren(); // the answer's first piece may be here before the step that says it again
        steps.push(record);
        rows.push(null);
      } else if (record.t === "text") {
        text.append(fill(make("span", "e3-word e3-word-plain", null, { "data-token": record.ids.join(" "), "data-mark": "plain" }), record.run));
      } else if (record.t === "alternatives") {
        record.list.forEach((one, place) => (alternatives[record.from + place] = one));
        if (selected) describe(selected);
      } else if (record.t === "numbers") {
        final = record.tiles;
        if (shown === steps.length) emit("tiles", final);
      } else if (record.t === "state") {
        state = record.state;
        live = false;
        root.dataset.state = state;
        if (held) tell();
      }
    };

    // ---- drawing
    function chip(step, part) {
      const [token, mark, position, run, probability, output, cut] = part;
      const made = make("bdi", `e3-chip e3-${mark}${cut ? " e3-cut" : ""}`, null, {
        role: "gridcell",
        tabindex: "-1",
        "data-token": token,
        "data-mark": mark,
        "data-step": step.i,
        "data-position": position,
      });
      if (output !== null) made.dataset.output = output;
      if (cut) made.dataset.cut = "1";
      made.setAttribute("aria-label", `${NAMES[mark]}${cut ? ", cut off by the stop" : ""}: ${plain(run) || "nothing"}; step ${step.i}, position ${position}`);
      made.facts = { step, token, mark, position, run, probability, output, cut };
      return fill(made, run);
    }

    function row(step) {
      const made = make("div", "e3-row", null, { role: "row", "data-step": step.i });
      made.append(make("span", "e3-number", step.phase === "prefill" ? "prefill" : String(step.i), { role: "rowheader" }));
      for (const part of step.chips) made.append(chip(step, part));
      if (!step.chips.length) made.append(make("span", "e3-muted", `${step.scheduled} tokens of the prompt`));
      if (step.finish) made.append(make("span", "e3-muted e3-finish", `end: ${step.finish}`));
      return made;
    }

    // Show the first `wanted` steps: rows and words are made once and hidden or shown from then on.
    function grow(wanted) {
      wanted = Math.max(0, Math.min(wanted, steps.length));
      for (; shown < wanted; shown += 1) {
        const step = steps[shown];
        if (!rows[shown]) {
          rows[shown] = { row: row(step), words: step.out.map((part) => word(step, part)) };
          list.append(rows[shown].row);
          text.append(...rows[shown].words);
        }
        rows[shown].row.hidden = false;
        rows[shown].words.forEach((one) => (one.hidden = false));
      }
      for (; shown > wanted; shown -= 1) {
        rows[shown - 1].row.hidden = true;
        rows[shown - 1].words.forEach((one) => (one.hidden = true));
      }
      if (selected && selected.closest(".e3-row").hidden) close();
      const entry = list.querySelector('[tabindex="0"]'); // what Tab reaches must be in sight; a part of the prompt has no token
      if (!entry || entry.closest(".e3-row").hidden) rove(list.querySelector(".e3-row:not([hidden]) .e3-chip"));
      if (followed) list.scrollTop = list.scrollHeight;
      if (trailed) text.scrollTop = text.scrollHeight;
      if (shown === steps.length && final) emit("tiles", final);
      else emit("tiles", shown ? steps[shown - 1].tiles : null);
      bounds();
    }

    function word(step, part) {
      const [token, mark, position, output, run] = part;
      const made = make("span", `e3-word e3-word-${mark}`, null, { "data-token": token, "data-mark": mark, "data-step": step.i, "data-position": position, "data-output": output });
      words[output] = made;
      return fill(made, run);
    }

    function bounds() {
      slider.max = String(steps.length);
      slider.value = String(shown);
      slider.disabled = play.disabled = !steps.length;
      count.textContent = steps.length ? `step ${shown} of ${steps.length}` : "no steps yet";
      slider.setAttribute("aria-valuetext", count.textContent);
    }

    // ---- the player: real step times, scaled; within a slow step the draft is shown before the verdict (the order is real, not timed)
    const rate = () => 2 ** Number(speed.value);
    function stop() {
      clearTimeout(timer);
      timer = null;
      play.textContent = "▶";
      play.setAttribute("aria-label", "Play the steps");
      for (const one of list.querySelectorAll(".e3-proposed, .e3-waiting")) one.classList.remove("e3-proposed", "e3-waiting");
      rows?.[shown - 1]?.words.forEach((one) => (one.hidden = false)); // they waited for the verdict
    }
    function tick() {
      if (shown >= steps.length) {
        stop();
        tell();
        return;
      }
      const step = steps[shown];
      const pause = Math.min(Math.max((step.took * 1000) / rate(), 16), 10000);
      grow(shown + 1);
      tell();
      const made = rows[shown - 1].row;
      const slow = pause > 250 && step.chips.length > 1;
      if (slow) {
        const drawn = [...made.querySelectorAll(".e3-chip")];
        drawn.forEach((one, place) => one.classList.add(place < drawn.length - 1 ? "e3-proposed" : "e3-waiting"));
        rows[shown - 1].words.forEach((one) => (one.hidden = true));
        timer = setTimeout(() => {
          drawn.forEach((one) => one.classList.remove("e3-proposed", "e3-waiting"));
          rows[shown - 1].words.forEach((one) => (one.hidden = false));
          timer = setTimeout(tick, pause / 2);
        }, pause / 2);
      } else timer = setTimeout(tick, pause);
    }
    play.addEventListener("click", () => {
      if (timer) {
        stop();
        held = shown < steps.length;
        return;
      }
      if (shown >= steps.length) grow(0);
      held = false;
      followed = trailed = true;
      play.textContent = "❚❚";
      play.setAttribute("aria-label", "Pause");
      tick();
    });
    slider.addEventListener("input", () => {
      stop();
      followed = trailed = true;
      grow(Number(slider.value));
      held = shown < steps.length;
      tell();
    });
    speed.addEventListener("input", () => {
      const value = rate();
      factor.textContent = value >= 1 ? `${+value.toFixed(1)}×` : `1/${+(1 / value).toFixed(1)}×`;
      speed.setAttribute("aria-valuetext", `${factor.textContent} of the recorded speed`);
    });
    // The charts follow: the server draws them for the first `shown` steps, at most twice a second.
    let told = 0;
    let telling = null;
    function tell() {
      if (live || telling) return;
      telling = setTimeout(() => {
        telling = null;
        told = Date.now();
        trigger("scrub", { steps: shown });
      }, Math.max(0, 500 - (Date.now() - told)));
    }

    // ---- selection: one tab stop, arrows move, Esc closes
    function rove(next) {
      const old = list.querySelector('[tabindex="0"]');
      if (old) old.tabIndex = -1;
      if (next) next.tabIndex = 0;
    }
    function select(next) {
      if (!next) return;
      if (selected) selected.classList.remove("e3-selected");
      root.querySelectorAll(".e3-word-selected").forEach((one) => one.classList.remove("e3-word-selected"));
      selected = next;
      followed = false;
      rove(next);
      next.classList.add("e3-selected");
      next.focus({ preventScroll: true });
      next.scrollIntoView({ block: "nearest", inline: "nearest" });
      const twin = next.facts.output === null ? null : words[next.facts.output];
      if (twin) {
        twin.classList.add("e3-word-selected");
        twin.scrollIntoView({ block: "nearest" });
      }
      describe(next);
    }
    function close() {
      card.hidden = true;
      if (selected) selected.classList.remove("e3-selected");
      root.querySelectorAll(".e3-word-selected").forEach((one) => one.classList.remove("e3-word-selected"));
      selected = null;
    }

    function describe(next) {
      const { step, token, mark, position, run, probability, output, cut } = next.facts;
      const title = make("b", "e3-card-title");
      title.append(make("span", "", `${NAMES[mark]} `), fill(make("bdi", `e3-chip e3-${mark}`), run));
      const lines = [make("span", "", `step ${step.i} · position ${position} · token id ${token}`)];
      if (mark === "accepted" || mark === "rejected" || mark === "unreached")
        lines.push(make("span", "", probability === null ? "draft confidence: not available on this server" : `draft confidence ${(probability * 100).toFixed(1)}%`));
      if (cut) lines.push(make("span", "", "The target accepted it, but the answer had ended: counted, not shown in the text."));
      if (step.counted) lines.push(make("span", "e3-muted", "rebuilt from the server's counts: which tokens were rejected, and when, is not known"));
      else lines.push(make("span", "e3-muted", `context ${step.context} tokens · step took ${(step.took * 1000).toFixed(0)} ms · ${step.batch} request${step.batch === 1 ? "" : "s"} in the batch`));
      // The target's distribution at this place: of this token where it is in the answer, of the token that replaced a rejected one.
      let place = output;
      if (mark === "rejected") {
        const own = step.chips[step.chips.length - 1];
        place = own && own[2] === position ? own[5] : null;
      }
      const table = alternativesOf(place, mark);
      card.replaceChildren(title, ...lines, table);
      pin(card, next, list, root);
    }

    function alternativesOf(place, mark) {
      if (place === null || !alternatives[place] || !alternatives[place].length) {
        const why = mark === "unreached" ? "the target never looked here" : live ? "come with the end of the answer" : "tick the box and run again to see them";
        return make("span", "e3-muted", `target's alternatives: ${why}`);
      }
      const table = make("table", "e3-alternatives");
      table.append(make("caption", "", mark === "rejected" ? "what the target wanted here" : "the target's alternatives here"));
      for (const [run, logprob] of alternatives[place]) {
        const line = make("tr");
        const chance = Math.exp(logprob);
        const bar = make("td", "e3-chance");
        const inner = make("span");
        inner.style.width = `${Math.max(1, chance * 100)}%`;
        bar.append(inner);
        const name = make("td");
        name.append(fill(make("bdi", "e3-chip e3-candidate"), run));
        line.append(name, make("td", "", `${(chance * 100).toFixed(1)}%`), bar);
        table.append(line);
      }
      return table;
    }

    function chipsOf(line) {
      return line ? [...line.querySelectorAll(".e3-chip")] : [];
    }
    function vertical(from, direction) {
      const place = chipsOf(from.closest(".e3-row")).indexOf(from);
      let line = from.closest(".e3-row");
      do line = direction > 0 ? line.nextElementSibling : line.previousElementSibling;
      while (line && (line.hidden || !chipsOf(line).length));
      const there = chipsOf(line);
      return there[Math.min(place, there.length - 1)];
    }
    list.addEventListener("keydown", (event) => {
      const from = event.target.closest(".e3-chip");
      if (!from) return;
      const line = chipsOf(from.closest(".e3-row"));
      const place = line.indexOf(from);
      const all = () => [...list.querySelectorAll(".e3-row:not([hidden]) .e3-chip")];
      const moves = {
        ArrowRight: () => line[place + 1] || vertical(line[0], 1),
        ArrowLeft: () => line[place - 1] || chipsOf(vertical(line[0], -1)?.closest(".e3-row")).pop(),
        ArrowDown: () => vertical(from, 1),
        ArrowUp: () => vertical(from, -1),
        Home: () => all()[0],
        End: () => all().pop(),
        Enter: () => from,
        " ": () => from,
      };
      if (event.key === "Escape") close();
      else if (moves[event.key]) select(moves[event.key]());
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    list.addEventListener("click", (event) => select(event.target.closest(".e3-chip")));
    text.addEventListener("click", (event) => {
      const one = event.target.closest(".e3-word");
      if (one && one.dataset.output) select(list.querySelector(`.e3-chip[data-output="${Number(one.dataset.output)}"]`));
    });
    list.addEventListener("scroll", () => {
      if (!selected) followed = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      if (selected) pin(card, selected, list, root);
    });
    text.addEventListener("scroll", () => {
      trailed = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    });
    document.addEventListener("click", (event) => {
      if (selected && !root.contains(event.target)) close();
    });

    reset();
    list.append(make("p", "e3-empty", "Run a prompt, or open a saved trace: each row is one engine step, what the draft proposed and what the target decided."));
    const clean = () => list.querySelector(".e3-empty")?.remove();
    const read = reader(reset, (record) => {
      clean();
      apply(record);
    });
    return (value) => {
      if (!value) return;
      read(value);
      // Once for all that came, not for each step: a file brings thousands, and every look at a height lays them all out.
      if (timer || held) bounds();
      else grow(steps.length);
    };
  });
})();
