"""What looks on while a training goes: the callback, and the run it sees.

run_start          before the first step, everything placed
  step_end         after every step (only callbacks that override it are called)
  log              a row of figures, every `log_every_steps`
  eval_end         figures of an evaluation
  checkpoint_saved a checkpoint stands complete in the run folder
  rolled_back      the training continues from an earlier step
train_end          after the last step, while the ranks still stand together
run_end            with the result, however the run ended

Every hook is called on every rank, in order. A callback looks on: what it changes it must change alike on every rank
(`run.request_stop`), and what it writes it writes where `run.is_owner`. The model is for `train_end` and the hooks
before it; where `run.computes_together`, whoever runs it does so on every rank, with the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from trainkit.config.schema import RunConfig
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.learning_rate import LearningRate
from trainkit.objectives.base import Collective
from trainkit.strategies.base import StepOutcome
from trainkit.trainer.state import State

__all__ = ["Callback", "Row", "Run", "overriding"]

Row = Mapping[str, float]
"""Figures by name: step, epoch, samples, seconds, train/loss, lr, samples_per_s, data_wait, ..."""


@dataclass(kw_only=True)
class Run:
    """A run as its callbacks see it."""

    folder: Path
    """Where it keeps everything."""
    cfg: RunConfig
    """The resolved config."""
    summary: Mapping[str, str]
    """Effective values, label -> text, in the order to show them."""
    plan: BatchPlan
    """How steps are cut."""
    num_steps: int
    """Steps of the whole training."""
    rate: LearningRate
    """The learning rate of every step."""
    state: State
    """How far it is."""
    is_owner: bool
    """Whether this rank writes files."""
    model: nn.Module
    """The model, where the strategy placed it."""
    device: torch.device
    """Where batches are."""
    collective: Collective
    """Sums over the data ranks."""
    computes_together: bool = False
    """Whether the ranks must run the model together, since each holds but a part of it."""
    notes: tuple[str, ...] = ()
    """What the summary says besides: what was displaced, shadowed, resumed."""
    datasets: Mapping[str, Any] = field(default_factory=dict)
    """Split -> dataset."""
    example: Any = None
    """The batch of the first shard that this rank computed; None before."""
    findings: Callable[[], Mapping[str, Any]] = dict
    """What the strategy has found, as result.json will say it; `counts` in it: how often each number was seen."""
    stop_reason: str | None = None
    """Why the run is about to end early."""

    def request_stop(self, reason: str) -> None:
        """End after this step; must be called alike on every rank. The first reason counts."""
        self.stop_reason = self.stop_reason or reason

    def example_batch(self) -> Any:
        """The first batch, where it is still at hand."""
        return self.example


class Callback:
    """Looks on; every hook does nothing until overridden."""

    prints: ClassVar[bool] = False
    """Whether it writes on the screen, which `quiet=true` leaves out."""
    decides_by_figures: ClassVar[bool] = False
    """Whether what it does to the training goes by evaluations, which then have to be made where the training is."""

    def run_start(self, run: Run) -> None:
        """Before the first step."""

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """After every step; on the hot path."""

    def log(self, run: Run, row: Row) -> None:
        """A row of figures was made."""

    def eval_end(self, run: Run, metrics: Row) -> None:
        """The model was evaluated."""

    def checkpoint_saved(self, run: Run, folder: Path) -> None:
        """A checkpoint is complete; on the owner only, since only it writes them."""

    def rolled_back(self, run: Run, step: int) -> None:
        """Continue from an earlier step, where `run.state` is by now, since `step` was not finite.

        What `state` gave for that checkpoint is restored before. Figures of later steps come again.
        """

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """The training ended as it should; on every rank, which may still exchange. `result` as in `run_end`."""

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """The run ended; `result` is what result.json holds."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: JSON."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""


def overriding(callbacks: Sequence[Callback], hook: str) -> list[Any]:
    """The bound hooks of those callbacks that override it, in order."""
    return [getattr(one, hook) for one in callbacks if getattr(type(one), hook) is not getattr(Callback, hook)]
