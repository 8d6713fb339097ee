"""The page of `trainkit watch --serve`: a table of runs; names from files are text, never markup."""

from __future__ import annotations

from typing import Final

_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>trainkit watch</title>
<style nonce="NONCE">
:root { color-scheme: light dark; --line: #8884; --quiet: #666; --ground: #fff; --ink: #000; }
@media (prefers-color-scheme: dark) { :root { --quiet: #aaa; --ground: #14171a; --ink: #e8eaed; } }
html { background: var(--ground); color: var(--ink); }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem; }
h1 { font-size: 1.15rem; overflow-wrap: anywhere; }
p { color: var(--quiet); }
div { overflow-x: auto; }
table { border-collapse: collapse; min-width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:first-child { overflow-wrap: anywhere; unicode-bidi: isolate; }
</style>
</head>
<body>
<main>
<h1 id="root">Runs</h1>
<p id="state" role="status">Connecting.</p>
<div tabindex="0" role="region" aria-labelledby="root">
<table>
<thead><tr><th scope="col">Run</th><th scope="col">State</th><th scope="col">Step</th><th scope="col">Left</th>
<th scope="col">Samples a second</th><th scope="col">Metrics</th></tr></thead>
<tbody id="runs"></tbody>
</table>
</div>
</main>
<script nonce="NONCE">
"use strict";
const number = (value) => value === null ? "" : Number(value.toPrecision(4)).toLocaleString("en");
const span = (seconds) => {
  if (seconds === null) return "";
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  const minutes = Math.floor(s / 60), hours = Math.floor(s / 3600);
  return (hours ? hours + ":" + two(minutes % 60) : minutes) + ":" + two(s % 60);
};
const events = new EventSource("events" + location.search);
events.onmessage = (event) => {
  const found = JSON.parse(event.data);
  document.getElementById("root").textContent = "Runs in " + found.root;
  document.getElementById("runs").replaceChildren(...found.runs.map((run) => {
    const row = document.createElement("tr");
    const step = run.step === null ? "" : run.step.toLocaleString("en");
    const of = run.last_step === null ? "" : " of " + run.last_step.toLocaleString("en");
    const metrics = Object.entries(run.metrics).map(([name, value]) => name + " " + number(value)).join(", ");
    const state = run.note ? run.state + " (" + run.note + ")" : run.state;
    for (const text of [run.folder, state, step + of, span(run.remaining_s), number(run.samples_per_s), metrics])
      row.appendChild(document.createElement("td")).textContent = text;
    return row;
  }));
  const more = found.not_shown ? ", and " + found.not_shown + " older ones" : "";
  const number_of = found.runs.length + (found.runs.length === 1 ? " run" : " runs");
  document.getElementById("state").textContent = number_of + more + ".";
};
events.onerror = () => { document.getElementById("state").textContent = "No connection to trainkit watch."; };
</script>
</body>
</html>
"""


def page(nonce: str) -> str:
    """Return the page; its script and style have a number used once, and nothing else of it runs."""
    return _PAGE.replace("NONCE", nonce)
