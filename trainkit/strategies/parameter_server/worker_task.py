"""The worker: it receives a work order, reads the variables, computes and stages the gradient, and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainkit.data.reading.collate import to_device
from trainkit.numerics.batch import Ticket, shards_of_rank
from trainkit.numerics.precision import LossScale
from trainkit.strategies.base import Batch, Data, Status, StepContext
from trainkit.strategies.core.copies import ComputingCopies, Sums, ThreadWork, computing_copy, total_of
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import LossDivisor, cloned_batch
from trainkit.strategies.core.update import apply_update
from trainkit.strategies.model_transforms import is_compiled
from trainkit.strategies.parameter_server.wire.client import ParameterServerClient
from trainkit.strategies.parameter_server.wire.variable_shards import tensors_of
from trainkit.strategies.parameter_server.wire.work_channel import WorkChannel, WorkOrder, WorkReport, gradient_keys
from trainkit.strategies.traffic.tables import sparse_tables as tables_of


def sparse_tables(model: nn.Module) -> dict[int, nn.Module]:
    """Return the tables with sparse gradients, by their index among the trainable parameters.

    A table whose weight another module uses as well is excluded: that module needs the full weight.

    Example:
        >>> list(sparse_tables(nn.Sequential(nn.Linear(2, 2), nn.Embedding(9, 2, sparse=True))))
        [2]
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    places = {id(param): place for place, param in enumerate(trained)}
    return {places[id(table.weight)]: table for table in tables_of(model).values()}


def read_when_looked_up(model: nn.Module, pull_rows: Callable[[int, Tensor], Tensor]) -> None:
    """Pull the rows that a table with sparse gradients needs before each of its lookups, outside of compiled code."""
    compiles = is_compiled(model)
    for place, table in sparse_tables(model).items():
        read = _reader(place, pull_rows)
        table.register_forward_pre_hook(torch.compiler.disable(read) if compiles else read, with_kwargs=True)  # type: ignore[no-untyped-call]


