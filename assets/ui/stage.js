// What the room looks at, for the attendee's page and the large-type view: a sentence, a trace, or a frozen step to guess about.
// Records come from lab/ui/workshop/stage.py; text is runs (see core.js), never markup.
window.eagle3.stage = (root, vote) => {
  "use strict";
  const { make, fill, mount } = window.eagle3;
  const badge = make("p", "e3-badge");
  const title = make("h2", "e3-stage-title");
  const say = make("p", "e3-stage-say");
  const body = make("div", "e3-stage-body");
  root.append(badge, title, say, body);
  let known = "";
  let lines = 0;
  let text = "";
  let trace = null;
  let guessed = ""; // the step that is on the page, and whether it is revealed

  // One of the page's elements outside gradio: the same `mount`, with a value that is set here.
  function element(name, parent) {
    const props = { value: "" };
    let changed = () => {};
    const holder = make("div", "e3-live");
    holder.append(make("div", "e3-root"));
    parent.append(holder);
    mount(name, holder, props, (_, call) => (changed = call), () => {});
    return {
      holder,
      set(value) {
        props.value = value;
        changed();
      },
    };
  }

  function later(ready, call, tries = 100) {
    if (ready()) call();
    else if (tries) setTimeout(later, 30, ready, call, tries - 1);
  }

  function showTrace(record, fresh) {
    if (fresh) {
      const prompt = make("p", "e3-stage-prompt");
      prompt.append(make("b", "", "Prompt: "), fill(make("span"), record.prompt));
      body.replaceChildren(prompt);
      trace = element("steps", body);
      text = "";
      lines = 0;
    }
    if (record.from !== lines) {
      lines = 0; // something was missed: the next request asks for everything
      text = "";
      return;
    }
    if (record.lines) {
      text += record.lines;
      lines += record.lines.split("\n").length - 1;
      trace.set(text);
    }
    if (!fresh) return;
    const holder = trace.holder;
    if (record.play) later(() => holder.querySelector('[data-state="done"], [data-state="opened"]'), () => holder.querySelector(".e3-play").click());
    if (record.focus !== null)
      later(
        () => holder.querySelector(`.e3-row[data-step="${Number(record.focus)}"]`),
        () => {
          const row = holder.querySelector(`.e3-row[data-step="${Number(record.focus)}"]`);
          const slider = holder.querySelector(".e3-slider");
          slider.value = String([...row.parentElement.children].indexOf(row) + 1);
          slider.dispatchEvent(new Event("input"));
          row.classList.add("e3-focus-row");
        },
      );
  }

  function bar(name, count, all, truth) {
    const line = make("div", `e3-tally${truth ? " e3-tally-true" : ""}`);
    const track = make("span", "e3-tally-track");
    const inner = make("span");
    inner.style.width = `${all ? (100 * count) / all : 0}%`;
    track.append(inner);
    line.append(make("b", "", `${truth ? "✓ " : ""}${name}`), track, make("span", "", String(count)));
    return line;
  }

  const guesses = (game) => `${game.votes} ${game.votes === 1 ? "guess" : "guesses"} so far`;

  function showGuess(game) {
    const now = `${game.id} ${game.revealed}`;
    if (guessed === now) {
      // What is there stays: every guess and every prompt of the room comes here, a click on a button that is made anew under the finger
      // is lost, and so is a reader's place in the text. Of a revealed step nothing changes any more.
      if (game.revealed) return;
      for (const made of body.querySelectorAll("[data-accept]")) made.setAttribute("aria-pressed", String(made.dataset.accept === String(game.mine)));
      body.querySelector(".e3-votes-count").textContent = guesses(game);
      return;
    }
    guessed = now;
    const prompt = make("p", "e3-stage-prompt");
    prompt.append(make("b", "", "Prompt: "), fill(make("span"), game.prompt));
    const before = make("p", "e3-before", null, { tabindex: "0", "aria-label": "The answer up to this step" });
    for (const run of game.before) before.append(fill(make("span"), run));
    before.append(make("span", "e3-caret", "▏"));
    const row = make("div", "e3-row e3-guess-row");
    row.append(make("span", "e3-number", `step ${game.step}`));
    if (game.revealed) for (const [run, mark] of game.row) row.append(fill(make("bdi", `e3-chip e3-${mark}`, null, { "data-mark": mark }), run));
    else game.draft.forEach((run) => row.append(fill(make("bdi", "e3-chip e3-proposed"), run)));
    row.querySelectorAll(".e3-chip")[game.position - 1]?.classList.add("e3-asked");
    const ask = make("p", "e3-ask");
    if (game.revealed) {
      ask.append(make("b", "", game.truth ? "Accepted" : "Rejected"), document.createTextNode(game.truth ? ": the target kept the draft's token." : ": the target said something else."));
      if (vote && game.mine !== null) ask.append(make("span", "e3-verdict-mine", game.mine === game.truth ? " You were right." : " You guessed otherwise."));
    } else {
      ask.append(document.createTextNode("The draft proposes "), fill(make("bdi", "e3-chip e3-proposed e3-asked"), game.draft[game.position - 1]));
      ask.append(document.createTextNode(" Will the target accept it?"));
    }
    const parts = [prompt, before, row, ask];
    if (vote && !game.revealed) {
      const buttons = make("div", "e3-votes", null, { role: "group", "aria-label": "Your guess" });
      for (const [accept, name] of [
        [true, "✓ Accept"],
        [false, "✕ Reject"],
      ]) {
        const made = make("button", `e3-vote e3-vote-${accept ? "accept" : "reject"}`, name, { type: "button", "aria-pressed": String(game.mine === accept), "data-accept": String(accept) });
        made.addEventListener("click", () => vote(game.id, accept));
        buttons.append(made);
      }
      parts.push(buttons);
    }
    if (game.revealed) {
      const all = game.tally.accept + game.tally.reject;
      parts.push(bar("Accept", game.tally.accept, all, game.truth), bar("Reject", game.tally.reject, all, !game.truth));
    } else parts.push(make("p", "e3-muted e3-votes-count", guesses(game)));
    body.replaceChildren(...parts);
    before.scrollTop = before.scrollHeight;
  }

  return {
    get known() {
      return known;
    },
    get lines() {
      return lines;
    },
    update(record) {
      const fresh = record.id !== known;
      known = record.id;
      root.dataset.kind = record.kind;
      root.dataset.stage = record.id;
      badge.textContent = record.recording || "";
      badge.hidden = !record.recording;
      title.replaceChildren();
      fill(title, record.title);
      title.hidden = !title.textContent;
      say.replaceChildren();
      fill(say, record.say);
      say.hidden = !say.textContent;
      if (record.kind === "trace") showTrace(record, fresh);
      else if (record.game) showGuess(record.game);
      else body.replaceChildren();
      if (record.kind !== "trace") lines = 0;
      if (!record.game) guessed = "";
      return fresh;
    },
  };
};

