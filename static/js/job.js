/* Job page: progress and log as frames bring them, curves over steps. */
(() => {
  "use strict";
  const { charts, whole, known, duration, fetched, throttled } = window.mistudio;
  const { base, whose, specOf, order, scaled, written, ticks, spaced } = window.mistudio.scales;
  const $ = (selector, place = document) => place.querySelector(selector);
  const parsed = (id) => JSON.parse(document.getElementById(id).textContent);
  const job = $("main").dataset.job;
  const section = $("#curves");
  const plots = new Map(); // name of the chart -> {spec, place, ends, names of its curves}
  let { curves } = parsed("points");

  /* Curves ---------------------------------------------------------------------------------------------- */
  function lastStep() {
    return Math.max(1, ...Object.values(curves).map(([steps]) => steps.at(-1) ?? 0));
  }

  function make(name, names) {
    const spec = specOf(name), several = names.length > 1;
    const figure = document.createElement("figure");
    figure.className = "chart";
    figure.append(caption(spec), Object.assign(document.createElement("div"), { className: "plot" }), axis());
    if (several) figure.append(keys(names));
    section.append(figure);
    const place = $(".plot", figure), output = $("output", figure);
    charts.make(place, {
      lines: names.map((_, n) => ({ token: several ? token(n) : "ink", dash: several && dashed(n), joined: several, points: (u) => u.data[0].length < 3 })),
      group: "steps", x: () => [0, lastStep()], label: written(spec),
      y: (lo, hi) => spaced(lo, hi, spec.low), ticks: ticks(spec),
      cursor: (at, u) => {
        const said = (n) => (at !== null && known(u.data[n + 1][at]) ? written(spec)(u.data[n + 1][at]) : "");
        output.textContent = at === null ? "" : several ? `at ${whole(u.data[0][at])}` : `${said(0) || "–"} at ${whole(u.data[0][at])}`;
        for (const [n, value] of figure.querySelectorAll(".legend b").entries()) value.textContent = said(n);
      },
    });
    plots.set(name, { spec, place, names, ends: figure.querySelectorAll(".ends span") });
  }

  const token = (n) => `s${(n % 6) + 1}`;
  const dashed = (n) => Math.floor(n / 6) % 2 === 1;

  /** Whose curve is which; the value under the pointer beside it. */
  function keys(names) {
    const element = Object.assign(document.createElement("p"), { className: "legend" });
    element.append(...names.map((name, n) => {
      const key = document.createElement("span");
      const swatch = Object.assign(document.createElement("span"), { className: `swatch ${token(n)}${dashed(n) ? " dash" : ""}` });
      key.append(swatch, ` ${whose(name) || "all"} `, document.createElement("b"));
      return key;
    }));
    return element;
  }

  function caption(spec) {
    const element = document.createElement("figcaption");
    const unit = Object.assign(document.createElement("span"), { className: "unit", textContent: spec.unit });
    element.append(`${spec.title} `, unit, document.createElement("output"));
    return element;
  }

  function axis() {
    const element = Object.assign(document.createElement("div"), { className: "ends" });
    element.append(document.createElement("span"), document.createElement("span"));
    return element;
  }

  /** The charts, in the order of the page, each with the names of its curves. */
  function grouped() {
    const found = new Map();
    for (const name of Object.keys(curves)) found.set(base(name), [...(found.get(base(name)) ?? []), name]);
    return [...found].sort(([a], [b]) => order(a) - order(b) || a.localeCompare(b));
  }

  function draw() {
    const wanted = grouped();
    section.hidden = !wanted.length;
    if (wanted.some(([name, names]) => plots.has(name) && plots.get(name).names.length !== names.length)) startOver();
    for (const [name, names] of wanted) {
      if (!plots.has(name)) make(name, names);
      const { spec, place, ends } = plots.get(name);
      place.chart.setData(uPlot.join(names.map((one) => [curves[one][0], curves[one][1].map((value) => scaled(spec, value))])));
      ends[0].textContent = "step 0";
      ends[1].textContent = whole(lastStep());
    }
  }

  /** A curve came to a chart: all are made anew, so that they stay in order. */
  function startOver() {
    for (const { place } of plots.values()) charts.drop(place);
    section.replaceChildren();
    plots.clear();
  }

  function point({ step, values }) {
    for (const [name, value] of Object.entries(values)) {
      const [steps, known] = (curves[name] ??= [[], []]);
      while (steps.length && steps.at(-1) >= step) { steps.pop(); known.pop(); } // a resume goes back
      steps.push(step);
      known.push(value);
    }
    draw();
  }

  const reload = throttled(2, async () => {
    try { curves = JSON.parse(await fetched(section.dataset.points)).curves; draw(); } catch { /* next time */ }
  });

  /* Progress -------------------------------------------------------------------------------------------- */
  let latest = null;
  function progress(p) {
    latest = p;
    const lead = $("[data-lead]"), bar = $("[data-bar]");
    if (!lead || $(".badge", document.querySelector('[data-part="head"]'))?.textContent !== "running") return;
    if (bar && known(p.fraction)) bar.value = p.fraction;
    const parts = [
      strong(known(p.fraction) ? `${Math.round(100 * p.fraction)} %` : "running"), p.stage,
      p.total ? `${whole(p.done)} of ${whole(p.total)} ${p.unit}` : p.done ? `${whole(p.done)} ${p.unit}` : "",
      p.rate ? `${p.rate >= 10000 ? whole(p.rate) : +p.rate.toPrecision(4)} ${p.unit}/s` : "",
      known(p.eta_seconds) ? strong(`${duration(p.eta_seconds)} left`) : "",
      p.message && Object.assign(document.createElement("span"), { className: "muted", textContent: p.message }),
    ].filter(Boolean);
    lead.replaceChildren(...parts.flatMap((part, n) => (n ? [" · ", part] : [part])));
  }
  const strong = (text) => Object.assign(document.createElement("b"), { textContent: text });

  /* Log: follows its end while the reader is there -------------------------------------------------------- */
  const log = $("#log");
  const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 30;
  const toEnd = () => { log.scrollTop = log.scrollHeight; };

  function line(text) {
    const follow = atEnd();
    log.append(text.endsWith("\n") ? text : `${text}\n`);
    if (follow) toEnd();
  }

  const reread = throttled(2, async () => {
    try {
      const fresh = new DOMParser().parseFromString(await fetched($("main").dataset.parts), "text/html").getElementById("log");
      const follow = atEnd();
      if (fresh && fresh.textContent !== log.textContent) log.textContent = fresh.textContent;
      if (follow) toEnd();
    } catch { /* next time */ }
  });

  document.addEventListener("live:frame", ({ detail: frame }) => {
    if (frame.channel !== `jobs/${job}`) return;
    if (frame.event === "job:progress") progress(frame.data.progress);
    if (!log.textContent) reread(); // lines that were written before this page listened
    if (frame.event === "job:metric") point(frame.data);
    if (frame.event === "job:log") line(frame.data.line);
    if (frame.event === "job:changed" && frame.seq) { reload(); reread(); }
  });
  document.addEventListener("live:again", () => { reload(); reread(); });
  document.addEventListener("live:patched", ({ detail: fresh }) => {
    if (latest) progress(latest); // the row is written every 5 s, frames come twice a second
    if (fresh.querySelector("[data-figure]") && !$("script[src*='plotly']")) location.reload(); // the result has a figure
  });
  document.addEventListener("theme:changed", () => requestAnimationFrame(draw));
  draw();
  toEnd();
})();
