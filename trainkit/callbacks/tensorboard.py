"""Scalars, tables and the first images for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.fields import above, cosmetic, unit
from trainkit.files import naming
from trainkit.objectives.tables import Table
from trainkit.trainer.events import Callback, Row, Run

if TYPE_CHECKING:
    from trainkit.report.events import EventFile


_COUNTERS = frozenset({"step", "epoch", "samples", "seconds"})
"""Columns that hold the position of a row, not metrics."""


class EventFolder:
    """The folder `tensorboard/`, or one below it, with the events of a callback; a resumed run continues its steps."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._events: EventFile | None = None
        self._start: int | None = None

    def of(self, run: Run) -> EventFile:
        """Return the file, which is created at the first call."""
        if self._events is None:
            from trainkit.report.events import EventFile  # noqa: PLC0415 - protobuf, after the first steps

            folder = run.folder / "tensorboard" / self._name
            # The previous attempt may have trained beyond its last checkpoint: those events are written again.
            start = run.begun_at if self._start is None else self._start
            purge_after = start if folder.is_dir() else None
            with naming(folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._events = EventFile(folder, purge_after=purge_after)
        return self._events

    def restart(self, step: int) -> None:
        """Discard the events after a step: those steps are trained again."""
        self.close()
        self._start = step

    def flush(self) -> None:
        """Write what is buffered."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        events, self._events = self._events, None
        if events is not None:
            events.close()


@dataclass(kw_only=True, eq=False)
class TensorBoard(Callback):
    """Writes each logged row to `tensorboard/` in the run folder, with the time of its measurement.

    To view them: tensorboard --logdir RUN/tensorboard
    """

    observes: ClassVar[bool] = True

    images: Annotated[bool, cosmetic] = True
    """Show the images of the first batch, if it contains images."""
    flush_s: Annotated[float, cosmetic, above(0), unit("seconds")] = 5.0
    """Seconds between two writes."""
    _events: EventFolder = field(default_factory=EventFolder, init=False, repr=False)
    _due: float = field(default=0.0, init=False, repr=False)
    _has_shown: bool = field(default=False, init=False, repr=False)

    def log(self, run: Run, row: Row) -> None:
        """Write a row; write the images before the first one of a run."""
        if not run.is_owner:
            return
        if self.images and not self._has_shown and run.begun_at == 0:
            self._has_shown = True
            if (images := next(images_in(run.example), None)) is not None:
                self._events.of(run).image("first batch", grid(images.numpy()), step=0)
        self._write(run, row)
        for name, finding in run.findings().items():
            if isinstance(finding, Mapping) and "counts" in finding:
                counts = {int(number): count for number, count in finding["counts"].items()}
                self._events.of(run).histogram(name, counts, step=run.state.step)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Write the metrics of an evaluation."""
        if run.is_owner:
            self._write(run, metrics)

    def eval_tables(self, run: Run, tables: Mapping[str, Table]) -> None:
        """Write the tables of an evaluation as text."""
        if run.is_owner:
            for name, table in tables.items():
                self._events.of(run).text(name, table.markdown(), step=run.state.step)

    def rolled_back(self, run: Run, step: int) -> None:
        """Start a new file that replaces the events of the steps that are trained again."""
        self._events.restart(run.state.step)

    def state(self) -> dict[str, Any]:
        """Write the buffered events: a run resumed from the checkpoint has every earlier one, even after a kill."""
        self._events.flush()
        return {}

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the buffered events: a run whose metrics cannot be written has not finished."""
        self._events.flush()

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Close the file."""
        self._events.close()

    def _write(self, run: Run, values: Row) -> None:
        events = self._events.of(run)
        figures = {name: value for name, value in values.items() if name not in _COUNTERS}
        events.scalars(figures, step=run.state.step)
        if time.monotonic() >= self._due:
            events.flush()
            self._due = time.monotonic() + self.flush_s


def images_in(batch: Any, *, most: int = 64) -> Iterator[Tensor]:
    """Yield the parts of a batch that are images: (count, 1 or 3, height, width) of numbers, at least 4 pixels a side.

    Args:
        batch: a tensor, or tuples, lists and mappings of such.
        most: limit of the images of each part.

    Yields:
        float32 on the host; NaN and infinity as 0.
    """
    if isinstance(batch, Tensor):
        if batch.ndim == 4 and batch.shape[0] and batch.shape[1] in (1, 3) and min(batch.shape[2:]) >= 4:
            yield torch.nan_to_num(batch[:most].detach().float().cpu(), posinf=0.0, neginf=0.0)
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from images_in(part, most=most)
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from images_in(part, most=most)


def write_png(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Write pixels as a PNG, into a folder that is made: (height, width, 1) grey, or (height, width, 3) red, green,
    blue.
    """
    from PIL import Image  # noqa: PLC0415 - 50 ms, where a picture is written only

    with naming(path):
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(path, "png")


def grid(images: NDArray[np.floating], *, num_columns: int = 8) -> NDArray[np.uint8]:
    """Tile a batch of images, scaled together to the full range of brightness.

    Args:
        images: (count, channels, height, width), 1 or 3 channels, any finite range.
        num_columns: images per row.

    Returns:
        (rows * height, columns * width, channels) pixels, one dark pixel between images.

    Example:
        >>> grid(np.ones((3, 1, 4, 4), np.float32), num_columns=2).shape
        (9, 9, 1)
    """
    count, channels, height, width = images.shape
    columns = min(num_columns, count)
    rows = -(-count // columns)
    low, high = float(images.min()), float(images.max())
    scaled = (images - low) * (255.0 / (high - low) if high > low else 0.0)
    canvas = np.zeros((rows * (height + 1) - 1, columns * (width + 1) - 1, channels), np.uint8)
    for index in range(count):
        top, left = index // columns * (height + 1), index % columns * (width + 1)
        canvas[top : top + height, left : left + width] = scaled[index].transpose(1, 2, 0).round()
    return canvas
