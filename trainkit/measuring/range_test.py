"""The learning-rate range test: a short training whose learning rate grows from step to step until it diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from trainkit.config.schema import RunConfig
from trainkit.config.sections import WarmupConfig
from trainkit.errors import AbsentFileError, NonFiniteError, TrainingError
from trainkit.fields import cosmetic
from trainkit.files import Kind, read_map, write_json_atomically
from trainkit.measuring.bench import Ended, alone, scratch_folder, train_apart
from trainkit.trainer.events import Callback, Row, Run

_WIDTH: Final = 0.02
"""Standard deviation of the smoothing, as a share of the points; at least one point."""
FEWEST_POINTS: Final = 10
"""Minimum number of points for a suggestion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatePoint:
    """One step of the test."""

    lr: float
    """The learning rate of the step."""
    loss: float
    """The loss of the step, before its update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LrCurve:
    """The loss over an exponentially growing learning rate, and the rates that it suggests.

    Example:
        >>> falling = [RatePoint(lr=10.0 ** (k / 10 - 4), loss=2 - math.tanh((k - 20) / 5)) for k in range(40)]
        >>> curve = LrCurve.of([*falling, *(RatePoint(lr=k * 1.0, loss=k * 9.0) for k in (1, 2))])
        >>> curve.steepest, curve.tenth_of_minimum
        (0.01, 0.0398)

    Source: Smith 2015, arXiv:1506.01186, section 3.3 (the range test).
    """

    points: tuple[RatePoint, ...]
    """The steps, in their order."""
    smoothed: tuple[float, ...]
    """The loss of each step as the weighted mean of its neighbours on both sides."""
    steepest: float | None
    """The rate at which the smoothed loss falls fastest over the rate's logarithm; None: the loss does not fall."""
    minimum: float | None
    """The rate with the least smoothed loss; None: the loss does not fall."""

    @property
    def tenth_of_minimum(self) -> float | None:
        """A tenth of the rate with the least loss."""
        return None if self.minimum is None else rounded(self.minimum / 10)

    @classmethod
    def of(cls, points: Sequence[RatePoint]) -> LrCurve:
        """Return the curve of the steps of a test, whose losses are finite.

        The loss counts as falling if its least smoothed value is below the first one by more than the noise: the
        standard deviation of the losses around the smoothed ones, up to the least.
        """
        if not points:
            return cls(points=(), smoothed=(), steepest=None, minimum=None)
        losses = np.array([point.loss for point in points], dtype=np.float64)
        smoothed = _smoothed(losses)
        least = int(np.argmin(smoothed))
        found = cls(points=tuple(points), smoothed=tuple(smoothed.tolist()), steepest=None, minimum=None)
        if len(points) < FEWEST_POINTS or least < 2:
            return found
        noise = float(np.std(losses[: least + 1] - smoothed[: least + 1]))
        if smoothed[0] - smoothed[least] <= noise:
            return found
        logs = np.log([point.lr for point in points])
        place = int(np.argmin(np.gradient(smoothed, logs)[:least]))
        return cls(
            points=found.points,
            smoothed=found.smoothed,
            steepest=rounded(points[place].lr),
            minimum=rounded(points[least].lr),
        )


