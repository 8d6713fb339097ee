// What callbacks have seen: the confusion matrix, the samples with the highest loss, the layers.
const percent = (value, digits = 1) => (isNumber(value) ? `${(100 * value).toFixed(digits)} %` : "");

function matrix(one) {
  const totals = one.counts.map((row) => row.reduce((sum, count) => sum + count, 0));
  const cell = (row, at) => {
    const count = one.counts[row][at];
    return el("span", {class: "cell", style: `--share: ${count ? 0.12 + 0.88 * count / totals[row] : 0}`}, count ? whole(count) : "·");
  };
  const columns = [{name: "class", of: (row) => one.classes[row]},
    ...one.classes.map((name, at) => ({name, number: true, of: (row) => cell(row, at)}))];
  const node = table("Row: class. Column: guess. Shade: share of the class.", columns, one.classes.map((_, row) => row));
  node.classList.add("matrix");
  return node;
}

function confusion() {
  for (const one of data.figures.confusion) {
    const mistakes = table("The most frequent mistakes", [{name: "class", of: (row) => row.class}, {name: "guess", of: (row) => row.guess},
      {name: "samples", number: true, of: (row) => whole(row.count)}, {name: "share of the class", number: true, of: (row) => percent(row.share)}], one.mistakes);
    section(`Confusion matrix, ${one.split}`,
      el("p", {class: "soft"}, text(`Step ${whole(one.step)}: ${percent(one.right)} of ${whole(one.samples)} samples are on the diagonal of ${whole(one.num_classes)} classes.`)),
      one.classes.length ? matrix(one) : null,
      one.mistakes.length ? mistakes : el("p", {}, "No sample is mistaken.")).classList.add("unprinted");
  }
}

function samplePictures() {
  for (const one of data.figures.samples) {
    section(`Highest losses, ${one.split}`, one.picture
      ? el("div", {class: "figure", tabindex: "0", role: "region", "aria-label": `Pictures of ${one.split}`}, el("img", {src: one.picture, alt: `The samples of ${one.split} with the highest loss, each with its class, the guess and its probability`}))
      : el("p", {}, text(`${one.file} is too large for this page.`))).classList.add("unprinted");
  }
}

// From 5 to 95 % of the values on one logarithmic scale for all layers of a kind, with the median.
function span(row, low, high) {
  if (!row.high || !high) return "";
  const place = (value) => 100 * Math.max(0, Math.log(Math.max(value || 0, low) / low) / Math.log(high / low));
  const [from, to, middle] = [row.low, row.high, row.median].map(place);
  return el("span", {class: "span", "aria-hidden": "true"}, el("i", {style: `left: ${from}%; width: ${Math.max(to - from, 1)}%`}), el("b", {style: `left: ${middle}%`}));
}

function layers() {
  const found = data.figures.layers;
  if (!found || !Object.keys(found.kinds).length) return;
  const tables = Object.entries(found.kinds).map(([kind, rows]) => {
    const high = Math.max(...rows.map((row) => row.high || 0)) * 1.2;
    const seen = rows.flatMap((row) => [row.low, row.median]).filter((value) => value > 0);
    const low = Math.max(Math.min(...seen, high / 10), high / 1e6);
    const value = (key) => ({number: true, of: (row) => short(row[key])});
    return table(`${kind[0].toUpperCase()}${kind.slice(1)}: magnitudes`, [{name: "layer", of: (row) => row.name},
      {name: "5 to 95 %", of: (row) => span(row, low, high)}, {name: "5 %", ...value("low")}, {name: "median", ...value("median")}, {name: "95 %", ...value("high")},
      {name: "largest", ...value("largest")}, {name: "rms", ...value("rms")}, {name: "zeros", number: true, of: (row) => percent(row.zeros)},
      {name: "not finite", number: true, of: (row) => whole(row.nonfinite)}], rows);
  });
  section("Layers", el("p", {class: "soft"}, `Step ${whole(found.step)}; TensorBoard shows all steps.`), ...tables).classList.add("unprinted");
}
