// The doctor's findings: one box each, with evidence, reason, a fix to copy and where it is known from. Text enters by textContent alone.
(() => {
  "use strict";
  const { define, make } = window.eagle3;
  const SIGNS = { error: "✗ error", warning: "! warning", note: "· note" };

  function copy(text, button) {
    const done = (ok) => {
      button.textContent = ok ? "copied" : "select it and copy";
      setTimeout(() => (button.textContent = "copy"), 1500);
    };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => done(true), () => done(false));
    else done(false);
  }

  function finding(one) {
    const box = make("details", "e3-finding", null, { "data-level": one.level, "data-rule": one.rule });
    box.open = one.level === "error";
    const head = make("summary", "e3-finding-head");
    head.append(make("b", `e3-level e3-level-${one.level}`, SIGNS[one.level] || one.level), make("span", "e3-finding-title", one.title), make("span", "e3-finding-seen", one.evidence));
    const list = make("dl", "e3-finding-body");
    const row = (name, ...parts) => {
      const value = make("dd");
      value.append(...parts);
      list.append(make("dt", "", name), value);
    };
    row("seen", one.evidence);
    row("why", one.reason);
    const button = make("button", "e3-copy", "copy", { type: "button", "aria-label": `Copy the fix for ${one.title}` });
    button.addEventListener("click", () => copy(one.fix, button));
    row("fix", make("code", "e3-fix", one.fix), button);
    if (one.expected) row("expected", one.expected);
    if (one.reads) row("reads", make("code", "", `vllm/${one.reads}`));
    const known = one.issues.map((issue, place) => {
      const link = one.links[one.issues.filter((other, before) => before < place && other.includes("#")).length];
      return issue.includes("#") ? make("a", "", `${issue} `, { href: link, target: "_blank", rel: "noopener noreferrer" }) : make("span", "", `${issue} `);
    });
    if (known.length) row("known from", ...known);
    box.append(head, list);
    return box;
  }

  define("doctor", (root) => {
    const say = make("p", "e3-doctor-sum", "Choose a recipe or paste a command line, then press Examine.", { role: "status" });
    const rows = make("dl", "e3-doctor-rows");
    const list = make("div", "e3-doctor-list", null, { tabindex: "0", "aria-label": "Findings" });
    root.append(say, rows, list);
    return (value) => {
      if (!value) return;
      const found = JSON.parse(value);
      list.replaceChildren();
      rows.replaceChildren();
      list.scrollTop = 0;
      if (found.error) {
        root.dataset.state = "error";
        say.textContent = found.error.filter((part) => part).join(" ");
        return;
      }
      const { error, warning, note } = found.counts;
      const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
      root.dataset.state = error ? "errors" : warning ? "warnings" : "clean";
      say.textContent = `${error ? "✗" : "✓"} ${many(error, "error")}, ${many(warning, "warning")}, ${many(note, "note")} of ${found.rules} rules.`;
      for (const [name, text] of found.rows) rows.append(make("dt", "", name), make("dd", "", text));
      for (const one of found.findings) list.append(finding(one));
    };
  });
})();
