/* Group page: one metric of all jobs in one chart, which of them, and the order of the table. */
(() => {
  "use strict";
  const { charts, known, whole, fetched, throttled } = window.mistudio;
  const { specOf, scaled, written, ticks, spaced } = window.mistudio.scales;
  const $ = (selector, place = document) => place.querySelector(selector);
  const $$ = (selector, place = document) => [...place.querySelectorAll(selector)];
  const section = $("#overlaid"), place = $(".plot", section), legend = $("#legend"), output = $("output", section);
  const ends = $$(".ends span", section);
  let metric = $("#metric").value;
  let curves = {}; // job -> [[steps], [values]]
  let hidden = null; // jobs that are not drawn
  let order = { column: null, down: false };

  /* Curves ---------------------------------------------------------------------------------------------- */
  /** The jobs in the order of the combinations, however the table is sorted. */
  const jobs = () => $$("[data-job]")
    .map((row) => ({ id: row.dataset.job, words: row.dataset.words, number: Number(row.cells[0].dataset.value) }))
    .sort((a, b) => a.number - b.number);
  const drawn = () => jobs().filter(({ id }) => curves[id] && !hidden.has(id));
  const token = ({ number }) => `s${(number % 6) + 1}`;
  const dashed = ({ number }) => Math.floor(number / 6) % 2 === 1;

  function draw() {
    hidden ??= new Set(jobs().slice(Number(section.dataset.drawn)).map(({ id }) => id));
    section.hidden = !Object.keys(curves).length;
    if (section.hidden) return;
    charts.drop(place);
    const spec = specOf(metric), these = drawn();
    legend.replaceChildren(...jobs().filter(({ id }) => curves[id]).map(entry));
    output.textContent = spec.unit;
    if (!these.length) return;
    charts.make(place, {
      lines: these.map((job) => ({ token: token(job), dash: dashed(job), joined: true, points: (u) => u.data[0].length < 3 })),
      group: "overlaid", x: () => [0, lastStep()], label: written(spec), y: (lo, hi) => spaced(lo, hi, spec.low), ticks: ticks(spec),
      cursor: (at, u) => say(at, u, spec, these),
    });
    place.chart.setData(uPlot.join(these.map(({ id }) => [curves[id][0], curves[id][1].map((value) => scaled(spec, value))])));
    ends[1].textContent = whole(lastStep());
  }

  const lastStep = () => Math.max(1, ...Object.values(curves).map(([steps]) => steps.at(-1) ?? 0));

  function entry(job) {
    const button = Object.assign(document.createElement("button"), { type: "button", title: "Show or hide its curve" });
    button.dataset.id = job.id;
    button.setAttribute("aria-pressed", String(!hidden.has(job.id)));
    const swatch = Object.assign(document.createElement("span"), { className: `swatch ${token(job)}${dashed(job) ? " dash" : ""}` });
    button.append(swatch, ` ${job.words} `, document.createElement("b"));
    return button;
  }

  /** The values under the pointer, each at its entry. */
  function say(at, u, spec, these) {
    output.textContent = at === null ? spec.unit : `${spec.unit} at step ${whole(u.data[0][at])}`;
    these.forEach(({ id }, n) => {
      const value = at === null ? null : u.data[n + 1][at];
      $(`[data-id="${id}"] b`, legend).textContent = known(value) ? written(spec)(value) : "";
    });
  }

  legend.addEventListener("click", ({ target }) => {
    const id = target.closest("button")?.dataset.id;
    if (!id) return;
    if (!hidden.delete(id)) hidden.add(id);
    draw();
    $(`[data-id="${id}"]`, legend)?.focus({ preventScroll: true });
  });

  const reload = throttled(2, async () => {
    if (!metric) return;
    try { curves = JSON.parse(await fetched(`${section.dataset.points}?metric=${encodeURIComponent(metric)}`)).curves; draw(); } catch { /* next time */ }
  });

  document.addEventListener("change", ({ target }) => {
    if (target.id !== "metric") return;
    metric = target.value;
    reload();
  });

  /* Table ----------------------------------------------------------------------------------------------- */
  const isNumber = (text) => text !== "" && !Number.isNaN(Number(text));
  function compare(a, b) {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is not known stands last, either way
    const found = isNumber(a) && isNumber(b) ? Number(a) - Number(b) : a.localeCompare(b, undefined, { numeric: true });
    return order.down ? -found : found;
  }

  function sort() {
    if (order.column === null) return;
    const body = $("[data-sorted] tbody");
    const value = (row) => row.cells[order.column].dataset.value ?? row.cells[order.column].textContent;
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
    $$("[data-sorted] th").forEach((head, n) => {
      if (n === order.column) head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  document.addEventListener("click", ({ target }) => {
    const head = target.closest("[data-sort]")?.closest("th");
    if (!head) return;
    order = { column: head.cellIndex, down: order.column === head.cellIndex && !order.down };
    sort();
  });

  document.addEventListener("live:patched", () => {
    const choice = $("#metric");
    if ([...choice.options].some(({ value }) => value === metric)) choice.value = metric;
    else metric = choice.value;
    sort();
    reload();
  });
  reload();
})();
