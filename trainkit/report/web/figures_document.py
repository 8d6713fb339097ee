"""The figures of callbacks on the page of a run: its confusion matrix, its worst samples, its layers.

Nothing in the files is trusted: content of another form is left out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trainkit.errors import UnreadableError
from trainkit.files import parse_json, read_tail
from trainkit.report.curves import number
from trainkit.report.web.page import printable
from trainkit.report.web.run_files import picture_at

KINDS: Final = ("gradients", "activations", "weights")
_TAIL: Final = 8 << 20
"""Bytes at the end of a file that are read for its newest line."""
_MOST_CLASSES: Final = 24
"""Up to this many classes, the page shows the whole matrix."""
_MOST_MISTAKES: Final = 12
_MOST_COUNTED: Final = 2**53
"""Samples in a cell: the largest count that a number of 64 bits holds exactly."""
_MOST_LAYERS: Final = 64
_MOST_SPLITS: Final = 3


def figures_of(folder: Path) -> dict[str, Any]:
    """Return the figures of a run folder: `confusion`, `samples` and `layers`, each empty if the run has none."""
    return {
        "confusion": list(_matrices(folder / "tables.jsonl")),
        "samples": list(_samples(folder / "plots")),
        "layers": _layers(folder / "histograms.jsonl"),
    }


def _newest(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects at the end of a file, the newest first."""
    with contextlib.suppress(UnreadableError):
        content, is_whole = read_tail(path, _TAIL)
        lines = content.split(b"\n")
        for line in reversed(lines if is_whole else lines[1:]):
            with contextlib.suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict):
                    yield row


def _matrices(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest confusion matrix of each split."""
    seen: set[str] = set()
    for row in _newest(path):
        name = row.get("name")
        if not isinstance(name, str) or not name.endswith("/confusion") or name in seen:
            continue
        seen.add(name)
        found = _matrix(row)
        if found is not None:
            yield {"split": printable(name.rpartition("/")[0], 60), **found}
        if len(seen) >= _MOST_SPLITS:
            return


def _matrix(row: dict[str, Any]) -> dict[str, Any] | None:
    columns, rows = row.get("columns"), row.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list) or len(rows) != len(columns) - 1 or not rows:
        return None
    counts: list[list[float]] = []
    for line in rows:
        if not isinstance(line, list) or len(line) != len(columns):
            return None
        cells = [number(cell) for cell in line[1:]]
        if any(cell is None or not 0 <= cell <= _MOST_COUNTED for cell in cells):
            return None
        counts.append([cell for cell in cells if cell is not None])
    classes = [printable(str(name), 60) for name in columns[1:]]
    size = len(classes)
    wrong = [(counts[at][to], at, to) for at in range(size) for to in range(size) if at != to and counts[at][to] > 0]
    wrong.sort(key=lambda one: (-one[0], one[1], one[2]))
    totals = [sum(line) for line in counts]
    mistakes = [
        {"class": classes[at], "guess": classes[to], "count": count, "share": count / totals[at]}
        for count, at, to in wrong[:_MOST_MISTAKES]
    ]
    hits, total = math.fsum(counts[at][at] for at in range(size)), math.fsum(totals)
    return {
        "step": number(row.get("step")),
        "right": hits / total if total else None,
        "samples": total,
        "num_classes": size,
        "classes": classes if size <= _MOST_CLASSES else [],
        "counts": counts if size <= _MOST_CLASSES else [],
        "mistakes": mistakes,
    }


def _samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the pictures of the worst samples; of those that do not fit into the page, only the name of the file."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("worst_*.png"))[:_MOST_SPLITS]:
            split = printable(path.stem.removeprefix("worst_"), 60)
            yield {"split": split, "file": f"plots/{printable(path.name, 80)}", "picture": picture_at(path)}


def _layers(path: Path) -> dict[str, Any] | None:
    """Return the newest record of the layers."""
    row = next(_newest(path), None)
    if row is None:
        return None
    kinds = {kind: list(_rows(row.get(kind)))[:_MOST_LAYERS] for kind in KINDS}
    return {"step": number(row.get("step")), "kinds": {kind: found for kind, found in kinds.items() if found}}


def _rows(named: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(named, dict):
        return
    for name, one in named.items():
        if not isinstance(one, dict):
            continue
        quantiles = one.get("quantiles")
        values = [number(value) for value in quantiles] if isinstance(quantiles, list) else []
        low, _, middle, _, high = values if len(values) == 5 else [None] * 5
        yield {
            "name": printable(name, 120),
            "low": low,
            "median": middle,
            "high": high,
            "largest": number(one.get("largest")),
            "rms": number(one.get("rms")),
            "zeros": number(one.get("zero_share")),
            "nonfinite": number(one.get("nonfinite")),
        }
