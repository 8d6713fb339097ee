"""The worker: it receives a work order, reads the variables, computes and stages the gradient, and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from trainkit.bounded import expect_map
from trainkit.data.reading.collate import to_device
from trainkit.errors import LinkError
from trainkit.numerics.batch import Ticket, shards_of_rank
from trainkit.numerics.precision import LossScale
from trainkit.strategies.base import Batch, Data, JsonMap, Status, StepContext
from trainkit.strategies.core.copies import ComputingCopies, Sums, ThreadWork, computing_copy, total_of
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import LossDivisor, apply_update, cloned_batch
from trainkit.strategies.model_transforms.compiling import is_compiled
from trainkit.strategies.traffic import sparse_tables as tables_of
from trainkit.strategies.updates.client import ParameterServerClient
from trainkit.strategies.updates.links import Connection
from trainkit.strategies.updates.variables import tensors_of

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
            return cls(**{**frame.meta, "shards": tuple(frame.meta["shards"])})  # type: ignore[arg-type]
        except (TypeError, KeyError) as error:
            raise LinkError(f"{link.peer} sent {frame.kind!r} instead of a work order: {error}") from error


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
        found = expect_map(meta, {"number": int, "read": int, "loss_sum": float, "weights": list, "status": str})
        Status(found["status"])
        return cls(**{**found, "weights": tuple(found["weights"])})

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
    return [f"{number}.{place}" for place in range(count)]


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

    def reader(place: int) -> Callable[..., None]:
        @torch.no_grad()
        def read(table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows = torch.unique(args[0] if args else kwargs["input"])
            weight = table.weight.data
            weight[rows] = pull_rows(place, rows).to(weight)

        return torch.compiler.disable(read) if is_compiled(model) else read  # type: ignore[no-untyped-call]

    for place, table in sparse_tables(model).items():
        table.register_forward_pre_hook(reader(place), with_kwargs=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Computed:
    """The sums of a work order."""

    sums: list[Sums]
    """Sums of all shards together, or of each shard if the order of summation is reproducible."""
    weights: tuple[float, ...]
    """Weights of the shards of each sum."""
    divisor: LossDivisor
    loss_sum: float
    terms: dict[str, float]


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
        self, ticket: Ticket, batches: Sequence[Batch], training: StepContext, *, scale: LossScale, batch_size: int
    ) -> _Computed:
        """Compute forward and backward of the shards of a work order.

        Replicas take the shards in turn. With a reproducible order of summation each shard is a separate work.
        """
        self.set_loss_scale(scale)
        shares: list[dict[int, ThreadWork]] = []
        for rank, replica in enumerate(self.copies):
            own = shards_of_rank(len(batches), rank=rank, num_ranks=len(self.copies), lanes=None)
            share = {}
            for places in [own] if own and not self._is_ordered else [(place,) for place in own]:
                given = Ticket(ticket.step, tuple(ticket.shards[place] for place in places))
                moved = [to_device(batches[place], replica.device) for place in places]
                moved = [cloned_batch(batch) for batch in moved] if self._is_ordered else moved
                share[places[0]] = ThreadWork(replica, given, moved, training, batch_size)
            shares.append(share)
        in_order = [work for _, work in sorted((place, work) for share in shares for place, work in share.items())]
        if self.source.packing is None:
            in_order[0].agree_on_grad_layout()
            self.settle(self.source)
        in_turn = self.may_compile((rank, work.batches) for rank, share in enumerate(shares) for work in share.values())
        found = self.run(self._sums_of, shares, in_turn=in_turn)
        by_place = {place: sums for share in found for place, sums in share.items()}
        sums, weights = [by_place[place] for place in sorted(by_place)], [float(work.weight) for work in in_order]
        if not self._is_ordered:
            weights, sums = [sum(weights)], [total_of(sums)]
        terms: dict[str, float] = {}
        for work in in_order:
            for name, term in work.terms.items():
                terms[name] = terms.get(name, 0.0) + float(term)
        loss_sum = sum(float(work.loss_sum) for work in in_order if work.loss_sum is not None)
        divisor = in_order[0].divisor
        return _Computed(sums=sums, weights=tuple(weights), divisor=divisor, loss_sum=loss_sum, terms=terms)

    def _sums_of(self, works: Mapping[int, ThreadWork]) -> dict[int, Sums]:
        """Compute the works of one thread one after the other; return their sums on the first replica's device."""
        return {place: work.sums(self.source.device)[0][1] for place, work in works.items()}


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
        mixes: bool,
    ) -> None:
        self._replicas, self._servers, self._data, self._training = replicas, servers, data, training
        self._mode, self._mixes = mode, mixes
        self._replica = replicas.source
        self._captured = GradientCapture()
        replicas.source.use_stepper(self._captured)
        self._read: tuple[int, int | None] | None = None
        """Version of the variables here, and number of loads of the servers."""
        self._row_lock = Lock()
        self._tables = sparse_tables(replicas.source.model)
        for replica in replicas.copies:
            read_when_looked_up(replica.model, self._pull_rows)

    def run(self, link: Connection, waits: Callable[[int], None] = lambda _step: None) -> None:
        """Execute work orders until there are no more.

        Args:
            link: the connection to the chief.
            waits: receives the last computed step, whenever there may be no work for a long time.
        """
        link.send("ready")
        waits(0)
        while (order := WorkOrder.received(link)) is not None:
            link.send("report", asdict(self._execute(order)))
            waits(order.step)

    def _execute(self, order: WorkOrder) -> WorkReport:
        replica, training, ticket = self._replica, self._training, Ticket(order.step, order.shards)
        replica.on_phase("data", order.step)
        batches = self._data.fetch(ticket)
        read = self._pull(order)
        batch_size = training.plan.global_size if self._mixes else training.plan.batch_size(order.step)
        scale = replace(replica.precision.loss_scale(), scale=order.scale)  # the chief knows the overflows before
        computed = self._replicas.compute(ticket, batches, training, scale=scale, batch_size=batch_size)
        report = WorkReport(
            number=order.number,
            read=read,
            loss_sum=computed.loss_sum,
            weights=computed.weights,
            terms=computed.terms,
            mixed=self._servers.mixed,
            scale=order.scale,
        )
        if self._mode == "async":
            (sums,), loss_sum = computed.sums, computed.loss_sum
            loss = torch.full((), loss_sum, device=replica.device)  # written by a kernel, without a copy
            status, norm = apply_update(replica, sums, computed.divisor, training.rule(read), loss_sum=loss)
            if status is not Status.applied:
                return replace(report, status=status.value)
            report = replace(report, norm=None if norm is None else float(norm))
        for key, sums in zip(report.keys, computed.sums, strict=True):
            self._push(key, sums, computed.divisor)
        return report

    def _pull(self, order: WorkOrder) -> int:
        """Pull the variables, unless the required ones are present already; return their version."""
        servers = self._servers
        if self._mode == "async" or self._read != (order.version, order.loads):
            known = None if self._read is None else self._read[1]
            tensors = enumerate(tensors_of(self._replica.model))
            version = servers.pull([None if place in self._tables else one for place, one in tensors])
            self._replicas.refresh(frozen=servers.loads != known)
            self._read = version, servers.loads
        assert self._read is not None
        return self._read[0]

    def _pull_rows(self, place: int, rows: Tensor) -> Tensor:
        """Return current rows from the servers; threads of the replicas call one after the other."""
        with self._row_lock:
            return self._servers.pull_rows(place, rows)

    def _push(self, key: str, sums: Sequence[Tensor | None], divisor: LossDivisor) -> None:
        replica, count = self._replica, len(self._replica.params)
        grads, buffers = sums[:count], sums[count : len(sums) - int(divisor.counted)]
        if self._mode == "async":
            grads = self._captured.grads
        elif replica.sparse and replica.numerics.reproducible:
            grads = [one.to_dense() if one is not None and one.is_sparse else one for one in grads]
        self._servers.push(key, grads, replica.buffers.in_all_places(buffers))
