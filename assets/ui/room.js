// The attendee's page and the large-type view. The page asks the room what changed (see lab/ui/workshop/web.py) and shows it; it holds no
// state of its own but what is typed, so a reload, a sleeping phone or a restarted app costs nothing.
(() => {
  "use strict";
  const { make, fill, stage: stageOf, follow, qr, mount } = window.eagle3;
  const one = (id) => document.getElementById(id);
  const dark = new URLSearchParams(location.search).get("__theme");
  const theme = () => document.documentElement.classList.toggle("dark", dark ? dark === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  theme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);

  // Larger and smaller type, kept by the browser.
  const big = document.body.dataset.page === "stage";
  let zoom = Number(localStorage.getItem(big ? "eagle3-stage-zoom" : "eagle3-zoom")) || (big ? 1.6 : 1);
  const scale = (by) => {
    zoom = Math.min(3, Math.max(0.8, Math.round((zoom + by) * 10) / 10));
    document.documentElement.style.setProperty("--e3-zoom", String(zoom));
    localStorage.setItem(big ? "eagle3-stage-zoom" : "eagle3-zoom", String(zoom));
  };
  scale(0);
  one("smaller").addEventListener("click", () => scale(-0.2));
  one("larger").addEventListener("click", () => scale(0.2));

  const engine = (record) => {
    one("engine").dataset.health = record.engine.health;
    one("engine").textContent = record.engine.health === "ready" ? record.engine.label : record.engine.said;
    one("engine").title = record.engine.said;
  };
  const trouble = (text) => {
    one("trouble").textContent = text;
    one("trouble").hidden = !text;
  };

  if (big) {
    const stage = stageOf(one("stage"));
    let drawn = "";
    follow(
      "room/state",
      () => ({ screen: 1, stage: stage.known, s: stage.lines }),
      (record) => {
        engine(record);
        stage.update(record.stage);
        const join = record.join;
        one("join").hidden = record.stage.kind !== "empty" || !join.url;
        one("foot").textContent = join.url ? `${join.url} · ${record.engine.present} here` : "";
        if (join.url && drawn !== join.url) {
          drawn = join.url;
          one("join").replaceChildren(make("h2", "", "Join"), qr(join.qr, `QR code of ${join.url}`), make("p", "e3-join-url", join.url));
          if (join.note) one("join").append(make("p", "e3-muted", join.note));
        }
      },
      trouble,
    );
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own zoom
      if (event.key === "+" || event.key === "=") scale(0.2);
      else if (event.key === "-") scale(-0.2);
    });
    return;
  }

  async function post(what, values) {
    const response = await fetch(`room/${what}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(values) });
    const record = await response.json();
    if (!response.ok) {
      told(record.error.what, `${record.error.why} ${record.error.todo}`.trim(), "error");
      return false;
    }
    told("", "", "info");
    return true;
  }
  // What was refused stays until the next act; below it, what the room says of this seat.
  function told(what, todo, level) {
    one("refused").textContent = what ? `${what} ${todo}` : "";
    one("refused").hidden = !what;
    one("refused").dataset.level = level;
  }

  const stage = stageOf(one("stage"), (game, accept) => post("guess", { game, accept }).catch(lost));
  const lost = () => told("The connection is lost.", "What you typed is kept: try again.", "error");
  const props = { value: "" };
  let changed = () => {};
  mount("steps", one("mine"), props, (_, call) => (changed = call), () => {});
  one("mine").querySelector(".e3-empty").textContent = "Run a prompt: each row is one engine step, what the draft proposed and what the target decided.";
  let mine = "";
  let lines = 0;

  // ---- the two parts, side by side where there is room, else tabs
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  function choose(name, focus) {
    for (const tab of tabs) {
      const on = tab.dataset.part === name;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      if (on) delete tab.dataset.news;
      if (on && focus) tab.focus();
    }
    document.body.dataset.part = name;
  }
  tabs.forEach((tab, place) => {
    tab.addEventListener("click", () => choose(tab.dataset.part));
    tab.addEventListener("keydown", (event) => {
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") choose(tabs[1 - place].dataset.part, true);
    });
  });
  choose("you");

  // ---- asking
  one("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    await post("ask", { prompt: one("prompt").value }).catch(lost);
  });
  one("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      one("ask").requestSubmit();
    }
  });
  one("stop").addEventListener("click", () => post("stop", {}).catch(lost));
  one("offer").addEventListener("click", () => post("offer", {}).catch(lost));

  const asked = new URLSearchParams(location.search);
  if (asked.get("scenario"))
    fetch(`room/scene?${new URLSearchParams({ scenario: asked.get("scenario"), scene: asked.get("scene") || "1" })}`)
      .then((response) => response.json())
      .then((record) => (record.error ? told(record.error.what, record.error.todo, "error") : record.prompt && (one("prompt").value ||= record.prompt)))
      .catch(lost);

  let seen = "";
  follow(
    "room/state",
    () => ({ run: mine, n: lines, stage: stage.known, s: stage.lines }),
    (record, again) => {
      if (again) told("The workshop was restarted.", "Answers from before are gone; your seat is kept.", "info");
      engine(record);
      const me = record.me;
      one("seat").textContent = `Seat ${me.seat}`;
      one("score").textContent = me.played ? `${me.right} of ${me.played} guesses right` : "";
      one("said").textContent = me.text;
      one("said").dataset.level = me.level;
      one("detail").textContent = me.detail;
      one("stop").disabled = me.state !== "line" && me.state !== "running";
      one("offer").disabled = me.offered || me.state !== "over" || !record.mine || record.mine.state !== "done";
      one("offer").textContent = me.offered ? "Offered to the room" : "Offer to the room";
      document.body.dataset.state = me.state;
      const queue = one("queued");
      queue.replaceChildren(...me.queued.map((run) => fill(make("li"), run)));
      if (record.mine) {
        if (record.mine.id !== mine) {
          mine = record.mine.id;
          lines = 0;
          props.value = "";
          one("asked").replaceChildren(make("b", "", "You asked: "), fill(make("span"), record.mine.prompt));
        }
        if (record.mine.from !== lines) lines = 0;
        else if (record.mine.lines) {
          props.value = (lines ? props.value : "") + record.mine.lines;
          lines += record.mine.lines.split("\n").length - 1;
          changed();
        }
      }
      stage.update(record.stage);
      one("empty").hidden = record.stage.kind !== "empty";
      if (record.stage.id !== seen && record.stage.kind !== "empty") {
        const typing = document.activeElement === one("prompt") && one("prompt").value.trim() !== "";
        if (typing) tabs[0].dataset.news = "1";
        else choose("room");
      }
      seen = record.stage.id;
    },
    trouble,
  );
})();
