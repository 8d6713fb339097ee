"""The chief assigns work, makes the servers apply updates of the gradients, and evaluates; workers compute.

A worker receives a work order, reads the variables, computes and stages the gradient, and reports.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from threading import Lock, Thread
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor, nn

from trainkit.adapters.average import AVERAGE
from trainkit.data.reading.collate import to_device
from trainkit.errors import CheckpointError, LinkError, TrainingError
from trainkit.files import expect_map
from trainkit.numerics.batch import Ticket
from trainkit.numerics.precision import LossScale
from trainkit.strategies.base import (
    Batch,
    Data,
    Executor,
    JsonMap,
    LeftOut,
    PhaseListener,
    SetupRequest,
    StateDict,
    Status,
    StepContext,
    StepCounter,
    StepOutcome,
    ignore_phase,
)
from trainkit.strategies.core.copies import ComputingCopies, CopiesStep, Sums, ThreadWork
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.replica import Replica, replica_state, restore_replica
from trainkit.strategies.core.step import LossDivisor, ShardStep, apply_update, cloned_batch
from trainkit.strategies.model_transforms.compiling import is_compiled
from trainkit.strategies.tensors.layouts import FlatBuffer
from trainkit.strategies.traffic import sparse_tables as tables_of
from trainkit.strategies.updates.links import AddressBook, Connection
from trainkit.strategies.updates.scheduler import (
    FILE,
    PendingUpdate,
    UpdateLog,
    WorkScheduler,
    settled,
    staleness_summary,
)
from trainkit.strategies.updates.server import CHIEF, ParameterServerClient, lane_sum
from trainkit.strategies.updates.variables import tensors_of, unsaved_of

Mode = Literal["sync", "async"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOrder:
    """A work item as sent to a worker."""

    number: int
    """Number of the order; part of the name of its gradient."""
    step: int
    shards: tuple[int, ...]
    version: int
    """Version of the variables at the assignment."""
    loads: int = 1
    """Number of loads of the servers: more than one if the training was rolled back."""
    scale: float = 1.0
    """The loss scale."""

    @classmethod
    def received(cls, link: Connection) -> Self | None:
        """Receive the next work order; return None if the chief requests the end.

        Raises:
            LinkError: the connection to the chief broke, or it sent something else.
        """
        frame = link.receive()
        if frame.kind == "bye":
            return None
        try:
            return cls.of(frame.meta)
        except (TypeError, KeyError) as error:
            raise LinkError(f"{link.peer} sent {frame.kind!r} instead of a work order: {error}") from error

    @classmethod
    def of(cls, meta: JsonMap) -> Self:
        """Decode an order, from `asdict` as JSON.

        Raises:
            TypeError, KeyError: it is something else.
        """
        return cls(**{**meta, "shards": tuple(meta["shards"])})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkReport:
    """The result of a work order: its gradient is staged at the servers."""

    number: int
    read: int
    """Version of the variables from which it was computed."""
    loss_sum: float
    weights: tuple[float, ...]
    """The weights of the shards of each staged gradient: there is one gradient, or one per shard."""
    norm: float | None = None
    """The global norm of the gradient before clipping, if the worker clips."""
    status: str = Status.applied.value
    """Otherwise the gradient overflowed, or is not finite at any loss scale, and nothing is staged."""
    scale: float = 1.0
    """The loss scale of its order."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """The sums of the terms of the loss, by name."""
    mixed: bool = False
    """Whether it was computed from variables of several versions, because no attempt found all servers at one."""

    @classmethod
    def of(cls, meta: JsonMap) -> Self:
        """Decode a received report."""
        values = expect_map(meta, {"number": int, "read": int, "loss_sum": float, "weights": list, "status": str})
        Status(values["status"])
        return cls(**{**values, "weights": tuple(values["weights"])})

    @property
    def keys(self) -> list[str]:
        """The names of its gradients at the servers."""
        return gradient_keys(self.number, len(self.weights))


def gradient_keys(number: int, count: int) -> list[str]:
    """Return the names of a work item's gradients at the servers.

    Example:
        >>> gradient_keys(7, 2)
        ['7.0', '7.1']
    """
    return [f"{number}.{index}" for index in range(count)]


def sparse_tables(model: nn.Module) -> dict[int, nn.Module]:
    """Return the tables with sparse gradients, by their index among the trainable parameters.

    A table whose weight another module uses as well is excluded: that module needs the full weight.

    Example:
        >>> list(sparse_tables(nn.Sequential(nn.Linear(2, 2), nn.Embedding(9, 2, sparse=True))))
        [2]
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    index_of = {id(param): index for index, param in enumerate(trained)}
    return {index_of[id(table.weight)]: table for table in tables_of(model).values()}


