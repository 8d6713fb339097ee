"""Measure a training: `trainkit bench` adds this callback to the trainings that it starts."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Final

import torch
from torch import Tensor

from trainkit.callbacks.every_run import CompileTime
from trainkit.callbacks.gpu import consumed_joules, devices_of
from trainkit.cluster.host import peak_resident_bytes
from trainkit.fields import at_least, cosmetic, unit
from trainkit.files import naming
from trainkit.strategies.base import PhaseListener, StepOutcome
from trainkit.trainer.events import Callback, Row, Run
from trainkit.trainer.metrics_accumulator import PARTS, PhaseClock, wait_for

FILE: Final = "measured.json"
"""File of a run folder that holds the measurement."""


@dataclass
class _Running:
    clock: PhaseClock = field(default_factory=PhaseClock)
    compiling: CompileTime | None = None
    first: int = 0
    """Number of updates before the measured steps."""
    began_at: float = 0.0
    """Start time in seconds since the epoch, as `time.time`."""
    first_step_at: float | None = None
    since: float = 0.0
    """Start of the measured steps, on `time.perf_counter`."""
    trained_s: float = 0.0
    """`State.seconds` at that moment."""
    joules: float | None = None
    weights: list[Tensor | float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """When each measured step ended on the host's clock, `time.perf_counter`."""
    figures: dict[str, Any] = field(default_factory=dict)
    until: dict[str, float] | None = None


@dataclass(kw_only=True, eq=False)
class Measurement(Callback):
    """Measures the steps after a warm-up: their duration, the parts of a step, memory and energy.

    Rank 0 writes `measured.json` into the run folder. No step is changed; on a CUDA device the host waits for the
    device after the first step, before the first measured step, and after the last one.
    """

    measures_only: ClassVar[bool] = True
    decides_by_figures: ClassVar[bool] = True

    warmup_steps: Annotated[int, cosmetic, at_least(1), unit("steps")] = 10
    """Steps before the measured ones."""
    num_steps: Annotated[int | None, cosmetic, at_least(1), unit("steps")] = None
    """Measured steps; null: until the end of the training."""
    until: Annotated[str | None, cosmetic] = None
    """The metric of an evaluation that ends the training; null: no metric ends it."""
    target: Annotated[float, cosmetic] = 0.0
    """The training ends when the metric reaches this value or a better one."""
    mode: Annotated[str, cosmetic] = "max"
    """Whether higher or lower values are better: max or min."""
    _running: _Running = field(default_factory=_Running, init=False, repr=False)

    def phase_listener(self) -> PhaseListener:
        """Return the clock of the parts of a step."""
        return self._running.clock

    def run_start(self, run: Run) -> None:
        """Record when the first step begins, and count the time of torch.compile from now on."""
        running = self._running
        running.first, running.began_at = run.state.step + self.warmup_steps, time.time()
        running.compiling = CompileTime()

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Begin and end the measured steps."""
        running, step = self._running, run.state.step
        running.clock.end_step()
        if running.first_step_at is None:
            wait_for(run.device)
            running.first_step_at = time.time()
        if step == running.first:
            self._begin(run)
        elif step > running.first and not running.figures:
            running.weights.append(outcome.weight)
            running.ends.append(time.perf_counter())
            if self.num_steps is not None and step >= running.first + self.num_steps:
                self._end(run)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """End the training once the metric reaches the target."""
        value = metrics.get(self.until or "", math.nan)
        reached = value <= self.target if self.mode == "min" else value >= self.target
        if reached and self._running.until is None:
            state = run.state
            record = {"seconds": state.seconds, "steps": state.step, "samples": state.samples, "value": value}
            self._running.until = record
            run.request_stop(f"{self.until} is {value:g}")

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Gather the figures of all ranks, and write them."""
        running = self._running
        if running.since and not running.figures:
            self._end(run)
        if running.compiling is not None:
            running.compiling.close()
        content = {
            **self._gathered(run),
            "began_at": running.began_at,
            "first_step_s": (running.first_step_at or running.began_at) - running.began_at,
            "step_spread": _spread_of(running.ends),
            "compile_s": running.compiling.seconds if running.compiling is not None else 0.0,
            "replicas": run.collective.num_ranks,
            "device": run.device.type,
            "until": running.until,
            "metric": result.get("metrics", {}).get(self.until) if self.until else None,
            "trained_s": run.state.seconds,
            "trained_steps": run.state.step,
        }
        if run.is_owner:
            path = run.folder / FILE
            with naming(path):
                path.write_text(json.dumps(content, indent=1), encoding="utf-8")

    def _begin(self, run: Run) -> None:
        running = self._running
        wait_for(run.device)
        for device in devices_of(run):
            torch.cuda.reset_peak_memory_stats(device)
        running.joules = consumed_joules(devices_of(run))
        running.clock.begin(run.device)
        running.trained_s, running.since = run.state.seconds, time.perf_counter()

    def _end(self, run: Run) -> None:
        running = self._running
        wait_for(run.device)
        seconds = time.perf_counter() - running.since
        if self.until is not None:  # without the evaluations
            seconds = run.state.seconds - running.trained_s
        joules = consumed_joules(devices_of(run))
        spent = math.nan if joules is None or running.joules is None else joules - running.joules
        weights = sum(float(weight) for weight in running.weights)
        running.figures = {"seconds": seconds, "targets": weights, "joules": spent, **running.clock.lap()}
        running.figures["steps"] = run.state.step - running.first

    def _gathered(self, run: Run) -> dict[str, Any]:
        """Return the figures of the measured steps over all ranks; collective."""
        names = ("seconds", "targets", "joules", *PARTS)
        figures = [self._running.figures.get(name, 0.0) for name in names]
        rows = run.collective.gather(torch.tensor([*figures, float(_peak(run))], dtype=torch.float64))
        by_rank = [row.tolist() for row in rows]
        steps = int(self._running.figures.get("steps", 0))
        samples = run.plan.samples_before(self._running.first + steps) - run.plan.samples_before(self._running.first)
        joules = sum(row[2] for row in by_rank)
        return {
            "steps": steps,
            "samples": samples,
            "seconds": max(row[0] for row in by_rank),
            "targets": sum(row[1] for row in by_rank),
            "joules": None if math.isnan(joules) else joules,
            "ranks": [dict(zip(PARTS, row[3 : 3 + len(PARTS)], strict=True)) for row in by_rank],
            "peak_bytes": int(max(row[-1] for row in by_rank)),
        }


def _spread_of(ends: Sequence[float]) -> float:
    """Return the standard deviation of the steps divided by their median, without regard to outliers; 0 for too few
    steps.

    The quartiles of a normal distribution lie 1.349 standard deviations apart.

    Example:
        >>> _spread_of([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
        0.0
    """
    steps = [after - before for before, after in pairwise(ends)]
    if len(steps) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(steps)
    return (high - low) / 1.349 / middle if middle > 0 else 0.0


def _peak(run: Run) -> int:
    """Return the most bytes held by this process: on its fullest CUDA device, else in the host's memory."""
    devices = devices_of(run)
    if devices:
        return max(torch.cuda.max_memory_allocated(device) for device in devices)
    return peak_resident_bytes()
