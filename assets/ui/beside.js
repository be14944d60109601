// The comparison: a verdict over two texts. Tokens before the first difference are plain; the differing one is marked in both.
(() => {
  "use strict";
  const { define, reader, make, fill, plain } = window.eagle3;

  define("beside", (root) => {
    const verdict = make("div", "e3-verdict", null, { role: "status" });
    const panes = make("div", "e3-panes");
    root.append(verdict, panes);
    let lanes = [];
    let settled = false;

    function tile(name, value, why, kind) {
      const made = make("div", "e3-tile", null, { title: why || "", "data-tile": name });
      if (kind) made.dataset.kind = kind;
      made.append(make("b", "", value), make("span", "", name));
      return made;
    }

    function header() {
      const speed = (lane) => (lane && lane.done && lane.done.speed ? `${lane.done.speed.toFixed(1)}` : "–");
      const why = (lane) => (lane && lane.done && lane.done.speed ? `${lane.done.tokens} tokens in ${lane.done.seconds.toFixed(2)} s, from sending the request to its last token` : "");
      verdict.replaceChildren(
        tile("baseline tok/s", speed(lanes[0]), why(lanes[0]), "none"),
        tile("with the draft tok/s", speed(lanes[1]), why(lanes[1]), lanes[1] ? lanes[1].kind : "bf16"),
      );
    }

    function reset() {
      lanes = [];
      settled = false;
      panes.replaceChildren();
      header();
    }

    function pane(lane, place) {
      const section = make("section", "e3-pane", null, { "data-kind": lane.kind, "data-lane": place });
      const title = make("h3", "e3-panel-title", lane.label);
      const text = make("div", "e3-answer", null, { tabindex: "0", "aria-label": `Answer of ${lane.label}` });
      section.append(title, text);
      panes.append(section);
      return { ...lane, title, text, tokens: 0, done: null };
    }

    function differ(record) {
      for (const lane of lanes) {
        for (const span of lane.text.children) {
          const from = Number(span.dataset.output);
          if (record.at >= from && record.at < from + Number(span.dataset.count)) {
            span.classList.add("e3-differs");
            span.title = `The first difference, token ${record.at + 1}`;
            span.scrollIntoView({ block: "nearest" });
          }
        }
      }
    }

    const apply = (record) => {
      if (record.t === "start") {
        lanes = record.lanes.map(pane);
        header();
      } else if (record.t === "tokens") {
        const lane = lanes[record.lane];
        const trailed = lane.text.scrollHeight - lane.text.scrollTop - lane.text.clientHeight < 40; // else somebody reads further up
        if (record.anew) {
          lane.text.replaceChildren();
          lane.tokens = 0;
        }
        for (const [ids, mark, run] of record.list) {
          const span = make("span", `e3-word e3-word-${mark}`, null, { "data-token": ids.join(" "), "data-mark": mark, "data-output": lane.tokens, "data-count": ids.length });
          lane.tokens += ids.length;
          lane.text.append(fill(span, run));
        }
        if (trailed) lane.text.scrollTop = lane.text.scrollHeight;
      } else if (record.t === "lane") {
        lanes[record.lane].done = record;
        header();
      } else if (record.t === "verdict" && !settled) {
        settled = true;
        header();
        const up = record.speedup;
        const range = up && record.pairs > 1 ? `median of ${record.pairs} pairs, ${up[1].toFixed(2)} to ${up[2].toFixed(2)}` : "one pair: press again for more";
        verdict.append(tile("speed-up", up ? `${up[0].toFixed(2)}×` : "–", `Ratio of output tok/s on the client's clock, prompt included; ${range}`, "up"));
        const sign = { same: "✓ identical", different: "≠ differ", unknown: "?" }[record.kind];
        verdict.append(tile(record.kind === "different" ? `first at token ${record.at + 1}` : "token ids", sign, record.words, record.kind));
        const said = make("div", "e3-said", null, { "data-verdict": record.kind });
        said.append(make("span", "", record.words));
        if (record.margin !== null) {
          const [one, two] = record.best;
          said.append(make("span", "", `The target's margin there is ${record.margin.toFixed(record.margin < 0.01 ? 6 : 4)} nats: “${plain(one[0])}” ${one[1].toFixed(3)} against “${plain(two[0])}” ${two[1].toFixed(3)}${record.tie}.`));
        }
        said.append(make("span", "e3-muted", `Speed-up: ${range}. Both lanes eager; the baseline runs without the plugin, the draft's lane with tracing.`));
        if (record.busy) said.append(make("b", "e3-warning", `⚠ ${record.busy}`));
        verdict.append(said);
        if (record.at !== null) differ(record);
      }
    };
    reset();
    panes.append(make("p", "e3-empty", "Press “Run beside the baseline”: the same prompt goes to the engine without a draft, then to the one with it."));
    const read = reader(reset, apply);
    return (value) => value && read(value);
  });
})();
