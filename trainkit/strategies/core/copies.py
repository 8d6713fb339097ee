"""Copies of a model on several devices of one process: one thread per copy, all refreshed from one replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainkit.cluster.host import use_device
from trainkit.data.reading.collate import to_device
from trainkit.numerics.batch import Ticket, lane_order, shards_of_rank
from trainkit.numerics.copies import copied
from trainkit.numerics.generators import GENERATORS_LOCK
from trainkit.numerics.precision import LossScale
from trainkit.numerics.randomness import BlockKeys, forget_keys
from trainkit.objectives.base import Loss
from trainkit.strategies.base import Batch, PhaseListener, StepContext, ignore_phase
from trainkit.strategies.core.buffers import StepBuffers
from trainkit.strategies.core.replica import PlacedModel, Replica
from trainkit.strategies.core.step import ShardStep, added
from trainkit.strategies.model_transforms.compiling import is_compiled
from trainkit.strategies.model_transforms.recomputing import Recomputed
from trainkit.strategies.tensors.layouts import FlatBuffer
from trainkit.strategies.tensors.staging import Parcel, moved

Sums = Sequence[Tensor | None]
"""Gradients, sums of buffers, and the counted weight, if there is one."""

_Work = TypeVar("_Work")
_Result = TypeVar("_Result")


class ComputingCopies:
    """Replicas that compute, and a thread for each.

    Args:
        source: the replica from which the copies are refreshed.
        copies: one replica per device; the source may be one of them, and if it is the only one, it runs on the
            caller's thread.
    """

    def __init__(self, source: Replica, copies: Sequence[Replica]) -> None:
        self.source, self.copies = source, list(copies)
        self._is_alone = len(copies) == 1 and copies[0] is source
        self._compiles = any(is_compiled(copy.model) for copy in copies)
        self._computed_shapes: set[tuple[object, ...]] = set()
        """Pairs (copy, shapes of a shard that it has computed)."""
        self._threads = ThreadPoolExecutor(len(copies), thread_name_prefix="compute")
        self._had_threads = torch.get_num_threads()
        if not self._is_alone:
            on_cpu = sum(copy.device.type == "cpu" for copy in copies)
            torch.set_num_threads(max(self._had_threads // max(on_cpu, 1), 1))

    def close(self) -> None:
        """End the threads, and restore the number of threads of torch."""
        self._threads.shutdown()
        if not self._is_alone:
            torch.set_num_threads(self._had_threads)

    def submit(self, compute: Callable[[_Work], _Result], work: _Work) -> Future[_Result]:
        """Compute on a thread."""
        return self._threads.submit(compute, work)

    def may_compile(self, assigned: Iterable[tuple[int, Sequence[Batch]]]) -> bool:
        """Return whether code may be compiled for (copy, its batches), because a shape is new to a copy.

        torch.compile sets flags of the whole process while it works, so another thread may run its code eagerly, with
        different rounding, or fail: no other copy may compute during that time.
        """
        if not self._compiles or self._is_alone:
            return False
        shapes = {(copy, *_shapes(batch)) for copy, batches in assigned for batch in batches}
        is_new = not shapes <= self._computed_shapes
        self._computed_shapes |= shapes
        return is_new

    def compute(self, shares: Sequence[Sequence[ThreadWork]]) -> None:
        """Compute the works of each copy on its own thread; all threads have ended, even if one fails."""
        in_turn = self.may_compile((copy, work.batches) for copy, works in enumerate(shares) for work in works)
        running: list[Future[None]] = []
        for works in shares:
            if self._is_alone:
                self._compute(works)
            else:
                running.append(self.submit(self._compute, works))
            if in_turn:
                wait(running)
        wait(running)  # no thread may compute while the copies are torn down
        for future in running:
            future.result()

    def _compute(self, works: Sequence[ThreadWork]) -> None:
        for work in works:
            work.compute(self.source.device)

    @torch.no_grad()
    def refresh(self, *copies: Replica, frozen: bool = False) -> None:
        """Copy buffers and parameters of the source to copies with separate memory, in one transfer per device.

        Args:
            copies: the copies to refresh; none: all.
            frozen: whether to copy untrained parameters as well.
        """
        values, parcel = _tensors_of(self.source, frozen=frozen), None
        for copy in copies or self.copies:
            if copy is self.source or not values:
                continue
            targets = _tensors_of(copy, frozen=frozen)
            if copy.device == self.source.device:
                for tensor, value in zip(targets, values, strict=True):
                    if tensor.data_ptr() != value.data_ptr():
                        tensor.data.copy_(value)
            else:
                parcel = parcel or Parcel(values, towards=copy.device)
                torch._foreach_copy_([tensor.data for tensor in targets], parcel.on(copy.device))

    def set_loss_scale(self, scale: LossScale) -> None:
        """Give the source and the copies a loss scale."""
        for replica in (self.source, *self.copies):
            replica.set_loss_scale(scale)

    def agree(self, work: ThreadWork) -> None:
        """Find the layout of gradients and buffers by the first work, for the source and all copies; once."""
        if self.source.packing is None:
            work.agree_on_grad_layout()
            for replica in (self.source, *self.copies):
                if replica is not work.replica:
                    replica.adopt_layout(work.replica)


def _shapes(batch: Batch) -> Iterator[torch.Size]:
    return (value.shape for value in tree_leaves(batch) if isinstance(value, Tensor))


def _tensors_of(replica: Replica, *, frozen: bool) -> list[Tensor]:
    return [*(replica.model.parameters() if frozen else replica.trained), *replica.model.buffers()]


def computing_copy(
    variables: Replica, device: torch.device, *, shares: bool, on_phase: PhaseListener = ignore_phase
) -> Replica:
    """Return a replica for a device to compute with.

    Args:
        variables: the central model.
        device: the device of the copy.
        shares: whether, on the variables' own device, its parameters are in their memory.
        on_phase: receives (phase, step) of its computation.
    """
    memo = {id(p): _on(p, device, shares=shares) for p in variables.model.parameters()}
    model = copied(variables.model, memo).to(device)
    forget_keys(model)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = variables.masters if variables.masters_apart else params
    parts = replace(
        variables.parts_made_of,
        placed=PlacedModel(model=model, params=params, masters=masters),
        device=device,
        device_types=(device.type,),
        placement=None,
        buffers=StepBuffers(model, variables.precision.master_dtype),
        keys=BlockKeys(model, seed=variables.numerics.seed, devices=[device], drawing=variables.keys.drawing),
        on_phase=on_phase,
    )
    return Replica(parts)


def _on(param: nn.Parameter, device: torch.device, *, shares: bool) -> nn.Parameter:
    return nn.Parameter(param.detach().to(device, copy=not shares), requires_grad=param.requires_grad)


class ThreadWork(ShardStep):
    """The shards of one thread. Threads take turns while they draw from generators that all of them share."""

    def __init__(
        self,
        replica: Replica,
        ticket: Ticket,
        batches: Sequence[Batch],
        training: StepContext,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(replica, ticket, batches, training, batch_size)
        draws = self.replica.keys.draw_on_host(self.training.objective)
        recomputes = draws and any(isinstance(module.forward, Recomputed) for module in self.replica.model.modules())
        self._around_forward = GENERATORS_LOCK if draws else nullcontext()
        self._around_shard = GENERATORS_LOCK if recomputes else nullcontext()
        self.lane_sums: list[tuple[int, Sums]] = []
        """(lane, its sums), or one sum of all shards; none without a shard."""

    def _shard(self, shard: int, batch: Batch) -> Tensor | float:
        with self._around_shard:
            weight = super()._shard(shard, batch)
        # the loop sees the model of the variables, and not copies
        self.replica.refuse_changed_params(self.ticket.step + 1)
        return weight

    def _forward(self, shard: int, batch: Batch) -> Loss:
        with self._around_forward:
            return super()._forward(shard, batch)

    def compute(self, device: torch.device) -> None:
        """Find the sums; each list travels to a device as soon as it is complete, in one transfer. For a thread."""
        use_device(self.replica.device)
        if self.replica.buffers.names:
            self.replica.buffers.begin_step()
        self.lane_sums = [(lane, moved(sums, device)) for lane, sums in self.partials()]


class CopiesStep(ShardStep):
    """One try at a step whose shards the copies share, each on its own thread.

    Args:
        copies: the copies; the replica of the step holds the variables.
    """

    def __init__(
        self,
        replica: Replica,
        ticket: Ticket,
        batches: Sequence[Batch],
        training: StepContext,
        batch_size: int | None = None,
        *,
        copies: ComputingCopies,
    ) -> None:
        super().__init__(replica, ticket, batches, training, batch_size)
        self._copies, batch_of = copies, dict(zip(ticket.shards, batches, strict=True))
        num_shards, count, self._works = training.plan.num_shards(ticket.step), len(copies.copies), list[ThreadWork]()
        for index, copy in enumerate(copies.copies):
            shards = ticket.shards[index::count]
            if replica.lanes is not None:
                shards = shards_of_rank(num_shards, rank=index, num_ranks=count, lanes=replica.lanes)
            copy_batches = [to_device(batch_of[shard], copy.device) for shard in shards]
            self._works.append(ThreadWork(copy, Ticket(ticket.step, shards), copy_batches, training, batch_size))

    def agree_on_grad_layout(self) -> FlatBuffer:
        """Find the layout of gradients and buffers in the first copy, and pass it to the others."""
        self._copies.agree(self._works[0])
        assert self.replica.packing is not None
        return self.replica.packing

    def partials(self) -> Iterator[tuple[int, Sums]]:
        """Yield (lane, its sums) on the variables' device, in an order that does not depend on the threads' speed."""
        replica, works, copies = self.replica, self._works, self._copies
        copies.compute([[work] for work in works])
        replica.set_sparse(copies.copies[0].sparse)
        device, by_lane = copies.copies[0].device, [dict(work.lane_sums) for work in works]
        for work in works:
            if work.loss_sum is None:  # it had no shard
                continue
            loss = work.loss_sum.to(device)
            self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
            self.weight = added(self.weight, work.weight.to(device) if isinstance(work.weight, Tensor) else work.weight)
            for name, term in work.terms.items():
                self.terms[name] = self.terms[name] + term.to(device) if name in self.terms else term.to(device)
        if replica.lanes is None:
            yield 0, total_of([sums[0] for sums in by_lane if sums])
            return
        for lane in lane_order(replica.lanes):
            if lane in by_lane[lane % len(works)]:
                yield lane, by_lane[lane % len(works)][lane]


def total_of(parts: Sequence[Sums]) -> list[Tensor | None]:
    """Return sums in the order of the parts, in the memory of the first that has one; sparse ones coalesced.

    Example:
        >>> total_of([[torch.tensor(1.0), None], [torch.tensor(2.0), None]])
        [tensor(3.), None]
    """
    total = list(parts[0])
    for more in parts[1:]:
        for index, (left, right) in enumerate(zip(total, more, strict=True)):
            if left is None or right is None:
                total[index] = right if left is None else left
            elif left.is_sparse:
                total[index] = (left + right).coalesce() if right.is_sparse else right.add_(left)
            else:
                left.add_(right)
    return total
