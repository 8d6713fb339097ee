"""The chief's dispatcher: it assigns work to the workers, and orders the servers to make updates of their gradients."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

import torch
from torch import Tensor

from trainkit.errors import LinkError, TrainingError
from trainkit.strategies.base import LeftOut, Status, StepContext, StepOutcome
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import LossDivisor
from trainkit.strategies.parameter_server.coordinator.registry import OWN, WorkerEvent, WorkerHandle, WorkerRegistry
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate, WorkItem, WorkScheduler
from trainkit.strategies.parameter_server.coordinator.update_log import UpdateLog
from trainkit.strategies.parameter_server.server.gradient_buffer import lane_sum
from trainkit.strategies.parameter_server.wire.client import ParameterServerClient
from trainkit.strategies.parameter_server.wire.work_channel import WorkOrder, WorkReport, gradient_keys
from trainkit.strategies.parameter_server.worker.main import Mode

__all__ = ["UpdateDispatcher"]

_POLL_S: Final = 1.0
"""Seconds between two checks for workers that have been silent for long."""


@dataclass(kw_only=True)
class UpdateDispatcher:
    """Makes one update after the other of staged gradients. Everything here runs on the main thread."""

    local: Replica
    """The chief's model; its loss scale is adjusted here."""
    desk: WorkScheduler
    servers: ParameterServerClient
    """Connections for orders to the servers."""
    staff: WorkerRegistry
    record: UpdateLog | None
    mode: Mode
    lanes: int | None
    """Number of lanes of the reproducible order of summation."""
    leaves_out: bool
    """Whether a step that is not finite is skipped."""
    mixes: bool
    """Whether an update may contain shards of several steps."""
    timeout_s: float
    """How long a worker may take for one work item."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of updates by staleness."""
    mixed: int = 0
    """Number of gradients that were computed from variables of several versions."""
    _seats: dict[str, WorkerHandle] = field(default_factory=dict)
    _reports: dict[int, WorkReport] = field(default_factory=dict)
    _loads: int = 1

    def start_again(self, desk: WorkScheduler, record: UpdateLog | None) -> None:
        """Continue from an earlier version, which the servers have restored: the training was rolled back.

        Gradients that workers still compute for the old scheduler are discarded when they arrive.

        Args:
            desk: the scheduler at that version.
            record: the log of the updates before it.
        """
        self._drop(tuple(self.desk.running.values()))
        self._discard_stale()
        desk.number_after(self.desk)
        for name in self._seats:
            desk.join(name)
        self.desk, self.record = desk, record
        self._reports.clear()
        self._loads += 1

    def next_update(self, training: StepContext) -> StepOutcome:
        """Handle worker events until an update is ready, and make it; idle workers get work."""
        while True:
            merge = self.desk.next_ready_update()
            self._discard_stale()
            if merge is not None:
                outcome = self._apply_update(merge, training)
                self._hand_out()
                return outcome
            self._hand_out()
            self._report_idle()
            event = self.staff.next_event(_POLL_S)
            if event is not None:
                self._take(event)
            self._expire_silent_workers()

    def close(self) -> None:
        """Stop all workers."""
        self.staff.stop_local_worker()
        for seat in self._seats.values():
            if seat.name != OWN:
                _try(seat.give, None)
        if self.record is not None:
            self.record.close()

    def _report_idle(self) -> None:
        """Report `idle` while the in-process worker has no work, so that the hang detector does not blame the chief."""
        own = self._seats.get(OWN)
        if own is not None and own.order is None:
            self.local.on_phase("idle", self.desk.version)

    def _hand_out(self) -> None:
        for seat in list(self._seats.values()):
            errand = self.desk.next(seat.name) if seat.order is None else None
            if errand is None:
                continue
            order = WorkOrder(
                number=errand.number,
                step=errand.ticket.step,
                shards=errand.ticket.shards,
                version=errand.version,
                loads=self._loads,
                scale=self.local.loss_scale.scale,
            )
            _try(seat.give, order)  # if its connection is broken, its thread reports that

    def _take(self, event: WorkerEvent) -> None:
        """Handle one worker event. Events of workers already declared lost are ignored."""
        seat = event.seat
        if event.kind == "ready":
            self._on_worker_lost(seat.name)  # the worker reconnected before its old connection was seen to break
            self._seats[seat.name] = seat
            self.desk.join(seat.name)
        elif self._seats.get(seat.name) is not seat:
            return
        elif event.kind == "pulled":
            self.desk.pulled(int(event.meta["number"]))
        elif event.kind == "report":
            self._on_report(seat, WorkReport.of(event.meta))
        elif event.error is not None and seat.name == OWN:
            raise event.error
        else:
            self._on_worker_lost(seat.name)

    def _on_report(self, seat: WorkerHandle, report: WorkReport) -> None:
        seat.order = None
        if report.number not in self.desk.running:  # it was computed before a rollback
            self.servers.discard_staged(gradient_keys(report.number, len(report.weights)))
            return
        self._reports[report.number] = report
        self.desk.report(report.number, report.read)

    def _on_worker_lost(self, name: str) -> None:
        """Remove a lost worker; its work is assigned again."""
        seat = self._seats.pop(name, None)
        if seat is not None:
            seat.cut()
            lost = self.desk.leave(name)
            self._drop(lost)

    def _expire_silent_workers(self) -> None:
        late = time.monotonic() - self.timeout_s
        for seat in list(self._seats.values()):
            if seat.order is None or seat.since > late:
                continue
            if seat.name == OWN:
                raise TrainingError(f"step {seat.order.step}: no gradient within strategy.timeout_s={self.timeout_s:g}")
            self._on_worker_lost(seat.name)

    def _discard_stale(self) -> None:
        """Discard the gradients that are no longer needed."""
        thrown = self.desk.pop_discarded()
        if thrown:
            self._drop(thrown)
            for errand in thrown:
                self._reports.pop(errand.number, None)

    def _drop(self, errands: Iterable[WorkItem]) -> None:
        """Make the servers discard the staged gradients of work items."""
        each = self.lanes is not None
        counts = [(errand.number, len(errand.ticket.shards) if each else 1) for errand in errands]
        self.servers.discard_staged([key for number, count in counts for key in gradient_keys(number, count)])

    def _apply_update(self, merge: PendingUpdate, training: StepContext) -> StepOutcome:
        self.local.on_phase("update", merge.version)
        reports = [self._reports.pop(errand.number) for errand in merge.errands]
        make = self._apply_one if self.mode == "async" else self._apply_sum
        status, norm = make(merge, reports, training)
        losses = sum(report.loss_sum for report in reports)
        weight = sum(weight for report in reports for weight in report.weights)
        tickets = tuple(errand.ticket for errand in merge.errands)
        left_out = (LeftOut(merge.version, tickets),) if status is Status.skipped else ()
        outcome = StepOutcome(merge.version, status, self._number(losses), weight, norm, left_out, tickets)
        if status is Status.retry:
            self.desk.requeue_after_overflow(merge)
            return outcome
        self.desk.merged(merge)
        if self.record is not None:
            self.record.note(merge)
        self._figure(merge, reports)
        return outcome

    def _figure(self, merge: PendingUpdate, reports: Sequence[WorkReport]) -> None:
        self.mixed += sum(report.mixed for report in reports)
        if self.mode == "async":
            self.staleness[merge.staleness] += 1
            self.local.step_metrics["staleness"] = float(merge.staleness)
        if self.desk.late:
            self.local.step_metrics["late_gradients"] = float(self.desk.late.total())

    def _apply_one(
        self, merge: PendingUpdate, reports: list[WorkReport], training: StepContext
    ) -> tuple[Status, Tensor | None]:
        """Apply one gradient that its worker has already scaled and clipped."""
        (report,) = reports
        if not report.is_finite:
            return Status.skipped, None
        update = training.rule(merge.version)
        self.servers.apply(
            version=merge.version + 1,
            lr_factor=update.lr_factor / merge.lr_divisor,
            factor=merge.factor,
            keys=gradient_keys(report.number, 1),
        )
        return Status.applied, None if report.norm is None else self._number(report.norm)

    def _apply_sum(
        self, merge: PendingUpdate, reports: list[WorkReport], training: StepContext
    ) -> tuple[Status, Tensor | None]:
        """Apply the sum of shards' gradients: the same as `apply_update`, but on the servers."""
        scale, update = self.local.loss_scale, training.rule(merge.version)
        staged = _staged(merge, reports)
        weight_factor, buffer_factor = self._factors(merge, [weight for _, weight in staged], training)
        norms = self.servers.sum(
            [key for key, _ in staged],
            lanes=self.lanes,
            weight_factor=weight_factor,
            unscale=None if scale.scale == 1.0 else 1.0 / scale.scale,
            norms=update.max_norm is not None,
            exact=self.lanes is not None,
            check_finite=scale.moves or self.leaves_out,
            check_others=self.leaves_out,
        )
        is_lost = self.leaves_out and not (norms.others_finite and all(isfinite(one.loss_sum) for one in reports))
        if is_lost or not norms.finite:
            retries = not is_lost and (scale.may_retry or not self.leaves_out)
            self.servers.discard_sum()
            self.local.set_loss_scale(scale.after(overflow=True) if retries else scale.after_skip())
            return (Status.retry if retries else Status.skipped), None
        norm, factor = None, 1.0
        if update.max_norm is not None:
            norm = norms.total()
            factor = float(torch.clamp(update.max_norm / (norm + 1e-6), max=1.0))
        self.servers.apply(
            version=merge.version + 1, lr_factor=update.lr_factor, factor=factor, buffer_factor=buffer_factor
        )
        self.local.set_loss_scale(scale.after(overflow=False))
        return Status.applied, norm

    def _factors(self, merge: PendingUpdate, weights: list[float], training: StepContext) -> tuple[float | None, float]:
        """Return the factors of gradients and buffers beyond those that workers applied; None: no factor."""
        plan, weighing = training.plan, training.weighing
        tickets = [errand.ticket for errand in merge.errands]
        samples = sum(plan.shard_size(ticket.step, shard) for ticket in tickets for shard in ticket.shards)
        size = plan.global_size if self.mixes else samples
        divisor = LossDivisor.of(weighing, size)
        if divisor.counted:
            (total,) = lane_sum([[torch.tensor([weight], dtype=self._dtype)] for weight in weights], self.lanes)
            assert total is not None
            return float(torch.where(total > 0, divisor.value / total, 0.0)), size / samples
        return (None if size == samples else size / samples), size / samples

    @property
    def _dtype(self) -> torch.dtype:
        return self.local.precision.master_dtype

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self._dtype, device=self.local.device)


def _staged(merge: PendingUpdate, reports: Sequence[WorkReport]) -> list[tuple[str, float]]:
    """Return the gradients of an update with their weights, in the order of their steps and shards."""
    found = []
    for errand, report in zip(merge.errands, reports, strict=True):
        ticket, keys = errand.ticket, gradient_keys(report.number, len(report.weights))
        gradients = zip(ticket.shards, keys, report.weights, strict=False)  # one per shard, or one for all
        found += [((ticket.step, shard), key, weight) for shard, key, weight in gradients]
    return [(key, weight) for _, key, weight in sorted(found)]


def _try(send: Callable[[Any], None], order: Any) -> None:
    """Send; a broken connection is reported by the thread that receives from it."""
    with suppress(LinkError):
        send(order)
