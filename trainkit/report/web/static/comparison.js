// The page that compares runs, or the jobs of a sweep.
const {goal, runs, columns} = data, sign = goal.mode === "max" ? -1 : 1;
const isSweep = data.kind === "sweep", LINES = 8, AXES = 11;
// What curves stand over, and the column of a curve that has it; a cost where every run with curves has a price.
const UNITS = {step: null, sample: "samples", second: "seconds", "US dollar": "cost"};
for (const one of data.curves.flatMap((curve) => curve.runs)) {
  const run = runs[one.run];
  if (one.seconds && isNumber(run.usd_s)) one.cost = one.seconds.map((value) => Number((value * run.usd_s).toPrecision(6)));
}
const units = Object.keys(UNITS).filter((name) => UNITS[name] !== "cost" || data.curves.every((curve) => curve.runs.every((one) => one.cost)));
let inside = runs.map((_, at) => at), chosen = null, unit = "step";

function header() {
  const [best] = points(inside).filter((row) => row.mean !== null).sort((one, other) => one.faded - other.faded || sign * (one.mean - other.mean));
  const what = best && folded.map((key) => `${key}=${best.run.settings[key] ?? ""}`).join(" ");
  page.append(el("header", {}, el("h1", {}, text(data.title)),
    best ? el("div", {class: "best"}, el("b", {}, spread(best)), el("span", {}, text(goal.metric), el("span", {class: "soft"}, ` best (${goal.mode}) of ${runs.length}`)),
      el("span", {class: "soft"}, text(isSweep && what ? what : best.run.name))) : null,
    el("p", {class: best ? "verdict plain" : "verdict"}, text(data.sentence)),
    ...data.notes.map((note) => el("p", {class: "soft"}, text(note)))));
}

function differences() {
  if (isSweep) return;
  section("What differs", data.differences.length ? table("Keys that differ, the keys that can change the result first", [
    {name: "key", of: (row) => el("code", {}, text(row.key))}, {name: "changes", of: (row) => tag(row.tag)},
    ...runs.map((run, at) => ({name: run.name, of: (row) => el("code", {}, text(row.values[at]))}))], data.differences)
    : el("p", {class: "soft"}, "No key differs."));
}

// Runs that differ in their seed or fold alone are one row: mean and spread.
const repeats = ["seed", "cv.fold"], repeated = columns.some((key) => repeats.includes(key));
const folded = repeated ? columns.filter((key) => !repeats.includes(key) && !(data.tags[key] === "cosmetic")) : columns;
function points(places) {
  const found = new Map();
  for (const at of places) {
    const run = runs[at], same = folded.map((key) => run.settings[key] ?? "");
    const key = repeated && !run.faded ? JSON.stringify(same) : `${at}`;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(at);
  }
  return [...found.values()].map((members) => {
    const values = members.map((at) => runs[at].value).filter(isNumber), number = values.length;
    const mean = number ? values.reduce((sum, one) => sum + one, 0) / number : null;
    const deviation = number > 1 ? Math.sqrt(values.reduce((sum, one) => sum + (one - mean) ** 2, 0) / (number - 1)) : null;
    const best = members.reduce((one, other) => ((runs[other].value ?? Infinity * sign) * sign < (runs[one].value ?? Infinity * sign) * sign ? other : one));
    const sum = (key) => members.reduce((all, at) => all + (runs[at][key] ?? 0), 0);
    return {members, mean, deviation, number, best, run: runs[best], seconds: sum("seconds"), faded: members.every((at) => runs[at].faded)};
  });
}

// The columns: the swept keys first. A key may have the name of a figure (steps): columns are told apart by their place.
const code = (words) => el("code", {}, text(words));
const named = (row) => text(row.members.map((at) => runs[at].name).join(", "));
const spread = (row) => (row.mean === null ? "" : `${short(row.mean)}${row.deviation === null ? "" : ` ± ${Number(row.deviation.toPrecision(2))}`}`);
const jobColumn = {name: isSweep ? "job" : "run", value: (row) => row.run.name, of: named, head: true};
const metricColumn = {name: goal.metric, value: (row) => row.mean, number: true,
  of: (row) => el("span", {title: exact(row.mean)}, spread(row), row.number > 1 ? el("span", {class: "soft"}, `, n = ${row.number}`) : "")};
const cells = [...(isSweep ? folded.map((key) => ({name: key, value: (row) => row.run.settings[key] ?? "", of: (row) => code(row.run.settings[key] ?? "")})) : [jobColumn]),
  metricColumn, {name: "steps", value: (row) => row.run.steps, of: (row) => whole(row.run.steps), number: true},
  {name: "seconds", value: (row) => row.seconds, of: (row) => seconds(row.seconds), number: true},
  {name: "status", value: (row) => row.run.status, of: (row) => text(row.run.status)}, ...(isSweep ? [jobColumn] : [])];

let order = {column: metricColumn, down: goal.mode === "max"};
function sorted(rows) {
  const value = order.column.value;
  const compare = (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (one.faded !== other.faded && order.column === metricColumn) return one.faded - other.faded;
    if (a === null || b === null) return (a === null) - (b === null);
    const [x, y] = [Number(a), Number(b)];
    const by = Number.isFinite(x) && Number.isFinite(y) && a !== "" && b !== "" ? x - y : String(a).localeCompare(String(b), "en", {numeric: true});
    return order.down ? -by : by;
  };
  return [...rows].sort(compare);
}

