"""The chief's dispatcher: it assigns work to the workers, and makes the servers apply updates of their gradients."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isfinite
from threading import Thread
from typing import Any, Final

import torch
from torch import Tensor

from trainkit.bounded import expect_map
from trainkit.errors import LinkError, TrainingError
from trainkit.strategies.base import JsonMap, LeftOut, Status, StepContext, StepOutcome
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import LossDivisor
from trainkit.strategies.parameter_server.coordinator.scheduler import PendingUpdate, WorkItem, WorkScheduler
from trainkit.strategies.parameter_server.coordinator.update_log import UpdateLog
from trainkit.strategies.parameter_server.server.aggregation import AggregationOptions
from trainkit.strategies.parameter_server.server.gradient_buffer import lane_sum
from trainkit.strategies.parameter_server.wire.client import ParameterServerClient
from trainkit.strategies.parameter_server.wire.transport import Connection
from trainkit.strategies.parameter_server.wire.work_channel import (
    LocalWorkChannel,
    WorkChannel,
    WorkOrder,
    WorkReport,
    gradient_keys,
)
from trainkit.strategies.parameter_server.worker_task import Mode

OWN: Final = "chief"
"""Name of the worker in the chief's own process."""


@dataclass(kw_only=True, eq=False)
class WorkerHandle:
    """A worker from the chief's point of view."""

    name: str
    send: Callable[[WorkOrder | None], None]
    """Function that sends a work order, or the request to end (None)."""
    cut: Callable[[], None] = lambda: None
    """Function that closes the connection."""
    order: WorkOrder | None = None
    """The current work order."""
    since: float = field(default_factory=time.monotonic)
    """Time of its assignment."""

    def give(self, order: WorkOrder | None) -> None:
        """Assign a work order, or request the end."""
        self.order, self.since = order, time.monotonic()
        self.send(order)

    def finish_order(self) -> None:
        """Record that the worker has reported and is idle."""
        self.order = None


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """A message from a worker, or its loss."""

    worker: WorkerHandle
    kind: str
    """`ready`, `pulled`, `report`, or `gone`."""
    meta: JsonMap = field(default_factory=dict)
    error: BaseException | None = None


