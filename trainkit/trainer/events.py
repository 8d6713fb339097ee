"""Define the hooks of callbacks, and the view of the run and its progress that they receive.

validate           before the run starts
run_start          before the first step, after the model was placed
  step_end         after every step (only callbacks that override it are called)
  row_figures      before a row of metrics is logged, to add figures to it
  log              with a row of metrics, every `log_every_steps`
  eval_end         with the metrics of an evaluation
  eval_tables      with its tables, if a metric returns any
  checkpoint_saved a checkpoint in the run folder is complete
  rolled_back      the training continues from an earlier step
train_end          after the last step, before the ranks leave the process group
run_end            with the result, for every end of the run
ended              in the process that started the run, even if every rank was killed

Every hook except `checkpoint_saved` and `ended` is called on every rank, in order. A callback that changes the training
must do the same on every rank (`run.request_stop`); files are written if `run.is_owner`. The model may be used up to
`train_end`; if `run.computes_together`, it must be run on every rank with the same inputs. The process that starts a
run calls `validate` and `ended` by the functions at the end of this module; the ranks call the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from trainkit.config.schema import RunConfig
from trainkit.config.sections import NumericsConfig
from trainkit.config.targets.build import build, class_built_by
from trainkit.errors import NonFiniteError, Problem, StopKind, TrainingError, listed, status_of_error
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.schedules import LearningRate
from trainkit.objectives.base import Collective, Objective
from trainkit.objectives.tables import Table
from trainkit.strategies.base import Facts, GradientListener, LeftOut, PhaseListener, Status, StepOutcome
from trainkit.trainer.time_limit import Lengths

REMEDY: Final = "Lower optimizer.lr, set clip.max_norm or add warmup.steps"
"""Remedy for losses or gradients that are not finite; the beginning of a sentence."""
_MOST_STEPS: Final = 1000
"""Number of steps that are listed; further ones are only counted."""
_MOST_SAMPLES: Final = 256
"""Number of samples that are listed per step."""
_FIRST_JUDGED: Final = 100
"""The share of skipped steps is checked from this step on."""


class RollbackNeeded(Exception):  # noqa: N818 - a request to the session, never shown to users
    """A step is not finite for the first time: restore the last checkpoint, and train up to it again."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step}")
        self.step = step


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A step that was not finite, and that is trained again."""

    step: int
    """Number of updates before this step."""
    checkpoint: int
    """Step of the checkpoint that was restored."""


@dataclass
class LeftOutSteps:
    """Counts the skipped steps, and ends a run that skips too many; the same on every rank."""

    settings: NumericsConfig
    samples_in: Callable[[Ticket], Sequence[int]]
    """Returns the samples of a ticket."""
    count: int = 0
    """Number of skipped steps."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """`step`, `samples` and `num_samples` of each skipped step, as in result.json."""
    first: int = -1
    """The first of the latest consecutive skipped steps."""
    last: int = -1
    """The last of the latest consecutive skipped steps."""
    suspect: Suspect | None = None
    """The step for which the last checkpoint was restored, with `rollback`."""

    def samples_of(self, tickets: Sequence[Ticket], most: int = _MOST_SAMPLES) -> tuple[list[int], int]:
        """Return the first samples of tickets, and the number of all."""
        samples = [int(sample) for ticket in tickets for sample in self.samples_in(ticket)]
        return samples[:most], len(samples)

    def take(self, left_out: LeftOut) -> None:
        """Count a skipped step, or request that it is trained again.

        Raises:
            NonFiniteError: too many consecutive steps are skipped; with `rollback`, a second step since the restored
                checkpoint.
            RollbackNeeded: with `rollback`, the step was not finite for the first time.
        """
        step, suspect, limit = left_out.step, self.suspect, self.settings.max_skips_in_a_row
        if self.settings.on_nonfinite == "rollback":
            if suspect is None:
                raise RollbackNeeded(step)
            if suspect.step != step:
                raise NonFiniteError(
                    f"numerics.on_nonfinite=rollback: loss or gradient of step {step} is not finite, as in step "
                    f"{suspect.step}; both follow the checkpoint of step {suspect.checkpoint}, and at most one such "
                    f"step between two checkpoints is left out. {REMEDY}, save more often with "
                    "checkpoint.every_steps, or use numerics.on_nonfinite=skip."
                )
        self.first = self.first if self.count and step == self.last + 1 else step
        self.last, self.count = step, self.count + 1
        if len(self.steps) < _MOST_STEPS:
            samples, total = self.samples_of(left_out.tickets)
            self.steps.append({"step": step, "samples": samples, "num_samples": total})
        if self.settings.on_nonfinite == "skip" and self.last - self.first + 1 >= limit:
            raise NonFiniteError(
                f"numerics.max_skips_in_a_row={limit}: steps {self.first} to {step} were left out in a row, "
                f"because loss or gradient was not finite; {self._so_far(step + 1)}. {REMEDY}, see "
                f"the samples under skipped_steps in result.json, or raise numerics.max_skips_in_a_row."
            )

    def judge_share(self, step: int) -> None:
        """End the run if more steps were skipped than allowed.

        Raises:
            NonFiniteError: their share is above `numerics.max_skipped_share`.
        """
        limit = self.settings.max_skipped_share
        if self.settings.on_nonfinite != "skip" or step < _FIRST_JUDGED or self.count / step <= limit:
            return
        raise NonFiniteError(
            f"numerics.max_skipped_share={limit:g}: {self._so_far(step)}, because loss or gradient was not finite: a "
            f"share of {self.count / step:.3g} (steps {listed((row['step'] for row in self.steps), 8, self.count)}). "
            f"{REMEDY}, see the samples under skipped_steps in result.json, or raise numerics.max_skipped_share."
        )

    def train_again(self, suspect: Suspect | None) -> None:
        """Record the step that is trained for the second time; None if no step is."""
        self.suspect = suspect

    def saved(self, step: int) -> None:
        """Clear the suspect when a checkpoint of a later step is saved."""
        if self.suspect is not None and step > self.suspect.step:
            self.suspect = None

    def findings(self) -> dict[str, Any]:
        """Return the entries of result.json: each step with its samples, and the number of unlisted steps."""
        rest = self.count - len(self.steps)
        return {"skipped_steps": list(self.steps), **({"skipped_steps_not_listed": rest} if rest else {})}

    def to_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"count": self.count, "first": self.first, "last": self.last, "steps": list(self.steps)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the state that `to_json` returned."""
        self.count, self.first, self.last = saved["count"], saved["first"], saved["last"]
        self.steps = list(saved["steps"])

    def _so_far(self, step: int) -> str:
        were = "was" if self.count == 1 else "were"
        return f"{self.count} of {step} steps {were} left out"


