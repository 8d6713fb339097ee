"""Measure trainings in turns: each is a short training in processes of its own, and its figures are medians.

    turn      train a config apart, and read what `trainkit.callbacks.Measurement` wrote
    choice    the turns of one training, and their figures
    bench     each round runs one turn of every choice

The searches for `loader.num_workers` and `batch.micro_size`, the range test and `scale` use the same turns.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any, Final, Protocol, Self

from trainkit.callbacks.measurement import FILE
from trainkit.config.schema import MonitoredMetric, RunConfig
from trainkit.config.targets.allowed import package_environ
from trainkit.config.yaml_files import config_dir_environ
from trainkit.errors import AbsentFileError, StorageError
from trainkit.files import read_map
from trainkit.run.begin import write_resolved
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup
from trainkit.run.signals import raised_stops
from trainkit.sweeps.results.job_results import last_line
from trainkit.trainer.metrics_accumulator import PARTS

_MEASUREMENT: Final = "trainkit.callbacks.Measurement"
ERROR_FILE: Final = "error.json"
"""File with the error that ended a turn, next to its run folder: `error`, its class, and `line`, its first line."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The result of an evaluation that ends a training."""

    metric: str
    """The name of the metric."""
    value: float
    """The value that ends a training."""
    mode: str
    """Whether higher or lower values are better: max or min."""

    @classmethod
    def of(cls, metric: str, value: float, cfg: RunConfig) -> Target:
        """Return the target with the direction that the config gives to the metric."""
        return cls(metric=metric, value=value, mode=MonitoredMetric.of(replace(cfg.eval, metric=metric)).mode)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A training that has run in processes of its own, its measurement, or the reason why it failed."""

    folder: Path = Path()
    """Its run folder; any file may be missing."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The content of `measured.json` (`trainkit.callbacks.measurement`); empty for a turn that failed."""
    start_s: float = 0.0
    """Seconds from the start of the process to the first step."""
    failure: str = ""
    """Reason why it failed, in one line; empty if it did not."""
    error: str = ""
    """The class of trainkit's error that has ended it, or `SIGKILL`; empty if it ended in another way."""


def measured_config(cfg: RunConfig, *, warmup_steps: int, num_steps: int) -> RunConfig:
    """Return the config of a turn: a warm-up and the measured steps.

    Evaluation, callbacks, loggers and checkpoints are left out; the rest is the training of the config.
    """
    node = {"_target_": _MEASUREMENT, "warmup_steps": warmup_steps, "num_steps": num_steps}
    return replace(
        alone(cfg, {"measurement": node}),
        stop_at_step=warmup_steps + num_steps,
        eval=replace(cfg.eval, every_steps=None, every_epochs=None, beside=False),
    )


def config_until(cfg: RunConfig, target: Target) -> RunConfig:
    """Return the config of a turn that trains until an evaluation has a result, or to its end."""
    ends = {"until": target.metric, "target": target.value, "mode": target.mode}
    node = {"_target_": _MEASUREMENT, "warmup_steps": 1, **ends}
    return replace(alone(cfg, {"measurement": node}), eval=replace(cfg.eval, beside=False))