def read_when_looked_up(model: nn.Module, pull_rows: Callable[[int, Tensor], Tensor]) -> None:
    """Pull the rows that a table with sparse gradients needs before each of its lookups, outside of compiled code."""

    def reader(index: int) -> Callable[..., None]:
        @torch.no_grad()
        def read(table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows = torch.unique(args[0] if args else kwargs["input"])
            weight = table.weight.data
            weight[rows] = pull_rows(index, rows).to(weight)

        return torch.compiler.disable(read) if is_compiled(model) else read  # type: ignore[no-untyped-call]

    for index, table in sparse_tables(model).items():
        table.register_forward_pre_hook(reader(index), with_kwargs=True)


class GradientCapture(OptimizerStepper):
    """Replaces an optimizer and captures the gradients, which are sent to the servers."""

    def __init__(self) -> None:
        self.grads: Sequence[Tensor | None] = ()

    def step(self, grads: Sequence[Tensor | None], lr_factor: float) -> None:
        """Store the gradients; the learning rate is that of the version at which they are applied."""
        del lr_factor
        self.grads = grads


class OrderWorker(ABC):
    """Executes work orders. It keeps no state that another worker would need.

    Args:
        replica: the replica, which has the parameters of the last pull.
        mode: `async`: a ticket is a whole step, whose gradient is clipped here; `sync`: shards of a step.
    """

    def __init__(self, replica: Replica, data: Data, training: StepContext, *, mode: Mode) -> None:
        self._replica, self._data, self._training, self._mode = replica, data, training, mode
        self._captured = GradientCapture()
        replica.use_stepper(self._captured)
        self._read = -1, 0, False
        """Version of the variables here, number of loads of the servers, and whether there are several versions."""

    def run(self, link: Connection | None, on_phase: PhaseListener = ignore_phase) -> None:
        """Execute work orders until there are no more.

        Args:
            link: the connection to the chief; None: another process of this worker has it.
            on_phase: receives (`idle`, the last computed step), whenever there may be no work for a long time.
        """
        if link is not None:
            link.send("ready")
        on_phase("idle", 0)
        while (order := self._next(link)) is not None:
            report = self._execute(order)
            if link is not None:
                link.send("report", asdict(report))
            on_phase("idle", order.step)

    def _execute(self, order: WorkOrder) -> WorkReport:
        replica, training, ticket = self._replica, self._training, Ticket(order.step, order.shards)
        replica.on_phase("data", order.step)
        batches = self._data.fetch(self._share(ticket))
        if self._mode == "async" or self._read[:2] != (order.version, order.loads):
            self._read = self._pull()
        read, _, mixed = self._read
        scale = replace(replica.precision.loss_scale(), scale=order.scale)  # the chief knows the overflows before
        works, names = self._compute(ticket, batches, scale), training.objective.term_names
        numbers = [
            sum(float(work.loss_sum) for work, _ in works if work.loss_sum is not None),
            *(sum(float(work.terms.get(name, 0.0)) for work, _ in works) for name in names),
            *(float(work.weight) for work, _ in works),
        ]
        loss_sum, *rest = self._summed(numbers)
        terms, weights = dict(zip(names, rest, strict=False)), rest[len(names) :]
        divisor = works[0][0].divisor
        report = WorkReport(
            number=order.number,
            read=read,
            loss_sum=loss_sum,
            weights=tuple(weights),
            terms=terms,
            mixed=mixed,
            scale=order.scale,
        )
        if self._mode == "async":
            loss = torch.full((), loss_sum, device=replica.device)  # written by a kernel, without a copy
            status, norm = apply_update(replica, works[0][1], divisor, training.rule(read), loss_sum=loss)
            if status is not Status.applied:
                return replace(report, status=status.value)
            report = replace(report, norm=None if norm is None else float(norm))
        for key, (_, sums) in zip(report.keys, works, strict=True):
            count = len(replica.params)
            buffers = sums[count : len(sums) - int(divisor.counted)]
            self._push(key, self._captured.grads if self._mode == "async" else sums[:count], buffers)
        return report

    def _next(self, link: Connection | None) -> WorkOrder | None:
        """Wait for the next order; None: there are no more."""
        return None if link is None else WorkOrder.received(link)

    def _share(self, ticket: Ticket) -> Ticket:
        """Return the part of a ticket that this process computes."""
        return ticket

    def _summed(self, numbers: list[float]) -> list[float]:
        """Return the sums of numbers over the processes of this worker."""
        return numbers

    @abstractmethod
    def _pull(self) -> tuple[int, int, bool]:
        """Pull the variables, untrained ones only after another load of the servers; return what `_read` describes."""

    @abstractmethod
    def _compute(self, ticket: Ticket, batches: Sequence[Batch], scale: LossScale) -> list[tuple[ShardStep, Sums]]:
        """Compute forward and backward of a ticket, of which this process has the batches of its share.

        Returns:
            A step with its sums; in a reproducible run one for each shard, in their order.
        """

    @abstractmethod
    def _push(self, key: str, grads: Sequence[Tensor | None], buffers: Sequence[Tensor | None]) -> None:
        """Stage a gradient at the servers."""


class Worker(OrderWorker):
    """A worker of one process, with a whole replica for each of its devices.

    Source: replicas within a worker of tf.distribute.ParameterServerStrategy; in-graph replication, Abadi et al. 2016,
    arXiv:1605.08695, section 4.4.

    Args:
        copies: the replicas, which share the shards of an order; the first has the parameters of the last pull.
        mode: `async`: a ticket is a whole step, whose gradient is clipped here; `sync`: shards of a step.
        mixes: whether an update may contain shards of several steps, so that all are divided by the size of a full
            batch.
    """

    def __init__(
        self,
        copies: ComputingCopies,
        servers: ParameterServerClient,
        data: Data,
        training: StepContext,
        *,
        mode: Mode,
        mixes: bool,
    ) -> None:
        super().__init__(copies.source, data, training, mode=mode)
        self._copies, self._servers, self._mixes = copies, servers, mixes
        self._row_lock = Lock()
        self._tables = sparse_tables(copies.source.model)
        for replica in copies.copies:
            read_when_looked_up(replica.model, self._pull_rows)

    def _pull(self) -> tuple[int, int, bool]:
        servers, tensors = self._servers, enumerate(tensors_of(self._replica.model))
        version = servers.pull([None if index in self._tables else tensor for index, tensor in tensors])
        self._copies.refresh(frozen=servers.loads != self._read[1])
        return version, servers.loads, servers.mixed

    def _pull_rows(self, index: int, rows: Tensor) -> Tensor:
        """Return current rows from the servers; threads of the replicas call one after the other."""
        with self._row_lock:
            return self._servers.pull_rows(index, rows)

    def _compute(self, ticket: Ticket, batches: Sequence[Batch], scale: LossScale) -> list[tuple[ShardStep, Sums]]:
        plan, copies, count = self._training.plan, self._copies, len(self._copies.copies)
        size = plan.global_size if self._mixes else plan.batch_size(ticket.step)
        copies.set_loss_scale(scale)
        if not self._replica.numerics.reproducible:
            work = CopiesStep(self._replica, ticket, batches, self._training, size, copies=copies)
            return [(work, work.run())]
        works = []
        for index, (shard, batch) in enumerate(zip(ticket.shards, batches, strict=True)):
            copy = copies.copies[index % count]
            cloned = [cloned_batch(to_device(batch, copy.device))]
            works.append(ThreadWork(copy, Ticket(ticket.step, (shard,)), cloned, self._training, size))
        copies.agree(works[0])
        copies.compute([works[index::count] for index in range(count)])
        return [(work, work.lane_sums[0][1]) for work in works]

    def _push(self, key: str, grads: Sequence[Tensor | None], buffers: Sequence[Tensor | None]) -> None:
        replica = self._replica
        if self._mode == "sync" and replica.sparse and replica.numerics.reproducible:
            grads = [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]
        self._servers.push(key, grads, replica.buffers.for_all_names(buffers))


_POLL_S: Final = 1.0
"""Seconds between two checks for workers that have been silent for long."""


class Chief(Executor):
    """The chief's process: the model that is evaluated, the workers, and the updates.

    Messages of workers arrive in one queue; all methods run on the main thread. Another thread is a worker as in other
    processes.

    Args:
        eval_model: the model that is evaluated; its loss scale is adjusted here.
        servers: the connections to the servers.
        work: runs the chief's own worker, on a thread; None: it has none.
        mixes: whether an update may contain shards of several steps.
        timeout_s: seconds that a worker may take for one work item.
    """

    def __init__(
        self,
        request: SetupRequest,
        eval_model: Replica,
        addresses: AddressBook,
        servers: ParameterServerClient,
        *,
        scheduler: WorkScheduler,
        work: Callable[[], None] | None,
        mode: Mode,
        mixes: bool,
        timeout_s: float,
    ) -> None:
        self._request, self._eval_model, self._training = request, eval_model, request.training
        self._addresses, self._servers, self._listener = addresses, servers, addresses.listener(CHIEF)
        self._scheduler, self._mode, self._mixes, self._timeout_s = scheduler, mode, mixes, timeout_s
        numerics = eval_model.numerics
        self._lanes = numerics.lanes if numerics.reproducible else 0
        """Lanes of the reproducible order of summation; 0: the order is free."""
        self._thread = Thread(target=self._run_worker, args=(work,), name="chief's worker", daemon=True)
        self._events = queue.SimpleQueue[tuple[Connection | None, WorkReport | BaseException | None]]()
        """Messages of workers, None: it is ready; and the error of the chief's own."""
        self._workers: dict[str, Connection] = {}
        self._orders: dict[str, tuple[WorkOrder, float]] = {}
        """The current work of each busy worker, and the time of its assignment."""
        self._reports: dict[int, WorkReport] = {}
        """The gradients that wait at the servers, by number."""
        self._log = UpdateLog(None, 0)
        self._recalled: JsonMap = {}
        """The assigned work in a checkpoint."""
        self._loads = 0
        """Number of loads of the servers; 0 before the first ticket."""
        self._eval_version = 0
        """The version of the evaluated model."""
        self._shows_averages = False
        """Whether the evaluated model holds averages."""
        self._mixed = 0
        """Number of gradients that were computed from variables of several versions."""

    @property
    def local(self) -> Replica:
        """The model that is evaluated."""
        return self._eval_model

    def assign(self, step: int) -> tuple[int, ...]:
        """Return an empty tuple: shards are assigned to idle workers."""
        del step
        return ()

    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:
        """Send the servers the variables, again after a rollback; yield empty tickets: each waits for an update."""
        version, folder = position.step, self._request.folder
        try:
            self._scheduler.recall(self._recalled, version, until)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"meta.json does not hold the assigned steps: {error}.") from None
        local = self._eval_model
        self._servers.load_state({**replica_state(local), **unsaved_of(local.model)}, version=version)
        self._eval_version, self._loads = version, self._loads + 1
        self._reports.clear()
        self._log.close()
        self._log = UpdateLog(None if folder is None else folder / FILE, version)
        while True:
            yield Ticket(position.step, ())

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Handle messages of workers until an update is ready, and make it; idle workers get work."""
        del ticket, batches
        if self._thread.ident is None:
            self._listener.serve(self._listen)
            self._addresses.publish(CHIEF, self._listener.address)
            self._thread.start()
        while True:
            update = self._scheduler.next_ready_update()
            outcome = None if update is None else self._apply(update)
            self._assign_work()
            if outcome is not None:
                return outcome
            if CHIEF in self._workers and CHIEF not in self._orders:  # else the hang detector blames the chief
                self._eval_model.on_phase("idle", self._scheduler.version)
            with suppress(queue.Empty):
                self._take(*self._events.get(timeout=_POLL_S))
            self._expire_silent_workers()

    def refresh_model(self) -> None:
        """Read the variables into the model for evaluation."""
        if self._eval_version != self._scheduler.version:
            self._servers.pull(tensors_of(self._eval_model.model))
            self._eval_version = self._scheduler.version

    def swap_averages(self) -> bool:
        """Read the averages from the servers into the model for evaluation; if they are there already, read the
        variables again.
        """
        if self._shows_averages:
            self._shows_averages, self._eval_version = False, -1
            self.refresh_model()
            return True
        state, params = self.state_dict(), self._eval_model.params
        averages = {name: state[key] for name in params if (key := f"optimizer/{AVERAGE}/{name}") in state}
        with torch.no_grad():
            for name, average in averages.items():
                params[name].copy_(average)
        self._shows_averages = bool(averages)
        return self._shows_averages

    def state_dict(self) -> StateDict:
        """Return the state of the servers; before the first step, the state that they will load."""
        if self._thread.ident is None:
            return replica_state(self._eval_model)
        self._log.flush()
        return self._servers.state()

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a checkpoint; the servers load it before the next step."""
        restore_replica(self._eval_model, state)

    def state_dict_extra(self) -> JsonMap:
        """Return the work that is assigned and not applied."""
        return self._scheduler.remember() if self._loads else self._recalled

    def load_state_extra(self, extra: JsonMap) -> None:
        """Assign this work again, before any other."""
        self._recalled = dict(extra)

    def result_extra(self) -> JsonMap:
        """Return the staleness of the updates, and the number of late gradients."""
        extra: dict[str, object] = {}
        if self._mode == "async" and self._log.staleness:
            extra["staleness"] = staleness_summary(self._log.staleness)
        if self._scheduler.late:
            extra["late_gradients"] = dict(sorted(self._scheduler.late.items()))
        if self._mixed:
            extra["mixed_reads"] = self._mixed
        return extra

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - other tasks wait for no exchange
        """End the other tasks, and close all connections."""
        self._addresses.end()
        for link in self._workers.values():
            with suppress(LinkError):
                link.send("bye")
        with suppress(LinkError):
            self._servers.shutdown()
        self._servers.close()
        self._listener.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._log.close()

    def _run_worker(self, work: Callable[[], None] | None) -> None:
        try:
            if work is not None:
                work()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._events.put((None, error))

    def _listen(self, link: Connection) -> None:
        """Receive from a worker, on the thread of its connection, until that ends."""
        try:
            while True:
                frame = link.receive()
                link.tensors(0)
                self._events.put((link, None if frame.kind == "ready" else WorkReport.of(frame.meta)))
        except (LinkError, TypeError, ValueError) as error:
            self._events.put((link, error))

    def _take(self, link: Connection | None, message: WorkReport | BaseException | None) -> None:
        """Handle one message. Those of workers already declared lost are ignored."""
        if link is None:
            assert isinstance(message, BaseException)
            raise message
        if message is None:
            self._remove_worker(link.peer)  # the worker reconnected before its old connection was seen to break
            self._workers[link.peer] = link
            self._scheduler.join(link.peer)
        elif self._workers.get(link.peer) is not link:
            return
        elif isinstance(message, BaseException):
            self._remove_worker(link.peer)
        else:
            self._orders.pop(link.peer, None)
            if self._scheduler.report(message.number, link.peer, message.read):
                self._reports[message.number] = message
            else:
                self._servers.discard_staged(message.keys)

    def _assign_work(self) -> None:
        for name, link in self._workers.items():
            item = None if name in self._orders else self._scheduler.next(name)
            if item is not None:
                order = WorkOrder(
                    number=item.number,
                    step=item.ticket.step,
                    shards=item.ticket.shards,
                    version=item.version,
                    loads=self._loads,
                    scale=self._eval_model.loss_scale.scale,
                )
                self._orders[name] = order, time.monotonic()
                with suppress(LinkError):  # the thread that receives from a broken connection reports that
                    link.send("work", asdict(order))

    def _remove_worker(self, name: str) -> None:
        """Remove a lost worker; its work is assigned again."""
        link, (order, _) = self._workers.pop(name, None), self._orders.pop(name, (None, 0.0))
        if link is not None:
            link.close()
            self._scheduler.leave(name)
        if order is not None:
            count = len(order.shards) if self._lanes else 1
            self._servers.discard_staged(gradient_keys(order.number, count))

    def _expire_silent_workers(self) -> None:
        now = time.monotonic()
        silent = {name: order for name, (order, since) in self._orders.items() if now - since > self._timeout_s}
        if silent:
            self._servers.check()  # where a server does not answer, its workers wait, and it is the one to be named
        for name, order in silent.items():
            if name == CHIEF:
                reason = f"no gradient within strategy.timeout_s={self._timeout_s:g}"
                raise TrainingError(f"step {order.step}: {reason}")
            self._remove_worker(name)

    def _apply(self, update: PendingUpdate) -> StepOutcome:
        scheduler, local = self._scheduler, self._eval_model
        local.on_phase("update", update.version)
        reports = [self._reports.pop(item.number) for item in update.items]
        status, norm = (self._apply_one if self._mode == "async" else self._apply_sum)(update, reports)
        loss_sum = self._number(sum(report.loss_sum for report in reports))
        weight = sum(weight for report in reports for weight in report.weights)
        left_out = (LeftOut(update.version, update.tickets),) if status is Status.skipped else ()
        names = self._training.objective.term_names
        terms = {name: self._number(sum(report.terms.get(name, 0.0) for report in reports)) for name in names}
        if status is Status.retry:
            scheduler.requeue_after_overflow(update)
        else:
            scheduler.merged(update)
            self._log.note(update)
            self._mixed += sum(report.mixed for report in reports)
            if self._mode == "async":
                local.step_metrics["staleness"] = float(update.staleness)
            if scheduler.late:
                local.step_metrics["late_gradients"] = float(scheduler.late.total())
        return StepOutcome(update.version, status, loss_sum, weight, norm, left_out, update.tickets, terms)

    def _apply_one(self, update: PendingUpdate, reports: list[WorkReport]) -> tuple[Status, Tensor | None]:
        """Apply one gradient that its worker has already unscaled and clipped."""
        (report,), decision, local = reports, update.decision, self._eval_model
        worker_status, leaves_out = Status(report.status), self._leaves_out
        status, scale = settled(local.loss_scale, report.scale, worker_status, leaves_out=leaves_out)
        local.set_loss_scale(scale)
        if status is not Status.applied:
            return status, None
        lr_factor = self._lr_factor(update.version) / decision.lr_divisor
        self._servers.apply(version=update.version + 1, lr_factor=lr_factor, factor=decision.factor, keys=report.keys)
        return status, None if report.norm is None else self._number(report.norm)

    def _apply_sum(self, update: PendingUpdate, reports: list[WorkReport]) -> tuple[Status, Tensor | None]:
        """Apply the sum of shards' gradients: like `apply_update`, but on the servers."""
        local, rule, leaves_out = self._eval_model, self._training.rule(update.version), self._leaves_out
        scale = local.loss_scale
        # one gradient per shard, or one for all; a worker takes neighbouring shards, so these are in their order
        keys = [key for report in reports for key in report.keys]
        factors, buffer_factor = self._factors(update, [weight for report in reports for weight in report.weights])
        sums = self._servers.sum(
            keys,
            lanes=self._lanes,
            factors=factors if scale.scale == 1.0 else [*factors, 1.0 / scale.scale],
            checks=scale.moves or leaves_out,
            norms=rule.max_norm is not None,
        )
        is_lost = leaves_out and not (sums.others_finite and all(isfinite(report.loss_sum) for report in reports))
        sum_status = Status.skipped if is_lost else Status.applied if sums.finite else Status.retry
        status, after = settled(scale, scale.scale, sum_status, leaves_out=leaves_out)
        local.set_loss_scale(after)
        if status is not Status.applied:
            return status, None
        norm, factor = None, 1.0
        if rule.max_norm is not None:
            norm = sums.norm
            factor = float(torch.clamp(rule.max_norm / (norm + 1e-6), max=1.0))
        self._servers.apply(
            version=update.version + 1,
            lr_factor=self._lr_factor(update.version),
            factor=factor,
            buffer_factor=buffer_factor,
        )
        return status, norm

    def _factors(self, update: PendingUpdate, weights: list[float]) -> tuple[list[float], float]:
        """Return the factors of gradients, and the factor of buffers, that workers have not applied."""
        plan = self._training.plan
        samples = sum(plan.shard_size(ticket.step, shard) for ticket in update.tickets for shard in ticket.shards)
        size = plan.global_size if self._mixes else samples
        divisor = LossDivisor.of(self._training.weighing, size)
        if divisor.counted:
            packing = FlatBuffer([torch.Size([1])], self._eval_model.precision.master_dtype, torch.device("cpu"))
            counts = [[torch.tensor([weight], dtype=packing.dtype)] for weight in weights]
            (total,) = lane_sum(counts, self._lanes, packing)
            assert total is not None
            return [float(divisor.factor(total))], size / samples
        return ([] if size == samples else [size / samples]), size / samples

    def _lr_factor(self, version: int) -> float:
        """Return the factor of the learning rate; servers know those of several optimizers."""
        return 1.0 if self._request.optimizers else self._training.rule(version).lr_factor

    @property
    def _leaves_out(self) -> bool:
        return self._eval_model.numerics.leaves_out

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self._eval_model.precision.master_dtype, device=self._eval_model.device)
