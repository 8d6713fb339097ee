"""Fully sharded data parallelism: every rank holds a part of each parameter, and gathers it to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from torch import nn

from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import Problem
from trainkit.fields import at_least, at_most, placement, speed
from trainkit.strategies.base import Facts, PlanContext
from trainkit.strategies.groups.process_group import GroupOfOne, ProcessGroupOptions
from trainkit.strategies.mesh.sharding import Axes
from trainkit.strategies.mesh.step import unsharded_model_problems
from trainkit.strategies.mesh.strategy import Layout, MeshStrategy, Wrap, wrap_problems
from trainkit.strategies.scaling import Scaled


@dataclass(frozen=True, kw_only=True)
class Fsdp(GroupOfOne, ProcessGroupOptions, MeshStrategy):
    """Train a model that does not fit on one device: parameters, gradients and optimizer state are sharded over the
    ranks.

    Each rank computes its own shards of the batch, as in `mirrored`. The parameters of a block are gathered before it
    computes and resharded after; its gradients are reduce-scattered (FSDP2).

    Example:
        >>> [task.device for task in Fsdp(replicas=2).tasks(PlanContext())]
        ['cpu', 'cpu']

    Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, stage 3); Zhao et al. 2023, arXiv:2304.11277.
    """

    alone_as_one_device: ClassVar[bool] = True
    facts: ClassVar[Facts] = replace(MeshStrategy.facts, place=2, supports_meta_init=True, converts=True)

    replicate: Annotated[int, at_least(1), at_most(MOST_PROCESSES), placement] = 1
    """Groups of ranks, each with a whole model sharded over its ranks; above 1 (hybrid) gradients are summed over
    groups.
    """
    wrap: Annotated[Wrap, placement] = "blocks"
    """Unit of the gathers: `blocks` as a map names them, or modules of some classes, `[Block]`."""
    reshard_after_forward: Annotated[bool, speed] = True
    """Whether all blocks but the last reshard after forward; false keeps the whole model unsharded until backward."""
    sync: Annotated[Literal["each", "last"], speed] = "each"
    """Whether gradients are summed after each shard, or only after the last one of a rank, with unsharded gradients
    until then.
    """
    offload: Annotated[bool, placement] = False
    """Whether parts and their optimizer are kept in the memory of the host, and copied to the GPU for gathering."""

    def layout(self, num_ranks: int) -> Layout:
        """Return the layout: groups of ranks, each with a whole model."""
        return Layout(
            axes=Axes(replicate=self.replicate, shard=max(num_ranks // self.replicate, 1)),
            wrap=self.wrap,
            reshard_after_forward=self.reshard_after_forward,
            sync=self.sync,
            offload=self.offload,
            gathers_alone=self.is_grouped,
        )

    def layout_problems(self, context: PlanContext) -> list[Problem]:
        """Return problems: uneven groups, groups of one rank, and an empty list of classes."""
        count, groups = self.num_replicas(context), self.replicate
        if count % groups:
            rule = f"must divide the {count} replicas."
            return [Problem(key="strategy.replicate", value=groups, rule=rule)]
        if groups > 1 and count == groups:
            rule = f"leaves each of the {count} replicas a whole model. Use at most {count // 2}, or strategy=mirrored."
            return [Problem(key="strategy.replicate", value=groups, rule=rule)]
        return wrap_problems(self.wrap)

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return the problems of sharded parameters even for one rank: a run may continue on more."""
        problems = super().validate_model(model, context)
        return problems if self.layout_in(context).gathers else [*unsharded_model_problems(model), *problems]

    @classmethod
    def spread_over(cls, count: int) -> dict[str, int]:
        """Return the number of replicas, each on a device."""
        return cls.sharded_over(count)

    @classmethod
    def sharded_over(cls, count: int) -> dict[str, int]:
        """Return the override for `count` replicas that each hold a part of the model."""
        return {"replicas": count}

    def scaled(self, replicas: int, context: PlanContext) -> Scaled:  # noqa: ARG002 - the same on any device
        """Return the key for `replicas` ranks."""
        return Scaled(keys={"replicas": replicas})
