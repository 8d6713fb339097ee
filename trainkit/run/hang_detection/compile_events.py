"""Tell when torch.compile works: a step may then take much longer than its neighbours and be healthy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from trainkit.run.hang_detection.self_watch import BeatCounter
from trainkit.run.process.heartbeat import Beats

__all__ = ["report_compiling"]


@contextlib.contextmanager
def report_compiling(beats: Beats | BeatCounter | None) -> Iterator[None]:
    """Enter the phase `compile` whenever torch.compile works, as long as the block runs.

    Does nothing where torch.compile was not imported: creating any optimizer of torch's imports it.

    Args:
        beats: of this rank; None: this rank has no pulse.
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