const board = el("div", {}), picked = el("div", {}), count = el("p", {class: "soft", "aria-live": "polite"}), plots = el("div", {});
function leaderboard() {
  const rows = sorted(points(inside));
  const heads = cells.map((column, at) => el("th", {scope: "col", class: column.number ? "number" : null,
    "aria-sort": order.column === column ? (order.down ? "descending" : "ascending") : "none"},
  el("button", {type: "button", onclick: () => {
    order = {column, down: order.column === column ? !order.down : column === metricColumn && goal.mode === "max"};
    leaderboard();
    board.querySelectorAll("th[aria-sort] button")[at].focus();
  }}, text(column.name), order.column === column ? (order.down ? " ↓" : " ↑") : "")));
  const body = rows.map((row) => {
    const pick = el("input", {type: "radio", name: "chosen", "aria-label": `choose ${row.run.name}`,
      onchange: () => { chosen = row.best; leaderboard(); board.querySelector("input:checked").focus(); }});
    pick.checked = row.members.includes(chosen);
    return el("tr", {class: [row.faded ? "faded" : "", pick.checked ? "chosen" : ""].join(" ").trim() || null, "data-jobs": row.members.map((at) => runs[at].name).join(" ")},
      el("td", {class: "number"}, pick), ...cells.map((column) => el(column.head ? "th" : "td", {scope: column.head ? "row" : null, "data-name": column.name, class: column.number ? "number" : null}, column.of(row))));
  });
  board.replaceChildren(el("div", {class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Table of the leaderboard"},
    el("table", {class: "sortable"}, el("caption", {}, `By ${goal.metric} (${goal.mode}); a click on a column sorts`),
      el("thead", {}, el("tr", {}, el("td", {class: "number"}), ...heads)), el("tbody", {}, ...body))));
  const one = chosen === null ? null : runs[chosen];
  picked.replaceChildren(one && one.command ? commandLine("repeat", one.command)
    : el("p", {class: "soft small"}, one ? "The command of this row is not on this page." : "Choose a row to see its command."));
  count.textContent = `${inside.length} of ${runs.length} ${isSweep ? "jobs" : "runs"}`;
  drawCurves(rows);
}

function coordinateSection() {
  const swept = columns.filter((key) => new Set(runs.map((run) => run.settings[key] ?? "")).size > 1), names = swept.slice(0, AXES);
  if (!isSweep || !names.length) return;
  const without = swept.slice(AXES), words = `The first ${AXES} swept keys and the metric have an axis. Without one: ${without.join(", ")}.`;
  const axes = [...names.map((name) => axisOf(name, runs.map((run) => run.settings[name] ?? ""))), axisOf(goal.metric, runs.map((run) => run.value))];
  const values = runs.map((run) => run.value).filter(isNumber), low = Math.min(...values), high = Math.max(...values);
  const jobs = runs.map((run) => ({values: {...run.settings, [goal.metric]: run.value}, faded: run.faded,
    score: run.value === null ? null : high === low ? .5 : (run.value - low) / (high - low)}));
  const drawn = coordinates(axes, jobs, (places) => { inside = places; leaderboard(); });
  section("Jobs", count, drawn.node, without.length ? el("p", {class: "soft small"}, text(words)) : null).classList.add("jobs");
  drawn.apply();
}

function drawCurves(rows) {
  dropCharts(plots);
  const wanted = isSweep || runs.length > LINES
    ? [...new Set([...(chosen === null ? [] : [chosen]), ...rows.flatMap((row) => row.members)])].slice(0, LINES) : runs.map((_, at) => at);
  const grid = el("div", {class: "charts"}), constant = [];
  for (const curve of data.curves) {
    const series = wanted.flatMap((at) => curve.runs.filter((one) => one.run === at && (unit === "step" || one[UNITS[unit]])).map((one) => {
      const x = unit === "step" ? steps(one) : one[UNITS[unit]];
      const label = isSweep ? folded.map((key) => `${key}=${runs[at].settings[key] ?? ""}`).join(" ") || runs[at].name : runs[at].name;
      return {name: isSweep ? `${runs[at].name}: ${label}` : label, x, y: one.y, seen: one.seen, figure: curve.name, faded: runs[at].faded};
    })).filter((one) => one.x.length);
    const values = series.flatMap((one) => one.y);
    if (values.length && values.every((value) => value === values[0])) constant.push({name: curve.name, value: values[0]});
    else if (series.length) grid.append(chart(curve.name, series.map(increasing), {unit}));
  }
  const buttons = units.map((name) => el("button", {type: "button", "aria-pressed": String(unit === name), onclick: (event) => {
    unit = name;
    leaderboard();
    plots.querySelector(`button[aria-pressed=true]`).focus();
  }}, `${name}s`));
  const note = runs.length > LINES ? el("span", {class: "soft small"}, `the first ${LINES} of the table`) : null;
  plots.replaceChildren(el("div", {class: "bar"}, el("span", {class: "soft"}, "over"), ...buttons, note), grid,
    ...(constant.length ? [table("Figures with one value", [{name: "figure", of: (row) => row.name}, {name: "value", number: true, of: (row) => figure(row.name, row.value)}], constant)] : []));
  watchCharts();
}

// Two rows of one step (a row of the log and an evaluation) have one place in seconds: charts need rising places.
function increasing(one) {
  const x = [], y = [];
  one.x.forEach((place, at) => {
    if (x.length && place <= x[x.length - 1]) { y[y.length - 1] = one.y[at]; return; }
    x.push(place);
    y.push(one.y[at]);
  });
  return {...one, x, y};
}

header();
differences();
coordinateSection();
section(isSweep ? "Leaderboard" : "Results", board, picked);
section("Curves", plots);
page.append(el("footer", {}, `Written ${data.written}. The page loads nothing from a network.`));
leaderboard();
