"""What a job has said of its metric so far, from its `metrics.jsonl`, while it goes and after."""

from __future__ import annotations

import math
from pathlib import Path

from trainkit.bounded_json import expect_map, parse_json
from trainkit.errors import UnreadableError
from trainkit.reading import read_lines, size_of

__all__ = ["Rows", "figure_at"]


class Rows:
    """The figures of one metric as they come: each call of `new` gives those since the last.

    A resumed job takes rows back that it makes again: a file that has become shorter is read from its start.

    Args:
        path: of a `metrics.jsonl`, which need not exist yet.
        metric: its name.
    """

    def __init__(self, path: Path, metric: str) -> None:
        self._path, self._metric, self._read = path, metric, 0

    def new(self) -> list[tuple[int, float]]:
        """Step and figure of each new row; NaN for one that is no number."""
        try:
            if size_of(self._path) < self._read:
                self._read = 0
            lines = list(read_lines(self._path, start=self._read))
        except UnreadableError:
            return []
        self._read += sum(map(len, lines))
        return [found for line in lines if (found := _figure(line, self._metric)) is not None]


def figure_at(path: Path, metric: str, step: int | None) -> float | None:
    """The last figure of a metric up to a step, in a `metrics.jsonl`; None where there is none.

    Args:
        path: the file.
        metric: its name.
        step: None: up to the end.
    """
    found = [value for at, value in Rows(path, metric).new() if step is None or at <= step]
    return found[-1] if found else None


def _figure(line: bytes, metric: str) -> tuple[int, float] | None:
    try:
        row = expect_map(parse_json(line), {"step": int, metric: (float, type(None))})
        return row["step"], math.nan if row[metric] is None else float(row[metric])
    except ValueError:
        return None
