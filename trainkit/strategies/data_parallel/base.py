"""Data parallelism: a whole copy of the model on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainkit.objectives.base import Collective
from trainkit.strategies.base import Numerics
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.groups.collective import broadcast_values
from trainkit.strategies.groups.process_group import ProcessGroupStrategy
from trainkit.strategies.model_transforms import Compiles
from trainkit.strategies.reducers import BackendReducer, DeterministicReducer, LocalReducer, Reducer

__all__ = ["DataParallel"]


@dataclass(frozen=True, kw_only=True)
class DataParallel(ProcessGroupStrategy):
    """What mirrored and multi_worker_mirrored share: everything but the machines they take.

    Each replica computes its shards of the global batch; gradients are summed over all (NCCL on GPUs, gloo on CPUs),
    and every replica makes the same update.
    """

    elastic: ClassVar[bool] = True
    compiles: ClassVar[Compiles] = "model"

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:
        """The lanes of a reproducible run, else the backend's all-reduce."""
        if numerics.reproducible:
            return DeterministicReducer(lanes=numerics.lanes, rank=collective.rank, num_ranks=collective.num_ranks)
        return LocalReducer() if collective.num_ranks == 1 else BackendReducer()

    def align(self, replica: Replica) -> None:
        """Take over rank 0's parameters and buffers: a model may draw its own where no seed reaches. Collective."""
        if replica.num_ranks > 1:
            for tensor in [*replica.model.state_dict().values(), *replica.masters.values()]:
                broadcast_values(tensor, src=0)
