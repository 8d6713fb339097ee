"""The time that torch.compile takes in a run, and steps in which it compiles the same code again."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final

_log = logging.getLogger(__name__)
_FIRST_STEPS: Final = 3
"""Steps of a start in which other shapes, and code that first runs then, are compiled."""
_TOLERATED: Final = 2
"""Later steps that may compile again without a word: a ragged last batch, then any size."""


class CompileTime:
    """Adds up the time in which torch.compile works, and warns once if later steps compile again; does nothing if
    torch.compile was not imported.

    Args:
        step: returns the number of the current step.
    """

    def __init__(self, step: Callable[[], int] = lambda: 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock, self._begun = clock, 0.0
        self._step, self._first = step, step()
        self._again: set[int] = set()
        self._handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if self._handler is not None:
            self._handler.register_start_callback(self._start)
            self._handler.register_end_callback(self._stop)

    def _start(self, *_: object) -> None:
        self._begun = self._clock()

    def _stop(self, *args: object) -> None:
        self.seconds += self._clock() - self._begun
        step, number = self._step(), str(getattr(args[0], "compile_id", "") if args else "").rpartition("/")[2]
        if step < self._first + _FIRST_STEPS or number.partition("_")[0] in ("", "0"):  # the number of a variant
            return
        told = len(self._again) > _TOLERATED
        self._again.add(step)
        if not told and len(self._again) > _TOLERATED:
            steps = ", ".join(map(str, sorted(self._again)))
            _log.warning(
                "compile.mode: torch.compile has compiled the same code again in steps %s, which may take longer than "
                "it saves. %s Keep a value that changes at each step in a buffer, or use compile.mode=off.",
                steps,
                _reason(),
            )

    def close(self) -> None:
        """Stop counting."""
        if self._handler is not None:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._stop)
            self._handler = None


def _reason() -> str:
    """Return torch's reason of the last recompilation, as far as this version of torch keeps it."""
    metrics = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
    found: list[Any] = [] if metrics is None else [getattr(one, "recompile_reason", None) for one in metrics()]
    reasons = [str(one) for one in found if one]
    if not reasons:
        return "TORCH_LOGS=recompiles shows its reason."
    first = reasons[-1].partition("(HINT")[0].partition("\n")[0]
    return f"Its reason: {' '.join(first.partition(': ')[2].split())}."
