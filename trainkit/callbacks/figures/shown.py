"""Figures of a run: drawn by processes of their own, and shown by TensorBoard."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from trainkit.errors import UnreadableError
from trainkit.fields import above, cosmetic
from trainkit.files import read_bytes
from trainkit.report.drawing import Drawing
from trainkit.storage import naming
from trainkit.trainer.events import Callback, Row, Run

if TYPE_CHECKING:
    from trainkit.report.events import EventFile

_log = logging.getLogger(__name__)
_TIMEOUT_S: Final = 60.0
"""Enough time to build matplotlib's font cache, which the first plot on a machine does."""
_PNG: Final = struct.Struct(">16xII")
"""Signature and header of a PNG up to its width and height."""


class EventFolder:
    """A folder below `tensorboard/` with the events of one callback; a resumed run continues its steps."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._events: EventFile | None = None
        self._start: int | None = None

    def of(self, run: Run) -> EventFile:
        """Return the file, which is created at the first call."""
        if self._events is None:
            from trainkit.report.events import EventFile  # noqa: PLC0415 - protobuf, after the first steps

            parent = run.folder / "tensorboard"
            with naming(parent):
                parent.mkdir(exist_ok=True)
            folder = parent / self._name
            start = run.begun_at if self._start is None else self._start
            self._events = EventFile(folder, purge_after=start if folder.is_dir() else None)
        return self._events

    def restart(self, step: int) -> None:
        """Discard the events after a step: those steps are trained again."""
        self.close()
        self._start = step

    def close(self) -> None:
        """Write what is buffered."""
        events, self._events = self._events, None
        if events is not None:
            events.close()


class FigureQueue:
    """Draws the newest of the requested figures, each in a process of its own, one at a time.

    Args:
        every_s: least seconds between two drawings of a run; the last figures are drawn at its end.
        events: event folder for TensorBoard; None: only image files are written.
    """

    def __init__(self, *, every_s: float, events: EventFolder | None = None) -> None:
        self._every_s, self._events = every_s, events
        self._waiting: dict[Path, tuple[int, Mapping[str, Any]]] = {}
        self._running: tuple[Path, int, Drawing] | None = None
        self._due = 0.0

    def ask(self, run: Run, path: Path, request: Mapping[str, Any]) -> None:
        """Draw a figure of this step, now or when the drawings before it are done."""
        self._waiting[path] = run.state.step, request
        self.advance(run)

    def advance(self, run: Run) -> None:
        """Collect finished drawings and start the drawings that are due; does not wait."""
        if self._running is not None and not self._running[2].running:
            self._take(run)
        if self._running is None and self._waiting and time.monotonic() >= self._due:
            self._begin()
            if not self._waiting:
                self._due = time.monotonic() + self._every_s

    def finish(self, run: Run) -> None:
        """Draw everything that waits, and wait for it."""
        while self._running is not None or self._waiting:
            if self._running is None:
                self._begin()
            self._take(run)

    def _begin(self) -> None:
        path = next(iter(self._waiting))
        step, request = self._waiting.pop(path)
        try:
            self._running = path, step, Drawing(request)
        except OSError as error:  # a process that cannot be started must not end the training
            _log.warning("plots/%s: %s", path.name, error)

    def _take(self, run: Run) -> None:
        if self._running is None:
            return
        (path, step, drawing), self._running = self._running, None
        if trouble := drawing.wait(_TIMEOUT_S):
            _log.warning("plots/%s: %s", path.name, trouble)
            return
        if self._events is None:
            return
        try:
            png = read_bytes(path)
            width, height = _PNG.unpack_from(png)
        except (UnreadableError, struct.error) as error:
            _log.warning("plots/%s: %s", path.name, error)
            return
        self._events.of(run).image(path.stem, png, height=height, width=width, step=step, wall_time=time.time())
        self._events.of(run).flush()


@dataclass(frozen=True, kw_only=True)
class EvaluationFigures(Callback):
    """Draws a figure of each split after an evaluation: a subclass requests it in `eval_tables`."""

    observes: ClassVar[bool] = True
    decides_by_figures: ClassVar[bool] = True  # an evaluator beside the training gives it no tables
    events_name: ClassVar[str]
    """Folder of its events below `tensorboard/`."""

    every_s: Annotated[float, cosmetic, above(0)] = 60.0
    """Least seconds between two drawings during the run; the last evaluation is always drawn."""
    _events: EventFolder = field(init=False, repr=False, compare=False)
    _figures: FigureQueue = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        events = EventFolder(self.events_name)
        object.__setattr__(self, "_events", events)
        object.__setattr__(self, "_figures", FigureQueue(every_s=self.every_s, events=events))

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Collect finished drawings."""
        if run.is_owner:
            self._figures.advance(run)

    def log(self, run: Run, row: Row) -> None:
        """Collect finished drawings, and start the drawings that are due."""
        if run.is_owner:
            self._figures.advance(run)

    def rolled_back(self, run: Run, step: int) -> None:
        """Replace the figures of the steps that are trained again."""
        self._events.restart(run.state.step)

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Draw the last evaluation."""
        if run.is_owner:
            self._figures.finish(run)
        self._events.close()


def figure_path(run: Run, kind: str, split: str) -> Path:
    """Return the path of a figure of a split."""
    return run.folder / "plots" / f"{kind}_{split.replace('/', '_')}.png"
