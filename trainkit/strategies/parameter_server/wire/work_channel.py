"""What a worker and the chief say to each other, over a link or within the chief's own process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from trainkit.errors import LinkError
from trainkit.numerics.batch import Ticket
from trainkit.strategies.parameter_server.wire.transport import Connection, Frame

__all__ = ["LocalWorkChannel", "RemoteWorkChannel", "WorkChannel", "WorkOrder", "WorkReport", "gradient_keys"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOrder:
    """An errand as the worker gets it."""

    number: int
    """Names the gradient that comes of it."""
    step: int
    shards: tuple[int, ...]
    version: int
    """Updates that the variables have seen as it is handed out."""
    loads: int = 1
    """How often the servers have been given their numbers: more than once where the training was rolled back."""
    scale: float = 1.0
    """The loss scale."""

    @property
    def ticket(self) -> Ticket:
        """What to compute."""
        return Ticket(self.step, self.shards)

    @classmethod
    def of(cls, frame: Frame) -> Self:
        """As it came over a link."""
        return cls(**{**frame.meta, "shards": tuple(frame.meta["shards"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkReport:
    """What came of an errand: its gradient is staged at the servers."""

    number: int
    read: int
    """Updates that the variables had seen when it was computed from them."""
    loss_sum: float
    weights: tuple[float, ...]
    """What the shards of each staged gradient weigh: there is one, or one a shard."""
    norm: float | None = None
    """The global norm of the gradient before clipping, where the worker clips."""
    is_finite: bool = True
    """False: the worker leaves it out, by policy, and has staged nothing."""
    mixed: bool = False
    """Whether it was computed from variables of several versions: no try found all servers at one."""

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Self:
        """As it was said."""
        return cls(**{**meta, "weights": tuple(meta["weights"])})


def gradient_keys(number: int, count: int) -> list[str]:
    """The names of an errand's gradients at the servers.

    Example:
        >>> gradient_keys(7, 2)
        ['7.0', '7.1']
    """
    return [f"{number}.{place}" for place in range(count)]


class WorkChannel(Protocol):
    """How a worker talks with the chief."""

    def take(self) -> WorkOrder | None:
        """The next errand, waited for; None: there are no more."""

    def pulled(self, number: int) -> None:
        """The variables have been read."""

    def report(self, report: WorkReport) -> None:
        """A gradient is staged."""


class RemoteWorkChannel:
    """Over a link to the chief.

    Args:
        link: to the chief; anything but an errand and a bye ends it.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        link.send("ready")

    def take(self) -> WorkOrder | None:
        """The next errand; None where the chief says bye.

        Raises:
            LinkError: the chief is gone, or says something else.
        """
        frame = self._link.receive()
        if frame.kind == "bye":
            return None
        try:
            if frame.kind == "errand":
                return WorkOrder.of(frame)
        except (TypeError, KeyError) as error:
            raise LinkError(f"{self._link.peer} hands out an errand that is none: {error}") from error
        raise LinkError(f"{self._link.peer} says {frame.kind!r}, which is no errand")

    def pulled(self, number: int) -> None:
        """Tell the chief."""
        self._link.send("pulled", {"number": number})

    def report(self, report: WorkReport) -> None:
        """Tell the chief."""
        self._link.send("report", asdict(report))


class LocalWorkChannel:
    """Within the chief's process.

    Args:
        tell: takes a kind and what goes with it, as a link's frames have them.
    """

    def __init__(self, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self._tell = tell
        self.orders: queue.SimpleQueue[WorkOrder | None] = queue.SimpleQueue()

    def take(self) -> WorkOrder | None:
        """The next errand; None at the end."""
        return self.orders.get()

    def pulled(self, number: int) -> None:
        """Tell the main thread."""
        self._tell("pulled", {"number": number})

    def report(self, report: WorkReport) -> None:
        """Tell the main thread."""
        self._tell("report", asdict(report))
