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
  const axis = { gridcolor: colourOf("--line"), zerolinecolor: colourOf("--line"), linecolor: colourOf("--line"), automargin: true, exponentformat: "e" };
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

// Read an axis of steps as samples, tokens or hours; a step without a row lies between its neighbours.
function switched(chart, kind) {
  const axis = chart.layout.xaxis ?? {}, runs = DATA.axes;
  if (kind === "steps" || axis.title?.text !== "trainer step") return chart;
  const convert = ({ steps, [kind]: values }) => (step) => {
    const after = steps.findIndex((known) => known >= step);
    if (step === null || after < 0 || values[after] === null) return null;
    if (steps[after] === step) return values[after];
    const share = (step - steps[after - 1]) / (steps[after] - steps[after - 1]);
    return values[after - 1] + share * (values[after] - values[after - 1]);
  };
  const data = chart.data.map((trace) => ({ ...trace, x: trace.x.map(convert(runs[trace.meta] ?? Object.values(runs)[0])) }));
  const title = { samples: "samples trained", tokens: "tokens trained", hours: "hours since the start, start-up included" }[kind];
  return { data, layout: { ...chart.layout, xaxis: { ...axis, title: { text: title }, exponentformat: "SI" } } };
}

// Charts in a folded part are drawn when it opens: they have no width before.
function drawCharts(root = document) {
  const kind = document.getElementById("axis")?.value ?? "steps";
  DATA.charts.forEach((chart, index) => {
    const place = document.getElementById(`chart-${index}`), { data, layout } = switched(chart, kind);
    if (!root.contains(place) || place.closest("details:not([open])")) return;
    const isSmall = place.closest(".small") !== null;
    Plotly.react(place, data, themed({ ...(isSmall ? { height: 220 } : {}), ...layout }), CONFIG);
  });
}

function unfold(part) {
  fillAll();
  if (part.open && window.Plotly) drawCharts(part);
}

function redraw() {
  drawCharts();
  if (DATA.timeline) drawTimeline();
}

// Fill rows evenly: as many per row as fit, and no row left half empty.
function fill(grid) {
  const { columnGap, width } = getComputedStyle(grid), gap = parseFloat(columnGap), count = grid.children.length;
  const fit = Math.max(1, Math.floor((parseFloat(width) + gap) / (parseFloat(getComputedStyle(grid).getPropertyValue("--least")) + gap)));
  const rows = Math.ceil(count / fit), start = (row) => Math.ceil((row * count) / rows);
  for (let row = 0; row < rows; row++) {
    const share = start(row + 1) - start(row);
    for (let at = start(row); at < start(row + 1); at++) grid.children[at].style.flexBasis = `calc((100% - ${(share - 1) * gap}px) / ${share} - 0.1px)`;
  }
}

function fillAll() {
  document.querySelectorAll(".grid, .tiles, .cards, .answers").forEach((grid) => grid.closest("details:not([open])") || fill(grid));
}

// Sort by the last number of a cell (the one after an arrow), largest first; else by text.
function sortBy(table, column) {
  const heading = table.tHead.rows[0].cells[column];
  const isFalling = heading.getAttribute("aria-sort") !== "descending";
  const key = (row) => row.cells[column].textContent.split("→").pop().replaceAll(",", "");
  const order = (a, b) => parseFloat(key(b)) - parseFloat(key(a)) || Number.isNaN(parseFloat(key(a))) - Number.isNaN(parseFloat(key(b))) || key(a).localeCompare(key(b));
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", isFalling ? "descending" : "ascending");
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => (isFalling ? order(a, b) : order(b, a))));
}

// Highlight the section in view in the navigation, and keep its link visible.
function follow() {
  const nav = document.querySelector("nav"), sections = [...document.querySelectorAll("section")];
  const at = scrollY ? sections.findLastIndex((section) => section.getBoundingClientRect().top < innerHeight / 3) : 0;
  [...nav.querySelectorAll("a")].forEach((link, index) => link.classList.toggle("here", index === Math.max(at, 0)));
}

// Paper is narrower than the screen, and always light.
function onPaper(isPaper) {
  document.documentElement.classList.toggle("paper", isPaper);
  if (isPaper) document.querySelectorAll("details.part").forEach((part) => { part.open = true; });
  fillAll();
  redraw();
  document.querySelectorAll(".js-plotly-plot").forEach((place) => Plotly.relayout(place, isPaper ? { width: place.clientWidth } : { width: null, autosize: true }));
}
