"""A step on ranks that hold parts of the parameters: all of them compute equally many shards, together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from trainkit.errors import TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Batch, StepContext
from trainkit.strategies.core.sharded.replica import ShardedReplica
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.groups.process_group import all_gather_object
from trainkit.strategies.tensors.layouts import FlatBuffer


def dummy_batch(batch: Any, device: torch.device, all_ranks: Collective) -> Any:
    """Broadcast rank 0's batch to every rank that has none; collective over all ranks.

    Args:
        batch: this rank's own, which it keeps; None if it has none. Rank 0 has one.
        device: the device for collectives.
        all_ranks: all ranks.

    Raises:
        TrainingError: the batch holds more than tensors, numbers and text in lists, tuples and dicts.
    """
    sends = all_ranks.rank == 0
    leaves, spec = tree_flatten(batch if sends else None)
    description = [treespec_dumps(spec), [_described(leaf) for leaf in leaves]] if sends else None
    spec_text, described = all_gather_object(description, all_ranks)[0]
    own = leaves if sends else [None] * len(described)
    found = [_exchanged(leaf, description, device) for leaf, description in zip(own, described, strict=True)]
    return tree_unflatten(found, treespec_loads(spec_text)) if batch is None else batch


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)}
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return {"value": leaf}
    raise TrainingError(
        f"a batch holds a {type(leaf).__name__}, which cannot be told to a rank without a batch of its own. Choose "
        "batch.micro_size so that every step has a shard for each rank, or use batch.drop_last=true."
    )


def _exchanged(leaf: Any, description: dict[str, Any], device: torch.device) -> Any:
    if "value" in description:
        return description["value"]
    if leaf is None:
        leaf = torch.empty(description["shape"], dtype=getattr(torch, description["dtype"]), device=device)
    held = leaf.detach().contiguous()
    dist.broadcast(held.reshape(-1).view(torch.uint8), src=0)  # as bytes: backends lack some dtypes
    return held


class ShardedWork(ShardStep):
    """One try at a step whose forward and backward passes are collective.

    Gradients are summed over the ranks during backward; tensors that are whole on every rank (updated buffers, the
    counted weight) are summed at the end. A rank with fewer shards than others repeats one, with weight 0.
    """

    replica: ShardedReplica

    def __init__(
        self,
        replica: ShardedReplica,
        ticket: Ticket,
        batches: Sequence[Batch],
        training: StepContext,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(replica, ticket, batches, training)
        self._group = group
        self._counts = True

    def run(self) -> Sequence[Tensor | None]:
        """Return this rank's gradient shards, updated buffers and counted weight, over all shards; collective."""
        replica = self.replica
        again = self._again()
        packing = replica.packing or self.agree_on_grad_layout()
        if replica.buffers.names:
            replica.buffers.begin_step()
        turns = list(zip(self.ticket.shards, self.batches, strict=True))
        for turn, (shard, batch) in enumerate(turns, start=1):
            self._expect(is_last=turn == len(turns) and again is None)
            self.weight = self.weight + self._shard(shard, batch)
        if again is not None:
            self._expect(is_last=True)
            self._repeat(again)
        self._enter("reduce")
        return [*replica.take_grads(), *self._sum(packing)]

    def agree_on_grad_layout(self) -> FlatBuffer:
        """Find which buffers are updated, and agree on it; collective, once."""
        replica, buffers = self.replica, self.replica.buffers
        if buffers.names:
            batch = self.batches[0] if self.batches else replica.stand_in
            with torch.no_grad(), buffers.watch() as changed:
                self._forward(0, batch)
            rows = replica.data_ranks.gather(torch.tensor(changed))
            buffers.settle(torch.stack(rows).amax(0).tolist())
        shapes = buffers.shapes() + [torch.Size([1])] * self.divisor.counted
        packing = FlatBuffer(shapes, replica.precision.master_dtype, replica.device, num_grads=0)
        replica.set_packing(packing)
        return packing

    def _again(self) -> Batch:
        """Return the batch to repeat if other ranks have more shards, or None. Collective."""
        plan, replica, step = self.training.plan, self.replica, self.ticket.step
        num_shards, ranks = plan.num_shards(step), replica.num_ranks
        if replica.stand_in is None and plan.num_shards(plan.steps_per_epoch - 1) < ranks:  # some step will need it
            own, all_ranks = self.batches[0] if self.batches else None, replica.all_ranks
            replica.set_stand_in(own if num_shards >= ranks else dummy_batch(own, replica.device, all_ranks))
        if len(self.batches) == -(-num_shards // ranks):
            return None
        return self.batches[-1] if self.batches else replica.stand_in

    def _repeat(self, batch: Batch) -> None:
        """Take part in the collectives of a shard, and add nothing."""
        seen, terms, self._counts = self.loss_sum, dict(self.terms), False
        self._shard(self.ticket.shards[-1] if self.ticket.shards else 0, batch)
        self.loss_sum, self.terms, self._counts = seen, terms, True

    def _shard_fraction(self, shard: int) -> float:
        return super()._shard_fraction(shard) if self._counts else 0.0

    def _seed(self, total: Tensor) -> Tensor:
        return super()._seed(total) if self._counts else torch.zeros_like(total, requires_grad=False)

    def _expect(self, *, is_last: bool) -> None:
        self.replica.expect(is_last)

    def _sum(self, packing: FlatBuffer) -> list[Tensor]:
        """Sum the tensors that are unsharded on every rank over the ranks whose data differ."""
        replica = self.replica
        held: list[Tensor | None] = list(replica.buffers.take()) if replica.buffers.names else []
        if self.divisor.counted:
            weight = torch.as_tensor(self.weight, dtype=packing.dtype, device=replica.device)
            held.append(weight.reshape(1))
        if not held:
            return []
        flat = packing.pack(held)
        dist.all_reduce(flat, group=self._group)
        return packing.views(flat)
