"""A worker of several processes, which hold one replica in parts and compute together.

The first process has the connections to the chief and to the servers. It receives the orders, and reads the variables
into the memory of its host, whole, of which all keep parts; it collects the gradient from its parts, and pushes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.data.reading.collate import to_device
from trainkit.errors import LinkError
from trainkit.files import whole_numbers
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.precision import LossScale
from trainkit.strategies.base import Batch, Data, JsonMap, StepContext
from trainkit.strategies.collectives import GroupCollective, all_gather_object, broadcast_values
from trainkit.strategies.core.copies import Sums
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import MakeStep, ShardStep
from trainkit.strategies.tensor_shards import iter_gather_full
from trainkit.strategies.tensors.layouts import local_part
from trainkit.strategies.updates.chief import Mode, OrderWorker, WorkOrder
from trainkit.strategies.updates.links import Connection
from trainkit.strategies.updates.server import ParameterServerClient
from trainkit.strategies.updates.variables import VariableShards

_UNLIMITED: Final = timedelta(days=365)
"""An order may come at any time; the end of another process is noticed at once."""


@dataclass(frozen=True, kw_only=True)
class _OrderPlan(BatchPlan):
    """The plan of a work order: its shards are all that the processes compute in the step."""

    count: int
    """Number of shards of the order."""

    def num_shards(self, step: int) -> int:  # noqa: ARG002 - an order belongs to one step
        return self.count


class GroupWorker(OrderWorker):
    """One process of a worker that holds a replica in parts; all take part in each order. Made collectively.

    Args:
        replica: this process's part, whose ranks are the processes of the worker.
        make_step: makes a step of all of them.
        shares: the variables of the whole model.
        mode: as of `OrderWorker`.
    """

    def __init__(
        self,
        replica: Replica,
        data: Data,
        training: StepContext,
        *,
        make_step: MakeStep[Replica],
        shares: VariableShards,
        mode: Mode,
    ) -> None:
        super().__init__(replica, data, training, mode=mode)
        self._make_step, self._shares = make_step, shares
        waiting, ranks = dist.new_group(backend="gloo", timeout=_UNLIMITED), replica.all_ranks
        self._waiting = GroupCollective(
            rank=ranks.rank, num_ranks=ranks.num_ranks, device=torch.device("cpu"), group=waiting
        )
        self._servers: ParameterServerClient | None = None
        self._wholes: list[Tensor] = []
        """The variables of the last pull, on the first process."""

    def use_servers(self, servers: ParameterServerClient) -> None:
        """Take the connections to the servers; for the first process."""
        self._servers = servers
        self._wholes = [torch.empty(variable.shape, dtype=variable.dtype) for variable in self._shares.variables]

    @contextmanager
    def leading(self) -> Iterator[None]:
        """End the others, which wait for an order or for variables, if a connection breaks; for the first process."""
        try:
            yield
        except LinkError:
            self._broadcast(None)
            raise

    def _broadcast(self, message: JsonMap | None) -> JsonMap:
        """Return the message of the first process; collective.

        Raises:
            LinkError: it has lost the chief or a server.
        """
        first, *_ = all_gather_object(message, self._waiting)
        if first is None and self._waiting.rank > 0:
            raise LinkError("the first process of this worker has lost the chief or a server")
        return first or {}

    def _next(self, link: Connection | None) -> WorkOrder | None:
        order = super()._next(link)
        order_meta = self._broadcast({} if order is None else asdict(order))
        return WorkOrder.of(order_meta) if order_meta else None

    def _share(self, ticket: Ticket) -> Ticket:
        ranks = self._replica.data_ranks
        return Ticket(ticket.step, ticket.shards[ranks.rank :: ranks.num_ranks])

    def _pull(self) -> tuple[int, int, bool]:
        servers, message = self._servers, dict[str, object]()
        if servers is not None:
            message = {"version": servers.pull(self._wholes), "loads": servers.loads, "mixed": servers.mixed}
        pulled = self._broadcast(message)
        version, loads = whole_numbers([pulled["version"], pulled["loads"]])
        self._load(frozen=loads != self._read[1])
        return version, loads, bool(pulled["mixed"])

    def _load(self, *, frozen: bool) -> None:
        """Keep this process's parts of the variables, one variable after the other; collective."""
        replica = self._replica
        parts, buffers = replica.parts, dict(replica.model.named_buffers())
        for index, variable in enumerate(self._shares.variables):
            if variable.kind == "frozen" and not frozen:
                continue
            shape, dtype, device = variable.shape, variable.dtype, replica.device
            whole = self._wholes[index] if self._wholes else torch.empty(shape, dtype=dtype, device=device)
            broadcast_values(whole, device=device)
            if variable.kind == "buffer":
                local_part(buffers[variable.name]).copy_(whole)
            else:
                parts[variable.name].data.copy_(whole[replica.cuts[variable.name].region])
        replica.refresh_params()
        replica.reload()

    def _compute(self, ticket: Ticket, batches: Sequence[Batch], scale: LossScale) -> list[tuple[ShardStep, Sums]]:
        replica, training = self._replica, self._training
        replica.set_loss_scale(scale)
        plan = {item.name: getattr(training.plan, item.name) for item in fields(BatchPlan)}
        training = replace(training, plan=_OrderPlan(**plan, count=len(ticket.shards)))
        moved = [to_device(batch, replica.device) for batch in batches]
        work = self._make_step(replica, self._share(ticket), moved, training)
        sums = work.run()
        replica.refuse_changed_params(ticket.step + 1)
        return [(work, sums)]

    def _summed(self, numbers: list[float]) -> list[float]:
        sums: list[float] = self._replica.data_ranks.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return sums

    def _push(self, key: str, grads: Sequence[Tensor | None], buffers: Sequence[Tensor | None]) -> None:
        replica, servers = self._replica, self._servers
        named = ((name, replica.cuts[name], grad) for name, grad in zip(replica.params, grads, strict=True))
        pieces = {
            name: [cut.piece(grad)] for name, cut, grad in named if grad is not None and cut.is_written and grad.numel()
        }
        wholes = {name: whole for name, whole in iter_gather_full(pieces, replica.all_ranks) if servers is not None}
        if servers is not None:
            servers.push(key, [wholes.get(name) for name in replica.params], replica.buffers.for_all_names(buffers))
