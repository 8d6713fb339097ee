"""Executors of central storage: the threads of a process compute a step together, or each of them whole steps.

Updates follow a step of all threads; or, asynchronously, they are applied as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from trainkit.bounded import whole_numbers
from trainkit.data.reading.collate import to_device
from trainkit.numerics.batch import Ticket, lane_order, shards_of_rank
from trainkit.strategies.base import (
    Batch,
    Executor,
    JsonMap,
    LeftOut,
    LocalModel,
    StateDict,
    Status,
    StepContext,
    StepCounter,
    StepOutcome,
)
from trainkit.strategies.core.copies import ComputingCopies, Sums, ThreadWork, sum_of, total_of
from trainkit.strategies.core.optimizer import Updater
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
        """Return the share of the shards of each copy, with the batches on its device."""
        given, copies, plan = dict(zip(ticket.shards, batches, strict=True)), self._copies.copies, self._training.plan
        num_shards, lanes, works = plan.num_shards(ticket.step), self._variables.lanes, []
        for place, copy in enumerate(copies):
            own = shards_of_rank(num_shards, rank=place, num_ranks=len(copies), lanes=lanes)
            own_batches = [to_device(given[shard], copy.device) for shard in own]
            works.append(ThreadWork(copy, Ticket(ticket.step, own), own_batches, self._training))
        return works

    def _partials(self, works: Sequence[ThreadWork], num_shards: int) -> Iterator[tuple[int, Sums]]:
        """Yield (lane, its sums) on the variables' device, in an order that does not depend on the threads' speed."""
        device, lanes, copies = self._variables.device, self._variables.lanes, self._copies
        in_turn = copies.may_compile((place, work.batches) for place, work in enumerate(works))
        found = [dict(one) for one in copies.run(lambda work: work.sums(device), works, in_turn=in_turn)]
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
        """Restore the buffers of an interrupted step."""
        return self._variables.recover(step)

    def swap_averages(self) -> bool:
        """Exchange the variables and their averages."""
        found = self._variables.swap_averages()
        self._copies.refresh()
        return found

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - there is no other rank
        """End the threads."""
        self._copies.close()


def _terms(works: Sequence[ThreadWork], device: torch.device) -> dict[str, Tensor]:
    """Return the terms of the loss, summed over the threads with shards."""
    found: dict[str, Tensor] = {}
    for work in works:
        for name, term in work.terms.items():
            found[name] = found[name] + term.to(device) if name in found else term.to(device)
    return found


@dataclass(frozen=True, kw_only=True)
class _InFlightStep:
    """A step in progress on a copy."""

    ticket: Ticket
    copy: int


@dataclass(frozen=True, kw_only=True)
class _Gradient:
    """The result of a step on a copy."""

    work: ThreadWork
    sums: Sums
    version: int
    """Version of the variables from which it was computed: their number of updates."""


class AsyncCentralExecutor(CentralExecutor):
    """The variables and the copies, each of which computes whole steps and has its own optimizer over the variables."""

    def __init__(
        self,
        copies: ComputingCopies,
        local: LocalModel,
        training: StepContext,
        steppers: Sequence[Updater],
    ) -> None:
        super().__init__(copies, local, training)
        self._steppers = list(steppers)
        self._free = list(reversed(range(len(steppers))))
        """Copies without a step, the next one last."""
        self._running: dict[Future[_Gradient], _InFlightStep] = {}
        """Steps in progress, in the order of assignment."""
        self._left_over: list[int] = []
        """Steps that an earlier start assigned and that were not applied."""
        self._version = 0
        """Number of updates of the variables."""
        self._lock = Lock()
        """Held while all variables are read or written."""

    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:
        """Yield whole steps, first the unfinished ones of an earlier start; then empty tickets, which wait for the
        rest.
        """
        self._version = position.step
        first = position.step + len(self._left_over)
        last = first + (1 << 62) if until is None else until
        for step in [*self._left_over, *range(first, last)]:
            self._left_over = [one for one in self._left_over if one != step]
            yield Ticket(step, self.assign(step))
        while True:
            yield Ticket(position.step, ())

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Assign a step to a free copy; if none is free, apply the first gradient that arrives.

        Args:
            ticket: a whole step; an empty one only waits.
            batches: one per shard, on the variables' device.

        Returns:
            The applied update, as the step of its version; or the outcome of a step in progress.
        """
        if ticket.shards:
            self._send(_InFlightStep(ticket=ticket, copy=self._free.pop()), batches)
            if self._free:
                return StepOutcome(ticket.step, Status.handed_out, None, 0.0)
        self._variables.on_phase("reduce", ticket.step)  # the time in which the copies compute
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        first = next(future for future in self._running if future in done)
        sent = self._running.pop(first)
        self._free.append(sent.copy)
        return self._apply(sent, first.result())

    def _send(self, sent: _InFlightStep, batches: Sequence[Batch]) -> None:
        copies = self._copies
        copy = copies.copies[sent.copy]
        work = ThreadWork(copy, sent.ticket, [to_device(batch, copy.device) for batch in batches], self._training)
        if self._variables.packing is None:
            work.agree_on_grad_layout()
            copies.settle(work.replica)
        compiles = copies.may_compile([(sent.copy, work.batches)])
        if compiles:
            wait(self._running)
        future = copies.submit(self._computed, work)
        self._running[future] = sent
        if compiles:
            wait([future])

    def _computed(self, work: ThreadWork) -> _Gradient:
        """Read the current variables and compute a whole step with them, on a thread."""
        with self._lock:
            self._copies.refresh(work.replica)
            version = self._version
        ((_, sums),) = work.sums(self._variables.device)
        return _Gradient(work=work, sums=sums, version=version)

    def _apply(self, sent: _InFlightStep, found: _Gradient) -> StepOutcome:
        """Update the variables by the optimizer of the copy that computed."""
        variables, local, work = self._variables, self._local, found.work
        variables.on_phase("update", sent.ticket.step)
        with self._lock:
            variables.use_stepper(self._steppers[sent.copy])
            variables.set_sparse(work.replica.sparse)
            variables.buffers.begin_step()
            rule = self._training.rule(self._version)
            status, norm = apply_update(variables, found.sums, work.divisor, rule, loss_sum=work.loss_sum)
            local.step_metrics["staleness"] = float(self._version - found.version)
            version, self._version = self._version, self._version + 1
        weight = work.weight.to(local.device) if isinstance(work.weight, Tensor) else work.weight
        assert work.loss_sum is not None
        tickets = (sent.ticket,)
        left_out = (LeftOut(version, tickets),) if status is Status.skipped else ()
        terms = {name: term.to(local.device) for name, term in work.terms.items()}
        return StepOutcome(version, status, work.loss_sum.to(local.device), weight, norm, left_out, tickets, terms)

    def state_dict(self) -> StateDict:
        """Return the variables and the first copy's optimizer state; that of other copies in slots `NAME@COPY`."""
        variables = self._variables
        variables.use_stepper(self._steppers[0])
        found = replica_state(variables)
        for place, stepper in enumerate(self._steppers[1:], start=1):
            for key, tensor in stepper.state(variables.masters).items():
                kind, slot, name = key.split("/", 2)
                found[f"{kind}/{slot}@{place}/{name}"] = tensor
        return found

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a state of `state_dict`, or of another strategy, whose optimizer state every copy then uses."""
        variables = self._variables
        variables.use_stepper(self._steppers[0])
        restore_replica(variables, state)
        for place, stepper in enumerate(self._steppers[1:], start=1):
            own = {key.replace(f"@{place}/", "/", 1): state[key] for key in state if f"@{place}/" in key}
            stepper.restore(variables.masters, own or state)
        self._copies.refresh(frozen=True)

    def recover(self, step: int) -> bool:
        """Return False: other threads are in the middle of their steps."""
        del step
        return False

    def state_dict_extra(self) -> JsonMap:
        """Return the steps that are assigned and not applied."""
        return {"handed_out": sorted([*self._left_over, *(sent.ticket.step for sent in self._running.values())])}

    def load_state_extra(self, extra: JsonMap) -> None:
        """Assign these steps again, before any other."""
        self._left_over = whole_numbers(extra.get("handed_out", []))
