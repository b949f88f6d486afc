/* Charts: uPlot in our look. Every chart of a group shares its time axis and its cursor. */
window.mistudio.charts = (() => {
  "use strict";
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);

  let colours = new Map();
  /** The colour behind a token, as the canvas needs it: `light-dark()` is resolved by the browser. */
  function colour(token) {
    if (!colours.has(token)) {
      probe.style.color = `var(--${token})`;
      colours.set(token, getComputedStyle(probe).color);
    }
    return colours.get(token);
  }

  const everything = new Set();
  function repaint() {
    colours = new Map();
    for (const chart of everything) chart.redraw(false, true);
  }
  document.addEventListener("theme:changed", repaint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

  const resized = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      if (contentRect.width > 20) target.chart?.setSize({ width: contentRect.width, height: contentRect.height });
    }
  });

  function line({ token = "ink", dash, width = 1.5, fill, show = true, points = false, joined = false }) {
    return {
      stroke: () => colour(token), width, dash: dash ? [5, 3] : undefined, show, spanGaps: joined,
      fill: fill && (() => faded(colour(token), fill)), points: { show: points },
    };
  }

  const faded = (rgb, alpha) => rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);

  /** A limit: dashed, red only where reaching it is a fault (`hot`). */
  function guideLine(guide, hot) {
    return (u) => {
      const value = guide();
      if (value === null || value === undefined || value > u.scales.y.max) return;
      const y = Math.round(u.valToPos(value, "y", true)), { left, width } = u.bbox;
      u.ctx.save();
      Object.assign(u.ctx, { strokeStyle: colour(hot ? "bad" : "edge"), globalAlpha: 0.7, lineWidth: devicePixelRatio });
      u.ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      u.ctx.beginPath();
      u.ctx.moveTo(left, y);
      u.ctx.lineTo(left + width, y);
      u.ctx.stroke();
      u.ctx.restore();
    };
  }

  /** A chart in `place`. `x()` and `y(min, max)` give the ranges, `ticks(lo, hi)` the grid lines. */
  function make(place, { lines, bands, x, y, ticks, group, guide = () => null, hot = false, cursor = () => {}, label = String }) {
    const axis = { stroke: () => colour("muted"), font: "10px system-ui, sans-serif", ticks: { show: false } };
    const chart = new uPlot({
      width: Math.max(60, place.clientWidth), height: place.clientHeight || 92, padding: [7, 0, 7, 2],
      legend: { show: false },
      cursor: { sync: { key: group }, y: false, points: { size: 5 }, drag: { x: false, y: false } },
      scales: { x: { time: false, range: x }, y: { range: (u, lo, hi) => y(lo, hi) } },
      axes: [
        // Its labels are HTML below the chart. Not `show: false`: uPlot then leaves out the axes after it, too.
        { ...axis, size: 0, grid: { show: false }, splits: () => [], values: () => [] },
        {
          ...axis, side: 1, size: 36, gap: 4, grid: { stroke: () => colour("line"), width: 1 },
          splits: (u) => ticks(u.scales.y.min, u.scales.y.max), values: (u, values) => values.map(label),
        },
      ],
      series: [{}, ...lines.map(line)], bands,
      hooks: { draw: [guideLine(guide, hot)], setCursor: [(u) => cursor(u.cursor.idx ?? null, u)] },
    }, [[], ...lines.map(() => [])], place);
    place.chart = chart;
    everything.add(chart);
    resized.observe(place);
    return chart;
  }

  function drop(place) {
    if (!place.chart) return;
    everything.delete(place.chart);
    resized.unobserve(place);
    place.chart.destroy();
    delete place.chart;
  }

  const ends = (lo, hi) => [lo, hi];
  const halves = (lo, hi) => [lo, (lo + hi) / 2, hi];
  /** Two to four round numbers between `lo` and `hi`. */
  function nice(lo, hi) {
    const raw = (hi - lo) / 3, size = 10 ** Math.floor(Math.log10(raw));
    const step = size * ([1, 2, 5].find((n) => n * size >= raw) ?? 10);
    const found = [];
    for (let n = Math.ceil(lo / step); n * step <= hi + step * 1e-9; n++) found.push(+(n * step).toPrecision(12));
    return found;
  }
  return { make, nice, drop, colour, faded, ends, halves };
})();
