/* The page of a card: its charts and its values, live. */
(() => {
  "use strict";
  const { curves, localise } = window.mistudio;
  const { $, $$ } = curves;
  const main = $("main");
  const store = window.mistudio.history(main.dataset.curves, Number(main.dataset.sample) || 2);
  const [card] = curves.shown();
  const health = () => $("[data-health]")?.dataset.health;

  function draw() {
    if (document.hidden) return;
    curves.draw(card, store);
    if ($("#since").textContent !== store.says()) $("#since").textContent = store.says();
  }

  document.addEventListener("live:frame", ({ detail: frame }) => {
    if (frame.channel !== "system/gpus" || frame.event !== "system:metrics") return;
    const mine = frame.data.gpus.filter((metrics) => metrics.uuid === card.uuid);
    if (!mine.length) return;
    store.add(mine);
    curves.showCard(card.element, mine[0], curves.silent(health(), mine[0], frame.data.errors?.[card.uuid]));
    draw();
  });
  document.addEventListener("live:patched", () => health() === "lost" && curves.showCard(card.element, { power_limit_watts: card.limit }, true));
  /* Jobs that ran here: rows change in place, a new one comes on top; rows that were loaded beyond stay. */
  document.addEventListener("live:patched", ({ detail: fresh }) => {
    localise(fresh);
    for (const row of $$("[data-fresh-rows] tr[id]", fresh).reverse()) put(row);
  });

  function put(row) {
    const old = document.getElementById(row.id);
    if (!old) {
      $("#rows tr.none")?.remove();
      row.classList.add("new");
      $("#rows").prepend(row);
    } else if (old.innerHTML !== row.innerHTML && !old.contains(document.activeElement)) old.replaceWith(row);
  }

  document.addEventListener("history:changed", draw);
  document.addEventListener("theme:changed", () => requestAnimationFrame(draw));
  document.addEventListener("visibilitychange", draw);
  setInterval(draw, 5000); // the time axis moves on when no frame comes

  /** The window is the Monitor's: whoever looks at a week there looks at it here. */
  function remembered() {
    try { return JSON.parse(localStorage.getItem("monitor") || "{}"); } catch { return {}; }
  }

  function choose(minutes) {
    for (const button of $$("[data-choice] button")) button.ariaPressed = String(button.dataset.value === minutes);
    curves.ends(main, $(`[data-choice] [data-value="${minutes}"]`).textContent);
    try { localStorage.setItem("monitor", JSON.stringify({ ...remembered(), minutes })); } catch { /* for this page only */ }
    store.load(Number(minutes));
  }

  for (const button of $$("[data-choice] button")) button.addEventListener("click", () => choose(button.dataset.value));
  const last = remembered().minutes;
  choose($(`[data-choice] [data-value="${CSS.escape(last ?? "")}"]`) ? last : "30");
})();
