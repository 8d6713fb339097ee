"""The learning-rate range test: a short training whose learning rate grows from step to step until it diverges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from trainkit.bounded import Kind
from trainkit.config.schema import RunConfig
from trainkit.config.sections import WarmupConfig
from trainkit.errors import AbsentFileError, NonFiniteError, TrainingError
from trainkit.fields import cosmetic
from trainkit.files import read_map
from trainkit.measuring.bench import scratch_folder
from trainkit.measuring.lr_curve import Divergence, LrCurve, RatePoint
from trainkit.measuring.turns import Ended, alone, train_apart
from trainkit.storage import naming
from trainkit.trainer.events import Callback, Row, Run

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
            import json  # noqa: PLC0415 - for one rank

            path, found = run.folder / FILE, self._running
            with naming(path):
                content = {"points": found.points, "has_diverged": found.has_diverged}
                path.write_text(json.dumps(content), encoding="utf-8")


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
