// On paper: one page of A4. What tells least is left out until the rest fits, and the last line says what that was.
const PAPER = {height: 270 * 96 / 25.4, charts: 4, rows: 12};

function rowsOnPaper(most) {
  let cut = false;
  for (const body of page.querySelectorAll("tbody")) {
    if (body.closest("details, .unprinted")) continue;
    [...body.rows].forEach((row, at) => { row.classList.toggle("off-paper", at >= most); cut ||= at >= most; });
  }
  return cut ? `rows of tables after the first ${most}` : null;
}

function chartsOnPaper(most) {
  const all = [...page.querySelectorAll(".chart")];
  all.forEach((one, at) => one.classList.toggle("off-paper", at >= most));
  return all.length > most ? `charts after the first ${most}` : null;
}

function offPaper(nodes, words) {
  const shown = [...nodes].filter((node) => !node.classList.contains("unprinted"));
  for (const node of shown) node.classList.add("off-paper");
  return shown.length ? words : null;
}

const sectionOffPaper = (title) => offPaper([...page.querySelectorAll("section")].filter((one) => one.querySelector("h2").textContent === title), title.toLowerCase());

// The order in which parts are left out; a later line of the same kind replaces an earlier one.
const CUTS = [
  ["commands", () => offPaper([...page.querySelectorAll(".command")].filter((one) => one.getBoundingClientRect().height > 90), "long commands")],
  ["rows", () => rowsOnPaper(6)], ["ranks", () => sectionOffPaper("Ranks")], ["plan", () => sectionOffPaper("Plan against measured")],
  ["rows", () => rowsOnPaper(3)], ["charts", () => chartsOnPaper(2)], ["time", () => sectionOffPaper("Where the time went")],
  ["jobs", () => sectionOffPaper("Jobs")], ["curves", () => sectionOffPaper("Curves")], ["config", () => sectionOffPaper("Config")],
  ["differs", () => sectionOffPaper("What differs")], ["commands", () => offPaper(page.querySelectorAll(".command"), "commands")],
];

function toPaper() {
  document.documentElement.classList.add("paper");
  for (const one of charts.slice(0, PAPER.charts)) start(one);  // in the colours and at the width of paper
  const left = new Map([["rows", rowsOnPaper(PAPER.rows)], ["charts", chartsOnPaper(PAPER.charts)]]);
  const note = el("p", {class: "paper-note soft small"});
  page.append(note);
  const tell = () => {
    const words = [...left.values()].filter(Boolean);
    note.textContent = words.length ? `Left out on paper: ${words.join(", ")}.` : "";
  };
  tell();
  for (const [kind, cut] of CUTS) {
    if (page.getBoundingClientRect().height <= PAPER.height) return;
    left.set(kind, cut());
    tell();
  }
}

function toScreen() {
  document.documentElement.classList.remove("paper");
  for (const node of page.querySelectorAll(".off-paper")) node.classList.remove("off-paper");
  for (const node of page.querySelectorAll(".paper-note")) node.remove();
  again();
}

addEventListener("beforeprint", toPaper);
addEventListener("afterprint", toScreen);
