/* New job: another site on request, what was changed is marked; the keyboard keeps its place when the cards are fetched anew. */
(() => {
  "use strict";
  const place = document.getElementById("place");

  for (const button of document.querySelectorAll("[data-another-site]")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const sites = button.parentElement.querySelector("[data-sites]");
      const row = sites.lastElementChild.cloneNode(true);
      row.querySelector("select").value = sites.lastElementChild.querySelector("select").value;
      row.querySelector("input").value = "";
      sites.append(row);
      row.querySelector("input").focus();
    });
  }

  /* Run again with changes: a field that is not as it was says what it was. */
  const value = (field) => {
    const input = field.querySelector("input, select, textarea");
    return input.type === "checkbox" ? (input.checked ? "yes" : "no") : input.value;
  };
  for (const field of document.querySelectorAll("[data-was]:not(:has(.sites, .several-choices))")) {
    const mark = () => field.classList.toggle("changed", value(field) !== field.dataset.was);
    field.addEventListener("input", mark);
    field.addEventListener("change", mark);
  }

  document.querySelector("[data-submits]")?.addEventListener("change", ({ target }) => target.form.submit());

  /* A fragment that comes while somebody chooses a card, opens a section or copies, must not undo that. */
  let focused = null, opened = [];
  place.addEventListener("htmx:beforeSwap", () => {
    const active = document.activeElement;
    focused = place.contains(active) && active.name === "gpu" ? active.value : null;
    opened = [...place.querySelectorAll("details")].map((details) => details.open);
  });
  place.addEventListener("htmx:afterSwap", () => {
    place.querySelectorAll("details").forEach((details, n) => { details.open = opened[n] ?? false; });
    if (focused) place.querySelector(`[name="gpu"][value="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  });
  place.addEventListener("htmx:responseError", () => place.querySelector(".need")?.classList.add("bad"));
})();
