// Charts with one cursor: whatever chart is pointed at, or walked through by keys, all show the same place.
const charts = [];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const color = (at) => css(`--c${at % 8}`);

// {every: [first, stride, number]} or {dx: [first, differences...]} -> the steps of a curve
function steps(curve) {
  if (curve.every) return Array.from({length: curve.every[2]}, (_, at) => curve.every[0] + at * curve.every[1]);
  let here = 0;
  return curve.dx.map((by) => (here += by));
}

// The point at a place, or the last one before it.
function indexAt(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle - 1;
  }
  return xs.length && xs[low] <= x ? low : -1;
}

// Glyphs, not colours alone, tell the kinds of marks apart.
const MARKS = {
  rollback: {color: "--c3", draw: (c, x, y, r) => { c.moveTo(x, y - r - 1); c.lineTo(x + r + 1, y); c.lineTo(x, y + r + 1); c.lineTo(x - r - 1, y); c.closePath(); }},
  checkpoint: {color: "--c2", draw: (c, x, y, r) => { c.rect(x - r, y - r, 2 * r, 2 * r); }},
  evaluation: {color: "--c7", draw: (c, x, y, r) => { c.moveTo(x, y - r); c.lineTo(x + r, y + r); c.lineTo(x - r, y + r); c.closePath(); }},
  restart: {color: "--c1", draw: (c, x, y, r) => { c.arc(x, y, r, 0, 7); }},
};

