/* Scales of metric curves: which chart a metric has, how its values are drawn and written. For the pages of a job and a group. */
window.mistudio.scales = (() => {
  "use strict";
  const { known } = window.mistudio;
  const specs = JSON.parse(document.getElementById("chart-specs").textContent);

  const specOf = (name) => specs.find((spec) => spec.names.includes(name)) ?? { title: name.replaceAll("_", " "), unit: "" };
  const order = (name) => { const at = specs.findIndex((spec) => spec.names.includes(name)); return at < 0 ? specs.length : at; };
  const scaled = (spec, value) => {
    if (!known(value)) return null;
    if (spec.log) return value > 0 ? Math.log10(value) : null;
    return value * (spec.times ?? 1);
  };
  const small = (value) => value !== 0 && Math.abs(value) < 0.001;
  const short = (value) => (small(value) ? value.toExponential().replace(/(\.\d)\d*/, "$1") : Math.abs(value) >= 10000 ? `${+(value / 1000).toPrecision(3)}k` : String(+value.toPrecision(3)));

  /** A flat curve still needs a scale; a known floor is kept. */
  function spaced(lo, hi, floor) {
    if (lo === null || lo === undefined) return [0, 1];
    const bottom = floor !== undefined && lo >= floor ? floor : null;
    const room = (hi - (bottom ?? lo)) * 0.06 || Math.abs(hi) * 0.1 || 1;
    return [bottom ?? lo - room, hi + room];
  }
  return { specOf, order, scaled, short, spaced };
})();
