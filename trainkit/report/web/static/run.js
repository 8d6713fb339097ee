// The page of a run, from the data that stands in it.
function header() {
  const best = data.best;
  const result = best && el("div", {class: "best"}, el("b", {}, best.shown),
    el("span", {}, text(best.metric), el("span", {class: "soft"}, ` best (${best.mode}) at step ${whole(best.step)}`)),
    el("span", {class: "soft"}, best.spread || "spread over seeds not known: one run"));
  const isResult = result && data.state === "finished";  // of a run that ended otherwise, how it ended is the headline
  const verdict = el("p", {class: isResult ? "verdict plain" : "verdict"}, text(data.verdict));
  page.append(
    el("header", {},
      el("h1", {}, text(data.title)), ...(isResult ? [result, verdict] : [verdict, result].filter(Boolean)),
      ...data.commands.map((one) => commandLine(one.what, one.command)),
      el("dl", {class: "strip"}, ...data.trust.map((one) => el("div", {class: one.good === null ? null : one.good ? "good" : "bad"},
        el("dt", {}, one.name), el("dd", {class: "value"}, text(one.value)), el("dd", {class: "detail"}, text(one.detail)))))));
}

// Curves of one quantity share a chart: train/loss and val/loss, memory and memory_peak.
function groups() {
  const found = new Map();
  for (const curve of data.curves) {
    const name = curve.name.slice(curve.name.lastIndexOf("/") + 1).replace(/_peak$/, "");
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({name: curve.name, x: steps(curve), y: curve.y, seen: curve.seen});
  }
  return found;
}

function curves() {
  const kinds = [...new Set(data.marks.map((mark) => mark.kind))];
  const grid = el("div", {class: "charts"}), constant = [];
  for (const [name, all] of groups()) {
    const series = all.filter((one) => one.y.some((value) => value !== one.y[0]));
    constant.push(...all.filter((one) => !series.includes(one)));
    if (!series.length) continue;
    const thinned = series.filter((one) => one.seen > one.x.length);
    const note = thinned.length ? `${whole(thinned[0].seen)} points: the minimum, the maximum and the last of each bucket are shown.` : "";
    grid.append(chart(name, series, {marks: data.marks, note}));
  }
  section("Curves",
    kinds.length ? el("p", {class: "key"}, ...kinds.map(markKey)) : null,
    data.curves.length ? grid : el("p", {class: "soft"}, "No row is logged yet."),
    constant.length ? table("Figures with one value", [{name: "figure", of: (row) => row.name}, {name: "value", number: true, of: (row) => figure(row.name, row.y[0])},
      {name: "points", number: true, of: (row) => whole(row.seen)}], constant) : null,
    data.marks.length ? later("Table of marks", () => table("Marks, by step",
      [{name: "kind", of: (row) => row.kind}, {name: "step", number: true, of: (row) => row.step}, {name: "note", of: (row) => row.text}], data.marks)) : null);
}

function plan() {
  if (!data.plan.length) return section("Plan against measured", el("p", {class: "soft"}, "A run of 20 steps or more is compared with its plan."));
  const value = (key) => ({number: true, of: (row) => (row[key] === null ? "" : figure(row.figure, row[key]))});
  section("Plan against measured", table("What was planned and what was measured on rank 0",
    [{name: "figure", of: (row) => row.what}, {name: "planned", ...value("planned")}, {name: "measured", ...value("measured")},
      {name: "at the end", ...value("at_end")}, {name: "difference", number: true, of: (row) => (row.per_cent === null ? "" : `${row.per_cent > 0 ? "+" : ""}${short(row.per_cent)} %`)}],
    data.plan));
}

function time() {
  const parts = data.time.parts, total = parts.reduce((sum, part) => sum + part.seconds, 0);
  if (!total) return;
  const colors = ["--c0", "--c4", "--c7", "--c3"];
  const goodput = data.time.goodput;
  section("Where the time went",
    el("p", {}, goodput === null ? el("span", {class: "soft"}, data.time.note)
      : `Goodput ${(100 * goodput).toFixed(1)} %: this share of the time trained.`),
    el("div", {class: "shares", "aria-hidden": "true"},
      ...parts.map((part, at) => el("span", {style: `flex: ${part.seconds / total} 1 0; background: var(${colors[at]})`}))),
    table("Seconds of each part", [
      {name: "part", of: (row) => el("span", {}, el("span", {class: "swatch", style: `background: var(${colors[parts.indexOf(row)]})`}), row.name)},
      {name: "time", number: true, of: (row) => seconds(row.seconds)},
      {name: "share", number: true, of: (row) => `${(100 * row.seconds / total).toFixed(1)} %`}], parts));
}

function ranks() {
  if (!data.ranks.length) return section("Ranks", el("p", {class: "soft"}, "One process trained."));
  section("Ranks", table("The last sign of each rank", [{name: "rank", of: (row) => row.rank}, {name: "step", number: true, of: (row) => whole(row.step)},
    {name: "phase", of: (row) => row.phase}, {name: "log", of: (row) => row.log}], data.ranks));
}

function worst() {
  if (!data.worst) return;
  const {what, columns, rows, picture} = data.worst;
  section("Worst samples", el("p", {class: "soft"}, text(what)),
    picture ? el("p", {class: "worst"}, el("img", {src: picture, alt: "The worst samples, in the order of the table, eight in a row"})) : null,
    table("The samples with the highest loss", columns.map((name, at) => ({name, of: (row) => row[at]})), rows)).classList.add("unprinted");
}

function config() {
  const recipe = data.recipe ? `the recipe ${data.recipe}` : "the defaults";
  if (data.settings === null) {
    section("Config", el("p", {class: "soft"}, "The run was begun by a version that does not record who set a key; resolved.yaml holds every key."));
    return;
  }
  if (!data.settings.length) {
    section("Config", el("p", {}, text(`No key differs from ${recipe}.`)));
    return;
  }
  section("Config", table(`What differs from ${recipe}`, [{name: "key", of: (row) => el("code", {}, text(row.key))}, {name: "value", of: (row) => el("code", {}, text(row.value))},
    {name: data.recipe ? "recipe" : "default", of: (row) => el("code", {class: "soft"}, text(row.recipe))}, {name: "changes", of: (row) => tag(row.tag)}, {name: "set by", of: (row) => row.set_by}],
  data.settings));
}

function environment() {
  const pairs = [{name: "key", of: (row) => row[0]}, {name: "value", of: (row) => el("span", {class: "mono"}, text(row[1]))}];
  section("Environment", data.environment.length ? table("Where the run was started", pairs, data.environment) : el("p", {class: "soft"}, "environment.json is not there.")).classList.add("unprinted");
  if (data.notes.length) section("Notes", el("ul", {}, ...data.notes.map((note) => el("li", {}, text(note))))).classList.add("unprinted");
  if (data.result.length) section("Every value of result.json", table("In full precision", pairs, data.result)).classList.add("unprinted");
}

header();
curves();
plan();
time();
ranks();
confusion();
samplePictures();
worst();
layers();
config();
environment();
page.append(el("footer", {}, text(`Written ${data.written} from ${data.folder}. The page loads nothing from a network.`)));
watchCharts();
