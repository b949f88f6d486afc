/* Scales of metric curves: which chart a metric has, how its values are drawn and written. For the pages of a job and a group. */
window.mistudio.scales = (() => {
  "use strict";
  const { charts, known } = window.mistudio;
  const specs = JSON.parse(document.getElementById("chart-specs").textContent);

  /** `fvu[k 16]` is the curve of one of several that a job draws: they share the chart of `fvu`. */
  const base = (name) => name.split("[", 1)[0];
  const whose = (name) => name.slice(base(name).length + 1, -1);

  const specOf = (name) => specs.find((spec) => spec.names.includes(name)) ?? { title: name.replaceAll("_", " "), unit: "" };
  const order = (name) => { const at = specs.findIndex((spec) => spec.names.includes(name)); return at < 0 ? specs.length : at; };
  const scaled = (spec, value) => {
    if (!known(value)) return null;
    if (spec.log) return value > 0 ? Math.log10(value) : null;
    return value * (spec.times ?? 1);
  };
  const small = (value) => value !== 0 && Math.abs(value) < 0.001;
  const short = (value) => (small(value) ? value.toExponential().replace(/(\.\d)\d*/, "$1") : Math.abs(value) >= 10000 ? `${+(value / 1000).toPrecision(3)}k` : String(+value.toPrecision(3)));

  /** What stands at a scaled value: on a logarithmic scale the number itself, not its exponent. */
  const written = (spec) => (spec.log ? (value) => short(10 ** value) : short);

  /** Round numbers also on a logarithmic scale: 50, 100, 150 within a decade, else 1, 3, 10, 30, or powers of ten. */
  const ticks = (spec) => (spec.log ? logarithmic : charts.nice);
  function logarithmic(lo, hi) {
    if (hi - lo < 1) return charts.nice(10 ** lo, 10 ** hi).filter((value) => value > 0).map(Math.log10);
    if (hi - lo > 2) return charts.nice(lo, hi).filter(Number.isInteger);
    const decade = Math.floor(lo);
    return [0, 1, 2].flatMap((n) => [decade + n, decade + n + Math.log10(3)]).filter((at) => at >= lo && at <= hi);
  }

  /** A flat curve still needs a scale; a known floor is kept. */
  function spaced(lo, hi, floor) {
    if (lo === null || lo === undefined) return [0, 1];
    const bottom = floor !== undefined && lo >= floor ? floor : null;
    const room = (hi - (bottom ?? lo)) * 0.06 || Math.abs(hi) * 0.1 || 1;
    return [bottom ?? lo - room, hi + room];
  }
  return { base, whose, specOf, order, scaled, written, ticks, spaced };
})();
