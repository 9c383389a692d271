// Draws the charts in the colours of the page, and again when those change (dark mode, paper).
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
// Of versions; paler than those of what a lane does (timeline.js).
const COLOURS = ["#7db4e8", "#f3a977", "#7fd1aa", "#d2a0e2", "#f2d873", "#f2949d", "#7ed3d7", "#cdbba6"];
const GIVEN = -1;
const GIVEN_COLOUR = "#9aa0a6";
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };

function versionColour(version) {
  return version === GIVEN ? GIVEN_COLOUR : COLOURS[version % COLOURS.length];
}

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function themed(layout) {
  const axis = { gridcolor: colourOf("--line"), zerolinecolor: colourOf("--line"), linecolor: colourOf("--line"), automargin: true };
  return {
    height: 300, margin: { l: 48, r: 12, t: 8, b: 40 }, hovermode: "x unified",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, sans-serif", color: colourOf("--text"), size: 12 },
    hoverlabel: { bgcolor: colourOf("--card"), bordercolor: colourOf("--line"), font: { color: colourOf("--text") } },
    ...layout,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", ...layout.legend },
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
  };
}

function drawCharts() {
  DATA.charts.forEach((chart, index) => {
    const place = document.getElementById(`chart-${index}`);
    const isSmall = place.closest(".small") !== null;
    Plotly.react(place, chart.data, themed({ ...(isSmall ? { height: 220 } : {}), ...chart.layout }), CONFIG);
  });
}

function redraw() {
  drawCharts();
  if (DATA.timeline) drawTimeline();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
// Paper is narrower than the screen, and always light. Charts get their width by hand: the page is laid out for paper only later.
const PAPER_WIDTH = 700;
function onPaper(isPaper) {
  document.documentElement.classList.toggle("paper", isPaper);
  redraw();
  document.querySelectorAll(".js-plotly-plot").forEach((place) => {
    const columns = place.closest(".small") ? 3 : place.closest(".grid") ? 2 : 1;
    Plotly.relayout(place, isPaper ? { width: PAPER_WIDTH / columns - 42 } : { width: null, autosize: true });
  });
}
addEventListener("beforeprint", () => onPaper(true));
addEventListener("afterprint", () => onPaper(false));
drawCharts();
