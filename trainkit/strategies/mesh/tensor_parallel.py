"""Tensor parallelism: the layers of a plan are sharded over the ranks of a replica, which compute together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from torch import nn

from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import Problem
from trainkit.fields import at_least, at_most, placement
from trainkit.strategies.base import Facts, PlanContext
from trainkit.strategies.groups.process_group import ProcessGroupOptions
from trainkit.strategies.mesh.sharding import Axes
from trainkit.strategies.mesh.strategy import Layout, MeshStrategy, TensorPlan, plan_text


@dataclass(frozen=True, kw_only=True)
class TensorParallel(ProcessGroupOptions, MeshStrategy):
    """Train replicas whose layers are each sharded over `degree` ranks.

    Example:
        >>> len(TensorParallel(degree=2, replicas=2).tasks(PlanContext()))
        4
    """

    alone_as_one_device: ClassVar[bool] = True
    facts: ClassVar[Facts] = replace(MeshStrategy.facts, place=3)

    degree: Annotated[int, placement, at_least(1), at_most(MOST_PROCESSES)] = 1
    """Number of ranks over which each layer of the plan is sharded; 1 shards nothing."""
    plan: Annotated[TensorPlan, placement] = "auto"
    """Module names, suffixes of names or globs, each with a style (`colwise`, `rowwise` ...); `auto`: the model's own
    plan.
    """

    @property
    def ranks_a_replica(self) -> int:
        """The number of ranks over which each layer is sharded."""
        return max(self.degree, 1)

    def layout(self, num_ranks: int) -> Layout:
        """Return the layout: copies of a model whose layers are cut."""
        axes = Axes(replicate=max(num_ranks // self.ranks_a_replica, 1), tensor=self.ranks_a_replica)
        return Layout(axes=axes, plan=self.plan, tensor_key="degree")

    def layout_problems(self, context: PlanContext) -> list[Problem]:  # noqa: ARG002 - in any
        """Return problems: a degree that is none, and a plan that has no effect."""
        if self.degree < 1:
            return [Problem(key="strategy.degree", value=self.degree, rule="must be 1 or more.")]
        if self.degree > 1 or self.plan == "auto":
            return []
        rule = "has no effect with strategy.degree=1, which shards nothing. Use a degree of 2 or more."
        return [Problem(key="strategy.plan", value=plan_text(self.plan), rule=rule)]

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:
        """Return one replica, with a part of each layer on each device."""
        return {"replicas": 1, "degree": count}

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:
        """Return the note of how layers are sharded."""
        if self.degree == 1:
            return ("strategy.degree=1 shards no layer: every rank has a whole replica, as in strategy=mirrored.",)
        return super().notes(model, context)
