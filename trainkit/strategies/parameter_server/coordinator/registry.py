"""The workers of the chief: connections of workers in other processes, and a thread in the chief's own process."""

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

OWN: Final = "chief"
"""The name of the worker in the chief's own process."""


@dataclass(kw_only=True, eq=False)
class WorkerHandle:
    """A worker from the chief's point of view."""

    name: str
    send: Callable[[WorkOrder | None], None]
    """Sends a work order, or the request to end (None)."""
    cut: Callable[[], None] = lambda: None
    """Closes the connection."""
    order: WorkOrder | None = None
    """The current work order."""
    since: float = field(default_factory=time.monotonic)
    """When it was assigned."""

    def give(self, order: WorkOrder | None) -> None:
        """Assign a work order, or request the end."""
        self.order, self.since = order, time.monotonic()
        self.send(order)

    def finish_order(self) -> None:
        """Note that the worker has reported, and has no work now."""
        self.order = None


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """A message of a worker, or the loss of one."""

    worker: WorkerHandle
    kind: str
    """`ready`, `pulled`, `report`, or `gone`."""
    meta: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


class WorkerRegistry:
    """Workers that may join and leave; their messages arrive in one queue, for the chief's main thread."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        self._own: tuple[LocalWorkChannel, Thread] | None = None

    def serve_connection(self, connection: Connection) -> None:
        """Receive from a worker in another process, on the thread of its connection, until that ends."""

        def send(order: WorkOrder | None) -> None:
            connection.send("bye") if order is None else connection.send("work", asdict(order))

        worker = WorkerHandle(name=connection.peer, send=send, cut=connection.close)
        try:
            while True:
                frame = connection.receive()
                connection.read([])
                self._events.put(WorkerEvent(worker, frame.kind, frame.meta))
        except LinkError as error:
            self._events.put(WorkerEvent(worker, "gone", error=error))

    def start_local_worker(self, work: Callable[[WorkChannel], None]) -> None:
        """Start a worker thread in this process."""
        channel = LocalWorkChannel(lambda kind, meta: self._events.put(WorkerEvent(worker, kind, meta)))
        worker = WorkerHandle(name=OWN, send=channel.orders.put)

        def run() -> None:
            try:
                work(channel)
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                self._events.put(WorkerEvent(worker, "gone", error=error))

        thread = Thread(target=run, name="chief's worker", daemon=True)
        self._own = channel, thread
        self._events.put(WorkerEvent(worker, "ready"))
        thread.start()

    def next_event(self, timeout_s: float) -> WorkerEvent | None:
        """Return the next event; None if there is none within `timeout_s`."""
        with suppress(queue.Empty):
            return self._events.get(timeout=timeout_s)
        return None

    def stop_local_worker(self) -> None:
        """Let the local worker finish its current work, and end."""
        if self._own is not None:
            channel, thread = self._own
            channel.orders.put(None)
            thread.join()
            self._own = None
