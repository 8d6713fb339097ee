"""The live line of a notebook: one output of its cell, which is replaced."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from trainkit.callbacks.screen.reading import Reading, terminal_parts

_EVERY_S: Final = 0.5
"""Seconds between two replacements of the output: each one sends a message to the browser."""
_WIDTH: Final = 200
"""Limit of the characters of the texts: a browser wraps them."""


class _Handle(Protocol):
    def update(self, shown: object) -> None: ...


class Display(Protocol):
    """Shows an object below the cell, and returns a handle to replace it: `IPython.display.display`."""

    def __call__(self, shown: object, *, display_id: bool) -> Any:
        """Show an object."""


class LiveHtml:
    """A reading as HTML, and as text for a front end that shows no HTML."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._texts = [text for text, _ in terminal_parts(reading, step=reading.step, width=_WIDTH)]

    def __repr__(self) -> str:
        return "  ".join(self._texts)

    def _repr_html_(self) -> str:
        """Return the bar and the texts beside it, for a notebook."""
        label = f"step {self._reading.step} of {self._reading.num_steps}"
        bar = f"<progress max='1' value='{self._reading.done:.4f}' aria-label='{label}'></progress>"
        cells = "".join(f"<span style='margin-left:1em'>{html.escape(text)}</span>" for text in self._texts)
        return f"<div style='font-variant-numeric:tabular-nums'>{bar}{cells}</div>"


class NotebookLine:
    """A bar below the cell, replaced twice a second at most."""

    def __init__(self, *, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        self._display, self._clock = display, clock
        self._due = -float("inf")
        self._handle: _Handle | None = None
        self._unshown: Reading | None = None

    def update(self, reading: Reading) -> None:
        """Show the reading, if the output is due to be replaced."""
        self._unshown = reading
        if self._clock() >= self._due:
            self._due = self._clock() + _EVERY_S
            self.close()

    def close(self) -> None:
        """Show the last reading, if it was not shown yet; it stays below the cell."""
        reading, self._unshown = self._unshown, None
        if reading is None:
            return
        if self._handle is None:
            self._handle = self._display(LiveHtml(reading), display_id=True)
        else:
            self._handle.update(LiveHtml(reading))


def display_of_notebook() -> Display | None:
    """Return IPython's `display` if this process is the kernel of a notebook; None elsewhere, also in a terminal."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display  # noqa: PLC0415 - the kernel has imported it

    found: Display = display
    return found
