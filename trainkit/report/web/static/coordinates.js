// Parallel coordinates: one line a job through the axes of the swept keys and the metric. A part of an axis is chosen by
// dragging along it, or by the two lists below it, which a keyboard reaches.
const SVG = "http://www.w3.org/2000/svg";
function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// An axis: the values in their order, and the height of each, from 0 to 1.
function axisOf(name, texts) {
  const known = [...new Set(texts.filter((one) => one !== null && one !== ""))];
  const numbers = known.map(Number), numeric = known.length > 0 && numbers.every(Number.isFinite);
  if (!numeric) {
    known.sort();
    return {name, values: known, place: (value) => (known.length < 2 ? .5 : known.indexOf(String(value)) / (known.length - 1)), at: (value) => known.indexOf(String(value))};
  }
  const sorted = [...new Set(numbers)].sort((a, b) => a - b), low = sorted[0], high = sorted[sorted.length - 1];
  const log = low > 0 && high / low >= 30, scale = (value) => (log ? Math.log(value) : value);
  return {name, values: sorted, log, at: Number,
    place: (value) => (high === low ? .5 : (scale(Number(value)) - scale(low)) / (scale(high) - scale(low)))};
}

// Dark blue to yellow through equal steps of lightness: told apart by any eye, and in print; lighter on a dark ground.
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
function shade(share) {
  const stops = isDark ? [[139, 110, 190], [92, 143, 214], [51, 176, 172], [120, 210, 110], [240, 225, 80]]
    : [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [220, 200, 30]];
  const at = Math.min(.9999, Math.max(0, share)) * 4, low = Math.floor(at), part = at - low;
  return `rgb(${stops[low].map((one, place) => Math.round(one + part * (stops[low + 1][place] - one)))})`;
}

