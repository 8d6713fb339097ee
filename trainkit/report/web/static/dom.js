"use strict";
// Elements from plain values. Text is always set as text: nothing of a run is ever read as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Text of a run: isolated, so that its direction does not change what stands around it.
const text = (value) => el("span", {class: "text", dir: "auto"}, String(value));

function section(title, ...children) {
  const id = "s-" + title.toLowerCase().replace(/[^a-z]+/g, "-");
  const node = el("section", {"aria-labelledby": id}, el("h2", {id}, title), ...children);
  page.append(node);
  return node;
}

const isNumber = (value) => typeof value === "number";

// A number with 4 digits for a glance; tables and the cursor have every digit of the page.
function short(value) {
  if (!isNumber(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e9 || size < 1e-4)) return value.toExponential(3);
  return value.toLocaleString("en", {maximumSignificantDigits: size >= 1000 ? Math.ceil(Math.log10(size + 1)) : 4});
}
// A figure with 4 digits and the unit that its name tells.
const bytes = (value) => {
  const at = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, Math.abs(value))) / 10)));
  return `${short(value / 1024 ** at)} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
};
const UNIT_OF = [[/^(memory(_peak)?|bytes_a_step|gpu\/\d+\/memory)$/, bytes], [/^(data_wait|mfu|gpu\/\d+\/use)$/, (value) => `${short(100 * value)} %`],
  [/^step_s$/, (value) => (value < 1 ? `${short(1000 * value)} ms` : `${short(value)} s`)],
  [/^gpu\/\d+\/power$/, (value) => `${short(value)} W`], [/^gpu\/\d+\/temperature$/, (value) => `${short(value)} °C`]];
const unitOf = (name) => UNIT_OF.find(([pattern]) => pattern.test(name))?.[1];
function figure(name, value) {
  if (!isNumber(value)) return "not finite";
  return (unitOf(name) ?? short)(value);
}
const whole = (value) => (isNumber(value) ? value.toLocaleString("en") : "");
const exact = (value) => (value === null || value === undefined ? "not finite" : String(value));

function seconds(value) {
  if (!isNumber(value)) return "";
  if (value < 60) return `${value.toPrecision(3)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 60 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// columns: [{name, of(row), number}]. A cell is a node or a plain value.
function table(caption, columns, rows, {head = 0} = {}) {
  const cell = (tag, column, content, extra = {}) =>
    el(tag, {class: column.number ? "number" : null, "data-name": extra.scope === "col" ? null : column.name, ...extra},
      content instanceof Node ? content : content === "" || content === null || content === undefined ? "" : text(content));
  const body = rows.map((row) => el("tr", {}, ...columns.map((column, at) =>
    at === head ? cell("th", column, column.of(row), {scope: "row"}) : cell("td", column, column.of(row)))));
  return el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
    el("table", {}, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...columns.map((column) => cell("th", column, column.name, {scope: "col"})))),
      el("tbody", {}, ...body)));
}

// A table that is built when it is opened: a chart may have thousands of points.
function later(title, build) {
  const node = el("details", {}, el("summary", {}, title));
  node.addEventListener("toggle", () => { if (node.open && node.children.length === 1) node.append(build()); });
  return node;
}

function copyButton(words) {
  const button = el("button", {type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(words);
    } catch {
      const area = el("textarea", {}, words);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  }}, "copy");
  return button;
}

function commandLine(what, command) {
  return el("div", {class: "command"}, el("span", {class: "soft"}, what),
    el("code", {tabindex: "0", role: "region", "aria-label": `command: ${what}`}, text(command)), copyButton(command));
}

const tag = (name) => el("span", {class: `tag ${name}`}, name);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
