"""Common code of strategies whose ranks hold parts of the parameters, their gradients and the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from trainkit.errors import Problem, TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import hash64
from trainkit.objectives.base import Access, Collective
from trainkit.strategies.base import Batch, StateDict, StepContext
from trainkit.strategies.collectives import all_gather_object
from trainkit.strategies.core.replica_check import bits_hash
from trainkit.strategies.core.sparse import sparse_problems
from trainkit.strategies.core.step import ShardStep, added, cloned_batch, total_weight, weight_on
from trainkit.strategies.core.synchronous import SynchronousExecutor
from trainkit.strategies.mesh.state import (
    ShardedReplica,
    restore_pieces,
    sharded_pieces,
)
from trainkit.strategies.mesh.sums import Pass, passes_of
from trainkit.strategies.tensor_shards import ShardedState, gather_full
from trainkit.strategies.tensors.layouts import FlatBuffer


def dummy_batch(batch: Batch | None, device: torch.device, all_ranks: Collective) -> Batch:
    """Broadcast rank 0's batch to every rank that has none; collective over all ranks.

    Args:
        batch: the batch of this rank, which it keeps; None if it has none. Rank 0 always has one.
        device: the device for collectives.
        all_ranks: all ranks.

    Raises:
        TrainingError: the batch holds more than tensors, numbers and text in lists, tuples and dicts.
    """
    sends = all_ranks.rank == 0
    leaves, spec = tree_flatten(batch if sends else None)
    description = [treespec_dumps(spec), [_described(leaf) for leaf in leaves]] if sends else []
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
        f"a batch holds a {type(leaf).__name__}, which cannot be sent to a rank that has no shard in this step. "
        f"Choose "
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

    Gradients are summed over the ranks of `shard` during backward, and tensors that are whole on every rank (updated
    buffers, the counted weight) at the end; the reducer sums both over the copies. A rank with fewer shards than others
    repeats one, with weight 0.

    Args:
        group: the ranks of `shard`; None: this one alone.
        has_copies: whether the reducer sums over several copies.
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
        has_copies: bool = False,
    ) -> None:
        super().__init__(replica, ticket, batches, training)
        self._group, self._has_copies = group, has_copies
        self._counts = True
        self._now: Pass

    def run(self) -> Sequence[Tensor | None]:
        """Return this rank's gradient shards, updated buffers and counted weight, over all shards; collective."""
        replica, reducer = self.replica, self.replica.reducer
        passes = list(
            passes_of(
                self.training.plan.num_shards(self.ticket.step),
                rank=replica.data_ranks.rank,
                num_ranks=replica.num_ranks,
                lanes=replica.lanes,
            )
        )
        again = self._again(repeats=len(passes) > len(self.batches))
        packing = replica.packing or self.agree_on_grad_layout()
        if replica.buffers.names:
            replica.buffers.begin_step()
        reducer.begin(packing, num_shards=passes[0].num_shards)
        batches, left = dict(zip(self.ticket.shards, self.batches, strict=True)), iter(self.ticket.shards)
        weights: list[Tensor | float] = []
        for self._now in passes:
            replica.expect(self._now)
            shard = next(left, None) if replica.lanes is None else self._now.shard
            if shard is None:
                self._repeat(again)
            else:
                batch = batches[shard]
                weights.append(self._shard(shard, batch if replica.lanes is None else cloned_batch(batch)))
            if self._now.ends_lane and replica.lanes is not None:
                self._add_lane(self._now.lanes[replica.data_ranks.rank], weights)
                weights = []
        if replica.lanes is None and weights:
            self.weight = total_weight(weights)
        self._enter("reduce")
        grads = replica.take_grads()
        if replica.lanes is not None:
            return [*grads, *(reducer.finish() if packing.shapes else ())]
        if self._has_copies:
            found = [grad is not None or reducer.has_taken(place) for place, grad in enumerate(grads)]
            replica.agree_on_used(found)
            self._refuse_late(found)
        reducer.add(0, [*grads, *self._sum_whole(packing)])
        sums = reducer.finish()
        if not self._has_copies:
            return sums
        parts = zip(replica.params.values(), replica.used, sums, strict=False)
        # offloaded parts are in the memory of the host
        own = [total.to(param.device) if used and total is not None else None for param, used, total in parts]
        return [*own, *sums[len(own) :]]

    def agree_on_grad_layout(self) -> FlatBuffer:
        """Find which buffers are updated, and agree on it; collective, once."""
        replica, buffers = self.replica, self.replica.buffers
        self._provide_stand_in()
        if buffers.names:
            batch = self.batches[0] if self.batches else replica.stand_in
            with torch.no_grad(), buffers.watch() as changed:
                self._forward(0, cloned_batch(batch))
            rows = replica.data_ranks.gather(torch.tensor(changed))
            buffers.settle(torch.stack(rows).amax(0).tolist())
        grads = [param.shape for param in replica.params.values()] if replica.lanes is None else []
        shapes = [*grads, *buffers.shapes(), *[torch.Size([1])] * self.divisor.counted]
        packing = FlatBuffer(shapes, replica.precision.master_dtype, replica.device, num_grads=len(grads))
        replica.set_packing(packing)
        return packing

    def _again(self, *, repeats: bool) -> Batch:
        """Return the batch to repeat if other ranks have more shards, or None. Collective."""
        self._provide_stand_in()
        if not repeats:
            return None
        own = self.batches[-1] if self.batches else self.replica.stand_in
        return cloned_batch(own)  # a model may write into its inputs

    def _provide_stand_in(self) -> None:
        """Store a batch for later steps, if some step will have fewer shards than ranks. Collective."""
        plan, replica, step = self.training.plan, self.replica, self.ticket.step
        num_shards, ranks = plan.num_shards(step), replica.num_ranks
        if replica.stand_in is None and plan.num_shards(plan.steps_per_epoch - 1) < ranks:  # some step will need it
            own, all_ranks = self.batches[0] if self.batches else None, replica.all_ranks
            has_own = num_shards >= ranks
            replica.set_stand_in(cloned_batch(own) if has_own else dummy_batch(own, replica.device, all_ranks))

    def _repeat(self, batch: Batch) -> None:
        """Take part in the collectives of a shard, with weight 0."""
        seen, terms, self._counts = self.loss_sum, dict(self.terms), False
        self._shard(self.ticket.shards[-1] if self.ticket.shards else 0, batch)
        self.loss_sum, self.terms, self._counts = seen, terms, True

    def _shard_fraction(self, shard: int) -> float:
        return super()._shard_fraction(shard) if self._counts else 0.0

    def _seed(self, total: Tensor) -> Tensor:
        return super()._seed(total) if self._counts else torch.zeros_like(total, requires_grad=False)

    def _is_last(self, shard: int) -> bool:  # noqa: ARG002 - it may be repeated
        return self._now.ends

    def _add_lane(self, lane: int | None, weights: Sequence[Tensor | float]) -> None:
        """Give the reducer the tensors of a lane that every rank holds whole; None: this rank has only repeated one."""
        whole = self._take_whole(total_weight(weights) if weights else 0.0)
        if lane is not None:
            self.weight = added(self.weight, total_weight(weights))
            self.replica.reducer.add(lane, whole)

    def _take_whole(self, weight: Tensor | float) -> list[Tensor | None]:
        replica = self.replica
        held: list[Tensor | None] = list(replica.buffers.take()) if replica.buffers.names else []
        if self.divisor.counted:
            held.append(weight_on(weight, replica.precision.master_dtype, replica.device))
        return held

    def _sum_whole(self, packing: FlatBuffer) -> list[Tensor]:
        """Sum the tensors that every rank holds whole over the ranks of `shard`."""
        if not (held := self._take_whole(self.weight)):
            return []
        whole = FlatBuffer(packing.shapes[packing.num_grads :], packing.dtype, packing.device)
        flat = whole.pack(held)
        dist.all_reduce(flat, group=self._group)
        return whole.views(flat)


