"""Synchronous central storage: the threads of a process compute a step together, then the variables are updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainkit.data.reading.collate import to_device
from trainkit.numerics.batch import Ticket, lane_order, shards_of_rank
from trainkit.strategies.base import (
    Batch,
    Executor,
    LeftOut,
    LocalModel,
    StateDict,
    Status,
    StepContext,
    StepCounter,
    StepOutcome,
)
from trainkit.strategies.core.copies import ComputingCopies, Sums, ThreadWork, moved, sum_of, total_of
from trainkit.strategies.core.replica import replica_state, restore_replica
from trainkit.strategies.core.sparse import scatter_to_all_params
from trainkit.strategies.core.update import apply_update


class CentralExecutor(Executor):
    """The variables in one place, and the copies that compute with them."""

    def __init__(self, copies: ComputingCopies, local: LocalModel, training: StepContext) -> None:
        self._copies, self._variables, self._local, self._training = copies, copies.source, local, training

    @property
    def local(self) -> LocalModel:
        """The model that is evaluated."""
        return self._local

    def assign(self, step: int) -> tuple[int, ...]:
        """Return all shards: the threads share them."""
        return tuple(range(self._training.plan.num_shards(step)))

    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:  # noqa: ARG002 - the loop ends
        """Yield the position's step, whole."""
        while True:
            step = position.step
            yield Ticket(step, self.assign(step))

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Run forward and backward on all threads, and update the variables once."""
        copies, variables, training, device = self._copies, self._variables, self._training, self._local.device
        copies.set_loss_scale(self._local.loss_scale)
        works = self._works(ticket, batches)
        if variables.packing is None:
            works[0].agree_on_grad_layout()
            copies.settle(works[0].replica)
        assert variables.packing is not None
        variables.buffers.begin_step()
        num_shards = training.plan.num_shards(ticket.step)
        partials = self._partials(works, num_shards)
        sums = variables.reducer.reduce(partials, num_shards=num_shards, packing=variables.packing)
        variables.set_sparse(copies.copies[0].sparse)
        if variables.exchanged is not None:
            sums = scatter_to_all_params(variables, sums, {})
        variables.on_phase("update", ticket.step)
        loss_sum = sum_of([work.loss_sum.to(device) for work in works if work.loss_sum is not None])
        variables.begin_update(ticket.step)
        status, norm = apply_update(variables, sums, works[0].divisor, training.rule(ticket.step), loss_sum=loss_sum)
        self._local.set_loss_scale(variables.loss_scale)
        copies.refresh()
        variables.end_update(ticket.step)
        left_out = (LeftOut.whole(training.plan, ticket.step),) if status is Status.skipped else ()
        counted = sum_of([work.weight.to(device) for work in works if isinstance(work.weight, Tensor)])
        known = sum(work.weight for work in works if not isinstance(work.weight, Tensor))
        weight = known if counted is None else counted + known
        terms = _terms(works, device)
        return StepOutcome(ticket.step, status, loss_sum, weight, norm, left_out, terms=terms)

    def _works(self, ticket: Ticket, batches: Sequence[Batch]) -> list[ThreadWork]:
        """Return each copy's share of the shards, with its batches on its device."""
        given, copies, plan = dict(zip(ticket.shards, batches, strict=True)), self._copies.copies, self._training.plan
        num_shards, lanes, works = plan.num_shards(ticket.step), self._variables.lanes, []
        for place, copy in enumerate(copies):
            own = shards_of_rank(num_shards, rank=place, num_ranks=len(copies), lanes=lanes)
            own_batches = [to_device(given[shard], copy.device) for shard in own]
            works.append(ThreadWork(copy, Ticket(ticket.step, own), own_batches, self._training))
        return works

    def _partials(self, works: Sequence[ThreadWork], num_shards: int) -> Iterator[tuple[int, Sums]]:
        """Yield (lane, its sums) on the variables' device, in an order that does not depend on the threads' speed."""
        computed, device, lanes = (
            self._copies.run(ThreadWork.sums, works),
            self._variables.device,
            self._variables.lanes,
        )
        found = [{lane: moved(sums, device) for lane, sums in one} for one in computed]
        if lanes is None:
            yield 0, total_of([own[0] for own in found if own])
            return
        for lane in lane_order(lanes):
            if lane < num_shards:
                yield lane, found[lane % len(works)][lane]

    def state_dict(self) -> StateDict:
        """Return the state of the variables."""
        return replica_state(self._variables)

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the tensors of a checkpoint of any strategy, and copy them to the copies."""
        restore_replica(self._variables, state)
        self._copies.refresh(frozen=True)

    def recover(self, step: int) -> bool:
        """Put the buffers of an interrupted step back."""
        return self._variables.recover(step)

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - there is no other rank
        """End the threads."""
        self._copies.close()


def _terms(works: Sequence[ThreadWork], device: torch.device) -> dict[str, Tensor]:
    """Return the terms of the loss, summed over the threads that had a shard."""
    found: dict[str, Tensor] = {}
    for work in works:
        for name, term in work.terms.items():
            found[name] = found[name] + term.to(device) if name in found else term.to(device)
    return found