def alone(cfg: RunConfig, callbacks: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Return a config that prints and writes nothing, restarts nothing, and has only these callbacks."""
    return replace(
        cfg,
        resume=None,
        quiet=True,
        callbacks={name: dict(node) for name, node in callbacks.items()},
        logger={},
        checkpoint=replace(cfg.checkpoint, every_steps=None, every_epochs=None, every_s=None, export=False),
        supervisor=replace(cfg.supervisor, max_restarts=0),
        elastic=replace(cfg.elastic, min_replicas=None),
    )


def run_turn(cfg: RunConfig, folder: Path, *, threads: int | None = None) -> Turn:
    """Train a config in a new process, and return the measurement after the process has ended.

    Args:
        cfg: result of `measured_config` or `config_until`.
        folder: a new folder for the files of the turn.
        threads: CPU threads of each process; None: those of torch.
    """
    started = time.time()
    turn = train_apart(cfg, folder, threads=threads)
    return turn if turn.failure else finished_turn(turn.folder, started)


def train_apart(cfg: RunConfig, folder: Path, *, threads: int | None = None) -> Turn:
    """Train a config in a new process; return after this process and its children have ended.

    Args:
        cfg: a checked config.
        folder: a new folder for the files of the training.
        threads: CPU threads of each process; None: those of torch.
    """
    source = RunFolder(folder / "given")
    source.path.mkdir(parents=True)
    write_resolved(source, cfg)
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", **package_environ(), **config_dir_environ()}
    environ |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    ended: SimpleQueue[ProcessExit] = SimpleQueue()
    command = (sys.executable, "-m", "trainkit.measuring.turn_main", str(source.resolved), str(folder / "run"))
    log = folder / "output.log"
    with WorkerGroup(0, ended.put) as group:
        group.start(0, command, environ, log)
        code = ended.get().code
    if code == 0:
        return Turn(folder=folder / "run")
    error, line = "SIGKILL" if code == -signal.SIGKILL else "", last_line(log)
    with suppress(AbsentFileError):
        report = read_map(folder / ERROR_FILE, {"error": str, "line": str})
        error, line = report["error"], f"{report['error']}: {report['line']}"
    ending = f"exit {code}" if code >= 0 else f"signal {-code}"
    return Turn(folder=folder / "run", failure=": ".join(part for part in (ending, line) if part), error=error)


def finished_turn(run: Path, started: float) -> Turn:
    """Return the measurement of a training that has ended.

    Args:
        run: the run folder.
        started: time of its start, as `time.time`.
    """
    try:
        figures = read_map(run / FILE, {"began_at": float})
    except AbsentFileError:
        return Turn(failure="the training ended before its first measured step")
    return Turn(folder=run, figures=figures, start_s=max(figures["began_at"] - started, 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The median of some turns, with the least and the greatest of them.

    Example:
        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.0, high=3.0)
    """

    median: float
    """Median over the turns."""
    low: float
    """Smallest value."""
    high: float
    """Largest value."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of at least one value."""
        return cls(median=median(values), low=min(values), high=max(values))


@dataclass(kw_only=True)
class Choice:
    """One choice of a measurement, and the measurements of its turns."""

    label: str
    """The arguments that distinguish it from the other choices."""
    turns: list[Turn] = field(default_factory=list)
    """The turns that count, in their order."""
    cold: Turn | None = None
    """The turn before the first round, which does not count; None if there was none."""
    failure: str = ""
    """Reason why a turn failed; empty if none did."""

    def add(self, turn: Turn) -> None:
        """Add the measurement of a turn."""
        self.failure = turn.failure
        if turn.figures:
            self.turns.append(turn)

    @property
    def is_measured(self) -> bool:
        """Whether a turn has measured a step."""
        return not self.failure and any(turn.figures.get("steps") for turn in self.turns)

    def spread(self, name: str) -> Spread | None:
        """Return the spread of a figure of `SPREADS`, or of a part of a step, over the turns; None if one lacks it."""
        turns = [turn for turn in self.turns if turn.figures.get("steps")]
        figures = [value(turn) if (value := SPREADS.get(name)) else parts_of(turn.figures)[name] for turn in turns]
        values = [figure for figure in figures if figure is not None]
        return Spread.of(values) if values and len(values) == len(figures) else None

    @property
    def samples_per_s(self) -> Spread | None:
        """Samples per second over all replicas."""
        return self.spread("samples_per_s")

    @property
    def step_s(self) -> Spread | None:
        """Seconds per step."""
        return self.spread("step_s")

    @property
    def peak_bytes(self) -> int:
        """The most memory of a process, in bytes."""
        return max((turn.figures["peak_bytes"] for turn in self.turns), default=0)


def _of_figures(name: str, per: str | None = None) -> Callable[[Turn], float | None]:
    """Return what reads a figure of a turn, divided by another; None for a turn without it."""

    def read(turn: Turn) -> float | None:
        value: float | None = turn.figures.get(name)
        return value if value is None or per is None else value / turn.figures[per]

    return read


def _targets(turn: Turn) -> float | None:
    """Return the targets per second, if a sample has several (tokens), or a weight other than 1."""
    figures = turn.figures
    return None if figures["targets"] == figures["samples"] else float(figures["targets"] / figures["seconds"])


SPREADS: Final[Mapping[str, Callable[[Turn], float | None]]] = {
    "samples_per_s": _of_figures("samples", "seconds"),
    "targets_per_s": _targets,
    "step_s": _of_figures("seconds", "steps"),
    "start_s": lambda turn: turn.start_s,
    "first_step_s": _of_figures("first_step_s"),
    "compile_s": _of_figures("compile_s"),
    "joules_per_sample": _of_figures("joules", "samples"),
    "until_s": lambda turn: (turn.figures.get("until") or {}).get("seconds"),
    "step_spread": _of_figures("step_spread"),
}
"""Figure of a choice -> what reads it from a turn."""
STEP_PARTS: Final = (*PARTS, "rest")


def parts_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds per step of each part, the mean over ranks, and of the rest of a step.

    Example:
        >>> parts_of({"steps": 2, "seconds": 2.0, "ranks": [dict.fromkeys(PARTS, 0.3)]})["rest"]
        0.25
    """
    steps, ranks = figures["steps"], figures["ranks"]
    seconds = {part: sum(rank[part] for rank in ranks) / len(ranks) / steps for part in PARTS}
    return {**seconds, "rest": max(figures["seconds"] / steps - sum(seconds.values()), 0.0)}


WARMUP_STEPS: Final = 10
"""Steps at the start of each turn that are not measured."""
MOST_STEPS: Final = 100_000
_FIRST_STEPS: Final = 20
"""Measured steps of the turn before the first round, which determines the number of steps of the other turns."""
_FEWEST_STEPS: Final = 10
_TURN_S: Final = 2.0
"""Intended duration of the measured steps of a turn, unless the user gives their number."""
_MOST_TRIES, _PAUSE_S = 100, 0.1
"""Tries to remove a folder, and seconds between them."""


class StartTurn(Protocol):
    """Runs a turn."""

    def __call__(self, cfg: RunConfig, folder: Path) -> Turn:
        """Train a config in a new folder, and return its measurement."""


@dataclass(kw_only=True)
class Candidate:
    """A training to measure."""

    label: str
    """The arguments that distinguish it from the other candidates."""
    cfg: RunConfig
    """The checked config."""
    num_steps: int
    """Steps of the whole training."""


def bench(
    candidates: Sequence[Candidate],
    *,
    rounds: int,
    steps: int | None = None,
    target: Target | None = None,
    log: Callable[[str], None] = lambda _: None,
    start: StartTurn = run_turn,
) -> list[Choice]:
    """Measure each candidate once per round, in turns; each turn is a training in its own processes.

    Only one turn runs at a time. A candidate whose turn fails has no further turns; the others continue.

    Args:
        candidates: the trainings to measure.
        rounds: turns of each candidate.
        steps: measured steps of a turn; None: as many as take two seconds; an uncounted turn before the first round
            determines them.
        target: train until this result instead of a number of steps.
        log: receives a line when a turn begins.
        start: runs a turn in a folder that does not exist yet.

    Returns:
        The measurements, in the order of the candidates.
    """
    choices = [Choice(label=candidate.label) for candidate in candidates]
    with turns(start, log) as run:
        configs = []
        for candidate, choice in zip(candidates, choices, strict=True):
            if target is not None:
                configs.append(config_until(candidate.cfg, target))
                continue
            count = steps
            if count is None:
                choice.cold = run(f"warm-up: {candidate.label}", _config(candidate, _FIRST_STEPS))
                choice.failure, count = choice.cold.failure, steps_of(choice.cold)
            configs.append(_config(candidate, count))
        for number in range(rounds):
            for cfg, choice in zip(configs, choices, strict=True):
                if not choice.failure:
                    choice.add(run(f"round {number + 1} of {rounds}: {choice.label}", cfg))
    return choices


def _config(candidate: Candidate, steps: int) -> RunConfig:
    num_steps = max(1, min(steps, candidate.num_steps - WARMUP_STEPS, MOST_STEPS))
    return measured_config(candidate.cfg, warmup_steps=WARMUP_STEPS, num_steps=num_steps)


@contextmanager
def turns(start: StartTurn, log: Callable[[str], None]) -> Iterator[Callable[[str, RunConfig], Turn]]:
    """Yield a function that logs what it measures and runs a turn in a new folder; the block removes all folders."""
    with scratch_folder() as folder:
        numbers = itertools.count()

        def run(about: str, cfg: RunConfig) -> Turn:
            log(about)
            return start(cfg, folder / str(next(numbers)))

        yield run


def steps_of(turn: Turn) -> int:
    """Return the number of steps that take about two seconds, by a turn that does not count."""
    step_s = turn.figures["seconds"] / max(turn.figures["steps"], 1) if turn.figures else math.inf
    return max(_FEWEST_STEPS, min(math.ceil(_TURN_S / max(step_s, 1e-6)), MOST_STEPS))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder for the files of all turns; a stop signal ends the block, and the folder is removed.

    Raises:
        StorageError: it cannot be created. TerminatedError, HangupError: a stop signal was received.
    """
    with raised_stops(), ExitStack() as stack:
        try:
            folder = Path(tempfile.mkdtemp(prefix="trainkit-bench-"))
        except OSError as error:
            where = "TMPDIR=FOLDER chooses where bench keeps the files of its trainings."
            raise StorageError(f"bench has no folder for temporary files: {error.strerror}. {where}") from error
        for _ in range(2):  # a signal may interrupt the first
            stack.callback(_remove, folder)
        yield folder


def _remove(folder: Path) -> None:
    """Remove a folder; processes of an ended turn may still write for a moment."""
    tries = 0
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            tries += 1
            if tries == _MOST_TRIES:
                raise
            time.sleep(_PAUSE_S)
