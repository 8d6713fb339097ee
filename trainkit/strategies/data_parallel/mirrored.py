"""Mirrored: synchronous data parallelism on the devices of this host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext
from trainkit.strategies.data_parallel.base import DataParallel

__all__ = ["Mirrored"]


@dataclass(frozen=True, kw_only=True)
class Mirrored(DataParallel):
    """Train a copy of the model on every device of this host, in step.

    Each replica computes its shards of the global batch; gradients are summed over all (NCCL on GPUs, gloo on CPUs),
    and every replica makes the same update.

    Example:
        >>> [task.device for task in Mirrored(replicas=2).tasks(PlanContext())]
        ['cpu', 'cpu']

    Source: Goyal et al. 2017, arXiv:1706.02677, section 3; tf.distribute.MirroredStrategy.
    """

    alone_as_one_device: ClassVar[bool] = True

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return the problems of any data-parallel strategy, and that of a launch on more than one host."""
        if context.launch is not None and context.launch.num_hosts > 1:
            rule = f"is of one host, and {context.launch.kind} started {context.launch.num_hosts}. {_OTHER}"
            return [Problem(key="strategy", value="mirrored", rule=rule)]
        return super().validate(context)


_OTHER = "Use strategy=multi_worker_mirrored: the same training over hosts."
