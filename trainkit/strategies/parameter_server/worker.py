"""A worker: takes an errand, reads the variables, computes its gradient, stages it at the servers, reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from trainkit.strategies.base import Data, Status, Training
from trainkit.strategies.forward_backward import Divisor, StepWork
from trainkit.strategies.optimizer import Stepper
from trainkit.strategies.parameter_server.clients import Servers
from trainkit.strategies.parameter_server.errands import Errands, Order, Report
from trainkit.strategies.parameter_server.tables import read_when_looked_up, sparse_tables
from trainkit.strategies.parameter_server.variables import tensors_of
from trainkit.strategies.replica import Replica
from trainkit.strategies.update import apply_update

__all__ = ["Mode", "Worker"]

Mode = Literal["sync", "async"]


class _HandedOver(Stepper):
    """Stands where other strategies have their optimizer: what it would step with goes to the servers."""

    def __init__(self) -> None:
        self.grads: Sequence[Tensor | None] = ()

    def step(self, grads: Sequence[Tensor | None], lr_factor: float) -> None:
        """Keep the gradients; the rate is that of the version at which they are applied."""
        del lr_factor
        self.grads = grads


class Worker:
    """Computes errands with a replica of its own. It keeps nothing that another worker would need.

    Args:
        replica: computes; its parameters are those of the last read.
        servers: its own links to the servers.
        data: its own access to the training data.
        training: plan, objective and update rule.
        mode: `async`: a ticket is a whole step, whose gradient is clipped here; `sync`: a shard of one.
        mixes: whether an update may take shards of several steps, so that all are divided by what a full batch is.
    """

    def __init__(
        self, replica: Replica, servers: Servers, data: Data, training: Training, *, mode: Mode, mixes: bool = False
    ) -> None:
        self._replica, self._servers, self._data, self._training = replica, servers, data, training
        self._mode, self._mixes = mode, mixes
        self._handed_over = replica.stepper = _HandedOver()
        self._version: int | None = None
        self._tables = sparse_tables(replica.model)
        read_when_looked_up(self._tables, servers.pull_rows)

    def run(self, errands: Errands, waits: Callable[[int], None] = lambda _step: None) -> None:
        """Compute errands until there are no more.

        Args:
            errands: where they come from.
            waits: is told the step that was computed last, whenever there may be nothing to do for long.
        """
        step = 0
        waits(step)
        while (order := errands.take()) is not None:
            errands.report(self._compute(order, errands))
            step = order.step
            waits(step)

    def _compute(self, order: Order, errands: Errands) -> Report:
        replica = self._replica
        if replica.on_phase is not None:
            replica.on_phase("data", order.step)
        batches = self._data.fetch(order.ticket)
        read = self._read(order)
        errands.pulled(order.number)
        replica.loss_scale = replace(replica.loss_scale, scale=order.scale)
        work = self._work(order, batches)
        if replica.packing is None:
            work.discover()
        if replica.buffers.names:
            replica.buffers.begin_step()
        ((_, sums),) = work.partials()
        return self._stage(order, read, work, sums)

    def _read(self, order: Order) -> int:
        """Pull the variables, unless they are those that are wanted already; their version."""
        if self._mode == "async" or self._version != order.version:
            tensors = enumerate(tensors_of(self._replica.model))
            self._version = self._servers.pull([None if place in self._tables else one for place, one in tensors])
        return self._version

    def _work(self, order: Order, batches: Sequence[Any]) -> StepWork:
        work = StepWork(self._replica, order.ticket, batches, self._training)
        if self._mixes:
            work.batch_size = self._training.plan.global_size
            work.divisor = Divisor.of(self._training.weighing, work.batch_size)
        return work

    def _stage(self, order: Order, read: int, work: StepWork, sums: Sequence[Tensor | None]) -> Report:
        replica, norm = self._replica, None
        count = len(replica.params)
        grads, buffers = sums[:count], sums[count : len(sums) - int(work.divisor.counted)]
        assert work.loss_sum is not None
        told = Report(number=order.number, read=read, loss_sum=float(work.loss_sum), weight=float(work.weight))
        if self._mode == "async":
            status, norm = apply_update(replica, sums, work.divisor, self._training.rule(read))
            if status is not Status.applied:
                return replace(told, is_finite=False)
            grads = self._handed_over.grads
        elif replica.sparse and replica.numerics.reproducible:
            grads = [one.to_dense() if one is not None and one.is_sparse else one for one in grads]
        self._servers.push(order.key, grads, replica.buffers.in_all_places(buffers))
        return replace(told, norm=None if norm is None else float(norm))