def _smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each value and its neighbours weighted by a normal distribution."""
    width = max(1.0, _WIDTH * len(values))
    reach = math.ceil(3 * width)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    sums = np.convolve(values, weights)[reach : reach + len(values)]
    counts = np.convolve(np.ones(len(values)), weights)[reach : reach + len(values)]
    return np.asarray(sums / counts, dtype=np.float64)


def rounded(rate: float) -> float:
    """Return a rate with three digits.

    Example:
        >>> rounded(0.00316227)
        0.00316
    """
    return float(f"{rate:.3g}")


@dataclass
class Divergence:
    """Detects when the loss of a range test diverges.

    The loss is averaged over the last steps (weights 0.2, 0.16, 0.128 ...). The test has diverged once the average
    exceeds its first value and min + 3 * |min|: for a positive loss, four times the minimum.

    Example:
        >>> seen = Divergence()
        >>> [seen.add(loss) for loss in (2.0, 1.0, 1.0, 9.0, 90.0)]
        [False, False, False, False, True]
    """

    _sum: float = 0.0
    _weight: float = 0.0
    _first: float | None = None
    _least: float = math.inf

    def add(self, loss: float) -> bool:
        """Add the loss of a step, and return whether the losses have diverged."""
        self._sum, self._weight = 0.8 * self._sum + 0.2 * loss, 0.8 * self._weight + 0.2
        mean = self._sum / self._weight
        self._first = mean if self._first is None else self._first
        self._least = min(self._least, mean)
        return mean > max(self._first, self._least + 3 * abs(self._least))


FILE: Final = "range.json"
"""The file of a run folder with the steps of a range test."""
_KEYS: Final[Mapping[str, Kind]] = {"points": list, "has_diverged": bool}

StartTraining = Callable[[RunConfig, Path], Ended]
"""Function that trains a config in separate processes, in a folder that does not exist yet."""


@dataclass
class _Running:
    points: list[list[float]] = field(default_factory=list)
    divergence: Divergence = field(default_factory=Divergence)
    has_diverged: bool = False


@dataclass(frozen=True, kw_only=True)
class RangeTest(Callback):
    """Records the learning rate and the loss of each step, and ends the training once the loss diverges.

    The loss of a row is that of the whole step, over all shards and ranks. Rank 0 writes `range.json` into the run
    folder, even if the training ends with an error.
    """

    measures_only: ClassVar[bool] = True

    most: Annotated[int, cosmetic] = 100
    """Steps of the test."""
    _running: _Running = field(default_factory=_Running, init=False, repr=False, compare=False)

    def log(self, run: Run, row: Row) -> None:
        """Record a step; the rows are the same on every rank, and so is the decision to end."""
        running = self._running
        if "train/loss" not in row or "lr" not in row or len(running.points) == self.most:
            return
        running.points.append([row["lr"], row["train/loss"]])
        if running.divergence.add(row["train/loss"]) and not running.has_diverged:
            running.has_diverged = True
            run.request_stop("the loss diverges")

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the recorded steps."""
        del result
        if run.is_owner:
            found = self._running
            write_json_atomically(run.folder / FILE, {"points": found.points, "has_diverged": found.has_diverged})


@dataclass(frozen=True, kw_only=True)
class RangeResult:
    """The result of a range test."""

    curve: LrCurve
    ended: str
    """Why it ended: `diverged`, `not_finite`, or `range` (the loss did not diverge up to the largest rate)."""


def range_config(cfg: RunConfig, *, low: float, high: float, steps: int, peak: float) -> RunConfig:
    """Return the config of a range test.

    Warmup and schedule are replaced by the range. Evaluation, callbacks, loggers, checkpoints and averages of the
    weights are left out; the rest is the training of the config.

    Args:
        cfg: a checked config.
        low: the learning rate of the first step.
        high: the learning rate of the last step.
        steps: number of steps.
        peak: the peak learning rate of the config, after `lr_scaling`; above 0.
    """
    node = {"_target_": "trainkit.callbacks.RangeTest", "most": steps}
    return replace(
        alone(cfg, {"range_test": node}),
        schedule={"_target_": "trainkit.schedules.RateRange", "first": low / peak, "last": high / peak, "steps": steps},
        warmup=WarmupConfig(),
        epochs=None,
        steps=steps + 1,  # stopped one step before its end, because the end evaluates the model
        stop_at_step=steps,
        log_every_steps=1,
        average={},
        eval=replace(cfg.eval, every_steps=None, every_epochs=None, beside=False),
        numerics=replace(cfg.numerics, on_nonfinite="stop"),
    )


def range_test(cfg: RunConfig, *, start: StartTraining = train_apart) -> RangeResult:
    """Run a range test in separate processes; its files are deleted.

    Args:
        cfg: the result of `range_config`.
        start: function that trains a config in a folder that does not exist yet.

    Raises:
        NonFiniteError: the loss of the first step is not finite.
        TrainingError: the training failed.
    """
    with scratch_folder() as folder:
        ended = start(cfg, folder / "test")
        try:
            found = read_map(ended.folder / FILE, _KEYS)
        except AbsentFileError:
            found = {"points": [], "has_diverged": False}
    points = [RatePoint(lr=float(lr), loss=float(loss)) for lr, loss in found["points"]]
    not_finite = ended.error in _NOT_FINITE
    if ended.failure and not (not_finite and points):
        if not_finite:
            raise NonFiniteError(
                f"the loss is not finite before the first update, at any learning rate: {ended.failure}"
            )
        raise TrainingError(f"the range test failed: {ended.failure}")
    why = "not_finite" if not_finite else "diverged" if found["has_diverged"] else "range"
    return RangeResult(curve=LrCurve.of(points), ended=why)


_NOT_FINITE: Final = frozenset({"NonFiniteError", "LossScaleError"})
"""Errors that end a training whose loss or gradients are not finite."""
