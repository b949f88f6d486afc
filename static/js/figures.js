/* Figures of results: plotly, in our colours. Loaded only on pages that have one. */
(() => {
  "use strict";
  const { colour } = window.mistudio.charts;

  function themed(layout) {
    const axis = { gridcolor: colour("line"), linecolor: colour("edge"), zerolinecolor: colour("line") };
    return {
      ...layout, colorway: ["accent", "s2", "s3", "s4", "s5", "s6"].map(colour),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 320, margin: { l: 56, r: 12, t: 8, b: 46 },
      font: { color: colour("ink"), family: "system-ui, sans-serif", size: 12 },
      xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    };
  }

  function draw() {
    for (const place of document.querySelectorAll("[data-figure]")) {
      const figure = JSON.parse(document.getElementById(place.dataset.figure).textContent);
      window.Plotly.react(place, figure.data, themed(figure.layout), { displaylogo: false, responsive: true, displayModeBar: false });
    }
  }
  document.addEventListener("theme:changed", () => requestAnimationFrame(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => requestAnimationFrame(draw));
  document.addEventListener("live:patched", () => {
    if (document.querySelector("[data-figure]:empty")) draw();
  });
  draw();
})();