__all__ = ["Callback", "Ending", "Planned", "Row", "Run"]

_log = logging.getLogger(__name__)


_COUNTED: Final = ("step", "seconds", "best", "retries")


@dataclass(kw_only=True)
class State:
    """The state with which a resumed run continues, in addition to tensors."""

    plan: BatchPlan
    """The division of steps into batches."""
    step: int = 0
    """Updates completed, and steps skipped."""
    seconds: float = 0.0
    """Seconds of training, over all attempts; without evaluation and saving."""
    best: float | None = None
    """The best `eval.metric` so far."""
    retries: int = 0
    """Repetitions of steps that overflowed."""
    own_loss: bool = False
    """Whether the user's own loop has computed the loss of a step, so the config alone cannot continue the run."""
    left_out: LeftOutSteps = field(default_factory=lambda: LeftOutSteps(NumericsConfig(), lambda _ticket: ()))
    """Steps that were skipped because their values are not finite."""
    lengths: Lengths = field(default_factory=list)
    """The estimates of the length of the training, with `stop_after`."""
    compile_s: float = 0.0
    """Seconds of `seconds` in which torch.compile worked."""

    @property
    def epoch(self) -> float:
        """Passes over the dataset, including fractions: samples used divided by the size of the dataset."""
        return self.samples / self.plan.num_samples

    @property
    def samples(self) -> int:
        """Samples used."""
        return self.plan.samples_before(self.step)

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        return self.left_out.count

    def advance(self, outcome: StepOutcome) -> bool:
        """Record the outcome of a step; return whether the step is completed.

        An applied step and one skipped by policy are completed; an overflowed step is repeated, and an asynchronous one
        is in flight.

        Raises:
            NonFiniteError: too many steps are skipped.
            RollbackNeeded: the training must be repeated from the last checkpoint.
        """
        if outcome.status is Status.handed_out:
            return False
        if outcome.status is Status.retry:
            self.retries += 1
            return False
        self.step += 1
        for left_out in outcome.left_out:
            self.left_out.take(left_out)
        if self.left_out.count:
            self.left_out.judge_share(self.step)
        return True

    def take_best(self, value: float | None) -> None:
        """Record a value of `eval.metric` as the best so far; None: there is none."""
        self.best = value

    def mark_own_loss(self) -> None:
        """Record that the user's own loop has computed the loss of a step."""
        self.own_loss = True

    def to_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        counted = {name: getattr(self, name) for name in _COUNTED}
        optional: dict[str, Any] = {"own_loss": True} if self.own_loss else {}
        if self.lengths or self.compile_s:
            optional |= {"lengths": [*self.lengths], "compile_s": self.compile_s}
        return {**counted, **optional, "left_out": self.left_out.to_json()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the state that `to_json` returned."""
        for name in _COUNTED:
            setattr(self, name, saved[name])
        self.own_loss = saved.get("own_loss", False)
        self.lengths[:], self.compile_s = saved.get("lengths", []), saved.get("compile_s", 0.0)
        self.left_out.restore(saved["left_out"])


Row = Mapping[str, float]
"""Metrics by name: step, epoch, samples, seconds, train/loss, lr, samples_per_s, data_wait, ..."""


Measure = Callable[[str, Any], Mapping[str, float]]
"""Evaluates a split, or a dataset instead of it, and returns the metrics."""


def _no_session(split: str, dataset: Any) -> Mapping[str, float]:
    del dataset
    raise TrainingError(f"{split} cannot be evaluated: no training is running.")


@dataclass(kw_only=True)
class Run:
    """The view of a run that callbacks receive."""

    folder: Path
    """The run folder."""
    cfg: RunConfig
    """The resolved config."""
    summary: Mapping[str, str]
    """Effective values, label -> text, in the order to show them."""
    plan: BatchPlan
    """The division of steps into batches."""
    num_steps: int
    """Steps of the whole training."""
    rate: LearningRate
    """Learning rate of every step."""
    rates: Mapping[str, LearningRate] = field(default_factory=dict)
    """Learning rate of each of several optimizers, by name; empty if the run has one."""
    state: State
    """The progress of the training."""
    begun_at: int = 0
    """Updates completed when this start of the run began."""
    begun_moment: float = field(default_factory=time.monotonic)
    """Time at which this start of the run began its steps, on `time.monotonic`."""
    is_owner: bool
    """Whether this rank writes files."""
    model: nn.Module
    """The model on its devices."""
    device: torch.device
    """The device of the batches."""
    collective: Collective
    """Sums over the data ranks."""
    computes_together: bool = False
    """Whether the ranks must run the model together, because it is sharded."""
    notes: tuple[str, ...] = ()
    """Additional lines of the startup summary: overridden or shadowed keys, the resumed run."""
    datasets: Mapping[str, Any] = field(default_factory=dict)
    """Split -> dataset."""
    example: Any = None
    """The batch of the first shard that this rank computed; None before."""
    findings: Callable[[], Mapping[str, Any]] = dict
    """Returns the strategy's entries for result.json; `counts` in them: the frequency of each number."""
    stop_reason: str | None = None
    """Reason why the run is about to end early, in words."""
    stop_kind: StopKind | None = None
    """How it was asked to stop from outside; None: it was not, or something in the run asked first."""
    measure: Measure = field(default=_no_session, repr=False)
    """Evaluates a split, or a dataset instead of it; see `evaluate`."""

    def evaluate(self, split: str = "val", *, dataset: Any = None) -> Mapping[str, float]:
        """Evaluate the current model, and return the metrics; no callback receives them, and they are never the best.

        Collective: every rank calls it in the same hook, after the same step.

        Args:
            split: a split of the data; the prefix of the names.
            dataset: samples to evaluate instead of those of the split.

        Raises:
            TrainingError: not allowed in this hook or in an observer, or the split does not exist.
        """
        return self.measure(split, dataset)

    @property
    def expected_steps(self) -> int:
        """Steps of the whole training as known now: with `stop_after`, an estimate."""
        return self.num_steps if self.rate.length is None else max(self.rate.length(self.state.step), self.state.step)

    def add_note(self, message: str) -> None:
        """Add a line to the startup summary, before it is printed."""
        self.notes = (*self.notes, message)

    def keep_example(self, batch: object) -> None:
        """Keep the first batch that this rank computed."""
        self.example = batch

    def begin_steps(self) -> None:
        """Record the step and the time at which this start of the run begins."""
        self.begun_at, self.begun_moment = self.state.step, time.monotonic()

    def request_stop(self, reason: str, *, kind: StopKind | None = None) -> None:
        """End the run after this step; every rank must call it in the same step. The first request counts.

        `kind` is that of a request from outside; None: the run itself has a reason to end, and counts as finished.
        """
        if self.stop_reason is None:
            self.stop_reason, self.stop_kind = reason, kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The end of a run, as known to the process that started it."""

    name: str
    """Name of the run."""
    folder: Path
    """The run folder."""
    status: str
    """`finished`, `failed`, `stopped`, `preempted` or `hangup`."""
    reason: str
    """Reason, in one line; may be empty."""
    steps: int | None
    """Updates of the whole training; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run before it starts, as its callbacks check it."""

    key: str
    """Key of the called callback, `callbacks.confusion`."""
    cfg: RunConfig
    """The config; its microbatch may not be resolved yet."""
    objective: Objective
    datasets: Mapping[str, Any]
    """Split -> dataset."""
    sample: Any
    """A sample of the training data, not collated; None if it cannot be indexed."""
    strategy_facts: Facts
    """The properties of the strategy."""


class Callback:
    """The base class of callbacks; every hook does nothing until it is overridden."""

    prints: ClassVar[bool] = False
    """Whether the callback prints to the terminal; such callbacks are left out with `quiet=true`."""
    observes: ClassVar[bool] = False
    """Whether the callback only observes: its errors do not end the run, unless `observer_errors=stop`. It calls no
    collective, and changes nothing that a step reads.
    """
    decides_by_figures: ClassVar[bool] = False
    """Whether the callback changes the training by evaluation results; the evaluation must then run in the training
    process.
    """
    measures_only: ClassVar[bool] = False
    """Whether a run with it is a measurement: the run writes no checkpoint, and cannot be resumed."""

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Group (`model`, `data`) -> methods that its object must have. Of a recipe, the callback is left out with a note
    where the classes of other choices lack them.
    """

    details: ClassVar[tuple[str, ...]] = ()
    """Names of entries of `Objective.details` that evaluations during the training also measure."""

    def validate(self, planned: Planned) -> list[Problem]:
        """Return problems of this callback with the run; called on an object that receives no other hook. Pure."""
        del planned
        return []

    def run_start(self, run: Run) -> None:
        """Handle the start, before the first step."""

    def phase_listener(self) -> PhaseListener | None:
        """Return a function to call with (phase, step) at the begin of each phase, on the hot path; None: no
        function.
        """
        return None

    def gradient_listener(self) -> GradientListener | None:
        """Return a listener for the gradients of some steps; None: no listener. Called before `run_start`."""
        return None

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Handle the end of a step; on the hot path."""

    def rate_factor(self, step: int) -> float:
        """Return a factor on the learning rate of update `step`, the same on every rank; called for each update.

        It follows from what evaluations up to that step have shown, and is part of the state of the callback.
        """
        del step
        return 1.0

    def row_figures(self, run: Run) -> Mapping[str, float]:
        """Return figures for the row that is about to be logged; those of rank 0 are kept."""
        del run
        return {}

    def log(self, run: Run, row: Row) -> None:
        """Handle a row of metrics."""

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Handle the metrics of an evaluation."""

    def eval_tables(self, run: Run, tables: Mapping[str, Table]) -> None:
        """Handle the tables of an evaluation, after `eval_end`; called only if any exist."""

    def checkpoint_saved(self, run: Run, folder: Path) -> None:
        """Handle a complete checkpoint; called on rank 0 only, which writes it."""

    def rolled_back(self, run: Run, step: int) -> None:
        """Continue from an earlier step, the current one of `run.state`, because `step` was not finite.

        The state that `state` returned for that checkpoint is restored before. Metrics of later steps are logged again.
        """

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Handle a regular end of the training, on every rank, before the process group ends; `result` as in
        `run_end`.
        """

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Handle the end of the run; `result` is the content of result.json."""

    def ended(self, ending: Ending) -> None:
        """Handle the end of the run in the process that started it: the ranks may have been killed.

        Called once per command, after `status.json` and `result.json` are written, on an object that has received no
        other hook; its errors are warnings.
        """

    def state(self) -> dict[str, Any]:
        """Return the state of this callback for a checkpoint: JSON values, and tensors in dicts and lists."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned, its tensors on the CPU."""


def callback_problems(planned: Planned) -> list[Problem]:
    """Return the problems of the callbacks that validate a run; others are not built here.

    Args:
        planned: the run, with any key.
    """
    problems: list[Problem] = []
    for name, node in planned.cfg.callbacks.items():
        kind, key = class_built_by(node), f"callbacks.{name}"
        if kind is not None and issubclass(kind, Callback) and kind.validate is not Callback.validate:
            callback: Callback = build(node, key)
            problems += callback.validate(replace(planned, key=key))
    return problems


@contextmanager
def ended_hooks(cfg: RunConfig, folder: Path, read_result: Callable[[], Mapping[str, Any] | None]) -> Iterator[None]:
    """Call the hook of the callbacks that have it, after the block, even if it raises; their errors are warnings.

    Args:
        cfg: the config of the run.
        folder: the run folder.
        read_result: returns the content of `result.json`, or None if there is none.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        result = read_result() or {}
        status = result.get("status", "stopped") if failure is None else status_of_error(failure)
        reason, steps = (result.get("reason") or "") if failure is None else failure, result.get("steps")
        ending = Ending(
            name=cfg.name,
            folder=folder,
            status=str(status),
            reason=next(iter(str(reason).splitlines()), ""),
            steps=steps if isinstance(steps, int) else None,
        )
        for group, nodes in {"callbacks": cfg.callbacks, "logger": cfg.logger}.items():
            for name, node in nodes.items():
                try:
                    kind = class_built_by(node)
                    if kind is not None and getattr(kind, "ended", Callback.ended) is not Callback.ended:
                        build(node, group).ended(ending)
                except Exception as error:  # noqa: BLE001 - the run has ended, and its exit code is already determined
                    _log.warning("%s.%s failed in ended: %s: %s", group, name, type(error).__name__, error)
