"""Report where the user's own code makes a step of a GPU wait."""

from __future__ import annotations

import linecache
import logging
import os
import sys
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from trainkit.errors import is_library
from trainkit.trainer.events import Run
from trainkit.trainer.loop import Trigger

_AFTER: Final = 4
"""Steps of a start that may wait: they find layouts, and copy what stays on the device."""
_NEVER: Final = 1 << 62
_WATCHED: Final = "cuda"
_WAITS: Final = "called a synchronizing CUDA operation"
"""How torch's warning begins; c10/cuda/CUDAFunctions.cpp."""
_PROTOTYPE: Final = "Synchronization debug mode is a prototype"
_MOST_LINES: Final = 5
_PACKAGE: Final = f"{Path(__file__).parents[2]}{os.sep}"
_log = logging.getLogger(__name__)


class SyncWatch:
    """Watches one step of a run on a GPU for waits that lines of the user's code cause, once; on rank 0.

    torch warns of an operation that waits for the device while `torch.cuda.set_sync_debug_mode` is "warn". A wait
    counts if the innermost frame outside of libraries is not one of trainkit: rows, saves and scales wait by intent.
    A wait in backward shows no line of the forward pass, and does not count.
    """

    def __init__(self) -> None:
        self._waits = Counter[tuple[str, int, str]]()
        self._is_done, self._entered = False, ExitStack()

    def triggers(self, run: Run) -> tuple[list[Trigger], list[Trigger]]:
        """Return the triggers before and after all others of a step, so that none of those is watched."""
        watches = run.is_owner and run.device.type == _WATCHED and not self._is_done
        if not watches or torch.cuda.get_sync_debug_mode():  # the user watches
            return [], []
        first = run.state.step + _AFTER
        begin = Trigger(act=self._begin, next_after=lambda step: first if step < first else _NEVER)
        end = Trigger(act=lambda: self._report(run), next_after=lambda step: first + 1 if step <= first else _NEVER)
        return [end], [begin]

    def _begin(self) -> None:
        self._entered.enter_context(warnings.catch_warnings())
        for action, begin in (("always", _WAITS), ("ignore", _PROTOTYPE)):
            warnings.filterwarnings(action, message=begin)  # type: ignore[arg-type]
        shown = warnings.showwarning

        def note(message: Warning | str, *details: object) -> None:
            if not str(message).startswith(_WAITS):
                shown(message, *details)  # type: ignore[arg-type]
            elif (location := _own_line(sys._getframe(1))) is not None:  # noqa: SLF001 - the frame at the warning
                self._waits[location] += 1

        warnings.showwarning = note  # type: ignore[assignment]
        self._entered.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("warn")

    def close(self) -> None:
        """Watch no longer."""
        self._entered.close()

    def _report(self, run: Run) -> None:
        """Say which lines waited, on the screen and in result.json."""
        self.close()
        self._is_done = True
        for (file, line, name), count in self._waits.most_common(_MOST_LINES):
            times = "" if count == 1 else f", {count} times"
            text = (
                f"{file}:{line}, in {name}: this line makes each step wait for {run.device}{times}: "
                f"{linecache.getline(file, line).strip()}. Keep what it reads in a tensor, or read it less often."
            )
            run.add_note(text)
            _log.warning("%s", text)


def _own_line(frame: FrameType | None) -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost frame of the user; None if trainkit has called what waits."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return None
        if not is_library(file):
            return file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return None
