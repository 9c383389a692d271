// The timeline: the visible segments are binned to the screen's columns, so that a long run is as fast as a short one.
const LANE_GAP = 0.4;
const OTHER_COLOURS = { pause: "#7a1f2b", drain: "#c46a1a", verify: "#6a4fb3", train: "#2e7d55", publish: "#d6a21f", wait: "#858c94", other: "#c9ced3", checkpoint: "#3f87c9", eval: "#b065c6" };
const KIND_WORDS = { pause: "pause of the engines", drain: "draining", verify: "verification", train: "training", publish: "publication", wait: "waiting", other: "other", checkpoint: "saving", eval: "evaluation" };
const MARKS = {
  eval: ["evaluation", "diamond", "◆"], checkpoint: ["checkpoint", "square", "■"], parity: ["parity check", "circle", "●"], lost: ["worker lost", "x", "✖"],
  rejoined: ["worker back", "cross", "✚"], restarted: ["worker restarted", "triangle-up", "▲"],
};

function laneHeight(lane, rollouts) {
  return lane.name.startsWith("rollout/") ? Math.max(2.5, Math.min(10, lane.rows / 4, 20 / rollouts)) : 1;
}

// One heatmap holds all lanes, from the top down, with rows of different heights.
function rowsOf(timeline) {
  const edges = [0];
  const places = [];
  let y = 0;
  const rollouts = timeline.lanes.filter((lane) => lane.name.startsWith("rollout/")).length;
  for (const lane of timeline.lanes) {
    const height = laneHeight(lane, rollouts);
    places.push({ first: edges.length - 1, top: y, height });
    for (let row = 1; row <= lane.rows; row++) edges.push(y + (height * row) / lane.rows);
    y += height + LANE_GAP;
    edges.push(y);
  }
  return { edges, places, height: y };
}

// Each cell shows the segment that took most of it, if it was busy for half of the time; short verifications always show.
function binned(timeline, layout, from, to, columns) {
  const rows = layout.edges.length - 1;
  const width = (to - from) / columns;
  const taken = new Float32Array(rows * columns);
  const most = new Float32Array(rows * columns);
  const owner = new Int32Array(rows * columns).fill(-1);
  const segments = [];
  timeline.lanes.forEach((lane, number) => {
    const { first } = layout.places[number];
    const isVerifier = lane.name.startsWith("verifier/");
    for (let index = 0; index < lane.row.length; index++) {
      const start = lane.start[index], end = lane.end[index];
      if (end < from || start > to) continue;
      const isOverAll = lane.row[index] < 0;
      const segment = segments.push({ lane, index }) - 1;
      const left = Math.max(0, Math.floor((start - from) / width));
      const right = Math.min(columns - 1, Math.floor((end - from) / width));
      for (let row = isOverAll ? 0 : lane.row[index]; row < (isOverAll ? lane.rows : lane.row[index] + 1); row++) {
        for (let column = left; column <= right; column++) {
          const covered = Math.min(end, from + (column + 1) * width) - Math.max(start, from + column * width);
          const cell = (first + row) * columns + column;
          // A pause is drawn over the samples that it interrupts.
          const share = isVerifier ? 1 : (covered / width) * (isOverAll ? 1.001 : 1);
          taken[cell] += share;
          if (share > most[cell]) { most[cell] = share; owner[cell] = segment; }
        }
      }
    }
  });
  for (let cell = 0; cell < owner.length; cell++) if (taken[cell] < 0.5) owner[cell] = -1;
  return { owner, segments };
}

function described(timeline, { lane, index }) {
  const kind = lane.kind[index], label = timeline.labels[lane.label[index]];
  const what = kind >= 0 ? `version ${kind}` : KIND_WORDS[timeline.kinds[-1 - kind]];
  const seconds = (lane.end[index] - lane.start[index]) * timeline.unit;
  return `${lane.name}: ${what}${label ? ` · ${label}` : ""} · ${seconds.toPrecision(3)} s`;
}

