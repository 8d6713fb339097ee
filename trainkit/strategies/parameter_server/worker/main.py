"""The worker: it takes a work order, reads the variables, computes the gradient, stages it at the servers,
and reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from trainkit.strategies.base import Data, Status, StepContext
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.update import apply_update
from trainkit.strategies.parameter_server.wire.client import ParameterServerClient
from trainkit.strategies.parameter_server.wire.variables import tensors_of
from trainkit.strategies.parameter_server.wire.work_channel import WorkChannel, WorkOrder, WorkReport, gradient_keys
from trainkit.strategies.parameter_server.worker.replicas import Computed, WorkerReplicas
from trainkit.strategies.parameter_server.worker.sparse_embeddings import read_when_looked_up, sparse_tables

__all__ = ["Mode", "Worker"]

Mode = Literal["sync", "async"]


class GradientCapture(OptimizerStepper):
    """Takes the place of an optimizer: it captures the gradients, which are sent to the servers."""

    def __init__(self) -> None:
        self.grads: Sequence[Tensor | None] = ()

    def step(self, grads: Sequence[Tensor | None], lr_factor: float) -> None:
        """Store the gradients; the learning rate is that of the version at which they are applied."""
        del lr_factor
        self.grads = grads


class Worker:
    """Executes work orders with its own replicas. It keeps no state that another worker would need.

    Args:
        team: the replicas; the parameters of the first are those of the last read.
        servers: its own connections to the servers.
        data: its own access to the training data.
        training: plan, objective and update rule.
        mode: `async`: a ticket is a whole step, whose gradient is clipped here; `sync`: shards of one.
        mixes: whether an update may contain shards of several steps, so that all are divided by the size of a full
            batch.
    """

    def __init__(
        self,
        team: WorkerReplicas,
        servers: ParameterServerClient,
        data: Data,
        training: StepContext,
        *,
        mode: Mode,
        mixes: bool = False,
    ) -> None:
        self._team, self._servers, self._data, self._training = team, servers, data, training
        self._mode, self._mixes = mode, mixes
        self._replica = team.first
        self._captured = GradientCapture()
        team.first.use_stepper(self._captured)
        self._version: int | None = None
        self._loads: int | None = None
        self._row_lock = Lock()
        self._tables = sparse_tables(team.first.model)
        for replica in team.replicas:
            read_when_looked_up(sparse_tables(replica.model), self._pull_rows)

    def run(self, channel: WorkChannel, waits: Callable[[int], None] = lambda _step: None) -> None:
        """Execute work orders until there are no more.

        Args:
            channel: the channel to the chief.
            waits: receives the last computed step, whenever there may be no work for a long time.
        """
        step = 0
        waits(step)
        while (order := channel.take()) is not None:
            channel.report(self._execute(order, channel))
            step = order.step
            waits(step)

    def _execute(self, order: WorkOrder, channel: WorkChannel) -> WorkReport:
        self._replica.on_phase("data", order.step)
        batches = self._data.fetch(order.ticket)
        read, mixed = self._read(order), self._servers.mixed
        channel.pulled(order.number)
        plan = self._training.plan
        computed = self._team.compute(
            order.ticket,
            batches,
            self._training,
            loss_scale=replace(self._replica.loss_scale, scale=order.scale),
            batch_size=plan.global_size if self._mixes else plan.batch_size(order.step),
        )
        return replace(self._stage(order, read, computed), mixed=mixed)

    def _read(self, order: WorkOrder) -> int:
        """Pull the variables, unless the required ones are present already; return their version."""
        if self._mode == "async" or self._version != order.version or self._loads != order.loads:
            tensors = enumerate(tensors_of(self._replica.model))
            self._version = self._servers.pull([None if place in self._tables else one for place, one in tensors])
            self._team.refresh(frozen=self._servers.loads != self._loads)
            self._loads = self._servers.loads
        return self._version

    def _pull_rows(self, place: int, rows: Tensor) -> Tensor:
        """Return current rows from the servers; threads of the replicas call one after the other."""
        with self._row_lock:
            return self._servers.pull_rows(place, rows)

    def _stage(self, order: WorkOrder, read: int, computed: Computed) -> WorkReport:
        replica, norm = self._replica, None
        report = WorkReport(number=order.number, read=read, loss_sum=computed.loss_sum, weights=tuple(computed.weights))
        if self._mode == "async":
            (sums,) = computed.sums
            status, norm = apply_update(
                replica,
                sums,
                computed.divisor,
                self._training.rule(read),
                loss_sum=torch.tensor(computed.loss_sum, device=replica.device),
            )
            if status is not Status.applied:
                return replace(report, is_finite=False)
        for key, sums in zip(gradient_keys(order.number, len(computed.sums)), computed.sums, strict=True):
            self._push(key, sums, computed)
        return replace(report, norm=None if norm is None else float(norm))

    def _push(self, key: str, sums: Sequence[Tensor | None], computed: Computed) -> None:
        replica, count = self._replica, len(self._replica.params)
        grads, buffers = sums[:count], sums[count : len(sums) - int(computed.divisor.counted)]
        if self._mode == "async":
            grads = self._captured.grads
        elif replica.sparse and replica.numerics.reproducible:
            grads = [one.to_dense() if one is not None and one.is_sparse else one for one in grads]
        self._servers.push(key, grads, replica.buffers.in_all_places(buffers))
