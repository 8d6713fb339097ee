"""Add up the time that the phases of steps take on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from threading import get_ident
from time import perf_counter
from typing import Final

import torch

from trainkit.strategies.base import PhaseListener

PARTS: Final = ("input", "forward", "backward", "exchange", "update")
"""The parts of a step, in their order."""
_PART_OF: Final[Mapping[str, str]] = {
    "data": "input", "forward": "forward", "backward": "backward", "reduce": "exchange", "idle": "exchange",
    "update": "update",
}  # fmt: skip
"""Phase of a rank (`trainkit.trainer.failpoints.Phase`) -> part of a step."""


_MOST_EVENTS: Final = 4096
"""Limit of the stored events, enough for more than five hundred steps."""


class PhaseClock:
    """Measures the time of each part of a step; it is the listener of a rank's phases.

    A part begins where its phase begins, and ends where the next phase begins. The parts add up to the time of the
    rank: where one thread updates while another computes (the chief of a parameter server), the time of an update is
    taken from the part of the other thread, which continues after it. `backward` contains the part of the exchange that
    runs during backward, and `exchange` the rest of it, including the time that a rank waits for others.

    On the CPU a part is measured on the host's clock. On a CUDA device it is measured between events of the current
    stream, without waiting for the device: time in which the host is ahead of the device does not count.

    It measures between `begin` and `stop`; otherwise a phase costs one comparison.

    Example:
        >>> clock = PhaseClock()
        >>> clock.begin(torch.device("cpu"))
        >>> for phase in ("data", "forward", "backward", "reduce", "update"):
        ...     clock(phase, 0)
        >>> clock.end_step()
        >>> sorted(clock.lap()) == sorted(PARTS)
        True
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        """None while it does not measure."""
        self._reset()

    def _reset(self) -> None:
        self._events: list[tuple[str | None, torch.cuda.Event]] = []
        self._seconds: dict[str | None, float] = {}
        self._part: str | None = None
        self._parts: dict[int, str | None] = {}
        """The part of each thread that is within a step."""
        self._since = perf_counter()

    def begin(self, device: torch.device) -> None:
        """Discard all measurements, and measure on a device from now on."""
        self._device = device
        self._reset()

    def stop(self) -> None:
        """Stop measuring."""
        self._device = None

    def __call__(self, phase: str, step: int) -> None:
        """Receive a phase that begins."""
        del step
        if self._device is not None:
            part = self._parts[get_ident()] = _PART_OF.get(phase)
            self._mark(self._device, part)

    def end_step(self) -> None:
        """End the last part of a step: the time until the next phase does not belong to it."""
        if self._device is not None:
            self._parts.pop(get_ident(), None)
            self._mark(self._device, next(iter(self._parts.values()), None))

    def _mark(self, device: torch.device, part: str | None) -> None:
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append((part, event))
            if len(self._events) >= _MOST_EVENTS:
                self._fold(reached=lambda ended: bool(ended.query()))  # type: ignore[no-untyped-call]
            return
        now = perf_counter()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def _fold(self, reached: Callable[[torch.cuda.Event], bool]) -> None:
        """Add up the time between the events so far, up to the first one that the device has not reached."""
        done = 0
        for (part, begun), (_, ended) in pairwise(self._events):
            if not reached(ended):
                break
            self._seconds[part] = self._seconds.get(part, 0.0) + begun.elapsed_time(ended) / 1e3
            done += 1
        self._events = self._events[done:]

    def lap(self) -> dict[str, float]:
        """Return the seconds of each part since `begin` or the last call; on a CUDA device, wait for it."""
        if self._events:
            torch.cuda.synchronize(self._device)
            self._fold(reached=lambda _: True)
        found = {part: self._seconds.get(part, 0.0) for part in PARTS}
        self._seconds = {}
        return found


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has computed everything that was started on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def each_of(*listeners: PhaseListener) -> PhaseListener:
    """Return a listener that passes each phase to all of these, in order."""

    def listen(phase: str, step: int) -> None:
        for listener in listeners:
            listener(phase, step)

    return listen if len(listeners) > 1 else listeners[0]