def _reader(place: int, pull_rows: Callable[[int, Tensor], Tensor]) -> Callable[..., None]:
    @torch.no_grad()
    def read(table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = torch.unique(args[0] if args else kwargs["input"])
        weight = table.weight.data
        weight[rows] = pull_rows(place, rows).to(weight)

    return read


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """The result of a work order."""

    sums: list[Sums]
    """Sums of all shards together, or of each shard if the order of summation is reproducible."""
    weights: list[float]
    """Weights of the shards of each sum."""
    divisor: LossDivisor
    """The divisor of the loss."""
    loss_sum: float
    terms: dict[str, float]
    """The sums of the terms of the loss, by name."""


class WorkerReplicas(ComputingCopies):
    """The replicas of a worker: a given one, which holds the variables read from the servers, and copies of it.

    Args:
        devices: devices of all replicas, that of the given one first.

    Source: replicas within a worker of tf.distribute.ParameterServerStrategy; in-graph replication, Abadi et al. 2016,
    arXiv:1605.08695, section 4.4.
    """

    def __init__(self, first: Replica, devices: Sequence[torch.device]) -> None:
        more = [computing_copy(first, device, shares=device == first.device) for device in devices[1:]]
        super().__init__(first, [first, *more])
        self._is_ordered = first.numerics.reproducible

    def compute(
        self, ticket: Ticket, batches: Sequence[Batch], training: StepContext, *, loss_scale: LossScale, batch_size: int
    ) -> Computed:
        """Compute forward and backward of the shards of a work order."""
        self.set_loss_scale(loss_scale)
        shares = [self._share(rank, ticket, batches, training, batch_size) for rank in range(len(self.copies))]
        works = {place: work for share in shares for place, work in share.items()}
        if self.source.packing is None:
            works[0].agree_on_grad_layout()
            self.settle(self.source)
        in_turn = self.may_compile((rank, work.batches) for rank, share in enumerate(shares) for work in share.values())
        found = self.run(self._sums_of, shares, in_turn=in_turn)
        by_place = {place: sums for share in found for place, sums in share.items()}
        places = sorted(works)
        sums = [by_place[place] for place in places]
        weights = [float(works[place].weight) for place in places]
        losses = [works[place].loss_sum for place in places]
        if not self._is_ordered:
            weights, sums = [sum(weights)], [total_of(sums)]
        loss_sum = sum(float(loss) for loss in losses if loss is not None)
        terms: dict[str, float] = {}
        for name, term in chain.from_iterable(works[place].terms.items() for place in places):
            terms[name] = terms.get(name, 0.0) + float(term)
        return Computed(sums=sums, weights=weights, divisor=works[0].divisor, loss_sum=loss_sum, terms=terms)

    def _share(
        self, rank: int, ticket: Ticket, batches: Sequence[Batch], training: StepContext, batch_size: int
    ) -> dict[int, ThreadWork]:
        """Return the work of each replica, by the position of its first shard in the ticket.

        Replicas take the shards in turn. With a reproducible order of summation each shard is a separate work.
        """
        replica, found = self.copies[rank], {}
        own = shards_of_rank(len(batches), rank=rank, num_ranks=len(self.copies), lanes=None)
        for places in [own] if own and not self._is_ordered else [(place,) for place in own]:
            given = Ticket(ticket.step, tuple(ticket.shards[place] for place in places))
            own_batches = [to_device(batches[place], replica.device) for place in places]
            if self._is_ordered:
                own_batches = [cloned_batch(batch) for batch in own_batches]
            found[places[0]] = ThreadWork(replica, given, own_batches, training, batch_size)
        return found

    def _sums_of(self, works: Mapping[int, ThreadWork]) -> dict[int, Sums]:
        """Compute the work items of one thread, one after the other; return their sums on the first replica's
        device.
        """
        return {place: work.sums(self.source.device)[0][1] for place, work in works.items()}


Mode = Literal["sync", "async"]


class GradientCapture(OptimizerStepper):
    """Replaces an optimizer and captures the gradients, which are sent to the servers."""

    def __init__(self) -> None:
        self.grads: Sequence[Tensor | None] = ()

    def step(self, grads: Sequence[Tensor | None], lr_factor: float) -> None:
        """Store the gradients; the learning rate is that of the version at which they are applied."""
        del lr_factor
        self.grads = grads


class Worker:
    """Executes work orders with its own replicas. It keeps no state that another worker would need.

    Args:
        replicas: the replicas; the first has the parameters of the last pull.
        mode: `async`: a ticket is a whole step, whose gradient is clipped here; `sync`: shards of a step.
        mixes: whether an update may contain shards of several steps, so that all are divided by the size of a full
            batch.
    """

    def __init__(
        self,
        replicas: WorkerReplicas,
        servers: ParameterServerClient,
        data: Data,
        training: StepContext,
        *,
        mode: Mode,
        mixes: bool = False,
    ) -> None:
        self._replicas, self._servers, self._data, self._training = replicas, servers, data, training
        self._mode, self._mixes = mode, mixes
        self._replica = replicas.source
        self._captured = GradientCapture()
        replicas.source.use_stepper(self._captured)
        self._version: int | None = None
        self._loads: int | None = None
        self._row_lock = Lock()
        self._tables = sparse_tables(replicas.source.model)
        for replica in replicas.copies:
            read_when_looked_up(replica.model, self._pull_rows)

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
        computed = self._replicas.compute(
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
            self._replicas.refresh(frozen=self._servers.loads != self._loads)
            self._loads = self._servers.loads
        return self._version

    def _pull_rows(self, place: int, rows: Tensor) -> Tensor:
        """Return current rows from the servers; threads of the replicas call one after the other."""
        with self._row_lock:
            return self._servers.pull_rows(place, rows)

    def _stage(self, order: WorkOrder, read: int, computed: Computed) -> WorkReport:
        replica, norm = self._replica, None
        weights, terms = tuple(computed.weights), computed.terms
        report = WorkReport(number=order.number, read=read, loss_sum=computed.loss_sum, weights=weights, terms=terms)
        if self._mode == "async":
            (sums,) = computed.sums
            status, norm = apply_update(
                replica,
                sums,
                computed.divisor,
                self._training.rule(read),
                loss_sum=torch.full(
                    (), computed.loss_sum, device=replica.device
                ),  # written by a kernel, without a copy
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
