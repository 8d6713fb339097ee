"""Asynchronous central storage: every thread computes whole steps, updates are applied as they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from trainkit.bounded import whole_numbers
from trainkit.data.reading.collate import to_device
from trainkit.numerics.batch import Ticket
from trainkit.strategies.base import (
    Batch,
    LeftOut,
    LocalModel,
    StateDict,
    Status,
    StepContext,
    StepCounter,
    StepOutcome,
)
from trainkit.strategies.capabilities import JsonMap
from trainkit.strategies.central_storage.executor import CentralExecutor
from trainkit.strategies.core.copies import ComputingCopies, Sums, ThreadWork, moved
from trainkit.strategies.core.optimizer import Updater
from trainkit.strategies.core.replica import replica_state, restore_replica
from trainkit.strategies.core.update import apply_update


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
    """Updates that the variables had seen when it was computed from them."""


class AsyncCentralExecutor(CentralExecutor):
    """The variables and the copies, each of which takes whole steps with an optimizer of its own over the variables."""

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
        """In the order in which they were assigned."""
        self._left_over: list[int] = []
        """Steps that an earlier start assigned and that were not applied."""
        self._version = 0
        """Updates that the variables have seen."""
        self._lock = Lock()
        """Held while all variables are read or written."""

    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:
        """Yield whole steps, first the ones left over; then empty tickets, which wait for the rest."""
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
            The applied update, as the step of its version; or that the step is in progress.
        """
        if ticket.shards:
            self._send(_InFlightStep(ticket=ticket, copy=self._free.pop()), batches)
            if self._free:
                return StepOutcome(ticket.step, Status.handed_out, None, 0.0)
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
        self._running[copies.submit(self._computed, work)] = sent

    def _computed(self, work: ThreadWork) -> _Gradient:
        """Read the current variables and compute a whole step with them, on a thread."""
        with self._lock:
            self._copies.refresh(work.replica)
            version = self._version
        ((_, sums),) = work.sums()
        return _Gradient(work=work, sums=sums, version=version)

    def _apply(self, sent: _InFlightStep, found: _Gradient) -> StepOutcome:
        """Update the variables by the optimizer of the copy that computed."""
        variables, local, work = self._variables, self._local, found.work
        variables.on_phase("update", sent.ticket.step)
        with self._lock:
            variables.use_stepper(self._steppers[sent.copy])
            variables.set_sparse(work.replica.sparse)
            variables.buffers.begin_step()
            sums = moved(found.sums, variables.device)
            status, norm = apply_update(
                variables, sums, work.divisor, self._training.rule(self._version), loss_sum=work.loss_sum
            )
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
        """Restore a state of `state_dict`, or of another strategy, whose optimizer state each copy then continues."""
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