def unsharded_model_problems(model: nn.Module) -> list[Problem]:
    """Return problems of parameters that cannot be sharded, and gradients that cannot be summed in parts."""
    found = sparse_problems(model, "which are not summed in parts")
    scripted = (name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    if (name := next(scripted, None)) is not None:
        rule = f"{name} is a module of torch.jit, whose parameters cannot be sharded. Give the class it was made of."
        found.append(Problem(key="model", rule=rule))
    for name, param in model.named_parameters():
        if not param.dim():
            rule = f"{name} has no dims, and cannot be sharded. Give it the shape (1,)."
            found.append(Problem(key="model", rule=rule))
        elif not param.numel():
            rule = f"{name} has no elements, and cannot be sharded. Leave it out, or use strategy=mirrored."
            found.append(Problem(key="model", rule=rule))
    return found


def withheld_where_sharded(name: str) -> dict[Access, str]:
    """Return the access that an objective cannot have to a model whose parameters are unsharded only in its forward
    pass.

    Args:
        name: the strategy, for messages.
    """
    choose = "Use strategy=mirrored, whose replicas are unsharded"
    return {
        Access.methods: f"{name} gathers parameters for forward only. {choose}, or let forward call them.",
        Access.parameters: f"each rank of {name} holds a part of them. {choose}.",
        Access.derivatives: f"{name} reshards parameters after the first backward pass. {choose}.",
    }


def drifted_part(replica: ShardedReplica) -> str | None:
    """Return the first parameter whose same part has different bits on two ranks; collective."""
    names = list(replica.parts)
    rows = [
        [int(bits_hash(part)), hash64(*replica.cuts[name].offset) >> 1]  # a signed number holds 63 bits
        for name, part in replica.parts.items()
    ]
    gathered = torch.stack(replica.all_ranks.gather(torch.tensor(rows).unsqueeze(0))).squeeze(1).tolist()
    for at, name in enumerate(names):
        firsts: dict[int, int] = {}
        for rank, row in enumerate(gathered):
            bits, part = row[at]
            first = firsts.setdefault(part, rank)
            if gathered[first][at][0] != bits:
                return (
                    f"the parameter {name} differs on rank {rank} from rank {first}, which holds the same part of it."
                )
    return None


class ShardedExecutor(SynchronousExecutor[ShardedReplica]):
    """A rank with parts of the parameters, or unsharded ones if the replica has no slices."""

    def sharded_state_dict(self) -> ShardedState:
        """Return the shards of this rank; tensors that are whole on all ranks, on rank 0."""
        return sharded_pieces(self._replica) if self._replica.cuts else super().sharded_state_dict()

    def state_dict(self) -> StateDict:
        """Return the whole state, gathered on every rank; collective."""
        if self._replica.cuts:
            return gather_full(self.sharded_state_dict(), self._replica.all_ranks)
        return super().state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Restore this rank's parts of the tensors of a checkpoint of any strategy."""
        if self._replica.cuts:
            restore_pieces(self._replica, state)
        else:
            super().load_state_dict(state)

    def recover(self, step: int) -> bool:
        """Return False: other ranks hold parts, and may have begun an update."""
        del step
        return False

    def check_replicas(self) -> str | None:
        """Return a parameter whose same part has different bits on two ranks; collective."""
        return drifted_part(self._replica) if self._replica.cuts else None
