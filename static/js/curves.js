/* What a chart of a card looks like: its scale, its limits, its words. Shared by the Monitor and the page of a card. */
window.mistudio.curves = (() => {
  "use strict";
  const { charts, known, whole } = window.mistudio;
  const $ = (selector, place = document) => place.querySelector(selector);
  const $$ = (selector, place = document) => [...place.querySelectorAll(selector)];
  const UNITS = { utilization: "%", memory: "GiB", temperature: "°C", power: "W" };
  const MIB = 2 ** 20, MIB_PER_GIB = 1024;

  const number = (text) => (text === "" || text === undefined ? null : Number(text));
  const token = (index) => `s${(index % 6) + 1}`;
  const dashed = (index) => index >= 6;

  /** The cards that a page shows, as their elements say. */
  const shown = () => $$("[data-card]").map((element) => ({
    element, uuid: element.dataset.card, index: Number(element.dataset.index), name: element.dataset.name,
    get slowdown() { return number(element.dataset.slowdown); },
    get limit() { return number(element.dataset.limit); },
    get total() { return number(element.dataset.total); },
  }));

  /* Scales. What has a limit ends just above it, so that its guide can be seen -------------------------- */
  const ROOM = 1.06;
  const upTo = (limit, hi, least) => (known(limit) && limit > 0 ? ROOM * limit : Math.max(least, (hi ?? 0) * 1.05));
  const toLimit = (limit, least) => ({
    y: (lo, hi) => [0, upTo(limit(), hi, least)], guide: limit,
    ticks: (lo, hi) => (known(limit()) ? [0, limit()] : charts.nice(lo, hi)),
  });
  const SCALES = {
    utilization: () => ({ y: () => [0, 101], ticks: () => [0, 50, 100] }),
    memory: ({ total }) => toLimit(() => (known(total()) ? total() / MIB : null), MIB_PER_GIB),
    temperature: ({ slowdown }) => ({ y: () => [20, 100], ticks: () => [20, 60, 100], guide: slowdown, hot: true }),
    power: ({ limit }) => toLimit(limit, 10),
  };
  /** `limits`: functions that give slowdown (°C), limit (W) and total (bytes), or null. Memory is in MiB. */
  const scale = (name, limits) => SCALES[name](limits);
  const limitsOf = (card) => ({ slowdown: () => card.slowdown, limit: () => card.limit, total: () => card.total });
  const label = (name) => (value) => tick(name === "memory" ? value / MIB_PER_GIB : value);
  const tick = (value) => (value >= 10000 ? `${Math.round(value / 1000)}k` : whole(value));

  /* Words ----------------------------------------------------------------------------------------------- */
  const amount = (value, name) => (name === "memory" && known(value) ? (value / MIB_PER_GIB).toFixed(1) : whole(value));
  const measured = (value, name) => `${amount(value, name)} ${UNITS[name]}`;

  /** `41 % (38–45)`: the mean of a step, and between what the readings lay where they differ as written. */
  function spoken(series, at, name) {
    const [low, high] = [amount(series?.min[at], name), amount(series?.max[at], name)];
    return `${measured(series?.mean[at], name)}${low === high ? "" : ` (${low}–${high})`}`;
  }

  /* The charts of one card ------------------------------------------------------------------------------ */
  const BAND = 0.2;
  /** Highest, mean, lowest: the mean as a line, the others as the edges of its band. */
  const withBand = (colour, dash) => ({
    lines: [{ token: colour, width: 0 }, { token: colour, dash }, { token: colour, width: 0 }],
    bands: [{ series: [1, 3], fill: () => charts.faded(charts.colour(colour), BAND) }],
  });

  function make(card, store) {
    for (const figure of $$("[data-chart]", card.element)) {
      const name = figure.dataset.chart, output = $("output", figure);
      charts.make($(".plot", figure), {
        ...scale(name, limitsOf(card)), ...withBand(token(card.index), dashed(card.index)),
        x: store.range, group: "page", label: label(name),
        cursor: (at) => {
          output.textContent = at === null ? "" : `${spoken(store.series(card.uuid, name), at, name)} at ${store.when(store.times[at])}`;
        },
      });
    }
  }

  function draw(card, store) {
    const place = $(".plot", card.element);
    if (!place || place.offsetParent === null) return;
    if (!place.chart) make(card, store);
    for (const figure of $$("[data-chart]", card.element)) {
      const { mean = [], min = [], max = [] } = store.series(card.uuid, figure.dataset.chart) ?? {};
      figure.classList.toggle("unsaid", store.times.length > 2 && !mean.some(known));
      $(".plot", figure).chart.setData([store.times, max, mean, min]);
    }
  }

  /** "−30 min" under the left end of every chart. */
  function ends(place, text) {
    for (const element of $$("[data-from]", place)) element.textContent = `−${text}`;
  }

  /* What a card says now -------------------------------------------------------------------------------- */
  /** Whether there is nothing to show: the card is lost, or its last reading failed and the one before is old. */
  const silent = (health, metrics, error) => health === "lost" || Boolean(error && metrics.stale);

  /** A card that does not answer shows dashes; a reading that is old is shown, but paler. */
  function showCard(element, metrics, isSilent) {
    window.mistudio.fill(element, isSilent ? { power_limit_watts: metrics.power_limit_watts } : metrics);
    element.classList.toggle("old", Boolean(metrics.stale) && !isSilent);
    element.dataset.slowdown = metrics.temperature_slowdown_celsius ?? "";
    element.dataset.limit = metrics.power_limit_watts ?? "";
    const meter = $("meter", element);
    if (meter) meter.value = (!isSilent && metrics.memory_used_bytes) || 0;
  }

  return { $, $$, UNITS, number, token, dashed, shown, scale, label, measured, spoken, draw, ends, silent, showCard, withBand };
})();
