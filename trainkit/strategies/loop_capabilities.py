"""Optional protocols of strategies and executors for a user's own loop, as in `capabilities`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from trainkit.objectives.base import Access
from trainkit.strategies.base import Batch, LoopCall, PlanContext, StepOutcome, Strategy, Ticket
from trainkit.strategies.capabilities import refused_access


@runtime_checkable
class LimitsLoops(Protocol):
    """A strategy that does not support every call of a user's own loop."""

    def refused_calls(self, context: PlanContext) -> Mapping[LoopCall, str]:
        """Return the calls that the strategy refuses, each with the reason and an alternative; pure."""


def refused_calls(strategy: Strategy, context: PlanContext) -> Mapping[LoopCall, str]:
    """Return the calls that a strategy refuses, each with the reason. A loss of the loop calls the model itself."""
    found = dict(strategy.refused_calls(context)) if isinstance(strategy, LimitsLoops) else {}
    if (refused := refused_access(strategy, context, [Access.calls])) is not None:
        found.setdefault(LoopCall.own_loss, refused[1])
    return found


@runtime_checkable
class UpdatesApart(Protocol):
    """An executor that can stop between the gradients of a step and its update."""

    def forward_backward(self, ticket: Ticket, batches: Sequence[Batch]) -> tuple[Tensor | None, Tensor | float]:
        """Compute the gradients of a step; return loss sum and weight of this rank, as in `StepOutcome`. Collective."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the mean gradients of the step over all ranks, for this rank's parts, by canonical name."""

    def update(self) -> StepOutcome:
        """Update the parameters with these gradients; collective."""
