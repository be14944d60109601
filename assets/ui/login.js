// The password form of a workshop.
(() => {
  "use strict";
  const theme = new URLSearchParams(location.search).get("__theme");
  document.documentElement.classList.toggle("dark", theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const refused = document.getElementById("refused");
  document.getElementById("login").addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      const body = JSON.stringify({ password: document.getElementById("password").value });
      const response = await fetch("room/login", { method: "POST", headers: { "content-type": "application/json" }, body });
      const record = await response.json();
      if (response.ok) location.reload();
      else refused.textContent = `${record.error.what} ${record.error.todo}`;
    } catch {
      refused.textContent = "The workshop does not answer: try again.";
    }
    refused.hidden = !refused.textContent;
  });
})();
