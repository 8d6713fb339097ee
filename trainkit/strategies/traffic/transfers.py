"""The transfers of a step, and the protocol by which a strategy describes them.

Bytes are those of the tensors. Headers of TCP and of the transport, and the small sums of losses and counters, come on
top: below 5 % of transfers of 100 kB and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.numerics.batch import shards_of_rank
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import PlanContext, Strategy
from trainkit.strategies.traffic.dry_run import DryRun
from trainkit.strategies.traffic.flows import Flows


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The bytes of a step that serve one purpose."""

    what: str
    """Kind of data: gradients, parameters, activations or variables."""
    how: str
    """The operation, such as `all-reduce` or `pull`."""
    flows: Flows
    """Bytes of a step by sender and receiver."""
    messages: int = 1
    """Number of messages of a rank in sequence in a step; each costs the latency of a link."""
    overlaps: bool = False
    """Whether ranks compute during the transfer."""
    by: Literal["network", "memory"] = "network"
    """Path: the links between devices, or memory of a host that all ranks map."""
    first_step: int = 0
    """The first step with this transfer."""
    end_step: int | None = None
    """The first later step without it; None: it lasts to the end."""
    every: int = 1
    """Interval in steps between two transfers, counted from `first_step`; the last step of each interval has it."""
    note: str | None = None
    """Note about the limits of its figures."""

    @property
    def num_bytes(self) -> float:
        """Bytes that all ranks together send in a step with this transfer."""
        return sum(self.flows.values())

    def lasts_at(self, step: int) -> bool:
        """Return whether a step lies between `first_step` and `end_step`."""
        return self.first_step <= step and (self.end_step is None or step < self.end_step)

    def occurs_at(self, step: int) -> bool:
        """Return whether a step has this transfer.

        Example:
            >>> average = Transfer(what="parameters", how="all-reduce", flows={}, first_step=2, every=4)
            >>> [step for step in range(12) if average.occurs_at(step)]
            [5, 9]
        """
        return self.lasts_at(step) and (step - self.first_step + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class StepCut:
    """The division of a full step, as far as it determines the bytes of transfers."""

    num_shards: int
    """Number of shards of the step, over all replicas."""
    num_replicas: int = 1
    """Number of replicas that share the shards."""
    dry_run: DryRun | None = field(default=None, compare=False)
    """The dry run of the largest shard; None: facts that need it are unknown."""

    def shards_of(self, replica: int) -> int:
        """Return the shards of a replica: the replicas take them in turn.

        Example:
            >>> [StepCut(num_shards=5, num_replicas=2).shards_of(replica) for replica in (0, 1)]
            [3, 2]
        """
        return len(shards_of_rank(self.num_shards, rank=replica, num_ranks=self.num_replicas, lanes=None))

    @property
    def shards_a_replica(self) -> int:
        """Number of shards of the replica with the most.

        Example:
            >>> StepCut(num_shards=5, num_replicas=2).shards_a_replica
            3
        """
        return -(-self.num_shards // self.num_replicas)


@runtime_checkable
class DescribesTraffic(Protocol):
    """A strategy whose tasks exchange tensors in a step."""

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
        """Return the transfers of a step; None if they are not known before the run; pure."""


def traffic_of(strategy: Strategy, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:
    """Return the transfers of a step; none for a strategy of one process, None if they are not known."""
    if len(strategy.tasks(context)) == 1:
        return ()
    return strategy.traffic(model, context, cut) if isinstance(strategy, DescribesTraffic) else None


@dataclass(frozen=True, kw_only=True)
class WorkShare:
    """The share of a replica's work that each of its ranks computes."""

    operations: float = 1.0
    """Fraction of the operations of a replica that a rank runs (< 1 if it has only some layers); waiting counts as
    operations.
    """
    size: float = 1.0
    """Fraction of each operation that a rank computes (< 1 if layers are sharded); kernel launches do not decrease."""


@runtime_checkable
class DividesWork(Protocol):
    """A strategy under which several ranks share the operations of a replica."""

    def work_share(self, cut: StepCut) -> WorkShare:
        """Return the share of a rank; pure."""


def work_share(strategy: Strategy, cut: StepCut) -> WorkShare:
    """Return the share of a replica's work that each of its ranks computes; everything if one rank computes a
    replica.
    """
    return strategy.work_share(cut) if isinstance(strategy, DividesWork) else WorkShare()


@runtime_checkable
class WaitsForStages(Protocol):
    """A strategy whose devices wait for results of each other within a step."""

    def bubble(self, cut: StepCut) -> float:
        """Return the share of a step that each device waits, if all stages take equally long; pure."""


def bubble_of(strategy: Strategy, cut: StepCut) -> float | None:
    """Return the ideal bubble of a strategy with stages; None for others."""
    return strategy.bubble(cut) if isinstance(strategy, WaitsForStages) else None


def ranks_of(strategy: Strategy, context: PlanContext) -> Sequence[int]:
    """Return the ranks that compute, without an evaluator."""
    return [task.rank for task in strategy.tasks(context) if not task.is_evaluator]


def ranks_a_host(context: PlanContext, num_ranks: int) -> int:
    """Return the ranks of each host, which are neighbours."""
    return num_ranks if context.launch is None else max(num_ranks // context.launch.num_hosts, 1)


def precision_of(context: PlanContext) -> Precision:
    """Return the number formats of a plan."""
    return Precision(value=context.precision)  # type: ignore[arg-type]


def exchanged_elements(model: nn.Module) -> int:
    """Return the elements of the vector that replicas sum: gradients, and buffers that forward passes update.

    Only buffers of batch normalisation count: torch has no other layer that updates a buffer.

    Example:
        >>> exchanged_elements(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        22
    """
    grads = sum(param.numel() for param in model.parameters() if param.requires_grad)
    normed = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return grads + sum(buffer.numel() for module in normed for buffer in module.buffers(recurse=False))
