"""The time that torch.compile takes in a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any


class CompileTime:
    """Adds up the time in which torch.compile works; counts nothing if torch.compile was not imported."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock, self._begun = clock, 0.0
        self._handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if self._handler is not None:
            self._handler.register_start_callback(self._start)
            self._handler.register_end_callback(self._stop)

    def _start(self, *_: object) -> None:
        self._begun = self._clock()

    def _stop(self, *_: object) -> None:
        self.seconds += self._clock() - self._begun

    def close(self) -> None:
        """Stop counting."""
        if self._handler is not None:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._stop)
            self._handler = None
