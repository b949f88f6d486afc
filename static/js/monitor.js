/* Monitor: all cards together, one by one, or some of them on top of each other. The readings are in history.js. */
(() => {
  "use strict";
  const { charts, curves, fill, whole, size, known, fetched } = window.mistudio;
  const { $, $$, token, dashed, measured, spoken } = curves;
  const main = $("main");
  const SAMPLE = Number(main.dataset.sample) || 2;
  const TROUBLE = ["host_lost", "lost", "quarantined", "removed"]; // as in monitor/words.py
  const OLD = ["host_lost", "stale"];
  const GIB = 2 ** 30;
  const COMPARED = 6;
  const choice = { mode: "cards", minutes: "30", compared: null };
  const store = window.mistudio.history(main.dataset.curves, SAMPLE);
  const newest = new Map(); // uuid -> metrics
  let cards = []; // what the page shows, in its order

  /* Rows: only those in view are drawn ------------------------------------------------------------------ */
  const inView = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      inView[isIntersecting ? "add" : "delete"](target);
      if (isIntersecting) drawRow(target);
    }
  }, { rootMargin: "200px" });

  function drawRow(element) {
    const card = cards.find((one) => one.element === element);
    if (card) curves.draw(card, store);
  }

  /* All cards together ---------------------------------------------------------------------------------- */
  const aggregated = $("#aggregated");
  let all = {}; // the cards together, as of the last frame
  let cursorAt = null; // index of the step under the pointer, while it is on a chart

  /** A MIG instance is a part of its card, which is counted already. */
  const wholeCards = () => cards.filter((card) => !card.uuid.startsWith("MIG-"));

  /** Step by step over all cards. Unknown in all is unknown; unknown in some counts the others. */
  function across(name, part, combine) {
    const columns = wholeCards().map((card) => store.series(card.uuid, name)?.[part]).filter(Boolean);
    return store.times.map((_, n) => {
      const values = [];
      for (const column of columns) if (column[n] !== null) values.push(column[n]);
      return values.length ? combine(values) : null;
    });
  }
  const sum = (values) => { let total = 0; for (const value of values) total += value; return total; };
  const mean = (values) => sum(values) / values.length;
  const highest = (values) => Math.max(...values), lowest = (values) => Math.min(...values);

  /** Tops of the layers, the last card's highest: drawn from the top down, each filled to the one below. */
  function stack() {
    const columns = wholeCards().map((card) => store.series(card.uuid, "memory")?.mean ?? []);
    const said = store.times.map((_, n) => columns.some((column) => known(column[n])));
    const below = store.times.map(() => 0);
    return columns.map((column) => said.map((any, n) => (any ? (below[n] += column[n] ?? 0) : null))).reverse();
  }

  const limits = {
    slowdown: () => lowestOf(wholeCards().map((card) => card.slowdown)),
    limit: () => all.power_limit_watts ?? sumOf("limit"), total: () => all.memory_total_bytes ?? sumOf("total"),
  };
  /** Before the first frame: what the rows say. */
  const sumOf = (name) => {
    const values = wholeCards().map((card) => card[name]).filter(known);
    return values.length ? sum(values) : null;
  };
  const lowestOf = (values) => (values.some(known) ? Math.min(...values.filter(known)) : null);
  const plot = (place, name) => $(`[data-chart="${name}"] .plot`, place);
  const common = (name) => ({ ...curves.scale(name, limits), x: store.range, group: "page", label: curves.label(name), cursor: follow });

  function makeAggregated() {
    const layers = wholeCards().reverse();
    const edge = layers.length > 12 ? 0 : 1; // of many thin layers one would see the edges only
    charts.make(plot(aggregated, "memory"), {
      ...common("memory"),
      lines: layers.map((card) => ({ token: token(card.index), dash: dashed(card.index), width: edge, fill: 0.4 })),
      bands: layers.slice(1).map((_, n) => ({ series: [n + 1, n + 2] })),
    });
    charts.make(plot(aggregated, "utilization"), { ...common("utilization"), ...curves.withBand("accent") });
    for (const name of ["temperature", "power"]) charts.make(plot(aggregated, name), { ...common(name), lines: [{ token: "ink" }] });
  }

  function drawAggregated() {
    if (!plot(aggregated, "memory").chart) makeAggregated();
    const set = (name, ...columns) => plot(aggregated, name).chart.setData([store.times, ...columns]);
    set("memory", ...stack());
    set("utilization", across("utilization", "max", highest), across("utilization", "mean", mean), across("utilization", "min", lowest));
    set("temperature", across("temperature", "max", highest));
    set("power", across("power", "mean", sum));
    legend(aggregated, wholeCards());
  }

  function follow(at) {
    cursorAt = at;
    if (choice.mode === "aggregated") legend(aggregated, wholeCards());
    if (choice.mode === "compare") legend(compare, compared());
  }

  /** The cards at the moment under the pointer; without one, now. */
  function legend(place, these) {
    const at = Math.min(cursorAt ?? Infinity, store.times.length - 1);
    const moment = cursorAt === null || at < 0 ? "now" : store.when(store.times[at]);
    const head = Object.assign(document.createElement("b"), { textContent: moment });
    $("[data-legend]", place).replaceChildren(head, ...these.map((card) => legendOf(card, at, these.length)));
  }

  function legendOf(card, at, count) {
    const names = count > 12 ? ["memory"] : Object.keys(curves.UNITS);
    const item = document.createElement("span");
    item.append(chipOf(card), ` ${names.map((name) => measured(store.series(card.uuid, name)?.mean[at], name)).join(" · ")}`);
    return item;
  }

  const chipOf = (card) => Object.assign(document.createElement("a"), {
    className: `chip ${token(card.index)}${dashed(card.index) ? " dash" : ""}`, textContent: card.index,
    href: $("header a", card.element).href, title: card.name,
  });

  function totals() {
    const counted = wholeCards();
    const fresh = counted.map((card) => newest.get(card.uuid)).filter((card) => card && !card.stale);
    const values = (name) => fresh.map((card) => card[name]).filter(known);
    const added = (name) => (values(name).length ? sum(values(name)) : null);
    const heat = values("temperature_celsius"), busy = values("utilization_gpu_percent");
    all = {
      gpu_count: counted.length, readable_count: fresh.length,
      memory_used_bytes: added("memory_used_bytes"), memory_total_bytes: added("memory_total_bytes"),
      power_draw_watts: added("power_draw_watts"), power_limit_watts: added("power_limit_watts"),
      utilization_gpu_percent: busy.length ? mean(busy) : null, temperature_celsius_max: heat.length ? highest(heat) : null,
    };
    for (const place of $$("[data-totals]")) fill(place, all);
    showHottest(fresh.find((card) => known(card.temperature_celsius) && card.temperature_celsius === all.temperature_celsius_max));
  }

  function showHottest(metrics) {
    const card = metrics && cards.find((one) => one.uuid === metrics.uuid);
    for (const place of $$("[data-hottest]")) {
      if (place.dataset.hottest === (card?.uuid ?? "")) continue;
      place.dataset.hottest = card?.uuid ?? "";
      place.replaceChildren(...(card ? ["card ", chipOf(card)] : []));
    }
  }

  /* Some cards on top of each other --------------------------------------------------------------------- */
  const compare = $("#compare");

  /** The chosen ones that are here; before anybody chose, the first six. */
  function compared() {
    const chosen = choice.compared && cards.filter((card) => choice.compared.includes(card.uuid));
    return chosen ?? cards.slice(0, COMPARED);
  }

  /** Of several limits on one chart only one that all share means something. */
  function sharedLimits(these) {
    const shared = (name) => () => (new Set(these.map((card) => card[name])).size === 1 ? these[0][name] : null);
    return { slowdown: () => lowestOf(these.map((card) => card.slowdown)), limit: shared("limit"), total: shared("total") };
  }

  function makeCompare(these) {
    for (const name in curves.UNITS) {
      charts.make(plot(compare, name), {
        ...curves.scale(name, sharedLimits(these)), x: store.range, group: "page", label: curves.label(name), cursor: follow,
        lines: these.map((card) => ({ token: token(card.index), dash: dashed(card.index) })),
      });
    }
  }

  function drawCompare() {
    const these = compared(), shown = these.map((card) => card.uuid).join(" ");
    if (compare.dataset.shown !== shown) {
      for (const place of $$(".plot", compare)) charts.drop(place);
      compare.dataset.shown = shown;
    }
    if (these.length) {
      if (!plot(compare, "memory").chart) makeCompare(these);
      for (const name in curves.UNITS) {
        plot(compare, name).chart.setData([store.times, ...these.map((card) => store.series(card.uuid, name)?.mean ?? [])]);
      }
    }
    legend(compare, these);
  }

  function choosers() {
    const chosen = compared().map((card) => card.uuid);
    for (const button of $$("[data-compare]", compare)) {
      const is = chosen.includes(button.dataset.compare);
      button.ariaPressed = String(is);
      button.disabled = !is && chosen.length >= COMPARED;
    }
  }

  function toggle(uuid) {
    const chosen = compared().map((card) => card.uuid);
    choose("compared", chosen.includes(uuid) ? chosen.filter((one) => one !== uuid) : [...chosen, uuid].slice(0, COMPARED));
  }

  /* Frames ---------------------------------------------------------------------------------------------- */
  function cardsArrived({ gpus: readings, errors = {} }) {
    store.add(readings);
    for (const reading of readings) newest.set(reading.uuid, reading);
    for (const card of cards) {
      const reading = readings.find((one) => one.uuid === card.uuid);
      if (reading) curves.showCard(card.element, reading, curves.silent(healthOf(card.element), reading, errors[card.uuid]));
    }
    totals();
    drawDue();
  }

  const healthOf = (row) => $("[data-health]", row)?.dataset.health;

  /** What the rows say of a card, from its badge: trouble gets its frame, a lost card its dashes. */
  function judge({ element, limit }) {
    const health = healthOf(element);
    element.classList.toggle("trouble", TROUBLE.includes(health));
    if (OLD.includes(health)) element.classList.add("old"); // frames that stop coming cannot take it away
    if (health === "lost") curves.showCard(element, { power_limit_watts: limit }, true);
  }

  let drawnAt = 0;
  /** With every frame only what is in view; `everywhere` when all of it is another than before, and for print. */
  function draw(everywhere = false) {
    drawnAt = Date.now();
    if (choice.mode === "aggregated") drawAggregated();
    if (choice.mode === "compare") drawCompare();
    for (const card of cards) if (everywhere || inView.has(card.element)) curves.draw(card, store);
  }

  /** A window of days moves by a pixel in minutes: it is not drawn with every frame. */
  function drawDue() {
    const every = Math.min(30, (60 * choice.minutes) / 1000);
    if (!document.hidden && Date.now() - drawnAt >= 1000 * Math.max(0.9 * SAMPLE, every)) draw();
    if ($("#since").textContent !== store.says()) $("#since").textContent = store.says();
  }

  /** A card came or went: the rows anew; what is known of the others stays. */
  async function rebuild() {
    const fresh = new DOMParser().parseFromString(await fetched(location.href), "text/html");
    for (const place of $$(".plot")) charts.drop(place);
    for (const id of ["#rows", "#pick"]) $(id).replaceWith($(id, fresh));
    compare.dataset.shown = "";
    listen();
    store.refresh();
    show();
  }

  document.addEventListener("live:frame", ({ detail: frame }) => {
    if (frame.channel === "system/gpus" && frame.event === "system:metrics") return cardsArrived(frame.data);
    if (frame.channel.startsWith("system/") && frame.event === "system:metrics") return hostArrived(frame.data);
  });
  document.addEventListener("live:patched", ({ detail: fresh }) => {
    const rows = $("[data-cards]", fresh);
    if (rows && rows.dataset.cards !== cards.map((card) => card.uuid).join(" ")) rebuild();
    for (const card of cards) judge(card);
    totals();
  });
  document.addEventListener("history:changed", () => { draw(true); drawDue(); });
  window.addEventListener("beforeprint", () => draw(true));
  document.addEventListener("theme:changed", () => requestAnimationFrame(() => draw()));
  document.addEventListener("visibilitychange", () => document.hidden || draw());
  setInterval(drawDue, Math.max(1, SAMPLE) * 1000); // the time axis moves on when no frame comes

  /* Hosts ----------------------------------------------------------------------------------------------- */
  function hostArrived(data) {
    const place = $(`[data-host="${CSS.escape(data.host || "")}"]`);
    if (!place) return;
    const say = (name, text, value) => {
      const element = $(`[data-host-field="${name}"]`, place);
      if (!element) return;
      if (element.textContent !== text) element.textContent = text;
      const meter = $("meter", element.closest("div"));
      if (meter && known(value)) meter.value = value;
    };
    if (data.metric_type === "cpu") say("cpu", whole(data.percent), data.percent);
    if (data.metric_type === "memory") say("memory", `${whole(data.used_bytes / GIB)} / ${whole(data.total_bytes / GIB)} GiB`, data.percent);
    if (data.metric_type === "disk") {
      say("disk", rate("read", data.read_bytes_per_second, "write", data.write_bytes_per_second));
      (data.disks || []).forEach((disk, n) => say(`disk-${n}`, `${size(disk.used_bytes)} / ${size(disk.total_bytes)}`, disk.percent));
    }
    if (data.metric_type === "network") say("network", rate("in", data.received_bytes_per_second, "out", data.sent_bytes_per_second));
  }
  const rate = (one, first, other, second) => `${one} ${perSecond(first)} · ${other} ${perSecond(second)}`;
  const perSecond = (bytes) => (known(bytes) ? `${size(bytes)}/s` : "–");

  /* Choices, remembered by this browser ----------------------------------------------------------------- */
  function recall() {
    try { Object.assign(choice, JSON.parse(localStorage.getItem("monitor") || "{}")); } catch { /* first visit */ }
    if (!Array.isArray(choice.compared)) choice.compared = null;
    for (const name of ["mode", "minutes"]) { // what an earlier version remembered may not be there any more
      const values = $$(`[data-choice="${name}"] button`).map((button) => button.dataset.value);
      if (!values.includes(choice[name])) choice[name] = name === "mode" ? "cards" : "30";
    }
  }

  function choose(name, value) {
    choice[name] = value;
    try { localStorage.setItem("monitor", JSON.stringify(choice)); } catch { /* for this page only */ }
    show();
  }

  function show() {
    for (const group of $$("[data-choice]")) {
      for (const button of $$("button", group)) button.ariaPressed = String(button.dataset.value === choice[group.dataset.choice]);
    }
    curves.ends(main, $(`[data-choice="minutes"] [data-value="${choice.minutes}"]`).textContent);
    aggregated.hidden = choice.mode !== "aggregated";
    compare.hidden = choice.mode !== "compare";
    $("#rows").classList.toggle("lines", choice.mode !== "cards" || $("#rows").dataset.lines === "always");
    choosers();
    if (store.minutes !== Number(choice.minutes)) store.load(Number(choice.minutes));
    draw();
  }

  function listen() {
    cards = curves.shown();
    watch.disconnect();
    inView.clear();
    for (const card of cards) watch.observe(card.element);
    for (const button of $$("#pick [data-compare]")) button.addEventListener("click", () => toggle(button.dataset.compare));
    for (const button of $$("#rows .open")) {
      button.addEventListener("click", () => {
        button.ariaExpanded = String(button.closest(".card").classList.toggle("opened"));
        drawRow(button.closest(".card"));
      });
    }
  }

  for (const button of $$("[data-choice] button")) {
    button.addEventListener("click", () => choose(button.closest("[data-choice]").dataset.choice, button.dataset.value));
  }
  recall();
  listen();
  show();
})();
