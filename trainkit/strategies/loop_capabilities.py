"""What a loop of the user's own may ask of strategies and executors: optional protocols, as in `capabilities`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from trainkit.objectives.base import Access
from trainkit.strategies.base import Batch, LoopCall, PlanContext, StepOutcome, Strategy, Ticket
from trainkit.strategies.capabilities import refused_access


@runtime_checkable
class LimitsLoops(Protocol):
    """A strategy that cannot serve every call of a loop of the user's own."""

    def refused_calls(self, context: PlanContext) -> Mapping[LoopCall, str]:
        """Return the calls that it refuses, each with the reason and what to choose instead; pure."""


def refused_calls(strategy: Strategy, context: PlanContext) -> Mapping[LoopCall, str]:
    """Return the calls that a strategy refuses, each with the reason; a loss of the loop runs the model itself."""
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
        """Return the mean gradients of the step over all ranks, this rank's parts of them, by canonical name."""

    def update(self) -> StepOutcome:
        """Update the parameters by them; collective."""
