"""Who works for the chief: links of workers in other processes, and the thread of its own."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Thread
from typing import Any, Final

from trainkit.errors import LinkError
from trainkit.strategies.parameter_server.wire.transport import Connection
from trainkit.strategies.parameter_server.wire.work_channel import LocalWorkChannel, WorkChannel, WorkOrder

__all__ = ["OWN", "WorkerEvent", "WorkerHandle", "WorkerRegistry"]

OWN: Final = "chief"
"""The name of the worker in the chief's own process."""


@dataclass(kw_only=True, eq=False)
class WorkerHandle:
    """A worker as the chief knows it."""

    name: str
    send: Callable[[WorkOrder | None], None]
    """Gives it an errand, or the end."""
    cut: Callable[[], None] = lambda: None
    """Ends the connection."""
    order: WorkOrder | None = None
    """What it has in hand."""
    since: float = field(default_factory=time.monotonic)
    """When it got that."""

    def give(self, order: WorkOrder | None) -> None:
        """Give it an errand, or the end."""
        self.order, self.since = order, time.monotonic()
        self.send(order)


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """What a worker says, or what became of it."""

    seat: WorkerHandle
    kind: str
    """`ready`, `pulled`, `report`, or `gone`."""
    meta: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


class WorkerRegistry:
    """Workers that come and go; what they say arrives in one queue, for the chief's main thread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        self._own: tuple[LocalWorkChannel, Thread] | None = None

    def serve_connection(self, link: Connection) -> None:
        """Hear a worker in another process, on a thread of its link, until that ends."""

        def send(order: WorkOrder | None) -> None:
            link.send("bye") if order is None else link.send("errand", asdict(order))

        seat = WorkerHandle(name=link.peer, send=send, cut=link.close)
        try:
            while True:
                frame = link.receive()
                link.read([])
                self._events.put(WorkerEvent(seat, frame.kind, frame.meta))
        except LinkError as error:
            self._events.put(WorkerEvent(seat, "gone", error=error))

    def start_local_worker(self, work: Callable[[WorkChannel], None]) -> None:
        """Let a thread of this process work."""
        errands = LocalWorkChannel(lambda kind, meta: self._events.put(WorkerEvent(seat, kind, meta)))
        seat = WorkerHandle(name=OWN, send=errands.orders.put)

        def run() -> None:
            try:
                work(errands)
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                self._events.put(WorkerEvent(seat, "gone", error=error))

        thread = Thread(target=run, name="chief's worker", daemon=True)
        self._own = errands, thread
        self._events.put(WorkerEvent(seat, "ready"))
        thread.start()

    def next_event(self, timeout_s: float) -> WorkerEvent | None:
        """The next thing that somebody says; None where nobody does for so long."""
        with suppress(queue.Empty):
            return self._events.get(timeout=timeout_s)
        return None

    def stop_local_worker(self) -> None:
        """Let the own thread finish what it has in hand, and end."""
        if self._own is not None:
            errands, thread = self._own
            errands.orders.put(None)
            thread.join()
            self._own = None
