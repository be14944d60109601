// The page's elements share this: a list of them, a reader for values that only grow, and how text from a model gets into the page.
// Rule: text from a model enters by textContent alone. There is no innerHTML here, and no template is ever filled with a value.
window.eagle3 = (() => {
  "use strict";
  const elements = {};
  const listeners = {};

  // Called by gradio when an element is there: `define`d elements build their content once, then follow `value`.
  function mount(name, element, props, watch, trigger) {
    const root = element.querySelector(".e3-root") || element;
    if (root.dataset.mounted) return;
    root.dataset.mounted = name;
    root.classList.add(`e3-${name}-root`);
    const update = elements[name](root, trigger);
    let last = null;
    let waiting = false;
    const apply = () => {
      waiting = false;
      if (props.value === last) return;
      last = props.value;
      update(last || "");
    };
    watch("value", () => {
      if (waiting) return;
      waiting = true;
      // A hidden tab gets no animation frames, and a finished run must still reach it.
      if (document.hidden) setTimeout(apply, 50);
      else requestAnimationFrame(apply);
    });
    apply();
  }

  // Reads a growing string of JSON lines: gives `apply` each new record in order; a string that starts anew, or a record that is
  // missing, calls `reset` and reads everything again.
  function reader(reset, apply) {
    let seen = "";
    let next = 0;
    function read(text) {
      const lines = text.split("\n");
      lines.pop(); // what follows the last newline is not complete yet
      for (const line of lines) {
        const record = JSON.parse(line);
        if (record.n !== next) return false;
        next += 1;
        apply(record);
      }
      return true;
    }
    return (value) => {
      const end = value.lastIndexOf("\n") + 1;
      const grown = seen !== "" && value.startsWith(seen);
      if (!grown || !read(value.slice(seen.length, end))) {
        reset();
        next = 0;
        if (!read(value.slice(0, end))) console.error("eagle3: a value with missing records was ignored");
      }
      seen = value.slice(0, end);
    };
  }

  // A new element: make("span", "class names", "text", {attribute: value}).
  function make(tag, className, text, attributes) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined && text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    return made;
  }

  // A run of own text and signs in turn: signs go into <i>, so that a token "·" and a space look different.
  function fill(parent, run) {
    run.forEach((text, place) => {
      if (text === "") return;
      parent.append(place % 2 ? make("i", "", text) : document.createTextNode(text));
    });
    return parent;
  }

  // Puts a card below or above what it is about, within `root`; while that is scrolled out of view in its `list`, the card is hidden.
  function pin(card, about, list, root) {
    const at = about.getBoundingClientRect();
    const view = list.getBoundingClientRect();
    card.hidden = at.bottom <= view.top || at.top >= view.bottom;
    if (card.hidden) return;
    const frame = root.getBoundingClientRect();
    const size = card.getBoundingClientRect();
    const zoom = root.currentCSSZoom || 1; // larger type: rectangles are on the screen, the card's place is within what is enlarged
    card.style.left = `${Math.max(4, Math.min(at.left - frame.left, frame.width - size.width - 4)) / zoom}px`;
    const under = at.bottom - frame.top + 6;
    const over = at.top - frame.top - size.height - 6;
    card.style.top = `${(under + size.height > frame.height && over > 0 ? over : under) / zoom}px`;
  }

  const plain = (run) => run.join("");
  const on = (name, call) => (listeners[name] = listeners[name] || []).push(call);
  const emit = (name, value) => (listeners[name] || []).forEach((call) => call(value));
  const define = (name, build) => (elements[name] = build);
  return { define, mount, reader, make, fill, pin, plain, on, emit };
})();