// The long poll that every page of the workshop keeps: `query()` says what is known, `apply` gets each answer, `trouble` a sentence or "".
window.eagle3.follow = (path, query, apply, trouble) => {
  "use strict";
  const rest = (ms) => new Promise((done) => setTimeout(done, ms));
  let version = 0;
  let boot = "";
  (async () => {
    for (let failed = 0; ; ) {
      try {
        const wait = document.hidden ? 0 : 15;
        const response = await fetch(`${path}?${new URLSearchParams({ ...query(), v: version, boot, wait })}`, { cache: "no-store" });
        if (response.status === 401) {
          location.reload();
          return;
        }
        const record = await response.json();
        if (!response.ok) throw new Error(`${record.error.what} ${record.error.todo}`);
        const again = boot !== "" && record.boot !== boot;
        version = record.v;
        boot = record.boot;
        apply(record, again);
        trouble("");
        failed = 0;
        await rest(document.hidden ? 3000 : 350);
      } catch (error) {
        failed += 1;
        trouble(error instanceof TypeError ? "The connection is lost: trying again." : error.message);
        await rest(Math.min(500 * 2 ** failed, 5000));
      }
    }
  })();
};

// An inline SVG of a QR code: one path, dark on light in both themes, so that every camera reads it.
window.eagle3.qr = (code, label) => {
  const name = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(name, "svg");
  const path = document.createElementNS(name, "path");
  svg.setAttribute("viewBox", `0 0 ${Number(code.size)} ${Number(code.size)}`);
  svg.setAttribute("class", "e3-qr");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  path.setAttribute("d", code.path);
  svg.append(path);
  return svg;
};
