"""Common code of strategies whose ranks hold parts of the parameters, their gradients and the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from trainkit.errors import Problem, TrainingError
from trainkit.numerics.batch import BatchPlan, LaneNode, LaneSums, Ticket, lane_order, sum_of_ranks
from trainkit.objectives.base import Access, Collective
from trainkit.strategies.base import Batch, StepContext
from trainkit.strategies.collectives import all_gather_object
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep, added, cloned_batch, sparse_problems, total_weight, weight_on
from trainkit.strategies.tensors.layouts import FlatBuffer


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward and backward pass in which all data ranks take part."""

    shard: int | None
    """The shard of this rank; None: it repeats one, with weight 0."""
    ends: bool
    """Whether it is the last pass of the step."""
    ends_lane: bool
    """Whether it is the last one over the lanes of `lanes`; without lanes, `ends`."""
    lanes: tuple[int | None, ...]
    """The lane of each data rank, None for a rank without one; without lanes, its first shard."""
    num_shards: int
    """Number of shards of the step."""


def passes_of(num_shards: int, *, rank: int, num_ranks: int, lanes: int | None) -> Iterator[Pass]:
    """Yield the passes of a data rank in a step: as many as the other ranks have.

    With lanes, a round of passes is over one lane of each rank, and its longest lane decides how many passes it has.

    Example:
        >>> [turn.shard for turn in passes_of(5, rank=1, num_ranks=2, lanes=None)]
        [1, 3, None]
        >>> [(turn.shard, turn.lanes) for turn in passes_of(5, rank=1, num_ranks=2, lanes=4)]
        [(1, (0, 1)), (None, (0, 1)), (3, (2, 3))]
    """
    ranks, work = range(num_ranks), list[Sequence[range]]()
    if lanes is None:
        work.append([range(start, num_shards, num_ranks) for start in ranks])
    else:
        owned = [[lane for lane in lane_order(lanes) if lane % num_ranks == i and lane < num_shards] for i in ranks]
        for round_ in zip_longest(*owned, fillvalue=num_shards):
            work.append([range(lane, num_shards, lanes) for lane in round_])
    for number, shards in enumerate(work, start=1):
        longest = max(map(len, shards))
        for turn in range(longest):
            mine, is_last = shards[rank], turn == longest - 1
            yield Pass(
                shard=mine[turn] if turn < len(mine) else None,
                ends=is_last and number == len(work),
                ends_lane=is_last,
                lanes=tuple(numbers[0] if numbers else None for numbers in shards),
                num_shards=num_shards,
            )


class LaneSummation:
    """Sums the gradients of all units in the order of the lanes (see `numerics.summation`), over `replicate` and
    `shard`.

    Args:
        lanes: number of lanes.
        num_ranks: number of data ranks, which are all ranks of the run.
        copies: the ranks with the same parts; None: this one alone.
    """

    def __init__(self, *, lanes: int, num_ranks: int, copies: dist.ProcessGroup | None) -> None:
        self.lanes, self.num_ranks, self.copies = lanes, num_ranks, copies
        self.current: Pass
        """The pass that computes."""

    def begin(self, current: Pass) -> None:
        """Begin a pass."""
        self.current = current

    def attach(self, units: Sequence[Any], *, is_alone: bool) -> None:
        """Sum the gradients of units; `is_alone`: `shard` has one rank, where FSDP calls no reduce-scatter."""
        for unit in units:
            of_unit = LaneScatter(self)
            unit.set_custom_reduce_scatter(of_unit)
            if is_alone:
                unit.set_all_reduce_hook(lambda flat, of_unit=of_unit: of_unit(flat, flat.clone()))


