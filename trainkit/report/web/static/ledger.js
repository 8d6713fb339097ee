// The page of the ledger: every comparison, with the interval of its difference around 0.
const GOOD = {better: "good", worse: "bad"};

const sizes = {};  // metric -> the largest bound of an interval
for (const row of data.rows) sizes[row.metric] = Math.max(sizes[row.metric] ?? 0, ...row.interval.filter(isNumber).map(Math.abs));

function interval(row) {
  const [low, high] = row.interval;
  if (!isNumber(low) || !isNumber(high) || !isNumber(row.difference)) return null;
  const at = (value) => 50 + 50 * value / (sizes[row.metric] || 1);
  return el("span", {class: "span", "aria-hidden": "true"}, el("s", {style: "left: 50%"}),
    el("i", {style: `left: ${at(low)}%; width: ${Math.max(at(high) - at(low), 1)}%`}), el("b", {style: `left: ${at(row.difference)}%`}));
}

const lines = (words) => (words.length ? el("span", {}, ...words.map((one) => el("span", {class: "line"}, text(one)))) : null);
const side = (name) => el("code", {}, text(name || "as it is"));

page.append(el("header", {}, el("h1", {}, text(data.title)), el("p", {class: "verdict plain"}, text(data.sentence)),
  ...data.notes.map((note) => el("p", {class: "soft"}, text(note)))));
section("Comparisons", el("div", {class: "whole"}, table("B against A, the newest first; an interval holds 0 where its line in the middle is covered, and all of one metric have one scale", [
  {name: "answer", of: (row) => el("b", {class: `${GOOD[row.answer] ?? ""} words`}, text(row.answer))},
  {name: "B - A", of: (row) => (row.difference === null ? null : el("span", {}, text(row.line.slice(row.line.indexOf("  ") + 2)), interval(row)))},
  {name: "A", of: (row) => side(row.a.name)}, {name: "B", of: (row) => side(row.b.name)},
  {name: "what differs", of: (row) => lines(row.differences.map((one) => `${one.key}: ${one.left} -> ${one.right}`))},
  {name: "remarks", of: (row) => lines([...row.unpaired.map((one) => `pairing is broken: ${one}`), ...row.remarks])},
  {name: "seconds", number: true, of: (row) => seconds(row.seconds)},
  {name: "time", of: (row) => row.time.slice(0, 16).replace("T", " ")}], data.rows)));
page.append(el("footer", {}, `Written ${data.written}. The page loads nothing from a network.`));
