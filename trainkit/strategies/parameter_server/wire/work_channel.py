"""Messages between a worker and the chief, over a connection or within the chief's own process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol, Self

from trainkit.bounded import expect_map
from trainkit.errors import LinkError
from trainkit.numerics.batch import Ticket
from trainkit.strategies.base import JsonMap
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame


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

    @property
    def ticket(self) -> Ticket:
        """The ticket to compute."""
        return Ticket(self.step, self.shards)

    @classmethod
    def of(cls, frame: Frame) -> Self:
        """Decode a received work order."""
        meta = expect_map(frame.meta, {})
        return cls(**{**meta, "shards": tuple(meta["shards"])})


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
    is_finite: bool = True
    """False: by policy the worker skipped it and staged nothing."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """The sums of the terms of the loss, by name."""
    mixed: bool = False
    """Whether it was computed from variables of several versions, because no attempt found all servers at one."""

    @classmethod
    def of(cls, meta: JsonMap) -> Self:
        """Decode a received report."""
        found = expect_map(meta, {})
        return cls(**{**found, "weights": tuple(found["weights"])})


def gradient_keys(number: int, count: int) -> list[str]:
    """Return the names of a work item's gradients at the servers.

    Example:
        >>> gradient_keys(7, 2)
        ['7.0', '7.1']
    """
    return [f"{number}.{place}" for place in range(count)]


class WorkChannel(Protocol):
    """The channel of a worker to the chief."""

    def take(self) -> WorkOrder | None:
        """Wait for the next work order; return None if there are no more."""

    def pulled(self, number: int) -> None:
        """Report that the variables have been read."""

    def report(self, report: WorkReport) -> None:
        """Report that a gradient is staged."""


class RemoteWorkChannel:
    """A channel over a connection to the chief; any frame except a work order and `bye` is an error."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        link.send("ready")

    def take(self) -> WorkOrder | None:
        """Receive the next work order; return None if the chief requests the end.

        Raises:
            LinkError: the connection to the chief broke, or it sent another kind of frame.
        """
        frame = self._link.receive()
        if frame.kind == "bye":
            return None
        try:
            if frame.kind == "work":
                return WorkOrder.of(frame)
        except (TypeError, KeyError) as error:
            raise LinkError(f"{self._link.peer} sent a malformed work order: {error}") from error
        raise LinkError(f"{self._link.peer} sent {frame.kind!r} instead of a work order")

    def pulled(self, number: int) -> None:
        """Send the message to the chief."""
        self._link.send("pulled", {"number": number})

    def report(self, report: WorkReport) -> None:
        """Send the message to the chief."""
        self._link.send("report", asdict(report))


class LocalWorkChannel:
    """A channel within the chief's process."""

    def __init__(self, send: Callable[[str, JsonMap], None]) -> None:
        self._send = send
        self.orders: queue.SimpleQueue[WorkOrder | None] = queue.SimpleQueue()

    def take(self) -> WorkOrder | None:
        """Return the next work order; None at the end."""
        return self.orders.get()

    def pulled(self, number: int) -> None:
        """Send the message to the main thread."""
        self._send("pulled", {"number": number})

    def report(self, report: WorkReport) -> None:
        """Send the message to the main thread."""
        self._send("report", asdict(report))
