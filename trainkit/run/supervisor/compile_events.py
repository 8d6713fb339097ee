"""Report when torch.compile works: such a step may take much longer than its neighbours and still be healthy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from trainkit.run.process.heartbeat import Beats
from trainkit.run.supervisor.self_watch import BeatCounter

__all__ = ["report_compiling"]


@contextlib.contextmanager
def report_compiling(beats: Beats | BeatCounter | None) -> Iterator[None]:
    """Enter the phase `compile` whenever torch.compile works, for the duration of the block.

    Does nothing if torch.compile was not imported: creating any optimizer of torch imports it.

    Args:
        beats: reports the phases of this rank; None: this rank has no heartbeat.
    """
    handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if beats is None or handler is None:
        yield
        return
    before = [(beats.phase, beats.step)]

    def begins(*_: Any) -> None:
        before[0] = (beats.phase, beats.step)
        beats("compile", beats.step)

    def ends(*_: Any) -> None:
        if beats.phase == "compile":
            beats(*before[0])

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
    try:
        yield
    finally:
        handler.remove_start_callback(begins)
        handler.remove_end_callback(ends)
