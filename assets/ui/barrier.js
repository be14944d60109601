// The barrier: which block sizes each backend accepts, what is chosen, and a small cache with its block tables and token indices.
(() => {
  "use strict";
  const { define, make } = window.eagle3;
  const NAMES = ["A", "B"];

  function table(found) {
    const made = make("table", "e3-accepts");
    const head = make("tr");
    head.append(make("th", "", "accepts blocks of"), ...found.sizes.map((size) => make("th", "", size, size === found.size ? { "data-chosen": "true", scope: "col" } : { scope: "col" })));
    made.append(head);
    const row = (name, title, list) => {
      const line = make("tr");
      line.append(make("th", "", name, { title, scope: "row" }), ...list.map((yes) => make("td", "", yes ? "✓" : "✗", { "data-yes": yes })));
      made.append(line);
    };
    for (const one of found.backends) row(`${one.name} ${one.says}`, one.note, one.accepts);
    row("the engine starts", "select_common_block_size", found.starts);
    return made;
  }

  define("barrier", (root) => {
    const verdict = make("p", "e3-verdict-line", "", { role: "status" });
    const asked = make("p", "e3-asked e3-muted");
    const accepts = make("div");
    const title = make("h3");
    const cache = make("div", "e3-cache", null, { role: "img" });
    const rows = make("div");
    const story = make("p");
    const link = make("a", "", "vLLM pull request 39616", { target: "_blank", rel: "noopener noreferrer" });
    root.append(verdict, asked, accepts, title, cache, rows, story);

    function draw(found) {
      const drawn = found.cache;
      cache.replaceChildren();
      rows.replaceChildren();
      if (drawn.error) {
        title.textContent = drawn.error;
        return;
      }
      const K = drawn.blockSize;
      title.textContent = `A cache of ${drawn.owners.length} token slots in blocks of ${K}`;
      const said = drawn.tables.map((blocks, place) => `sequence ${NAMES[place]} holds blocks ${blocks.join(", ")}`).join("; ");
      cache.setAttribute("aria-label", `${title.textContent}; ${said}`);
      const slots = drawn.owners.map((owner, index) => {
        const slot = make("span", "e3-slot", owner ? `${NAMES[owner[0]]}${owner[1]}` : "", { "data-first": index % K === 0, title: `slot ${index}, block ${Math.floor(index / K)}` });
        if (owner) slot.dataset.owner = owner[0];
        return slot;
      });
      cache.append(...slots);
      let lit = null;
      const light = (button, block) => {
        const off = lit === button;
        if (lit) lit.setAttribute("aria-pressed", "false");
        lit = off ? null : button;
        if (lit) lit.setAttribute("aria-pressed", "true");
        slots.forEach((slot, index) => (slot.dataset.lit = !off && Math.floor(index / K) === block));
        story.firstChild.textContent = off ? story.dataset.text : `Block ${block} of ${K} token${K === 1 ? "" : "s"} becomes ${K === 1 ? "index" : "the indices"} ${Array.from({ length: K }, (_, token) => block * K + token).join(", ")} of the flattened cache. `;
      };
      drawn.tables.forEach((blocks, place) => {
        const line = make("div", "e3-table-row");
        line.append(make("b", "", `block table ${NAMES[place]}`));
        for (const block of blocks) {
          const button = make("button", "e3-block", block, { type: "button", "aria-pressed": "false", "aria-label": `Block ${block} of sequence ${NAMES[place]}` });
          button.addEventListener("click", () => light(button, block));
          line.append(button);
        }
        const indices = make("div", "e3-table-row");
        indices.append(make("b", "", `token indices ${NAMES[place]}`), make("span", "e3-indices", drawn.indices[place].join(" ")));
        rows.append(line, indices);
      });
    }

    return (value) => {
      if (!value) return;
      const found = JSON.parse(value);
      root.dataset.ok = found.ok;
      verdict.textContent = `${found.ok ? "✓" : "✗"} ${found.verdict}`;
      asked.textContent = found.asked;
      accepts.replaceChildren(table(found));
      story.dataset.text = "AITER's kernel reads single tokens; a Llama-type draft's kernel wants blocks of 16. Entry b of a block table of size K, written out as b·K … b·K+K−1, gives both what they want: ";
      story.replaceChildren(document.createTextNode(story.dataset.text), link);
      link.href = found.link;
      draw(found);
    };
  });
})();
