"""Asynchronous central storage: every thread computes whole steps, updates are applied as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from torch import Tensor

from trainkit.data.reading.collate import to_device
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.strategies.base import LeftOut, Status, StepContext, StepCounter, StepOutcome
from trainkit.strategies.central_storage.step import computed, moved
from trainkit.strategies.central_storage.variables import CentralVariables, ThreadWork
from trainkit.strategies.core.optimizer import OptimizerStepper, optimizer_state, restore_optimizer_state
from trainkit.strategies.core.replica import replica_state, restore_replica
from trainkit.strategies.core.update import apply_update

__all__ = ["InFlightSteps", "dispatch_or_apply", "dispatched", "flight_state", "restore_flight", "tickets_to_dispatch"]


@dataclass(frozen=True, kw_only=True)
class _InFlightStep:
    """A step under way on a copy."""

    ticket: Ticket
    copy: int
    training: StepContext


@dataclass(frozen=True, kw_only=True)
class _Gradient:
    """What came of an errand."""

    work: ThreadWork
    sums: Sequence[Tensor | None]
    version: int
    """Updates that the variables had seen when it was computed from them."""


@dataclass(kw_only=True)
class InFlightSteps:
    """What is under way between the variables and the copies."""

    steppers: list[OptimizerStepper]
    """An optimizer a copy, each over the variables."""
    free: list[int]
    """Copies without an errand, the next one last."""
    running: dict[Future[_Gradient], _InFlightStep] = field(default_factory=dict)
    """In the order in which they were handed out."""
    left_over: list[int] = field(default_factory=list)
    """Steps that an earlier start handed out and did not see applied."""
    version: int = 0
    """Updates that the variables have seen."""
    lock: Lock = field(default_factory=Lock)
    """Held while variables are read or written as a whole."""


def tickets_to_dispatch(
    flight: InFlightSteps, plan: BatchPlan, position: StepCounter, until: int | None
) -> Iterator[Ticket]:
    """Whole steps, those first that were handed out before and not applied; then empty tickets: wait for the rest."""
    flight.version = position.step
    first = position.step + len(flight.left_over)
    last = first + (1 << 62) if until is None else until
    for step in [*flight.left_over, *range(first, last)]:
        flight.left_over = [one for one in flight.left_over if one != step]
        yield Ticket(step, tuple(range(plan.num_shards(step))))
    while True:
        yield Ticket(position.step, ())


def dispatched(flight: InFlightSteps) -> list[int]:
    """The steps that were handed out and are not applied."""
    return sorted([*flight.left_over, *(errand.ticket.step for errand in flight.running.values())])


def flight_state(central: CentralVariables, flight: InFlightSteps) -> dict[str, Tensor]:
    """The variables and the first copy's optimizer, as any strategy takes them; the others' in slots `NAME@COPY`."""
    variables = central.variables
    variables.stepper = flight.steppers[0]
    found = replica_state(variables)
    for place, stepper in enumerate(flight.steppers[1:], start=1):
        for key, tensor in optimizer_state(stepper.optimizer, variables.masters).items():
            kind, slot, name = key.split("/", 2)
            found[f"{kind}/{slot}@{place}/{name}"] = tensor
    return found


def restore_flight(central: CentralVariables, flight: InFlightSteps, tensors: Mapping[str, Tensor]) -> None:
    """Take over what `flight_state` gave, or another strategy's state, whose optimizer each copy then continues."""
    variables = central.variables
    variables.stepper = flight.steppers[0]
    restore_replica(variables, tensors)
    for place, stepper in enumerate(flight.steppers[1:], start=1):
        own = {key.replace(f"@{place}/", "/", 1): tensors[key] for key in tensors if f"@{place}/" in key}
        restore_optimizer_state(stepper.optimizer, variables.masters, own or tensors)
        stepper.invalidate_cache()


def dispatch_or_apply(
    central: CentralVariables, flight: InFlightSteps, ticket: Ticket, batches: Sequence[Any], training: StepContext
) -> StepOutcome:
    """Hand a step to a free copy; when there is none left, apply the first gradient that comes.

    Args:
        central: the variables and the copies.
        flight: what is under way.
        ticket: a whole step; an empty one to wait only.
        batches: one a shard, on the variables' device.
        training: plan, objective and update rule.

    Returns:
        The update that was applied, as the step of its version; or that nothing was.
    """
    if ticket.shards:
        _send(central, flight, _InFlightStep(ticket=ticket, copy=flight.free.pop(), training=training), batches)
        if flight.free:
            return StepOutcome(ticket.step, Status.handed_out, None, 0.0)
    done, _ = wait(flight.running, return_when=FIRST_COMPLETED)
    first = next(future for future in flight.running if future in done)
    errand = flight.running.pop(first)
    flight.free.append(errand.copy)
    return _apply(central, flight, errand, first.result())


def _send(central: CentralVariables, flight: InFlightSteps, errand: _InFlightStep, batches: Sequence[Any]) -> None:
    copy = central.copies[errand.copy]
    moved = [to_device(batch, copy.device) for batch in batches]
    work = ThreadWork(copy, errand.ticket, moved, errand.training)
    if central.variables.packing is None:
        work.agree_on_grad_layout()
        central.settle(work.replica)
    flight.running[central.threads.submit(_computed, central, flight, work)] = errand


def _computed(central: CentralVariables, flight: InFlightSteps, work: ThreadWork) -> _Gradient:
    """On a thread: take the variables as they are now, and compute a whole step with them."""
    with flight.lock:
        central.refresh(work.replica)
        version = flight.version
    ((_, sums),) = computed(work)
    return _Gradient(work=work, sums=sums, version=version)


def _apply(central: CentralVariables, flight: InFlightSteps, errand: _InFlightStep, found: _Gradient) -> StepOutcome:
    """Update the variables by the optimizer of the copy that computed."""
    variables, work = central.variables, found.work
    if central.on_phase is not None:
        central.on_phase("update", errand.ticket.step)
    with flight.lock:
        variables.stepper = flight.steppers[errand.copy]
        variables.sparse = work.replica.sparse
        variables.buffers.begin_step()
        sums = moved(found.sums, variables.device)
        status, norm = apply_update(
            variables, sums, work.divisor, errand.training.rule(flight.version), loss_sum=work.loss_sum
        )
        central.step_metrics["staleness"] = float(flight.version - found.version)
        version, flight.version = flight.version, flight.version + 1
    weight = work.weight.to(central.device) if isinstance(work.weight, Tensor) else work.weight
    assert work.loss_sum is not None
    tickets = (errand.ticket,)
    left_out = (LeftOut(version, tickets),) if status is Status.skipped else ()
    return StepOutcome(version, status, work.loss_sum.to(central.device), weight, norm, left_out, tickets)
