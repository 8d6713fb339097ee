"""Read the progress of a running job from the `metrics.jsonl` in its folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainkit.bounded import expect_map, parse_json
from trainkit.config.schema import MonitoredMetric, RunConfig
from trainkit.errors import UnreadableError
from trainkit.files import read_lines, read_tail, size_of
from trainkit.sweeps.results.job_results import config_of

_TAIL_BYTES: Final = 1 << 13


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a job at one moment."""

    step: int | None = None
    done: float | None = None
    """Fraction of its steps, 0 to 1."""
    metric: float | None = None
    """The monitored metric at the latest evaluation."""
    loss: float | None = None
    """Mean training loss of the latest logged step."""
    remaining_s: float = float("inf")
    """Estimate of the remaining seconds of training."""


class Watch:
    """Polls the folder of a job's run, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows = MetricRows(folder / "metrics.jsonl")
        self._cfg: RunConfig | None = None
        self._last = Progress()
        self.goal = "metric"
        """The name of the run's monitored metric, once it is known."""

    def look(self) -> Progress:
        """Return the current progress; a value without new rows does not change."""
        if self._cfg is None:
            self._cfg = config_of(self._folder)
        if self._cfg is None:
            return self._last
        self.goal = MonitoredMetric.of(self._cfg.eval).metric
        row: dict[str, Any] = {}
        for found in self._rows.new():
            row |= {name: value for name, value in found.items() if isinstance(value, int | float)}
        self._last = _read(row, self.goal, self._cfg, self._last)
        return self._last


def _read(row: dict[str, Any], goal: str, cfg: RunConfig, before: Progress) -> Progress:
    if "step" not in row:
        return before
    step, seconds = int(row["step"]), row.get("seconds")
    done = _share(step, row.get("epoch"), cfg)
    left = seconds / done * (1 - done) if seconds is not None and done else float("inf")
    metric, loss = row.get(goal, before.metric), row.get("train/loss", before.loss)
    return Progress(step=step, done=done, metric=metric, loss=loss, remaining_s=left)


def _share(step: int, epoch: float | None, cfg: RunConfig) -> float | None:
    """Return the fraction of the training that is done; None if its length is not known in steps or epochs."""
    if cfg.steps is not None:
        return min(1.0, step / min(cfg.steps, cfg.stop_at_step or cfg.steps))
    if cfg.stop_at_step is not None:
        return min(1.0, step / cfg.stop_at_step)
    return min(1.0, epoch / cfg.epochs) if epoch is not None and cfg.epochs is not None else None


def last_line(log: Path) -> str:
    """Return the last line that a job printed."""
    try:
        lines = read_tail(log, _TAIL_BYTES)[0].decode(errors="replace").split("\n")
    except UnreadableError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


class MetricRows:
    """The rows of a `metrics.jsonl`: each call of `new` returns those since the last call.

    The file need not exist yet. A resumed job truncates rows that it writes again: a file that has become shorter is
    read from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Return the new rows; each has a `step`."""
        try:
            if size_of(self._path) < self._read:
                self._read = 0
            lines = list(read_lines(self._path, start=self._read))
        except UnreadableError:
            return []
        self._read += sum(map(len, lines))
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError):
                rows.append(expect_map(parse_json(line), {"step": int}))
        return rows
