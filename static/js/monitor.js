/* Monitor: card readings as frames bring them, kept in the browser for an hour and drawn as charts. */
(() => {
  "use strict";
  const { charts, fill, gib, whole, size, known, duration, fetched, patch } = window.mistudio;
  const $ = (selector, place = document) => place.querySelector(selector);
  const $$ = (selector, place = document) => [...place.querySelectorAll(selector)];
  const SAMPLE = Number($("main").dataset.sample) || 2;
  const KEPT_SECONDS = 3600;
  const TROUBLE = ["host_lost", "lost", "quarantined", "removed"]; // as in monitor/words.py
  const OLD = ["host_lost", "stale"];
  const GIB = 2 ** 30;
  const choice = { mode: "cards", minutes: "15" };
  const FIELDS = {
    utilization: (m) => m.utilization_gpu_percent,
    memory: (m) => (known(m.memory_used_bytes) ? m.memory_used_bytes / GIB : null),
    temperature: (m) => m.temperature_celsius,
    power: (m) => m.power_draw_watts,
  };
  const UNITS = { utilization: "%", memory: "GiB", temperature: "°C", power: "W" };

  /* History: one time axis for all cards, so that every chart shows the same moments -------------------- */
  const opened = Date.now() / 1000;
  const times = [];
  const history = new Map(); // uuid -> {utilization: [], memory: [], …}, as long as `times`
  const newest = new Map(); // uuid -> metrics

  function remember(cards) {
    const now = Date.now() / 1000;
    for (const card of cards) newest.set(card.uuid, card);
    const last = times.at(-1);
    if (last && now - last < SAMPLE / 2) return overwrite(cards); // several hosts, one moment
    if (last && now - last > 3 * SAMPLE) append(last + SAMPLE, []); // nothing came: a gap, drawn as a gap
    append(now, cards);
    while (times[0] < now - KEPT_SECONDS) forgetFirst();
  }

  function append(time, cards) {
    times.push(time);
    const values = new Map(cards.map((card) => [card.uuid, card]));
    for (const uuid of new Set([...history.keys(), ...values.keys()])) {
      if (!history.has(uuid)) history.set(uuid, blank(times.length - 1));
      for (const name in FIELDS) history.get(uuid)[name].push(reading(name, values.get(uuid)));
    }
  }

  function overwrite(cards) {
    for (const card of cards) {
      if (!history.has(card.uuid)) history.set(card.uuid, blank(times.length));
      for (const name in FIELDS) history.get(card.uuid)[name][times.length - 1] = reading(name, card);
    }
  }

  const reading = (name, card) => (card && !card.stale ? FIELDS[name](card) ?? null : null);
  const blank = (length) => Object.fromEntries(Object.keys(FIELDS).map((name) => [name, Array(length).fill(null)]));

  function forgetFirst() {
    times.shift();
    for (const card of history.values()) for (const name in FIELDS) card[name].shift();
  }

  /** From where on the history lies in the window; one point more, so that lines reach the edge. */
  function firstShown() {
    const from = Date.now() / 1000 - 60 * choice.minutes;
    return Math.max(0, times.findIndex((time) => time >= from) - 1);
  }
  const shownTimes = () => times.slice(firstShown());
  const shown = (uuid, name) => (history.get(uuid)?.[name] ?? []).slice(firstShown());
  const range = () => [Date.now() / 1000 - 60 * choice.minutes, Date.now() / 1000];

  /* Cards of the page ----------------------------------------------------------------------------------- */
  function cardRows() {
    return $$("[data-card]").map((element) => ({
      element, uuid: element.dataset.card, index: Number(element.dataset.index), name: element.dataset.name,
      slowdown: number(element.dataset.slowdown), limit: number(element.dataset.limit), total: number(element.dataset.total),
    }));
  }
  const number = (text) => (text === "" || text === undefined ? null : Number(text));
  const token = (index) => `s${(index % 6) + 1}`;
  const dashed = (index) => index >= 6;

  /* Charts of one card ---------------------------------------------------------------------------------- */
  const tick = (value) => (value >= 10000 ? `${Math.round(value / 1000)}k` : whole(value));
  const rounded = (hi, least) => Math.max(least, hi === null ? 0 : hi * 1.05);
  const SCALES = {
    utilization: () => ({ y: () => [0, 100], ticks: charts.halves }),
    memory: (card) => ({ y: (lo, hi) => [0, card.total ? card.total / GIB : rounded(hi, 1)], ticks: charts.ends }),
    temperature: (card) => ({ y: () => [20, 100], ticks: (lo, hi) => [20, 60, 100], guide: () => card.slowdown }),
    power: (card) => ({ y: (lo, hi) => [0, card.limit ?? rounded(hi, 10)], ticks: charts.ends }),
  };

  function makeCard(card) {
    for (const figure of $$("[data-chart]", card.element)) {
      const name = figure.dataset.chart, place = $(".plot", figure), output = $("output", figure);
      charts.make(place, {
        ...SCALES[name](card), x: range, group: "monitor", label: tick,
        lines: [{ token: token(card.index), dash: dashed(card.index) }],
        cursor: (at, u) => { output.textContent = at === null ? "" : spoken(u.data[1][at], name, u.data[0][at]); },
      });
    }
  }

  const measured = (value, name) => `${known(value) && name === "memory" ? value.toFixed(1) : whole(value)} ${UNITS[name]}`;
  const spoken = (value, name, time) => `${measured(value, name)} at ${clock(time)}`;
  const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour12: false });

  function drawCard(card) {
    const place = $(".plot", card.element);
    if (!place || place.offsetParent === null) return;
    if (!place.chart) makeCard(card);
    for (const figure of $$("[data-chart]", card.element)) {
      const values = shown(card.uuid, figure.dataset.chart);
      figure.classList.toggle("unsaid", times.length > 2 && !values.some(known));
      $(".plot", figure).chart.setData([shownTimes(), values]);
    }
  }

  /* Charts of all cards together ------------------------------------------------------------------------ */
  const aggregated = $("#aggregated");
  let all = {}; // the cards together, as of the last frame
  let cursorAt = null; // index into the shown times, while the pointer is on a chart

  /** A MIG instance is a part of its card, which is counted already. */
  const isWhole = (card) => !card.uuid.startsWith("MIG-");
  const wholeCards = () => cardRows().filter(isWhole);

  /** Unknown in all cards is unknown; unknown in some counts the others. */
  function across(name, combine) {
    const columns = wholeCards().map((card) => shown(card.uuid, name));
    return shownTimes().map((_, n) => {
      const values = columns.map((column) => column[n]).filter(known);
      return values.length ? combine(values) : null;
    });
  }
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const mean = (values) => sum(values) / values.length;
  /** Tops of the layers, the last card's highest: drawn from the top down, each filled to the one below. */
  function stack(cards) {
    const below = shownTimes().map(() => 0);
    const tops = cards.map((card) => shown(card.uuid, "memory").map((value, n) => {
      if (!known(value)) return anyKnown(cards, n) ? below[n] : null;
      return (below[n] += value);
    }));
    return tops.reverse();
  }
  const anyKnown = (cards, n) => cards.some((card) => known(shown(card.uuid, "memory")[n]));

  function makeAggregated(cards) {
    const plot = (name) => $(`[data-chart="${name}"] .plot`, aggregated);
    const common = { x: range, group: "monitor", label: tick, cursor: follow };
    const edge = cards.length > 12 ? 0 : 1; // of many thin layers one would see the edges only
    const layers = [...cards].reverse();
    charts.make(plot("memory"), {
      ...common, y: (lo, hi) => [0, known(all.memory_total_bytes) ? all.memory_total_bytes / GIB : rounded(hi, 1)], ticks: charts.ends,
      lines: layers.map((card) => ({ token: token(card.index), dash: dashed(card.index), width: edge, fill: 0.4 })),
      bands: layers.slice(1).map((_, n) => ({ series: [n + 1, n + 2] })),
    });
    charts.make(plot("utilization"), {
      ...common, y: () => [0, 100], ticks: charts.halves,
      lines: [{ token: "accent", width: 0 }, { token: "ink" }, { token: "accent", width: 0 }],
      bands: [{ series: [1, 3], fill: () => charts.faded(charts.colour("accent"), 0.22) }],
    });
    charts.make(plot("temperature"), {
      ...common, y: () => [20, 100], ticks: () => [20, 60, 100], lines: [{ token: "ink" }],
      guide: () => Math.min(...cards.map((card) => card.slowdown ?? Infinity)),
    });
    charts.make(plot("power"), {
      ...common, y: (lo, hi) => [0, all.power_limit_watts ?? rounded(hi, 10)], ticks: charts.ends, lines: [{ token: "ink" }],
    });
  }

  function drawAggregated() {
    if (aggregated.hidden) return;
    const cards = wholeCards();
    if (!$(".plot", aggregated).chart) makeAggregated(cards);
    const set = (name, ...columns) => $(`[data-chart="${name}"] .plot`, aggregated).chart.setData([shownTimes(), ...columns]);
    set("memory", ...stack(cards));
    set("utilization", ...[Math.max, null, Math.min].map((pick) => across("utilization", (v) => (pick ? pick(...v) : mean(v)))));
    set("temperature", across("temperature", (values) => Math.max(...values)));
    set("power", across("power", sum));
    legend(cards);
  }

  function follow(at) {
    cursorAt = at;
    legend(wholeCards());
  }

  /** All cards at the moment under the pointer; without one, now. */
  function legend(cards) {
    const at = cursorAt ?? shownTimes().length - 1;
    const time = shownTimes()[at];
    const parts = [Object.assign(document.createElement("b"), { textContent: cursorAt === null ? "now" : time ? clock(time) : "" })];
    for (const card of cards) parts.push(legendOf(card, at, cards.length));
    $("[data-legend]", aggregated).replaceChildren(...parts);
  }

  function legendOf(card, at, count) {
    const chip = Object.assign(document.createElement("span"), {
      className: `chip ${token(card.index)}${dashed(card.index) ? " dash" : ""}`, textContent: card.index,
    });
    const say = (name) => measured(shown(card.uuid, name)[at], name);
    const names = count > 12 ? ["memory"] : Object.keys(FIELDS);
    const item = document.createElement("span");
    item.append(chip, ` ${names.map(say).join(" · ")}`);
    return item;
  }

  function totals() {
    const cards = [...newest.values()].filter(isWhole);
    const fresh = cards.filter((card) => !card.stale && $(`[data-card="${CSS.escape(card.uuid)}"]`));
    const values = (name) => fresh.map((card) => card[name]).filter(known);
    const added = (name) => (values(name).length ? sum(values(name)) : null);
    const heat = values("temperature_celsius");
    all = {
      gpu_count: cards.length, readable_count: fresh.length,
      memory_used_bytes: added("memory_used_bytes"), memory_total_bytes: added("memory_total_bytes"),
      power_draw_watts: added("power_draw_watts"), power_limit_watts: added("power_limit_watts"),
      utilization_gpu_percent: values("utilization_gpu_percent").length ? mean(values("utilization_gpu_percent")) : null,
      temperature_celsius_max: heat.length ? Math.max(...heat) : null,
    };
    fill(aggregated, all);
    const hottest = fresh.find((card) => known(card.temperature_celsius) && card.temperature_celsius === all.temperature_celsius_max);
    $("[data-hottest]").textContent = hottest ? `card ${hottest.gpu_id}` : "";
  }

  /* Frames ---------------------------------------------------------------------------------------------- */
  function cardsArrived({ gpus: cards, errors = {} }) {
    remember(cards);
    for (const card of cards) {
      const row = $(`[data-card="${CSS.escape(card.uuid)}"]`);
      if (row) showCard(row, card, healthOf(row) === "lost" || Boolean(errors[card.uuid] && card.stale));
    }
    totals();
    if (!document.hidden) draw();
  }

  /** A card that does not answer shows dashes; a reading that is old is shown, but paler. */
  function showCard(row, card, silent) {
    fill(row, silent ? { power_limit_watts: card.power_limit_watts } : card);
    row.classList.toggle("old", Boolean(card.stale) && !silent);
    row.dataset.slowdown = card.temperature_slowdown_celsius ?? "";
    row.dataset.limit = card.power_limit_watts ?? "";
    $("meter", row).value = (!silent && card.memory_used_bytes) || 0;
  }

  const healthOf = (row) => $(".state .badge", row).dataset.health;

  /** What the rows say of a card, from its badge: trouble gets its frame, a lost card its dashes. */
  function judge(row) {
    const health = healthOf(row);
    row.classList.toggle("trouble", TROUBLE.includes(health));
    if (OLD.includes(health)) row.classList.add("old"); // the next reading takes it away
    if (health === "lost") showCard(row, { power_limit_watts: number(row.dataset.limit) }, true);
  }

  function draw() {
    drawAggregated();
    for (const card of cardRows()) drawCard(card);
    const shownFor = Math.min(60 * choice.minutes, Date.now() / 1000 - opened);
    $("#since").textContent = shownFor < 60 * choice.minutes - SAMPLE ? `since you opened the page, ${duration(shownFor)} ago` : "";
  }

  /** A card came or went: the rows anew; what was remembered of the others stays. */
  async function rebuild() {
    const fresh = new DOMParser().parseFromString(await fetched(location.href), "text/html");
    for (const place of $$(".plot")) charts.drop(place);
    $("#rows").replaceWith($("#rows", fresh));
    show();
    listen();
  }

  document.addEventListener("live:frame", ({ detail: frame }) => {
    if (frame.channel === "system/gpus" && frame.event === "system:metrics") return cardsArrived(frame.data);
    if (frame.channel.startsWith("system/") && frame.event === "system:metrics") return hostArrived(frame.data);
  });
  document.addEventListener("live:patched", ({ detail: fresh }) => {
    const rows = $("[data-cards]", fresh);
    const here = cardRows().map((card) => card.uuid).join(" ");
    if (rows && rows.dataset.cards !== here) rebuild();
    for (const { element } of cardRows()) judge(element);
  });
  document.addEventListener("theme:changed", () => requestAnimationFrame(draw));
  document.addEventListener("visibilitychange", () => document.hidden || draw());
  setInterval(() => document.hidden || draw(), Math.max(1, SAMPLE) * 1000); // the time axis moves on when no frame comes

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
    const from = choice.minutes === "60" ? "−1 h" : `−${choice.minutes} min`;
    for (const label of $$("[data-from]")) label.textContent = from;
    const together = choice.mode === "aggregated";
    aggregated.hidden = !together;
    $("#rows").classList.toggle("lines", together || $("#rows").dataset.lines === "always");
    draw();
  }

  function listen() {
    for (const button of $$("#rows .open")) {
      button.addEventListener("click", () => {
        const opened = button.closest(".card").classList.toggle("opened");
        button.ariaExpanded = String(opened);
        draw();
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