function drawMarks(marks) {
  return (plot) => {
    const {ctx, bbox} = plot, ratio = devicePixelRatio, {min, max} = plot.scales.x;
    ctx.save();
    for (const mark of marks) {
      if (mark.step < min || mark.step > max) continue;
      const x = plot.valToPos(mark.step, "x", true), kind = MARKS[mark.kind];
      if (mark.kind === "restart" || mark.kind === "rollback") {
        ctx.strokeStyle = css(kind.color);
        ctx.setLineDash([4 * ratio, 4 * ratio]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.fillStyle = css(kind.color);
      ctx.beginPath();
      kind.draw(ctx, x, bbox.top + bbox.height - 5 * ratio, 3 * ratio);
      ctx.fill();
    }
    ctx.restore();
  };
}

function markKey(kind) {
  const size = 12, svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", size);
  svg.setAttribute("height", size);
  svg.setAttribute("aria-hidden", "true");
  const shapes = {checkpoint: "M2 2h8v8h-8z", evaluation: "M6 2L10 10H2z", restart: "M6 2a4 4 0 1 0 .01 0z", rollback: "M6 1L11 6L6 11L1 6z"};
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", shapes[kind]);
  path.setAttribute("fill", `var(${MARKS[kind].color})`);
  svg.append(path);
  return el("span", {}, svg, kind);
}

// series: [{name, x, y, seen, faded}]; every series keeps its own places.
function chart(title, series, {unit = "step", marks = [], note = ""} = {}) {
  const joined = series.length === 1 ? [series[0].x, series[0].y]
    : uPlot.join(series.map((one) => [one.x, one.y]), series.map((one) => one.y.map(() => 1)));
  const legend = el("ul", {class: "legend"}), place = el("div", {class: "plot", tabindex: "0", role: "img", "aria-label": title});
  const values = series.map((one, at) => {
    const shown = el("span", {class: "at"});
    const line = el("i", {style: `border-color: var(--c${at % 8}); border-top-style: ${["solid", "dashed", "dotted"][at % 3]}`});
    legend.append(el("li", {class: one.faded ? "faded" : null}, line, text(one.name), shown));
    return shown;
  });
  const rows = () => series.flatMap((one) => one.x.map((x, at) => [one.name, x, one.y[at]]));
  const columns = [{name: "curve", of: (row) => row[0]}, {name: unit, number: true, of: (row) => exact(row[1])},
    {name: "value", number: true, of: (row) => exact(row[2])}];
  const node = el("div", {class: "chart"}, el("h3", {}, text(title)), legend, place,
    note ? el("p", {class: "small soft"}, note) : null, later("Table", () => table(`${title}, by ${unit}`, columns, rows())));
  const one = {node, place, legend, series, joined, unit, title, values, marks, plot: null, width: 0};
  charts.push(one);
  return node;
}

function build(one) {
  const width = Math.max(220, one.place.clientWidth);
  if (one.plot) one.plot.destroy();
  one.width = width;
  const height = Math.round(Math.min(260, Math.max(170, width * .52)));
  one.place.style.minHeight = `${height}px`;  // uPlot sizes itself a moment later, and paper is measured at once
  const axis = {stroke: css("--soft"), grid: {stroke: css("--line"), width: 1}, ticks: {show: false}, font: "12px system-ui, sans-serif"};
  const y = one.series.flatMap((s) => s.y).filter(isNumber);
  const name = one.series[0].figure ?? one.series[0].name, label = (v) => (v === 0 ? "0" : figure(name, v));
  const incrs = unitOf(name) === bytes ? Array.from({length: 50}, (_, at) => 2 ** at) : undefined;  // 64 MiB, not 61.04
  const wide = Math.max(...[Math.min(...y), Math.max(...y)].map((v) => label(v).length), 3);
  one.plot = new uPlot({
    width, height, legend: {show: false},
    scales: {x: {time: false}}, padding: [10, 12, 0, 0],
    cursor: {drag: {x: true, y: false}, points: {size: 7}, y: false},
    axes: [{...axis, size: 32, values: (_, ticks) => ticks.map((v) => (Number.isInteger(v) || one.unit !== "step" ? v.toLocaleString("en") : ""))},
      {...axis, incrs, size: 22 + 7 * Math.min(wide, 11), values: (_, ticks) => ticks.map(label)}],
    series: [{}, ...one.series.map((s, at) => ({stroke: color(at), width: 1.6, dash: DASHES[at % 3], spanGaps: one.series.length > 1,
      alpha: s.faded ? .35 : 1, points: {show: s.x.length < 60, size: 5, fill: color(at)}}))],
    hooks: {draw: [drawMarks(one.marks)], setCursor: [(plot) => {
      if (plot.cursor.idx !== null && plot.cursor.event) moveTo(plot.data[0][plot.cursor.idx], one);
    }]},
  }, one.joined, one.place);
}

let shownAt = null;
function moveTo(x, source) {
  shownAt = x;
  for (const one of charts) {
    if (one.unit !== source.unit) continue;
    if (one !== source && one.plot) one.plot.setCursor({left: one.plot.valToPos(x, "x"), top: 0}, false);
    show(one, x);
  }
}

// The cursor says which point it shows: above 2,000 points a curve has not every step.
function show(one, x) {
  const said = one.series.map((s, at) => {
    const index = x === null ? s.x.length - 1 : indexAt(s.x, x);
    const words = index < 0 ? "" : `${figure(s.figure ?? s.name, s.y[index])} at ${one.unit} ${Number.isInteger(s.x[index]) ? whole(s.x[index]) : short(s.x[index])}`;
    one.values[at].textContent = words;
    return `${s.name} ${words}`;
  });
  one.place.setAttribute("aria-label", `${one.title}. ${said.slice(0, 6).join(", ")}. Arrow keys move the cursor, + and - zoom, 0 shows all, Shift and an arrow move what is shown.`);
}

function walk(one, event) {
  const xs = one.joined[0], here = shownAt === null ? xs.length - 1 : indexAt(xs, shownAt);
  const by = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10}[event.key];
  const next = by ? Math.min(xs.length - 1, Math.max(0, here + by)) : {Home: 0, End: xs.length - 1}[event.key];
  if (next === undefined) return;
  event.preventDefault();
  const {min, max} = one.plot.scales.x;
  if (xs[next] < min || xs[next] > max) part(one, xs[next] < min ? xs[next] : xs[next] - (max - min), max - min);
  one.plot.setCursor({left: one.plot.valToPos(xs[next], "x"), top: 0}, false);
  moveTo(xs[next], one);
}

// Shows a part of a chart, of a width and from a place on, as far as the curves reach.
function part(one, from, width) {
  const xs = one.joined[0], first = xs[0], last = xs[xs.length - 1], low = Math.max(first, Math.min(from, last - width));
  one.plot.setScale("x", width >= last - first ? {min: first, max: last} : {min: low, max: low + width});
}

// Zooms about the cursor, or about the middle where the cursor is elsewhere; at least two points stay.
function zoom(one, event) {
  const {min, max} = one.plot.scales.x, width = max - min, by = {"+": .5, "=": .5, "-": 2, 0: Infinity}[event.key];
  const along = event.shiftKey ? {ArrowLeft: -.25, ArrowRight: .25}[event.key] : undefined;
  if (event.ctrlKey || event.metaKey || event.altKey || (by === undefined && along === undefined)) return false;
  event.preventDefault();
  const about = shownAt !== null && shownAt >= min && shownAt <= max ? shownAt : (min + max) / 2;
  const from = by === undefined ? min + along * width : by === Infinity ? min : about - (about - min) * by, wide = width * (by ?? 1);
  if (by >= 1 || by === undefined || one.joined[0].filter((x) => x >= from && x <= from + wide).length > 1) part(one, from, wide);
  return true;
}

function start(one) {
  build(one);
  show(one, null);
  if (one.started) return;
  one.started = true;
  one.place.addEventListener("keydown", (event) => zoom(one, event) || walk(one, event));
}

// Only charts that come into view are drawn: a run may have two hundred.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    const one = charts.find((each) => each.place === entry.target);
    if (one) start(one);  // its chart may be gone by now: another row was chosen
  }
}, {rootMargin: "600px"});

function watchCharts() {
  for (const one of charts) if (!one.plot) seen.observe(one.place);
}

function dropCharts(inside) {
  for (let at = charts.length - 1; at >= 0; at--) {
    if (!inside.contains(charts[at].node)) continue;
    if (charts[at].plot) charts[at].plot.destroy();
    charts.splice(at, 1);
  }
}

const again = () => { for (const one of charts) if (one.plot) start(one); };
let pending = 0;
addEventListener("resize", () => {
  clearTimeout(pending);
  pending = setTimeout(() => { if (charts.some((one) => one.plot && Math.abs(one.place.clientWidth - one.width) > 4)) again(); }, 120);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
