"""One step of central storage: the threads compute their shards, the sums meet at the variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait

import torch
from torch import Tensor

from trainkit.data.reading.collate import to_device
from trainkit.numerics.batch import Ticket, lane_order, shards_of_rank
from trainkit.strategies.base import Batch, LeftOut, Status, StepContext, StepOutcome
from trainkit.strategies.central_storage.variables import CentralVariables, ThreadWork
from trainkit.strategies.core.grad_exchange import scatter_to_all_params
from trainkit.strategies.core.update import apply_update

__all__ = ["central_step", "computed", "moved", "total_of"]

_Sums = Sequence[Tensor | None]


def central_step(
    central: CentralVariables, ticket: Ticket, batches: Sequence[Batch], training: StepContext
) -> StepOutcome:
    """Compute a ticket with all threads, and update the variables once.

    Args:
        central: the variables and the copies; refreshed when this returns.
        ticket: all shards of a step.
        batches: one a shard, on the first copy's device.
        training: plan, objective and update rule.
    """
    central.set_loss_scale(central.local.loss_scale)
    works = _works(central, ticket, batches, training)
    variables = central.variables
    if variables.packing is None:
        works[0].agree_on_grad_layout()
        central.settle(works[0].replica)
    assert variables.packing is not None
    variables.buffers.begin_step()
    num_shards = training.plan.num_shards(ticket.step)
    partials = _partials(central, works, num_shards)
    sums = variables.reducer.reduce(partials, num_shards=num_shards, packing=variables.packing)
    variables.set_sparse(central.copies[0].sparse)
    if variables.exchanged is not None:
        sums = scatter_to_all_params(variables, sums, {})
    variables.on_phase("update", ticket.step)
    loss_sum = _added([work.loss_sum.to(central.local.device) for work in works if work.loss_sum is not None])
    variables.begin_update(ticket.step)
    status, norm = apply_update(variables, sums, works[0].divisor, training.rule(ticket.step), loss_sum=loss_sum)
    central.local.set_loss_scale(variables.loss_scale)
    central.refresh()
    variables.end_update(ticket.step)
    left_out = (LeftOut.whole(training.plan, ticket.step),) if status is Status.skipped else ()
    return StepOutcome(ticket.step, status, loss_sum, _weight(works, central.local.device), norm, left_out)


def _weight(works: Sequence[ThreadWork], device: torch.device) -> Tensor | float:
    counted = [work.weight.to(device) for work in works if isinstance(work.weight, Tensor)]
    known = sum(work.weight for work in works if not isinstance(work.weight, Tensor))
    total = _added(counted)
    return known if total is None else total + known


def _works(
    central: CentralVariables, ticket: Ticket, batches: Sequence[Batch], training: StepContext
) -> list[ThreadWork]:
    """Each copy's share of the shards, with its batches on its device."""
    given: Mapping[int, Batch] = dict(zip(ticket.shards, batches, strict=True))
    works = []
    for place, copy in enumerate(central.copies):
        own = shards_of_rank(
            training.plan.num_shards(ticket.step),
            rank=place,
            num_ranks=len(central.copies),
            lanes=central.variables.lanes,
        )
        moved = [to_device(given[shard], copy.device) for shard in own]
        works.append(ThreadWork(copy, Ticket(ticket.step, own), moved, training))
    return works


def _partials(central: CentralVariables, works: Sequence[ThreadWork], num_shards: int) -> Iterator[tuple[int, _Sums]]:
    """(lane, its sums) on the variables' device, in an order that no thread's speed decides."""
    running = [central.threads.submit(computed, work) for work in works]
    wait(running)  # also where one fails: nobody computes with what is being torn down
    found = [{lane: moved(sums, central.variables.device) for lane, sums in one.result()} for one in running]
    if central.variables.lanes is None:
        yield 0, total_of([own[0] for own in found if own])
        return
    for lane in lane_order(central.variables.lanes):
        if lane < num_shards:
            yield lane, found[lane % len(works)][lane]


def computed(work: ThreadWork) -> list[tuple[int, _Sums]]:
    """Return the sums that a thread computes: one per lane, or one in total; an empty list if it has no shard."""
    if work.replica.buffers.names:
        work.replica.buffers.begin_step()
    return list(work.partials())


def moved(sums: _Sums, device: torch.device) -> _Sums:
    """Return the sums on a device."""
    return [None if one is None else one.to(device) for one in sums]


def total_of(parts: Sequence[_Sums]) -> _Sums:
    """Return the sums over threads, the first thread's first; None where no thread has any."""
    return [_added([one for one in column if one is not None]) for column in zip(*parts, strict=True)]


def _added(tensors: Sequence[Tensor]) -> Tensor | None:
    if not tensors:
        return None
    total = tensors[0]
    for other in tensors[1:]:
        total = total + other
    return total
