"""The values of a step: its inputs and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.objectives.base import Objective


class Status(Enum):
    """The outcome of a try at a step."""

    applied = "applied"
    """The optimizer stepped."""
    retry = "retry"
    """Gradients overflowed: only the loss scale changed, and the same step is tried again."""
    handed_out = "handed out"
    """The step is in progress; nothing changed."""
    skipped = "skipped"
    """The loss or gradient was not finite and `numerics.on_nonfinite` leaves the step out: only its number is used."""


@dataclass(frozen=True, slots=True)
class UpdateParams:
    """The parameters of an update."""

    lr_factor: float
    """The learning rate of this update over the base rate, the same factor for every parameter group."""
    max_norm: float | None
    """Clip the gradient to this global norm."""


UpdateRule = Callable[[int], UpdateParams]
"""Update of a version: the number of updates the parameters have seen."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An update that was not made because its loss or gradient was not finite."""

    step: int
    """Number of updates before it, including skipped ones."""
    tickets: tuple[Ticket, ...]
    """Its shards."""

    @classmethod
    def whole(cls, plan: BatchPlan, step: int) -> LeftOut:
        """Return the step with all its shards."""
        return cls(step, (Ticket(step, tuple(range(plan.num_shards(step)))),))


@dataclass(slots=True)
class StepOutcome:
    """The result of a try at a step. Tensors stay on the device: reading one waits for it."""

    step: int
    status: Status
    loss_sum: Tensor | None
    """() this rank's sum over its targets, None if it had no shard."""
    weight: Tensor | float
    """This rank's total weight of targets: () tensor if it was counted, else a float."""
    grad_norm: Tensor | None = None
    """() global norm before clipping, if it was computed."""
    left_out: tuple[LeftOut, ...] = ()
    """The steps that all ranks know to be skipped: this one, or several since the last average."""
    tickets: tuple[Ticket, ...] = ()
    """The shards of this update, if they are not those of `step`."""
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """This rank's sums of the terms of the loss, () each, by name; empty where it had no shard."""


@dataclass(frozen=True, kw_only=True)
class LossWeighting:
    """The weight of a sample in the loss; from the objective and one sample, so that all ranks agree."""

    per_sample: float | None
    """The weight, if it is the same for all samples and known in advance; None: it is counted."""
    planned: float
    """The approximate weight: if weights are counted, a power of two near the planned total divides the loss."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The inputs of every step of a training; the same on every rank."""

    plan: BatchPlan
    """The cut of steps into shards."""
    objective: Objective
    """Scores a shard."""
    weighing: LossWeighting
    """The normalisation of the loss."""
    rule: UpdateRule
    """The update of a version."""
