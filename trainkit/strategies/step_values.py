"""The values of a step: what it is computed from, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.objectives.base import Objective


class Status(Enum):
    """What became of a try at a step."""

    applied = "applied"
    """The optimizer stepped."""
    retry = "retry"
    """Gradients overflowed: nothing changed but the loss scale, and the same step comes again."""
    handed_out = "handed out"
    """It is under way; nothing changed."""
    skipped = "skipped"
    """The loss or gradient was not finite and `numerics.on_nonfinite` leaves the step out: only its number is used."""


@dataclass(frozen=True, slots=True)
class UpdateParams:
    """What an update needs to know, where it happens."""

    lr_factor: float
    """The learning rate of this update over the base rate; every parameter group is multiplied alike."""
    max_norm: float | None
    """Clip the gradient to this global norm."""


UpdateRule = Callable[[int], UpdateParams]
"""Update of a version: the number of updates the parameters have seen."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An update that was not made because its loss or gradient was not finite."""

    step: int
    """Updates before it, those that were left out among them."""
    tickets: tuple[Ticket, ...]
    """The shards it would have been made of."""

    @classmethod
    def whole(cls, plan: BatchPlan, step: int) -> LeftOut:
        """Return the step with all its shards."""
        return cls(step, (Ticket(step, tuple(range(plan.num_shards(step)))),))


@dataclass(slots=True)
class StepOutcome:
    """What a try at a step gave. Tensors stay on the device: reading one waits for it."""

    step: int
    status: Status
    loss_sum: Tensor | None
    """() this rank's sum over its targets, None where it had no shard."""
    weight: Tensor | float
    """This rank's total weight of targets: () tensor where it was counted, else a float."""
    grad_norm: Tensor | None = None
    """() global norm before clipping, where it was computed."""
    left_out: tuple[LeftOut, ...] = ()
    """The steps that all ranks now know to be left out: this one, or those since the replicas last met."""
    tickets: tuple[Ticket, ...] = ()
    """The shards this update is made of, where they are not those of `step`."""


@dataclass(frozen=True, kw_only=True)
class LossWeighting:
    """How much a sample weighs in the loss; from the objective and one sample, so that every rank agrees."""

    per_sample: float | None
    """Its weight where that is the same for all and known beforehand; None: it is counted."""
    planned: float
    """About its weight: where weights are counted, a power of two near the planned total divides the loss."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What every step of a training needs; the same on every rank."""

    plan: BatchPlan
    """How steps are cut into shards."""
    objective: Objective
    """Scores a shard."""
    weighing: LossWeighting
    """How the loss is normalised."""
    rule: UpdateRule
    """The update of a version."""
