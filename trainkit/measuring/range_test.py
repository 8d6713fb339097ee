"""The learning-rate range test: a short training whose learning rate grows from step to step until it diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from trainkit.config.schema import RunConfig
from trainkit.config.sections import WarmupConfig
from trainkit.errors import AbsentFileError, NonFiniteError, TrainingError
from trainkit.fields import cosmetic
from trainkit.files import Kind, read_map, write_json_atomically
from trainkit.measuring.bench import Turn, alone, scratch_folder, train_apart
from trainkit.report.numbers import figure
from trainkit.report.tables import row_lines
from trainkit.trainer.events import Callback, Row, Run

Ending = Literal["diverged", "not_finite", "range"]
_WIDTH: Final = 0.02
"""Standard deviation of the smoothing, as a share of the points; at least one point."""
FEWEST_POINTS: Final = 10
"""Minimum number of points for a suggestion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateStep:
    """A step of the range test."""

    lr: float
    """The learning rate of this step, after `lr_scaling`."""
    loss: float
    """The loss of the whole step, before its update."""
    smoothed: float
    """The weighted mean of the losses around this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LrCurve:
    """The loss over an exponentially growing learning rate, and the rates that it suggests.

    Example:
        >>> falling = [(10.0 ** (k / 10 - 4), 2 - math.tanh((k - 20) / 5)) for k in range(40)]
        >>> curve = LrCurve.of([*falling, (1.0, 9.0), (2.0, 18.0)], "diverged")
        >>> curve.steepest, curve.tenth_of_minimum
        (0.01, 0.0398)

    Source: Smith 2015, arXiv:1506.01186, section 3.3 (the range test).
    """

    points: tuple[RateStep, ...]
    """The steps, in their order."""
    ended: Ending
    """Why the test ended."""
    steepest: float | None = None
    """The rate at which the smoothed loss falls fastest over the rate's logarithm; None: the loss does not fall."""
    minimum: float | None = None
    """The rate with the least smoothed loss; None: the loss does not fall."""

    @property
    def tenth_of_minimum(self) -> float | None:
        """A tenth of the rate with the least loss."""
        return None if self.minimum is None else rounded(self.minimum / 10)

    @classmethod
    def of(cls, steps: Sequence[tuple[float, float]], ended: Ending) -> LrCurve:
        """Return the curve of the steps of a test: the rate and the finite loss of each.

        The loss counts as falling if its least smoothed value is below the first one by more than the noise: the
        standard deviation of the losses around the smoothed ones, up to the least.
        """
        rates, losses = ([step[position] for step in steps] for position in (0, 1))
        smoothed = _smoothed(np.array(losses, dtype=np.float64)) if steps else np.zeros(0)
        columns = zip(rates, losses, smoothed.tolist(), strict=True)
        points = tuple(RateStep(lr=lr, loss=loss, smoothed=mean) for lr, loss, mean in columns)
        least = int(np.argmin(smoothed)) if steps else 0
        if len(points) < FEWEST_POINTS or least < 2:
            return cls(points=points, ended=ended)
        noise = float(np.std(losses[: least + 1] - smoothed[: least + 1]))
        if smoothed[0] - smoothed[least] <= noise:
            return cls(points=points, ended=ended)
        index = int(np.argmin(np.gradient(smoothed, np.log(rates))[:least]))
        return cls(points=points, ended=ended, steepest=rounded(rates[index]), minimum=rounded(rates[least]))


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
        >>> divergence = Divergence()
        >>> [divergence.add(loss) for loss in (2.0, 1.0, 1.0, 9.0, 90.0)]
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

StartTraining = Callable[[RunConfig, Path], Turn]
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
            running = self._running
            write_json_atomically(run.folder / FILE, {"points": running.points, "has_diverged": running.has_diverged})


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


def range_test(cfg: RunConfig, *, start: StartTraining = train_apart) -> LrCurve:
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
            content = read_map(ended.folder / FILE, _KEYS)
        except AbsentFileError:
            content = {"points": [], "has_diverged": False}
    not_finite = ended.error in _NOT_FINITE
    if ended.failure and not (not_finite and content["points"]):
        if not_finite:
            raise NonFiniteError(
                f"the loss is not finite before the first update, at any learning rate: {ended.failure}"
            )
        raise TrainingError(f"the range test failed: {ended.failure}")
    why: Ending = "not_finite" if not_finite else "diverged" if content["has_diverged"] else "range"
    return LrCurve.of([(float(lr), float(loss)) for lr, loss in content["points"]], why)


_NOT_FINITE: Final = frozenset({"NonFiniteError", "LossScaleError"})
"""Errors that end a training whose loss or gradients are not finite."""


@dataclass(frozen=True, kw_only=True)
class SuggestedRate:
    """A learning rate that the curve suggests."""

    lr: float
    """The learning rate of the training, after `lr_scaling`."""
    override: str
    """The override with which the training has this peak rate."""

    @classmethod
    def of(cls, rate: float | None, scale: float) -> SuggestedRate | None:
        """Return the override of a rate by the factor of `lr_scaling`; None without a rate."""
        return None if rate is None else cls(lr=rate, override=f"optimizer.lr={rounded(rate / scale):g}")


@dataclass(frozen=True, kw_only=True)
class FindLrDocument:
    """The result of `trainkit find lr`."""

    version: int
    """The version of this document."""
    command: str
    """The command, without secrets."""
    date: str
    """When the test ended, with the time zone."""
    global_size: int
    """Samples per step, for which the rates hold."""
    min_lr: float
    """The learning rate of the first step."""
    max_lr: float
    """The learning rate that the last step would have had."""
    steps: int
    """Steps from `min_lr` to `max_lr`."""
    ended: Ending
    """Why the test ended: the loss diverged, the loss was not finite, or `max_lr` was reached."""
    steepest: SuggestedRate | None
    """The rate at which the smoothed loss falls fastest; null if it does not fall."""
    tenth_of_minimum: SuggestedRate | None
    """A tenth of the rate with the least smoothed loss; null if it does not fall."""
    points: Sequence[RateStep]
    """The steps, in their order."""
    notes: list[str]
    """Notes for the user."""

    def lines(self) -> Iterator[str]:
        """Yield some steps of the curve, evenly spaced, the reason for its end, and the overrides."""
        last, count = len(self.points) - 1, min(len(self.points), _ROWS)
        shown = [self.points[last * index // max(count - 1, 1)] for index in range(count)]
        rows = [[figure(point.lr), figure(point.loss), figure(point.smoothed)] for point in shown]
        yield from row_lines(["learning rate", "loss", "smoothed"], rows)
        yield ""
        end = _ENDS[self.ended].format(lr=figure(self.points[-1].lr))
        yield f"  {end} (step {len(self.points)} of {self.steps}, {self.global_size:,} samples a step)."
        if self.steepest is None:
            yield "  the loss does not fall in this range by more than its noise: no rate is suggested."
        names = {"steepest fall": self.steepest, "a tenth of the minimum's rate": self.tenth_of_minimum}
        for name, rate in names.items():
            if rate is not None:
                is_scaled = rate.override != f"optimizer.lr={rate.lr:g}"
                scaled = f"  ({rate.lr:g} after lr_scaling)" if is_scaled else ""
                yield f"  {name:<{max(map(len, names))}}  {rate.override}{scaled}"


_ROWS: Final = 12
"""Steps of the curve that the terminal shows."""
_ENDS: Final = {
    "diverged": "the loss diverges at {lr}",
    "not_finite": "the loss is no longer finite after {lr}",
    "range": "the loss has not diverged up to {lr}: try a larger --max-lr",
}
