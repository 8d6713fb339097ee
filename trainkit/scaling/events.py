"""A discrete-event loop on a heap, and a link that serves one message after another."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]


class EventLoop:
    """Run actions in the order of their simulated times; equal times in the order in which they were scheduled.

    Example:
        >>> loop, seen = EventLoop(), []
        >>> loop.schedule(2.0, lambda: seen.append(loop.now))
        >>> loop.schedule(1.0, lambda: seen.append(loop.now))
        >>> loop.run(lambda: False)
        >>> seen
        [1.0, 2.0]
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Simulated seconds since the start."""
        self._events: list[tuple[float, int, Action]] = []
        self._scheduled = 0

    def schedule(self, delay_s: float, action: Action) -> None:
        """Run an action `delay_s` simulated seconds from now."""
        self._scheduled += 1
        heapq.heappush(self._events, (self.now + delay_s, self._scheduled, action))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run the scheduled actions until `is_over()`, or until none is left."""
        while self._events and not is_over():
            self.now, _, action = heapq.heappop(self._events)
            action()


@dataclass(kw_only=True)
class FifoLink:
    """A link that transfers messages one after another; a later message waits for the earlier ones.

    With random arrivals and messages of one size this is the queue M/D/1.
    """

    loop: EventLoop
    latency_s: float = 0.0
    busy_s: float = 0.0
    """Seconds of transfers until now."""
    waited_s: float = 0.0
    """Seconds that messages waited for earlier ones, in sum."""
    _free_at: float = field(default=0.0, init=False)

    def send(self, transfer_s: float, then: Action, *, least_s: float = 0.0) -> None:
        """Run `then` when a message has arrived.

        Args:
            transfer_s: seconds for which the message occupies the link.
            then: the receiver.
            least_s: seconds that the sender's own link needs; the message arrives no sooner.
        """
        start = max(self.loop.now, self._free_at)
        self._free_at = start + transfer_s
        self.busy_s += transfer_s
        self.waited_s += start - self.loop.now
        end = max(self._free_at, self.loop.now + least_s)
        self.loop.schedule(end + self.latency_s - self.loop.now, then)