class LaneScatter:
    """The reduce-scatter of a unit: pieces of gradients travel unsummed, and are added where they arrive.

    Each rank gets a slice of its part of the gradient from all data ranks, adds up those of each rank in the order of
    its lanes, and in the last pass of a step all in the order of the tree; the copies then gather the slices. Until
    then the output is zero, to which FSDP adds: `0 + sum`, so that the sign of zero does not depend on the ranks.
    """

    def __init__(self, summation: LaneSummation) -> None:
        self._summation = summation
        self._lane: Tensor | None = None
        """(data ranks, slice) the sums over the shards of the lanes that are being computed."""
        self._sums: list[LaneSums[Tensor]] = []

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *_: object, **_more: object) -> None:
        """Exchange the pieces of a pass; collective.

        Args:
            output_tensor: (numel,) this rank's part of the sum.
            input_tensor: (ranks of shard * numel,) the gradient of the pass.
        """
        summation, numel = self._summation, output_tensor.numel()
        current, lanes, num_ranks = summation.current, summation.lanes, summation.num_ranks
        copies = num_ranks * numel // input_tensor.numel()
        size = -(-numel // copies)
        pieces = nn.functional.pad(input_tensor.view(-1, numel), (0, size * copies - numel))
        sent = pieces.view(-1, copies, size).transpose(0, 1).reshape(num_ranks, size)
        received = torch.empty_like(sent) if num_ranks > 1 else sent
        if num_ranks > 1:
            dist.all_to_all_single(received, sent)
        self._lane = received if self._lane is None else self._lane.add_(received)
        output_tensor.zero_()
        if not current.ends_lane:
            return
        of_lane, self._lane = self._lane, None
        self._sums = self._sums or [
            LaneSums(Tensor.add_, num_lanes=lanes, num_shards=current.num_shards) for _ in range(num_ranks)
        ]
        for sums, lane, part in zip(self._sums, current.lanes, of_lane, strict=True):
            if lane is not None:
                sums.push(LaneNode(lane, lanes), part)
        if not current.ends:
            return
        of_ranks, self._sums = [sums.take() for sums in self._sums], []
        total = sum_of_ranks(Tensor.add_, of_ranks, num_lanes=lanes, num_shards=current.num_shards)
        if copies > 1:
            slices = total.new_empty(copies, size)
            dist.all_gather([*slices.unbind()], total, group=summation.copies)
            total = slices.view(-1)
        output_tensor.add_(total[:numel])


def provide_stand_in(replica: Replica, plan: BatchPlan, step: int, batches: Sequence[Batch]) -> None:
    """Give a replica a batch for later steps, if some step will have fewer shards than ranks. Collective."""
    if replica.stand_in is None and plan.num_shards(plan.steps_per_epoch - 1) < replica.num_ranks:
        batch = batches[0] if batches else None
        has_own = plan.num_shards(step) >= replica.num_ranks
        replica.set_stand_in(cloned_batch(batch) if has_own else dummy_batch(batch, replica.device, replica.all_ranks))


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
    local = leaves if sends else [None] * len(described)
    received = [_exchanged(leaf, description, device) for leaf, description in zip(local, described, strict=True)]
    return tree_unflatten(received, treespec_loads(spec_text)) if batch is None else batch


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)}
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return {"value": leaf}
    raise TrainingError(
        f"a batch holds a {type(leaf).__name__}, which cannot be sent to a rank that has no shard in this step. "
        "Choose batch.micro_size so that every step has a shard for each rank, or use batch.drop_last=true."
    )


def _exchanged(leaf: Any, description: dict[str, Any], device: torch.device) -> Any:
    if "value" in description:
        return description["value"]
    if leaf is None:
        leaf = torch.empty(description["shape"], dtype=getattr(torch, description["dtype"]), device=device)
    tensor = leaf.detach().contiguous()
    dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)  # as bytes: backends lack some dtypes
    return tensor


