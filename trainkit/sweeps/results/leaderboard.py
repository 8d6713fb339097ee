"""Order the points of a sweep by the loss, or another metric; print the leaderboard, and write it as files."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trainkit.config.commands import printed_command
from trainkit.config.grammar import key_of
from trainkit.config.schema import GROUPS, MonitoredMetric, load_resolved
from trainkit.config.sections import EvalConfig
from trainkit.errors import ConfigError, UnreadableError
from trainkit.files import write_atomically
from trainkit.report.numbers import count, duration, figure
from trainkit.strategies import ALL_DEVICES
from trainkit.sweeps import verdict
from trainkit.sweeps.results.job_results import (
    COMPLETE,
    NOT_RUN,
    PRUNED,
    SEED,
    STUDY_FILE,
    JobResult,
    by_point,
    first_config,
    key_value,
    read_entries,
    relative,
)

LOSS: Final = MonitoredMetric.of(EvalConfig())
"""The loss of the objective on the validation split, which is finer than an accuracy."""
_SEEDS: Final = "range(4)"
"""Seeds with which a point of a single seed is to be trained."""
_MOST_OUT: Final = 10
"""Sentences about points that are worse than another."""
_MAX_CELL: Final = 400
_ORDER: Final = {"finished": 0, "stopped": 0, PRUNED: 1, "preempted": 1, "hangup": 1}
"""Order by status before the metric: complete jobs, then pruned jobs, then failed ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaderboard:
    """Jobs, best first; then jobs that a search pruned, failed jobs, and jobs without the metric.

    Equal values are ordered by the validation loss, then by the number of the job.

    Example:
        >>> a, b = (
        ...     JobResult(
        ...         job=str(number),
        ...         status="finished",
        ...         metrics={"val/loss": loss},
        ...         overrides=(f"clip.max_norm={number}",),
        ...         seconds=1.5,
        ...         folder=Path(f"out/{number}"),
        ...     )
        ...     for number, loss in enumerate([0.5, 0.25])
        ... )
        >>> for line in Leaderboard.of([a, b], LOSS).lines():
        ...     print(line)
        #  job  status    val/loss  overrides        time   folder
        1  1    finished  0.25      clip.max_norm=1  1.5 s  out/1
        2  0    finished  0.5       clip.max_norm=0  1.5 s  out/0
    """

    goal: MonitoredMetric
    entries: tuple[JobResult, ...]
    also: str | None = None
    """Another metric that is shown: the one that chooses checkpoints."""

    @classmethod
    def of(cls, entries: Iterable[JobResult], goal: MonitoredMetric, *, also: str | None = None) -> Leaderboard:
        """Order the entries by a metric."""
        board = cls(goal=goal, entries=tuple(entries))

        def order(entry: JobResult) -> tuple[int, float, float]:
            value = board.value(entry)
            if value is None:
                return (3, 0.0, 0.0)
            tie = entry.metrics.get(LOSS.metric, math.inf)
            return (_ORDER.get(entry.status, 2), goal.sign * value, math.inf if math.isnan(tie) else tie)

        also = None if also == goal.metric else also
        return cls(goal=goal, entries=tuple(sorted(board.entries, key=order)), also=also)

    def value(self, entry: JobResult) -> float | None:
        """Return the value that orders an entry; None if it lacks the metric, or the value is not finite."""
        value = entry.metrics.get(self.goal.metric)
        return value if value is not None and math.isfinite(value) else None

    def top(self, count: int) -> Leaderboard:
        """Return the leaderboard of the first `count` entries."""
        return replace(self, entries=self.entries[:count])

    def lines(self) -> list[str]:
        """Return the lines of an aligned table."""
        rows = [[_printable(cell) for cell in row] for row in (self._head(), *self._rows())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def _head(self) -> list[str]:
        steps = ["steps"] if self._lengths_differ else []
        metrics = [self.goal.metric, *filter(None, [self.also])]
        return ["#", "job", "status", *metrics, *steps, "overrides", "time", "folder"]

    def _rows(self) -> list[list[str]]:
        return [[str(rank), *self._cells(entry)] for rank, entry in enumerate(self.entries, start=1)]

    @property
    def _lengths_differ(self) -> bool:
        """Whether the jobs made different numbers of steps; their values then cannot be compared."""
        return len({entry.steps for entry in self.entries if entry.steps is not None}) > 1

    def _cells(self, entry: JobResult) -> list[str]:
        steps = ["" if entry.steps is None else count(entry.steps)] if self._lengths_differ else []
        return [
            entry.job,
            entry.status,
            "" if self.value(entry) is None else _figure(entry, self.goal.metric),
            *([] if self.also is None else [_figure(entry, self.also)]),
            *steps,
            " ".join(entry.overrides),
            "" if entry.seconds is None else duration(entry.seconds),
            "" if entry.status == NOT_RUN else str(entry.folder),
        ]

    def verdict(self) -> list[str]:
        """Return which points may be the best, and which are worse by how much; empty without points of several seeds.

        Points that ended early are left out.
        """
        ended = [entry for entry in self.entries if entry.status in COMPLETE and self.value(entry) is not None]
        labels = [" ".join(entry.overrides) or f"job {entry.job}" for entry in ended]
        table = {label: entry.by_seed(self.goal.metric) for label, entry in zip(labels, ended, strict=True)}
        if len(table) < 2 or max(map(len, table.values())) < 2:
            return []
        resolution = verdict.resolution_of(value for column in table.values() for value in column.values())
        standings = verdict.standings(table, lower_is_better=self.goal.mode == "min", resolution=resolution)
        lines = [*verdict.sentences(standings)]
        more = len(lines) - 1 - _MOST_OUT
        return [*lines[: 1 + _MOST_OUT], *([f"and {more} more are worse than another"] if more > 0 else [])]

    def counts(self) -> str:
        """Return the number of jobs and the number per status, in words.

        Example:
            >>> Leaderboard(goal=MonitoredMetric.of(EvalConfig()), entries=()).counts()
            '0 jobs'
        """
        kinds = Counter(entry.status for entry in self.entries)
        return ", ".join([f"{len(self.entries)} {self.unit}", *(f"{number} {kind}" for kind, number in kinds.items())])

    @property
    def unit(self) -> str:
        """What an entry is: a job, or a point with several runs."""
        noun = "point" if any(entry.runs for entry in self.entries) else "job"
        return noun if len(self.entries) == 1 else f"{noun}s"

    def commands(self, folder: Path) -> list[tuple[str, str]]:
        """Return the next commands and their descriptions; empty if no job has the metric.

        The commands name the config folders and packages of this process. Keys for other choices of a mixed sweep, such
        as strategy.replicas with strategy=one_device, are left out.
        """
        best = next((entry for entry in self.entries if self.value(entry) is not None), None)
        if best is None or not best.arguments:
            return []
        again = ("the best point again", command_of(best))
        if not best.runs:  # one seed may be a lucky one
            fixed = [text for text in best.arguments if key_value(text)[0] != SEED]
            again = ("the best point with other seeds", _command([*fixed, f"{SEED}={_SEEDS}"], best, "-m"))
        then = printed_command("top", [folder, "--k", "1", "--then", ALL_DEVICES])
        return [again, ("the best on all devices", then)]

    def markdown(self, *, base: Path) -> str:
        """Return the leaderboard as Markdown: counts, table, commands; folders are relative to `base`."""
        marks = {"#": "--:", "job": ":----", "status": ":-------", "overrides": ":----------", "folder": ":-------"}
        head = self._head()
        lines = [f"# Leaderboard by {self.goal}", "", f"{self.counts()}.", ""]
        lines += [line for text in self.verdict() for line in (f"{text}.", "")]
        lines += [f"| {' | '.join(head)} |", f"|{'|'.join(marks.get(name, '----:') for name in head)}|"]
        for row, entry in zip(self._rows(), self.entries, strict=True):
            cells = [cell.replace("|", "\\|") for cell in row]
            cells[-3] = f"`{cells[-3]}`" if cells[-3] else ""
            folder = relative(entry.folder, base)
            cells[-1] = f"[{folder}]({folder})" if cells[-1] else ""
            lines.append(f"| {' | '.join(cells)} |")
        for about, command in self.commands(base):
            lines += ["", f"{about[0].upper()}{about[1:]}:", "", "```bash", command, "```"]
        return "\n".join(lines) + "\n"

    def csv(self, *, base: Path) -> str:
        """Return the leaderboard as CSV: full precision, a column per swept key; folders are relative to `base`."""
        keys = list(dict.fromkeys(key for entry in self.entries for key in entry.settings))
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        spreads = [f"{self.goal.metric} spread"] if any(entry.spread for entry in self.entries) else []
        table.writerow(["rank", "job", "status", self.goal.metric, *spreads, *keys, "steps", "seconds", "folder"])
        for rank, entry in enumerate(self.entries, start=1):
            spread = [_blank(entry.spread.get(self.goal.metric))] if spreads else []
            figures = [_blank(self.value(entry)), *spread, *(entry.settings.get(key, "") for key in keys)]
            figures += [_blank(entry.steps), _blank(entry.seconds)]
            table.writerow([rank, entry.job, entry.status, *figures, relative(entry.folder, base)])
        return text.getvalue()


def command_of(entry: JobResult) -> str:
    """Return the command that trains a job, or all seeds and folds of a point, again; empty if it is unknown."""
    if not entry.arguments:
        return ""
    seeds = entry.repeats(SEED)
    extra = [f"{SEED}={','.join(seeds)}"] if entry.runs and any(seeds) else []
    return _command([*entry.arguments, *extra], entry, *(["-m"] if len(seeds) > 1 else []))


def _command(arguments: Sequence[str], entry: JobResult, *flags: str) -> str:
    lines = [text for text in arguments if not text.lstrip("+").startswith("sweep.")]
    return printed_command("", [*flags, *_applicable(lines, entry.folder / "resolved.yaml")])


def _figure(entry: JobResult, metric: str) -> str:
    """Return the value of a metric; for several runs with its deviation and their number."""
    value, spread = entry.metrics.get(metric), entry.spread.get(metric, math.nan)
    around = f" ± {figure(spread)}, n = {len(entry.runs)}" if math.isfinite(spread) else ""
    return "" if value is None else figure(value) + around


def _applicable(arguments: Sequence[str], resolved: Path) -> list[str]:
    """Return the arguments without keys of groups that the choices of a run do not have.

    Args:
        arguments: all arguments of a point.
        resolved: the config of its run.
    """
    try:
        values = load_resolved(resolved).to_dict()
    except (ConfigError, UnreadableError):
        return [*arguments]

    def applies(argument: str) -> bool:
        group, _, key = key_of(argument).partition(".")
        node = values.get(group) if group in GROUPS and key and not argument.startswith("~") else None
        return not isinstance(node, Mapping) or key.partition(".")[0] in node

    return [argument for argument in arguments if applies(argument)]


def _printable(cell: str) -> str:
    """Return text for the screen: without control codes, and not longer than a few lines."""
    text = cell if len(cell) <= _MAX_CELL else f"{cell[:_MAX_CELL]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _blank(value: float | None) -> str:
    return "" if value is None else repr(value)


def collect(folder: Path, goal: MonitoredMetric | None = None, *, folds: bool = True) -> Leaderboard:
    """Return the leaderboard of a sweep, or of all runs below a folder.

    Args:
        folder: the folder.
        goal: the metric; None: the loss, whatever `eval.metric` says; that of a search, or of runs without the loss.
        folds: whether seeds and folds are one entry.
    """
    entries = read_entries(folder)
    entries = by_point(entries) if folds else entries
    cfg = first_config(entries)
    monitored = LOSS if cfg is None else MonitoredMetric.of(cfg.eval)
    if goal is None:
        has_loss = any(math.isfinite(entry.metrics.get(LOSS.metric, math.nan)) for entry in entries)
        goal = LOSS if has_loss and not (folder / STUDY_FILE).exists() else monitored
    return Leaderboard.of(entries, goal, also=monitored.metric)


def write(board: Leaderboard, folder: Path, *, is_end: bool = True) -> None:
    """Write `leaderboard.{md,csv}`; at the end of a sweep (`is_end`) also each job's settings for TensorBoard."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("leaderboard.md", board.markdown(base=folder)), ("leaderboard.csv", board.csv(base=folder))):
        write_atomically(folder / name, text)
    if not is_end or all(board.value(entry) is None for entry in board.entries):
        return
    for entry in board.entries:
        tensorboard = entry.folder / "tensorboard"
        if tensorboard.is_dir():
            from trainkit.report.events import write_hparams  # noqa: PLC0415 - imports protobuf: for a sweep's end only

            done = entry.status == "finished"
            write_hparams(tensorboard, settings=entry.settings, name=entry.job, finished=done)
