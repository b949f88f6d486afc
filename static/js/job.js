/* Job page: progress and log as frames bring them, curves over steps. */
(() => {
  "use strict";
  const { charts, whole, known, duration, fetched, throttled } = window.mistudio;
  const { specOf, order, scaled, written, ticks, spaced } = window.mistudio.scales;
  const $ = (selector, place = document) => place.querySelector(selector);
  const parsed = (id) => JSON.parse(document.getElementById(id).textContent);
  const job = $("main").dataset.job;
  const section = $("#curves");
  const plots = new Map(); // name of the metric -> {spec, place, output}
  let { curves } = parsed("points");

  /* Curves ---------------------------------------------------------------------------------------------- */
  function lastStep() {
    return Math.max(1, ...Object.values(curves).map(([steps]) => steps.at(-1) ?? 0));
  }

  function make(name) {
    const spec = specOf(name);
    const figure = document.createElement("figure");
    figure.className = "chart";
    figure.append(caption(spec), Object.assign(document.createElement("div"), { className: "plot" }), axis());
    section.append(figure);
    const place = $(".plot", figure), output = $("output", figure);
    charts.make(place, {
      lines: [{ token: "ink", points: (u) => u.data[0].length < 3 }], group: "steps", x: () => [0, lastStep()], label: written(spec),
      y: (lo, hi) => spaced(lo, hi, spec.low), ticks: ticks(spec),
      cursor: (at, u) => { output.textContent = at === null ? "" : `${known(u.data[1][at]) ? written(spec)(u.data[1][at]) : "–"} at ${whole(u.data[0][at])}`; },
    });
    plots.set(name, { spec, place, ends: figure.querySelectorAll(".ends span") });
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

  function draw() {
    const names = Object.keys(curves).sort((a, b) => order(a) - order(b) || a.localeCompare(b));
    section.hidden = !names.length;
    for (const name of names) {
      if (!plots.has(name)) make(name);
      const { spec, place, ends } = plots.get(name);
      const [steps, values] = curves[name];
      place.chart.setData([steps, values.map((value) => scaled(spec, value))]);
      ends[0].textContent = "step 0";
      ends[1].textContent = whole(lastStep());
    }
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