class WorkerRegistry:
    """Workers that may join and leave; their messages arrive in one queue, for the chief's main thread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        self._own: tuple[LocalWorkChannel, Thread] | None = None

    def serve_connection(self, connection: Connection) -> None:
        """Receive from a worker in another process, on the thread of its connection, until that ends."""

        def send(order: WorkOrder | None) -> None:
            connection.send("bye") if order is None else connection.send("work", asdict(order))

        worker = WorkerHandle(name=connection.peer, send=send, cut=connection.close)
        try:
            while True:
                frame = connection.receive()
                connection.read([])
                self._events.put(WorkerEvent(worker, frame.kind, frame.meta))
        except LinkError as error:
            self._events.put(WorkerEvent(worker, "gone", error=error))

    def start_local_worker(self, work: Callable[[WorkChannel], None]) -> None:
        """Start a worker thread in this process."""
        channel = LocalWorkChannel(lambda kind, meta: self._events.put(WorkerEvent(worker, kind, meta)))
        worker = WorkerHandle(name=OWN, send=channel.orders.put)

        def run() -> None:
            try:
                work(channel)
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                self._events.put(WorkerEvent(worker, "gone", error=error))

        thread = Thread(target=run, name="chief's worker", daemon=True)
        self._own = channel, thread
        self._events.put(WorkerEvent(worker, "ready"))
        thread.start()

    def next_event(self, timeout_s: float) -> WorkerEvent | None:
        """Return the next event; None if there is none within `timeout_s`."""
        with suppress(queue.Empty):
            return self._events.get(timeout=timeout_s)
        return None

    def stop_local_worker(self) -> None:
        """Let the local worker finish its current work, and end."""
        if self._own is not None:
            channel, thread = self._own
            channel.orders.put(None)
            thread.join()
            self._own = None


_POLL_S: Final = 1.0
"""Seconds between two checks for workers that have been silent for long."""


@dataclass(kw_only=True)
class UpdateDispatcher:
    """Makes updates of staged gradients, one after the other. All methods run on the main thread."""

    local: Replica
    """The chief's model; its loss scale is adjusted here."""
    scheduler: WorkScheduler
    servers: ParameterServerClient
    """Connections to the servers."""
    registry: WorkerRegistry
    record: UpdateLog
    mode: Mode
    lanes: int | None
    """Number of lanes of the reproducible order of summation."""
    leaves_out: bool
    """Whether a step that is not finite is skipped."""
    mixes: bool
    """Whether an update may contain shards of several steps."""
    timeout_s: float
    """Seconds that a worker may take for one work item."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of updates by staleness."""
    mixed: int = 0
    """Number of gradients that were computed from variables of several versions."""
    _workers: dict[str, WorkerHandle] = field(default_factory=dict)
    _reports: dict[int, WorkReport] = field(default_factory=dict)
    _loads: int = 1

    def start_again(self, scheduler: WorkScheduler, record: UpdateLog) -> None:
        """Continue from an earlier version, which the servers have restored: the training was rolled back.

        Gradients that workers still compute for the old scheduler are discarded when they arrive.
        """
        self._drop(tuple(self.scheduler.running.values()))
        self._discard_stale()
        scheduler.number_after(self.scheduler)
        for name in self._workers:
            scheduler.join(name)
        self.scheduler, self.record = scheduler, record
        self._reports.clear()
        self._loads += 1

    def next_update(self, training: StepContext) -> StepOutcome:
        """Handle worker events until an update is ready, and make it; idle workers get work."""
        while True:
            merge = self.scheduler.next_ready_update()
            self._discard_stale()
            if merge is not None:
                outcome = self._apply_update(merge, training)
                self._hand_out()
                return outcome
            self._hand_out()
            self._report_idle()
            event = self.registry.next_event(_POLL_S)
            if event is not None:
                self._take(event)
            self._expire_silent_workers()

    def close(self) -> None:
        """Stop all workers."""
        self.registry.stop_local_worker()
        for worker in self._workers.values():
            if worker.name != OWN:
                _try(worker.give, None)
        self.record.close()

    def _report_idle(self) -> None:
        """Report `idle` while the in-process worker has no work, so that the hang detector does not blame the chief."""
        own = self._workers.get(OWN)
        if own is not None and own.order is None:
            self.local.on_phase("idle", self.scheduler.version)

    def _hand_out(self) -> None:
        for worker in list(self._workers.values()):
            item = self.scheduler.next(worker.name) if worker.order is None else None
            if item is None:
                continue
            order = WorkOrder(
                number=item.number,
                step=item.ticket.step,
                shards=item.ticket.shards,
                version=item.version,
                loads=self._loads,
                scale=self.local.loss_scale.scale,
            )
            _try(worker.give, order)  # if its connection is broken, its thread reports that

    def _take(self, event: WorkerEvent) -> None:
        """Handle one worker event. Events of workers already declared lost are ignored."""
        worker = event.worker
        if event.kind == "ready":
            self._on_worker_lost(worker.name)  # the worker reconnected before its old connection was seen to break
            self._workers[worker.name] = worker
            self.scheduler.join(worker.name)
        elif self._workers.get(worker.name) is not worker:
            return
        elif event.kind == "pulled":
            self.scheduler.pulled(expect_map(event.meta, {"number": int})["number"])
        elif event.kind == "report":
            self._on_report(worker, WorkReport.of(event.meta))
        elif event.error is not None and worker.name == OWN:
            raise event.error
        else:
            self._on_worker_lost(worker.name)

    def _on_report(self, worker: WorkerHandle, report: WorkReport) -> None:
        worker.finish_order()
        if report.number not in self.scheduler.running:  # it was computed before a rollback
            self.servers.discard_staged(gradient_keys(report.number, len(report.weights)))
            return
        self._reports[report.number] = report
        self.scheduler.report(report.number, report.read)

    def _on_worker_lost(self, name: str) -> None:
        """Remove a lost worker; its work is assigned again."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.cut()
            lost = self.scheduler.leave(name)
            self._drop(lost)

    def _expire_silent_workers(self) -> None:
        late = time.monotonic() - self.timeout_s
        for worker in list(self._workers.values()):
            if worker.order is None or worker.since > late:
                continue
            if worker.name == OWN:
                raise TrainingError(
                    f"step {worker.order.step}: no gradient within strategy.timeout_s={self.timeout_s:g}"
                )
            self._on_worker_lost(worker.name)

    def _discard_stale(self) -> None:
        """Discard the gradients that are no longer needed."""
        thrown = self.scheduler.pop_discarded()
        if thrown:
            self._drop(thrown)
            for item in thrown:
                self._reports.pop(item.number, None)

    def _drop(self, items: Iterable[WorkItem]) -> None:
        """Discard the staged gradients of work items at the servers."""
        each = self.lanes is not None
        counts = [(item.number, len(item.ticket.shards) if each else 1) for item in items]
        self.servers.discard_staged([key for number, count in counts for key in gradient_keys(number, count)])

    def _apply_update(self, merge: PendingUpdate, training: StepContext) -> StepOutcome:
        self.local.on_phase("update", merge.version)
        reports = [self._reports.pop(item.number) for item in merge.items]
        make = self._apply_one if self.mode == "async" else self._apply_sum
        status, norm = make(merge, reports, training)
        losses = sum(report.loss_sum for report in reports)
        weight = sum(weight for report in reports for weight in report.weights)
        tickets = tuple(item.ticket for item in merge.items)
        left_out = (LeftOut(merge.version, tickets),) if status is Status.skipped else ()
        names = dict.fromkeys(name for report in reports for name in report.terms)
        terms = {name: self._number(sum(report.terms.get(name, 0.0) for report in reports)) for name in names}
        outcome = StepOutcome(merge.version, status, self._number(losses), weight, norm, left_out, tickets, terms)
        if status is Status.retry:
            self.scheduler.requeue_after_overflow(merge)
            return outcome
        self.scheduler.merged(merge)
        self.record.note(merge)
        self._figure(merge, reports)
        return outcome

    def _figure(self, merge: PendingUpdate, reports: Sequence[WorkReport]) -> None:
        self.mixed += sum(report.mixed for report in reports)
        if self.mode == "async":
            self.staleness[merge.staleness] += 1
            self.local.step_metrics["staleness"] = float(merge.staleness)
        if self.scheduler.late:
            self.local.step_metrics["late_gradients"] = float(self.scheduler.late.total())

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
        """Apply the sum of shards' gradients: like `apply_update`, but on the servers."""
        scale, update = self.local.loss_scale, training.rule(merge.version)
        staged = _staged(merge, reports)
        weight_factor, buffer_factor = self._factors(merge, [weight for _, weight in staged], training)
        options = AggregationOptions(
            lanes=self.lanes,
            weight_factor=weight_factor,
            unscale=None if scale.scale == 1.0 else 1.0 / scale.scale,
            norms=update.max_norm is not None,
            check_finite=scale.moves or self.leaves_out,
            check_others=self.leaves_out,
        )
        norms = self.servers.sum([key for key, _ in staged], options, exact=self.lanes is not None)
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
        """Return the factors of gradients and buffers that workers have not applied; None: no factor."""
        plan, weighing = training.plan, training.weighing
        tickets = [item.ticket for item in merge.items]
        samples = sum(plan.shard_size(ticket.step, shard) for ticket in tickets for shard in ticket.shards)
        size = plan.global_size if self.mixes else samples
        divisor = LossDivisor.of(weighing, size)
        if divisor.counted:
            (total,) = lane_sum([[torch.tensor([weight], dtype=self._dtype)] for weight in weights], self.lanes)
            assert total is not None
            return float(divisor.factor(total)), size / samples
        return (None if size == samples else size / samples), size / samples

    @property
    def _dtype(self) -> torch.dtype:
        return self.local.precision.master_dtype

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self._dtype, device=self.local.device)


def _staged(merge: PendingUpdate, reports: Sequence[WorkReport]) -> list[tuple[str, float]]:
    """Return the gradients of an update with their weights, in the order of their steps and shards."""
    found = []
    for item, report in zip(merge.items, reports, strict=True):
        ticket, keys = item.ticket, gradient_keys(report.number, len(report.weights))
        gradients = zip(ticket.shards, keys, report.weights, strict=False)  # one per shard, or one for all
        found += [((ticket.step, shard), key, weight) for shard, key, weight in gradients]
    return [(key, weight) for _, key, weight in sorted(found)]


def _try(send: Callable[[Any], None], order: Any) -> None:
    """Send; a broken connection is reported by the thread that receives from it."""
    with suppress(LinkError):
        send(order)
