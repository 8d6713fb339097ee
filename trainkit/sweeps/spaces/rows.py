"""What a job has said of its metric so far, from its `metrics.jsonl`, while it goes and after."""

from __future__ import annotations

import json
import math
from pathlib import Path

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
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._read:
                    self._read = 0
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._read += len(whole) + 1 if whole else 0
        return [found for line in whole.splitlines() if (found := _figure(line, self._metric)) is not None]


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
        row = json.loads(line)
        value = row[metric]
        return int(row["step"]), math.nan if value is None else float(value)
    except (ValueError, KeyError, TypeError):
        return None
