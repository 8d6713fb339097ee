"""What objectives, and loops of the user's own, may ask of strategies: optional protocols, as in `capabilities`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from trainkit.errors import Problem
from trainkit.objectives.base import Access, needs_of
from trainkit.strategies.base import Batch, LoopCall, PlanContext, StepOutcome, Strategy, Ticket


@runtime_checkable
class LimitsAccess(Protocol):
    """A strategy that cannot give an objective all of the model."""

    def withheld(self, context: PlanContext) -> Mapping[Access, str]:
        """Return what an objective cannot have, each with the reason and what to choose instead; pure."""


class RefusedAccess(NamedTuple):
    """What a strategy cannot give of the model."""

    access: Access
    reason: str
    """Why, and what to choose instead."""

    @property
    def rule(self) -> str:
        """The rule of a problem."""
        return f"{self.access.value}, and {self.reason}"


def refused_access(strategy: Strategy, context: PlanContext, needs: Collection[Access]) -> RefusedAccess | None:
    """Return the first of these needs that a strategy cannot serve; None where it serves all."""
    reasons = strategy.withheld(context) if isinstance(strategy, LimitsAccess) else {}
    return next((RefusedAccess(one, reasons[one]) for one in Access if one in needs and one in reasons), None)


def access_problems(strategy: Strategy, context: PlanContext) -> list[Problem]:
    """Return the problem of an objective that needs of the model what a strategy cannot give it."""
    objective = context.objective
    found = refused_access(strategy, context, () if objective is None else needs_of(objective))
    return [] if found is None else [Problem(key="objective", value=type(objective).__name__, rule=found.rule)]


@runtime_checkable
class LimitsLoops(Protocol):
    """A strategy that cannot serve every call of a loop of the user's own."""

    def refused_calls(self, context: PlanContext) -> Mapping[LoopCall, str]:
        """Return the calls that it refuses, each with the reason and what to choose instead; pure."""


def refused_calls(strategy: Strategy, context: PlanContext) -> Mapping[LoopCall, str]:
    """Return the calls that a strategy refuses, each with the reason; a loss of the loop runs the model itself."""
    found = dict(strategy.refused_calls(context)) if isinstance(strategy, LimitsLoops) else {}
    if (refused := refused_access(strategy, context, [Access.calls])) is not None:
        found.setdefault(LoopCall.own_loss, refused.reason)
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
