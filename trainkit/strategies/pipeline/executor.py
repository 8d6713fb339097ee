"""The running half of a pipeline: a rank with its stages."""

from __future__ import annotations

from trainkit.strategies.base import StateDict, StepContext
from trainkit.strategies.core.replica import replica_state, restore_replica
from trainkit.strategies.core.synchronous import SynchronousExecutor
from trainkit.strategies.groups.ranks import RankGroup
from trainkit.strategies.pipeline.groups import drifted
from trainkit.strategies.pipeline.replica import PipelineReplica
from trainkit.strategies.pipeline.work import PipelineWork
from trainkit.strategies.tensors.lazy_state import name_in, select
from trainkit.strategies.tensors.sharded import ShardedState, TensorShard, gather_full

__all__ = ["PipelineExecutor"]


class PipelineExecutor(SynchronousExecutor[PipelineReplica]):
    """A rank that sends the shards of its replica through its stages.

    It begins with what the first replica has, and with tied weights from their first stage; collective.

    Args:
        replica: the stages of this rank.
        training: plan, objective and update rule.
        ranks: the other ranks.
    """

    def __init__(self, replica: PipelineReplica, training: StepContext, ranks: RankGroup) -> None:
        super().__init__(replica, training, ranks=ranks, make_step=PipelineWork)
        here = {name: tensor for name, tensor in replica.model.named_parameters() if not tensor.is_meta}
        buffers = {name: tensor for name, tensor in replica.model.named_buffers() if not tensor.is_meta}
        replica.groups.align({**here, **buffers}, replica.holders)
        if replica.masters_apart:
            replica.groups.align(replica.masters, replica.holders)

    def sharded_state_dict(self) -> ShardedState:
        """Return this rank's tensors; of the first replica, and those of several stages on the first of them."""
        replica = self._replica
        if replica.rank:
            return {}
        found = {key: tensor for key, tensor in replica_state(replica).items() if not tensor.is_meta}
        return {key: (TensorShard.whole(tensor),) for key, tensor in found.items() if replica.is_home(name_in(key))}

    def state_dict(self) -> StateDict:
        """Return parameters in the masters' dtype, buffers, optimizer slots of all stages; collective."""
        return gather_full(self.sharded_state_dict(), self._replica.all_ranks)

    def load_state_dict(self, state: StateDict) -> None:
        """Restore this rank's tensors of a checkpoint of any strategy."""
        params = self._replica.model.named_parameters()
        foreign = {name for name, param in params if param.is_meta and param.requires_grad}
        restore_replica(self._replica, select(state, lambda key: name_in(key) not in foreign))

    def recover(self, step: int) -> bool:
        """Refuse: other ranks hold stages, and may have begun an update."""
        del step
        return False

    def check_replicas(self) -> str | None:
        """Return the first parameter whose bits are not the same on all ranks that hold it; collective."""
        replica = self._replica
        params = {name: param for name, param in replica.model.named_parameters() if not param.is_meta}
        return drifted(params, replica.holders, replica.all_ranks, num_ranks=replica.num_stage_ranks)