class ShardedWork(ShardStep):
    """One try at a step whose forward and backward passes are collective.

    Gradients are summed over the ranks of `shard` during backward, and tensors that are whole on every rank (updated
    buffers, the counted weight) at the end; the reducer sums both over the copies. A rank with fewer shards than others
    repeats one, with weight 0.

    Args:
        group: the ranks of `shard`; None: this one alone.
        has_copies: whether the reducer sums over several copies.
        expect: called before each pass.
    """

    def __init__(
        self,
        replica: Replica,
        ticket: Ticket,
        batches: Sequence[Batch],
        training: StepContext,
        *,
        group: dist.ProcessGroup | None = None,
        has_copies: bool = False,
        expect: Callable[[Pass], None] = lambda _pass: None,
    ) -> None:
        super().__init__(replica, ticket, batches, training)
        self._group, self._has_copies, self._expect = group, has_copies, expect
        self._counts = True
        self._current: Pass

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
        again = self._batch_to_repeat(repeats=len(passes) > len(self.batches))
        packing = replica.packing or self.agree_on_grad_layout()
        if replica.buffers.names:
            replica.buffers.begin_step()
        reducer.begin(packing, num_shards=passes[0].num_shards)
        batches, remaining = dict(zip(self.ticket.shards, self.batches, strict=True)), iter(self.ticket.shards)
        weights: list[Tensor | float] = []
        for self._current in passes:
            self._expect(self._current)
            shard = next(remaining, None) if replica.lanes is None else self._current.shard
            if shard is None:
                self._repeat(again)
            else:
                batch = batches[shard]
                weights.append(self._shard(shard, batch if replica.lanes is None else cloned_batch(batch)))
            if self._current.ends_lane and replica.lanes is not None:
                self._add_lane(self._current.lanes[replica.data_ranks.rank], weights)
                weights = []
        if replica.lanes is None and weights:
            self.weight = total_weight(weights)
        self._enter("reduce")
        grads = replica.take_grads()
        if replica.lanes is not None:
            return [*grads, *(reducer.finish() if packing.shapes else ())]
        if self._has_copies:
            has_grads = [grad is not None or reducer.has_taken(index) for index, grad in enumerate(grads)]
            replica.agree_on_used(has_grads)
            self._refuse_late(has_grads)
        reducer.add(0, [*grads, *self._sum_whole(packing)])
        sums = reducer.finish()
        if not self._has_copies:
            return sums
        parts = zip(replica.params.values(), replica.used, sums, strict=False)
        # offloaded parts are in the memory of the host
        local = [total.to(param.device) if used and total is not None else None for param, used, total in parts]
        return [*local, *sums[len(local) :]]

    def agree_on_grad_layout(self) -> FlatBuffer:
        """Find which buffers are updated, and agree on it; collective, once."""
        replica, buffers = self.replica, self.replica.buffers
        provide_stand_in(replica, self.training.plan, self.ticket.step, self.batches)
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

    def _batch_to_repeat(self, *, repeats: bool) -> Batch:
        """Return the batch to repeat if other ranks have more shards, or None. Collective."""
        provide_stand_in(self.replica, self.training.plan, self.ticket.step, self.batches)
        if not repeats:
            return None
        batch = self.batches[-1] if self.batches else self.replica.stand_in
        return cloned_batch(batch)  # a model may write into its inputs

    def _repeat(self, batch: Batch) -> None:
        """Take part in the collectives of a shard, with weight 0."""
        loss_sum, terms, self._counts = self.loss_sum, dict(self.terms), False
        self._shard(self.ticket.shards[-1] if self.ticket.shards else 0, batch)
        self.loss_sum, self.terms, self._counts = loss_sum, terms, True

    def _shard_fraction(self, shard: int) -> float:
        return super()._shard_fraction(shard) if self._counts else 0.0

    def _seed(self, total: Tensor) -> Tensor:
        return super()._seed(total) if self._counts else torch.zeros_like(total, requires_grad=False)

    def _is_last(self, shard: int) -> bool:  # noqa: ARG002 - it may be repeated
        return self._current.ends

    def _add_lane(self, lane: int | None, weights: Sequence[Tensor | float]) -> None:
        """Give the reducer the tensors of a lane that every rank holds whole; None: this rank has only repeated one."""
        whole = self._take_whole(total_weight(weights) if weights else 0.0)
        if lane is not None:
            self.weight = added(self.weight, total_weight(weights))
            self.replica.reducer.add(lane, whole)

    def _take_whole(self, weight: Tensor | float) -> list[Tensor | None]:
        replica = self.replica
        tensors: list[Tensor | None] = list(replica.buffers.take()) if replica.buffers.names else []
        if self.divisor.counted:
            tensors.append(weight_on(weight, replica.precision.master_dtype, replica.device))
        return tensors

    def _sum_whole(self, packing: FlatBuffer) -> list[Tensor]:
        """Sum the tensors that every rank holds whole over the ranks of `shard`."""
        if not (tensors := self._take_whole(self.weight)):
            return []
        whole = FlatBuffer(packing.shapes[packing.num_grads :], packing.dtype, packing.device)
        flat = whole.pack(tensors)
        dist.all_reduce(flat, group=self._group)
        return whole.views(flat)


def unsharded_model_problems(model: nn.Module) -> list[Problem]:
    """Return problems of parameters that cannot be sharded, and gradients that cannot be summed in parts."""
    problems = sparse_problems(model, "which are not summed in parts")
    scripted = (name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule))
    if (name := next(scripted, None)) is not None:
        rule = f"{name} is a module of torch.jit, whose parameters cannot be sharded. Give the class it was made of."
        problems.append(Problem(key="model", rule=rule))
    for name, param in model.named_parameters():
        if not param.dim():
            rule = f"{name} has no dims, and cannot be sharded. Give it the shape (1,)."
            problems.append(Problem(key="model", rule=rule))
        elif not param.numel():
            rule = f"{name} has no elements, and cannot be sharded. Leave it out, or use strategy=mirrored."
            problems.append(Problem(key="model", rule=rule))
    return problems


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
