/* Theme: light, dark, or the system's own. Runs before the first paint, so that no page flashes. */
(() => {
  "use strict";
  const NAMES = ["auto", "light", "dark"];
  const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
  const root = document.documentElement;

  function remembered() {
    try { return localStorage.getItem("theme") || "auto"; } catch { return "auto"; }
  }

  function set(name) {
    root.dataset.theme = name;
    try { localStorage.setItem("theme", name); } catch { /* private mode: for this page only */ }
    document.dispatchEvent(new CustomEvent("theme:changed"));
  }

  function label(button) {
    button.textContent = SIGNS[root.dataset.theme];
    button.title = button.ariaLabel = `Theme: ${root.dataset.theme}`;
  }

  root.dataset.theme = NAMES.includes(remembered()) ? remembered() : "auto";
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    label(button);
    button.addEventListener("click", () => {
      set(NAMES[(NAMES.indexOf(root.dataset.theme) + 1) % NAMES.length]);
      label(button);
    });
  });
})();
