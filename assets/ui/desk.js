// The presenter's desk, a tab of the lab's page: what the room sees, what it may see next, and the engine behind it.
// Acts are sent to lab/ui/workshop/desk.py; what is selected in the microscope is what Push and Freeze are about.
(() => {
  "use strict";
  const { define, make, fill, follow, qr } = window.eagle3;

  // gradio builds a tab when it is first opened, so what must be known before that is kept here: what is selected in the microscope
  // (remembered before a click elsewhere takes the selection away), and what a deep link asked for.
  let chosen = null;
  const listeners = [];
  const microscope = () => document.querySelector("#e3-steps .e3-steps-root");
  function look() {
    const steps = microscope();
    if (!steps || !steps.dataset.run) return;
    const chip = steps.querySelector(".e3-list .e3-selected");
    if (chip) chosen = { run: steps.dataset.run, step: Number(chip.dataset.step), position: Number(chip.dataset.position) };
    else if (chosen && chosen.run !== steps.dataset.run) chosen = null;
    listeners.forEach((call) => call());
  }
  document.addEventListener("pointerdown", look, true);
  document.addEventListener("keyup", look, true);

  async function send(name, values) {
    const response = await fetch("room/act", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ act: name, ...values }) });
    return response.json();
  }

  // A deep link: /present/?scenario=NAME&scene=2 goes there once, and opens the tab.
  const asked = new URLSearchParams(location.search);
  let linked = null;
  if (asked.get("scenario")) {
    linked = send("scene", { scenario: asked.get("scenario"), at: Number(asked.get("scene") || 1) });
    asked.delete("scenario");
    asked.delete("scene");
    history.replaceState(null, "", `${location.pathname}${asked.size ? `?${asked}` : ""}`);
    const open = setInterval(() => {
      const tab = document.getElementById("e3-tab-workshop-button");
      if (!tab) return;
      clearInterval(open);
      tab.click();
    }, 200);
  }

  define("desk", (root) => {
    const button = (name, call, className) => {
      const made = make("button", className || "", name, { type: "button" });
      made.addEventListener("click", call);
      return made;
    };
    const said = make("p", "e3-desk-said", "", { role: "status" });

    const report = (record) => {
      const error = record.error;
      said.textContent = error ? `${error.what} ${error.why} ${error.todo}` : record.said;
      said.dataset.level = error ? "error" : "done";
    };
    const lost = () => report({ error: { what: "The room does not answer:", why: "", todo: "try again." } });
    const act = (name, values) => send(name, values).then(report, lost);
    if (linked) linked.then(report, lost);

    const selection = make("p", "e3-muted e3-desk-selection");
    const tell = () => {
      selection.textContent = chosen
        ? `Selected in the microscope: step ${chosen.step}, token ${chosen.position}`
        : "Select a token in the microscope to push or freeze its step.";
    };
    listeners.push(tell);
    tell();
    const run = () => microscope()?.dataset.run || "";
    const step = () => (chosen && chosen.run === run() ? chosen : { step: null, position: 1 });

    // ---- the room
    const room = make("section", "e3-desk-card", null, { "aria-label": "The room" });
    const code = make("div", "e3-desk-qr");
    const address = make("div", "e3-desk-address");
    const health = make("p", "e3-engine");
    const draft = make("select", "", null, { "aria-label": "Draft of the room's lane" });
    const k = make("input", "", null, { type: "number", min: "1", max: "32", "aria-label": "K of the room's lane" });
    const lane = make("div", "e3-desk-buttons");
    const checks = make("ul", "e3-desk-checks", null, { "aria-label": "Preflight" });
    const ready = make("p", "e3-desk-verdict");
    lane.append(
      draft,
      make("span", "", "K"),
      k,
      button("Use this lane", () => act("lane", { draft: draft.value, k: Number(k.value) })),
      button("Restart the engine", () => act("restart", {})),
      button("Preflight", () => act("check", {})),
    );
    const top = make("div", "e3-desk-top");
    top.append(code, address);
    room.append(make("h3", "", "Room and engine"), top, health, lane, ready, checks);

    // ---- the stage
    const stage = make("section", "e3-desk-card", null, { "aria-label": "The stage" });
    const now = make("p", "e3-desk-now");
    const tally = make("div", "e3-desk-tally");
    const show = make("div", "e3-desk-buttons");
    const prompt = () => document.querySelector("#e3-prompt textarea")?.value || "";
    show.append(
      button("Run the prompt for all", () => act("run", { prompt: prompt() }), "e3-primary"),
      button("Push the trace", () => act("push", { run: run() })),
      button("Push the step", () => act("push", { run: run(), step: step().step ?? -1 })),
    );
    const game = make("div", "e3-desk-buttons");
    const reveal = button("Reveal", () => act("reveal", {}));
    game.append(
      button("Freeze the step", () => act("freeze", { run: run(), step: step().step, position: step().position })),
      reveal,
      button("Clear", () => act("clear", {})),
      button("Play the last good recording", () => act("replay", {})),
    );
    const large = make("a", "", "Open the large-type view (for the projector)", { href: "../stage", target: "_blank", rel: "noopener" });
    stage.append(make("h3", "", "Stage"), now, selection, show, game, tally, large);

    // ---- scenarios and offers
    const talk = make("section", "e3-desk-card", null, { "aria-label": "Scenario and offers" });
    const pick = make("select", "", null, { "aria-label": "Scenario" });
    const scenes = make("ol", "e3-desk-scenes");
    const steps = make("div", "e3-desk-buttons");
    let state = null;
    const go = (by) => {
      const at = state?.scenario && state.scenario.name === pick.value ? state.scenario.at + by : 1;
      return act("scene", { scenario: pick.value, at });
    };
    steps.append(
      pick,
      button("Back", () => go(-1)),
      button("Next", () => go(1), "e3-primary"),
      button("Reset the room", () => act("reset", {})),
    );
    const offers = make("ul", "e3-desk-offers", null, { "aria-label": "Offered by attendees" });
    talk.append(make("h3", "", "Scenario"), steps, scenes, make("h3", "", "Offered by attendees"), offers);
    const columns = make("div", "e3-desk-columns");
    columns.append(room, stage, talk);
    root.append(said, columns);

    // Builds what is in `parent` anew where it has changed. A button that has the keyboard's focus hands it to the one of the same `data-of`.
    const once = (parent, key, build) => {
      const text = JSON.stringify(key);
      if (parent.dataset.drawn === text) return;
      const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.of : undefined;
      parent.dataset.drawn = text;
      parent.replaceChildren(...build());
      if (focused !== undefined) [...parent.querySelectorAll("[data-of]")].find((one) => one.dataset.of === focused)?.focus();
    };
    const of = (made, name) => {
      made.dataset.of = name;
      return made;
    };
    const drawScenes = () => {
      const found = state.scenarios.find((one) => one.name === pick.value);
      const at = state.scenario && state.scenario.name === pick.value ? state.scenario.at : 0;
      once(scenes, [found, at], () =>
        (found ? found.scenes : []).map((name, place) => {
          const line = make("li", place + 1 === at ? "e3-now" : "");
          line.append(of(button(name, () => act("scene", { scenario: pick.value, at: place + 1 }), "e3-link"), `scene ${place}`));
          if (place + 1 === at) line.setAttribute("aria-current", "step");
          return line;
        }),
      );
    };
    pick.addEventListener("change", drawScenes);

    function draw(record) {
      state = record;
      const join = record.join;
      once(code, join.url, () => (join.url ? [qr(join.qr, `QR code of ${join.url}`)] : []));
      once(address, [join, record.engine.present, record.engine.waiting], () => [
        make("b", "e3-join-url", join.url || ""),
        make("span", "e3-muted", `${record.engine.present} here · ${record.engine.waiting} in line`),
        make("span", "e3-muted", join.note || ""),
      ]);
      health.dataset.health = record.engine.health;
      health.textContent = `${record.engine.label}: ${record.engine.health === "down" && record.trouble ? record.trouble : record.engine.said}`;
      health.title = health.textContent;
      once(draft, record.drafts, () => record.drafts.map((name) => make("option", "", { none: "no draft", bf16: "BF16", fp8: "FP8" }[name] || name, { value: name })));
      if (draft.dataset.now !== `${record.draft}/${record.k}`) {
        draft.dataset.now = `${record.draft}/${record.k}`;
        draft.value = record.draft;
        k.value = record.k;
      }
      ready.textContent = record.verdict.text;
      ready.dataset.good = String(record.verdict.good);
      const signs = { wait: "○", busy: "…", good: "✓", bad: "✕" };
      once(checks, record.checks, () => record.checks.map((one) => make("li", `e3-check-${one.state}`, `${signs[one.state]} ${one.name}: ${one.text || "waiting"}`, { title: one.text })));
      const kinds = { empty: "nothing: the large-type view shows how to join", say: "a text", trace: "a trace", guess: "a step to guess about" };
      const title = record.stage.title.join("");
      now.textContent = `On the stage: ${record.stage.recording || kinds[record.stage.kind]}${title ? ` (${title})` : ""}`;
      const playing = record.stage.game;
      reveal.disabled = !playing || playing.revealed;
      once(tally, [record.tally, record.scores, playing && playing.revealed], () => {
        const lines = [];
        if (record.tally) lines.push(make("p", "", `Accept ${record.tally.accept} · Reject ${record.tally.reject}${playing && playing.revealed ? ` · it was ${playing.truth ? "accepted" : "rejected"}` : ""}`));
        if (record.scores.guesses) lines.push(make("p", "e3-muted", `So far ${record.scores.right} of ${record.scores.guesses} guesses right, ${record.scores.players} players, best ${record.scores.best}`));
        return lines;
      });
      once(pick, record.scenarios, () => record.scenarios.map((one) => make("option", "", one.title, { value: one.name })));
      if (record.scenario && pick.dataset.now !== `${record.scenario.name}/${record.scenario.at}`) {
        pick.dataset.now = `${record.scenario.name}/${record.scenario.at}`;
        pick.value = record.scenario.name;
      }
      drawScenes();
      once(offers, record.offers, () =>
        record.offers.length
          ? record.offers.map((offer) => {
              const line = make("li");
              line.append(make("span", "", `Seat ${offer.seat} · ${offer.tokens} tokens `));
              if (!offer.looked) line.append(of(button("Look", () => act("look", { offer: offer.id })), offer.id));
              else {
                line.append(of(button("Show to all", () => act("allow", { offer: offer.id })), offer.id));
                const text = make("div", "e3-desk-offer");
                text.append(make("b", "", "Prompt: "), fill(make("span"), offer.prompt), make("br"), make("b", "", "Answer: "), fill(make("span"), offer.answer));
                line.append(text);
              }
              line.append(of(button("Take off", () => act("refuse", { offer: offer.id })), `${offer.id} off`));
              return line;
            })
          : [make("li", "e3-muted", "Nothing yet. Attendees offer their answers; you see the text when you press Look.")],
      );
    }

    follow("room/state", () => ({}), draw, (text) => {
      if (!text) return;
      said.textContent = text;
      said.dataset.level = "error";
    });

    return () => {};
  });
})();