function timelineFigure(timeline, from, to, columns) {
  const layout = rowsOf(timeline);
  const { owner, segments } = binned(timeline, layout, from, to, columns);
  const shades = [...COLOURS, ...timeline.kinds.map((kind) => OTHER_COLOURS[kind])];
  const shade = segments.map(({ lane, index }) => {
    const kind = lane.kind[index];
    return kind >= 0 ? kind % COLOURS.length : COLOURS.length - 1 - kind;
  });
  const texts = segments.map((segment) => described(timeline, segment));
  const z = [], customdata = [];
  for (let row = 0; row < layout.edges.length - 1; row++) {
    const cells = Array.from(owner.subarray(row * columns, (row + 1) * columns));
    z.push(cells.map((segment) => (segment < 0 ? null : shade[segment])));
    customdata.push(cells.map((segment) => texts[segment]));
  }
  const seconds = (ticks) => ticks * timeline.unit;
  const x = Array.from({ length: columns + 1 }, (_, column) => seconds(from + ((to - from) * column) / columns));
  const colorscale = shades.flatMap((colour, index) => [[index / shades.length, colour], [(index + 1) / shades.length, colour]]);
  const inSight = (time) => time >= from && time <= to;
  const data = [
    { type: "heatmap", x, y: layout.edges, z, customdata, colorscale, zmin: -0.5, zmax: shades.length - 0.5, showscale: false,
      hoverongaps: false, hovertemplate: "%{customdata}<extra></extra>" },
  ];
  const legend = [];
  const key = (name, mark, color) => legend.push(element("span", {}, mark ? element("b", { style: { color } }, mark) : element("i", { style: { background: color } }), name));
  const drawn = new Set([...new Set(owner)].filter((segment) => segment >= 0).map((segment) => segments[segment].lane.kind[segments[segment].index]));
  const seen = [...drawn].filter((kind) => kind >= 0).sort((a, b) => a - b);
  for (const first of seen.slice(0, COLOURS.length)) {
    const versions = seen.filter((version) => version % COLOURS.length === first % COLOURS.length), more = versions.length > 2 ? ", ..." : "";
    key(`version ${versions.slice(0, 2).join(", ")}${more}`, "", versionColour(first));
  }
  timeline.kinds.forEach((kind, place) => drawn.has(-1 - place) && key(KIND_WORDS[kind], "", OTHER_COLOURS[kind]));
  const marksOf = (kind) => timeline.marks.filter((mark) => mark.kind === kind && inSight(mark.time));
  for (const [kind, [name, symbol, mark]] of Object.entries(MARKS)) {
    const marks = marksOf(kind), color = colourOf(kind === "lost" ? "--bad" : "--accent");
    if (marks.length) key(name, mark, color);
    data.push({ type: "scatter", mode: "markers", x: marks.map(({ time }) => seconds(time)), y: marks.map(() => -0.5), text: marks.map(({ text }) => text),
      hovertemplate: "%{text}<extra></extra>", marker: { symbol, size: 8, color } });
  }
  const begins = publications(timeline, from, to), gaps = marksOf("gap").map(({ time }) => seconds(time));
  if (begins.length) key("a publication begins", "┊", colourOf("--text"));
  if (gaps.length) key("not running: left out", "┃", colourOf("--bad"));
  document.getElementById("timeline-legend").replaceChildren(...legend);
  const edges = [...begins.map((x) => ({ x, line: { color: colourOf("--text"), width: 1, dash: "dot" } })), ...gaps.map((x) => ({ x, line: { color: colourOf("--bad"), width: 4 } }))];
  return { data, layout: timelineLayout(timeline, layout, seconds(from), seconds(to), edges) };
}

// A line at the start of each publication, unless there are too many.
function publications(timeline, from, to) {
  const times = [];
  const kind = -1 - timeline.kinds.indexOf("publish");
  for (const lane of timeline.lanes) lane.kind.forEach((value, index) => {
    if (value === kind && lane.start[index] >= from && lane.start[index] <= to) times.push(lane.start[index] * timeline.unit);
  });
  return times.length > 60 ? [] : times;
}

function timelineLayout(timeline, rows, from, to, edges) {
  const names = timeline.lanes.map((lane) => (lane.note ? `${lane.name}<br><sub>${lane.note.replace(", ", ",<br>")}</sub>` : lane.name));
  return themed({
    height: 70 + Math.max(160, rows.height * 34), hovermode: "closest", dragmode: "zoom", showlegend: false,
    xaxis: { range: [from, to], title: { text: "seconds of the run since the first event shown" }, showgrid: false, zeroline: false },
    yaxis: { range: [rows.height, -1], fixedrange: true, showgrid: false, zeroline: false, tickvals: rows.places.map(({ top, height }) => top + height / 2), ticktext: names },
    shapes: edges.map(({ x, line }) => ({ type: "line", x0: x, x1: x, y0: 0, y1: rows.height, line, opacity: 0.6 })),
  });
}

let visible = DATA.timeline && DATA.timeline.focus;
function drawTimeline() {
  const timeline = DATA.timeline, place = document.getElementById("timeline-chart");
  const columns = Math.max(200, Math.min(1400, Math.round(place.clientWidth * 0.9)));
  const { data, layout } = timelineFigure(timeline, visible[0], visible[1], columns);
  const span = ((visible[1] - visible[0]) * timeline.unit).toPrecision(3);
  const note = timeline.left_out ? `; ${timeline.left_out} more workers are not shown` : "";
  document.getElementById("timeline-span").textContent = `${span} s of ${(timeline.end * timeline.unit).toPrecision(4)} s${note}`;
  return Plotly.react(place, data, layout, CONFIG);
}

function show(from, to) {
  const { end } = DATA.timeline;
  const width = Math.min(end, Math.max(20, to - from));
  const start = Math.max(0, Math.min(from, end - width));
  visible = [start, start + width];
  drawTimeline();
}

function moveTimeline(how) {
  const [from, to] = visible, width = to - from, middle = (from + to) / 2;
  if (how === "earlier") show(from - width * 0.7, to - width * 0.7);
  if (how === "later") show(from + width * 0.7, to + width * 0.7);
  if (how === "in") show(middle - width / 4, middle + width / 4);
  if (how === "out") show(middle - width, middle + width);
  if (how === "all") show(0, DATA.timeline.end);
}

function startTimeline() {
  drawTimeline().then((place) => place.on("plotly_relayout", (change) => {
    const { unit } = DATA.timeline;
    if (change["xaxis.autorange"]) show(0, DATA.timeline.end);
    else if ("xaxis.range[0]" in change) show(change["xaxis.range[0]"] / unit, change["xaxis.range[1]"] / unit);
  }));
  document.getElementById("timeline-buttons").addEventListener("click", (event) => moveTimeline(event.target.dataset.do));
}