// jobs: [{values: {axis: value}, score: 0..1 or null, faded}]; onChange gets the places of the jobs inside every choice.
function coordinates(axes, jobs, onChange) {
  const side = Math.min(70, page.clientWidth / 6), height = 330, top = 42, bottom = 24;
  const width = Math.max(Math.min(1040, page.clientWidth - 40), 90 * (axes.length - 1) + 2 * side);
  const inner = height - top - bottom, gap = axes.length > 1 ? (width - 2 * side) / (axes.length - 1) : 0;
  const room = Math.max(6, Math.min(22, 2 * Math.floor((gap || 198) / 18)));  // characters beside each other
  const x = (at) => side + at * gap, y = (axis, value) => top + inner * (1 - axis.place(value));
  const lines = svg("g", {fill: "none"}), marks = svg("g", {});
  const known = (job, axis) => job.values[axis.name] !== null && job.values[axis.name] !== undefined && job.values[axis.name] !== "";
  const paths = jobs.map((job) => {
    const points = axes.flatMap((axis, at) => (known(job, axis) ? [`${x(at).toFixed(1)},${y(axis, job.values[axis.name]).toFixed(1)}`] : []));
    const line = svg("polyline", {points: points.join(" "), "stroke-width": 1.8, stroke: job.score === null ? "var(--c7)" : shade(job.score)});
    lines.append(line);
    return line;
  });
  const ranges = axes.map(() => null), bands = [], selects = [];
  axes.forEach((axis, at) => {
    const band = svg("rect", {x: x(at) - 11, width: 22, fill: "var(--accent)", opacity: .25, height: 0, y: top});
    const label = svg("text", {x: x(at), y: 16, "text-anchor": "middle", fill: "var(--ink)", "font-size": 12, "font-weight": 600});
    label.textContent = axis.name.length > room ? `${axis.name.slice(0, room / 2)}…${axis.name.slice(1 - room / 2)}` : axis.name;
    const title = svg("title");
    title.textContent = axis.name;
    label.append(title);
    const grip = svg("rect", {x: x(at) - 16, y: top - 8, width: 32, height: inner + 16, fill: "transparent", style: "cursor: crosshair; touch-action: none", "data-axis": axis.name});
    marks.append(svg("line", {x1: x(at), x2: x(at), y1: top, y2: top + inner, stroke: "var(--soft)"}), label, band);
    const shown = axis.values.length <= 9 ? axis.values : [axis.values[0], axis.values[axis.values.length - 1]];
    for (const value of shown) {
      const tick = svg("text", {x: x(at) + (at === axes.length - 1 ? 8 : -8), y: y(axis, value) + 4, "text-anchor": at === axes.length - 1 ? "start" : "end", fill: "var(--soft)", "font-size": 11, stroke: "var(--ground)", "stroke-width": 4, "paint-order": "stroke"});
      tick.textContent = isNumber(value) ? short(value) : String(value).slice(0, Math.min(14, room));
      marks.append(tick);
    }
    marks.append(grip);
    let from = null;
    const share = (event) => {
      const box = grip.ownerSVGElement.getBoundingClientRect();
      return Math.min(1, Math.max(0, 1 - ((event.clientY - box.top) * height / box.height - top) / inner));
    };
    grip.addEventListener("pointerdown", (event) => { from = share(event); grip.setPointerCapture(event.pointerId); });
    grip.addEventListener("pointermove", (event) => { if (from !== null) brush(at, from, share(event)); });
    grip.addEventListener("pointerup", (event) => {
      if (from !== null && Math.abs(share(event) - from) < .01) choose(at, null);
      from = null;
    });
    bands.push(band);
  });
  const brush = (at, one, other) => {
    const [low, high] = [Math.min(one, other), Math.max(one, other)];
    const inside = axes[at].values.filter((value) => axes[at].place(value) >= low - 1e-9 && axes[at].place(value) <= high + 1e-9);
    choose(at, inside.length ? [inside[0], inside[inside.length - 1]] : null);
  };
  // range: the first and the last value of an axis; null: every job, also one without a value
  const choose = (at, range) => {
    ranges[at] = range;
    const [from, to] = selects[at];
    from.value = range === null ? "" : String(range[0]);
    to.value = range === null ? "" : String(range[1]);
    const ends = range === null ? [0, 0] : range.map((value) => y(axes[at], value));
    bands[at].setAttribute("y", Math.min(...ends) - (range ? 7 : 0));
    bands[at].setAttribute("height", range === null ? 0 : Math.abs(ends[0] - ends[1]) + 14);
    apply();
  };
  const apply = () => {
    const inside = jobs.flatMap((job, place) => (axes.every((axis, at) => ranges[at] === null || (known(job, axis)
      && axis.at(job.values[axis.name]) >= axis.at(ranges[at][0]) && axis.at(job.values[axis.name]) <= axis.at(ranges[at][1]))) ? [place] : []));
    const chosen = new Set(inside);
    paths.forEach((line, place) => line.setAttribute("opacity", !chosen.has(place) ? .06 : jobs[place].faded ? .3 : .85));
    onChange(inside);
  };
  const lists = axes.map((axis, at) => {
    const make = (words, end) => {
      const list = el("select", {"aria-label": `${axis.name} ${words}`, onchange: () => {
        const [from, to] = selects[at].map((one) => one.value), ends = [axis.values[0], axis.values[axis.values.length - 1]];
        const typed = (value, other) => (value === "" ? other : isNumber(ends[0]) ? Number(value) : value);
        choose(at, from === "" && to === "" ? null : [typed(from, ends[0]), typed(to, ends[1])]);
      }}, el("option", {value: ""}, words), ...axis.values.map((value) => el("option", {value: String(value)}, isNumber(value) ? exact(value) : value)));
      return list;
    };
    selects.push([make("from", 0), make("to", 1)]);
    return el("span", {class: "range"}, el("span", {class: "small"}, text(axis.name)), ...selects[at]);
  });
  const drawing = svg("svg", {viewBox: `0 0 ${width} ${height}`, class: "axes", role: "img",
    "aria-label": `One line a job through ${axes.map((axis) => axis.name).join(", ")}. The lists below choose parts of the axes.`}, lines, marks);
  const node = el("div", {}, el("div", {class: "wide", tabindex: "0", role: "region", "aria-label": "Parallel coordinates"}, drawing), el("div", {class: "ranges"}, ...lists,
    el("button", {type: "button", onclick: () => axes.forEach((_, at) => choose(at, null))}, "every job")));
  return {node, apply};
}
