"""A worker: takes an errand, reads the variables, computes its gradient, stages it at the servers, reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

from trainkit.strategies.base import Data, Status, Training
from trainkit.strategies.optimizer import Stepper
from trainkit.strategies.parameter_server.clients import Servers
from trainkit.strategies.parameter_server.errands import Errands, Order, Report, keys_of
from trainkit.strategies.parameter_server.tables import read_when_looked_up, sparse_tables
from trainkit.strategies.parameter_server.team import Computed, Team
from trainkit.strategies.parameter_server.variables import tensors_of
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
    """Computes errands with a team of its own. It keeps nothing that another worker would need.

    Args:
        team: computes; the parameters of its first replica are those of the last read.
        servers: its own links to the servers.
        data: its own access to the training data.
        training: plan, objective and update rule.
        mode: `async`: a ticket is a whole step, whose gradient is clipped here; `sync`: shards of one.
        mixes: whether an update may take shards of several steps, so that all are divided by what a full batch is.
    """

    def __init__(
        self, team: Team, servers: Servers, data: Data, training: Training, *, mode: Mode, mixes: bool = False
    ) -> None:
        self._team, self._servers, self._data, self._training = team, servers, data, training
        self._mode, self._mixes = mode, mixes
        self._replica = team.first
        self._handed_over = team.first.stepper = _HandedOver()
        self._version: int | None = None
        self._loads: int | None = None
        self._looking_up = Lock()
        self._tables = sparse_tables(team.first.model)
        for replica in team.replicas:
            read_when_looked_up(sparse_tables(replica.model), self._pull_rows)

    def run(self, errands: Errands, waits: Callable[[int], None] = lambda _step: None) -> None:
        """Compute errands until there are no more.

        Args:
            errands: where they come from.
            waits: is told the step that was computed last, whenever there may be nothing to do for long.
        """
        step = 0
        waits(step)
        while (order := errands.take()) is not None:
            errands.report(self._carry_out(order, errands))
            step = order.step
            waits(step)

    def _carry_out(self, order: Order, errands: Errands) -> Report:
        if self._replica.on_phase is not None:
            self._replica.on_phase("data", order.step)
        batches = self._data.fetch(order.ticket)
        read, mixed = self._read(order), self._servers.mixed
        errands.pulled(order.number)
        plan = self._training.plan
        computed = self._team.compute(
            order.ticket,
            batches,
            self._training,
            loss_scale=replace(self._replica.loss_scale, scale=order.scale),
            batch_size=plan.global_size if self._mixes else plan.batch_size(order.step),
        )
        return replace(self._stage(order, read, computed), mixed=mixed)

    def _read(self, order: Order) -> int:
        """Pull the variables, unless they are those that are wanted already; their version."""
        if self._mode == "async" or self._version != order.version or self._loads != order.loads:
            tensors = enumerate(tensors_of(self._replica.model))
            self._version = self._servers.pull([None if place in self._tables else one for place, one in tensors])
            self._team.refresh(frozen=self._servers.loads != self._loads)
            self._loads = self._servers.loads
        return self._version

    def _pull_rows(self, place: int, rows: Tensor) -> Tensor:
        """As the servers have them; threads of a team ask one after the other."""
        with self._looking_up:
            return self._servers.pull_rows(place, rows)

    def _stage(self, order: Order, read: int, computed: Computed) -> Report:
        replica, norm = self._replica, None
        told = Report(number=order.number, read=read, loss_sum=computed.loss_sum, weights=tuple(computed.weights))
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
                return replace(told, is_finite=False)
        for key, sums in zip(keys_of(order.number, len(computed.sums)), computed.sums, strict=True):
            self._push(key, sums, computed)
        return replace(told, norm=None if norm is None else float(norm))

    def _push(self, key: str, sums: Sequence[Tensor | None], computed: Computed) -> None:
        replica, count = self._replica, len(self._replica.params)
        grads, buffers = sums[:count], sums[count : len(sums) - int(computed.divisor.counted)]
        if self._mode == "async":
            grads = self._handed_over.grads
        elif replica.sparse and replica.numerics.reproducible:
            grads = [one.to_dense() if one is not None and one.is_sparse else one for one in grads]
        self._servers.push(key, grads, replica.buffers.in_all_places(buffers))
