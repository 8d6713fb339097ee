"""Figures of a run, drawn by processes of their own: curves, confusion matrices, the samples with the highest loss."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from trainkit.callbacks.tensorboard import EventFolder, grid, images_in, png_bytes
from trainkit.config.schema import MonitoredMetric
from trainkit.data.splits import read_sample
from trainkit.errors import Problem, UnreadableError
from trainkit.fields import above, cosmetic
from trainkit.files import read_bytes
from trainkit.numerics.generators import Untouched
from trainkit.numerics.schedules import lr_points
from trainkit.objectives.fields import input_of
from trainkit.objectives.metrics import WORST
from trainkit.objectives.tables import MAX_CELLS, Table
from trainkit.report.drawing import Drawing
from trainkit.trainer.events import Callback, Planned, Row, Run

_log = logging.getLogger(__name__)
_TIMEOUT_S: Final = 60.0
"""Enough time to build matplotlib's font cache, which the first plot on a machine does."""
_FIRST_S: Final = 5.0
_PNG: Final = struct.Struct(">16xII")
"""Signature and header of a PNG up to its width and height."""


class FigureQueue:
    """Draws the newest of the requested figures: all that wait, in one process.

    Args:
        every_s: least seconds between two processes, and at most 5 s before the first, so that a short run has one, at
            its end.
        events: event folder for TensorBoard; None: only image files are written.
    """

    def __init__(self, *, every_s: float, events: EventFolder | None = None) -> None:
        self._every_s, self._events = every_s, events
        self._waiting: dict[Path, tuple[int, Mapping[str, Any]]] = {}
        self._running: tuple[dict[Path, int], Drawing] | None = None
        self._due: float | None = None

    def ask(self, run: Run, path: Path, kind: str, **arguments: Any) -> None:
        """Draw a figure of this step, a PNG or those of a folder, with the others that are due."""
        place = "path" if path.suffix else "folder"
        self._waiting[path] = run.state.step, {"draw": kind, place: path, **arguments}
        if self._due is None:
            self._due = time.monotonic() + min(self._every_s, _FIRST_S)
        self.advance(run)

    def advance(self, run: Run) -> None:
        """Collect finished drawings and start the drawings that are due; does not wait."""
        if self._running is not None and not self._running[1].running:
            self._take(run)
        if self._running is None and self._waiting and self._due is not None and time.monotonic() >= self._due:
            self._begin()
            self._due = time.monotonic() + self._every_s

    def finish(self, run: Run) -> None:
        """Draw everything that waits, and wait for it."""
        while self._running is not None or self._waiting:
            if self._running is None:
                self._begin()
            self._take(run)

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting, {}
        try:
            drawing = Drawing(*(request for _, request in waiting.values()))
        except OSError as error:  # a process that cannot be started must not end the training
            _log.warning("plots: %s", error)
        else:
            self._running = {path: step for path, (step, _) in waiting.items()}, drawing

    def _take(self, run: Run) -> None:
        if self._running is None:
            return
        (steps, drawing), self._running = self._running, None
        for (path, step), trouble in zip(steps.items(), drawing.wait(_TIMEOUT_S), strict=True):
            if trouble:
                _log.warning("%s: %s", path, trouble)
            elif self._events is not None:
                self._show(run, self._events, path, step)

    def _show(self, run: Run, events: EventFolder, path: Path, step: int) -> None:
        try:
            png = read_bytes(path)
            width, height = _PNG.unpack_from(png)
        except (UnreadableError, struct.error) as error:
            _log.warning("%s: %s", path, error)
            return
        events.of(run).image(path.stem, png, height=height, width=width, step=step, wall_time=time.time())
        events.of(run).flush()


@dataclass(frozen=True, kw_only=True)
class DrawnFigures(Callback):
    """Draws figures while the run goes on: a subclass requests them of `_figures`."""

    observes: ClassVar[bool] = True
    events_name: ClassVar[str] = ""
    """Folder of its events below `tensorboard/`; "": figures are image files alone."""

    every_s: Annotated[float, cosmetic, above(0)] = 60.0
    """Least seconds between two drawings during the run; the last figures are always drawn."""
    _events: EventFolder = field(init=False, repr=False, compare=False)
    _figures: FigureQueue = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        events = EventFolder(self.events_name)
        shown = events if self.events_name else None
        vars(self).update(_events=events, _figures=FigureQueue(every_s=self.every_s, events=shown))

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
        """Draw what waits."""
        if run.is_owner:
            self._figures.finish(run)
        self._events.close()


TABLE: Final = "confusion"
"""Name of the metric, as `Objective.details` gives it."""


@dataclass(frozen=True, kw_only=True)
class Confusion(DrawnFigures):
    """Draws which classes are mistaken for which, after each evaluation: `plots/confusion_val.png`.

    Evaluations count the matrix besides the metrics of the objective, each sample once on any number of ranks. The page
    of the run and TensorBoard show it; `tables.jsonl` has the counts of every evaluation.
    """

    decides_by_figures: ClassVar[bool] = True  # an evaluator beside the training gives it no tables
    details: ClassVar[tuple[str, ...]] = (TABLE,)
    events_name: ClassVar[str] = "confusion"

    _has_said: bool = field(default=False, init=False, repr=False, compare=False)

    def validate(self, planned: Planned) -> list[Problem]:
        """Return problems: an objective without classes, and too many of them for a table."""
        dataset, rule = planned.datasets["train"], ""
        names = getattr(dataset, "classes", None)
        count = len(names) if isinstance(names, list | tuple) else 0
        if TABLE not in {*planned.objective.details(dataset, batch_size=1).metrics, *planned.objective.metrics()}:
            rule = f"needs classes, and {type(planned.objective).__name__} has none. Leave it out."
        elif count**2 > MAX_CELLS:
            rule = f"counts at most {MAX_CELLS:,} pairs of classes, and the data has {count:,} classes. Leave it out."
        return [Problem(key=planned.key, rule=rule)] if rule else []

    def eval_tables(self, run: Run, tables: Mapping[str, Table]) -> None:
        """Draw the matrix of each split."""
        if not run.is_owner:
            return
        found = {name: table for name, table in tables.items() if is_confusion(name, table)}
        if not found and not self._has_said:
            vars(self)["_has_said"] = True
            _log.warning("callbacks=[confusion] draws nothing: outputs are not (samples, classes), or have no targets.")
        for name, table in found.items():
            split = name.rpartition("/")[0]
            path = run.folder / "plots" / f"confusion_{split.replace('/', '_')}.png"
            title = f"{run.cfg.name}: confusion matrix of {split}, step {run.state.step:,}"
            counts = [list(row[1:]) for row in table.rows]
            self._figures.ask(run, path, "confusion", title=title, classes=table.columns[1:], counts=counts)


def is_confusion(name: str, table: Table) -> bool:
    """Return whether a table of an evaluation is a confusion matrix: of this name, and square.

    Example:
        >>> import torch
        >>> is_confusion("val/confusion", Table.of(torch.eye(2), ["cat", "dog"]))
        True
    """
    square = table.columns[1:] == tuple(str(row[0]) for row in table.rows)
    return name.rpartition("/")[2] == TABLE and bool(table.rows) and square


@dataclass(frozen=True, kw_only=True)
class SamplePictures(DrawnFigures):
    """Draws the 16 samples with the highest loss, after each evaluation: `plots/worst_val.png`.

    Each has its class, the guess of the model, and the probability of the guess. Under cross entropy they are the
    mistakes that the model is most confident of. The run's page and TensorBoard show them.
    """

    decides_by_figures: ClassVar[bool] = True  # an evaluator beside the training gives it no tables
    details: ClassVar[tuple[str, ...]] = (WORST,)
    events_name: ClassVar[str] = "samples"

    def validate(self, planned: Planned) -> list[Problem]:
        """Return problems: an objective that has no worst samples, and samples that are no images or cannot be read."""
        objective, dataset, rule = planned.objective, planned.datasets["train"], ""
        indexed = [split for split, one in planned.datasets.items() if not hasattr(one, "__getitem__")]
        if WORST not in objective.details(dataset, batch_size=1).metrics:
            rule = f"needs the loss of each sample, and {type(objective).__name__} returns none. Leave it out."
        elif planned.sample is None or indexed:
            rule = f"reads samples by their numbers, and the split {(*indexed, 'train')[0]} is a stream. Leave it out."
        elif not images_of([shown := input_of(planned.sample, getattr(objective, "input", None))]):
            found = tuple(shown.shape) if isinstance(shown, Tensor | np.ndarray) else type(shown).__name__
            rule = f"needs images, (1 or 3, height, width) of 4 pixels or more, and a sample is {found}. Leave it out."
        return [Problem(key=planned.key, rule=rule)] if rule else []

    def eval_tables(self, run: Run, tables: Mapping[str, Table]) -> None:
        """Draw the worst samples of each split."""
        if not run.is_owner:
            return
        for name, table in tables.items():
            split, _, kind = name.rpartition("/")
            dataset = dataset_of(run, split)
            if kind != WORST or dataset is None or not table.rows:
                continue
            places = [int(row[0]) for row in table.rows]
            images = images_of(inputs_at(dataset, places, run.cfg.objective.get("input")))
            captions = captions_of(table, getattr(dataset, "classes", None))
            path = run.folder / "plots" / f"worst_{split.replace('/', '_')}.png"
            title = f"{run.cfg.name}: highest losses of {split}, step {run.state.step:,}"
            shown = [(png_bytes(grid(one[None])), caption) for one, caption in zip(images, captions, strict=False)]
            if shown:
                self._figures.ask(run, path, "samples", title=title, samples=shown)


def dataset_of(run: Run, split: str) -> Any:
    """Return the dataset of a split; that of `val` for the averages' `val_ema`, None if the split does not exist."""
    found = [name for name in run.datasets if split == name or split.startswith(f"{name}_")]
    return run.datasets[max(found, key=len)] if found else None


def inputs_at(dataset: Any, places: Sequence[int], fields: Any = None) -> list[Any]:
    """Return the inputs of samples by their indices; no generator of the training draws meanwhile.

    Args:
        dataset: a dataset that can be indexed.
        places: indices of the samples.
        fields: input field named by the objective; None: the common names.
    """
    with Untouched(seed=0):
        return [input_of(read_sample(dataset, place), fields) for place in places]


def images_of(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs as images, each (1 or 3, height, width) float32; empty if one of them is not an image.

    Example:
        >>> images_of([torch.zeros(1, 8, 8)])[0].shape, images_of([torch.zeros(8)])
        ((1, 8, 8), [])
    """
    found = []
    for one in inputs:
        tensor = torch.as_tensor(one) if isinstance(one, Tensor | np.ndarray) else None
        image = None if tensor is None or tensor.dim() != 3 else next(images_in(tensor[None]), None)
        if image is None:
            return []
        found.append(image[0].numpy())
    return found


def captions_of(table: Table, classes: Any) -> list[tuple[str, str, str]]:
    """Return the lines of a caption for each row of a table of worst samples: class, guess, probability of the guess.

    Example:
        >>> columns = ("sample", "loss", "target", "guess", "probability")
        >>> table = Table(columns=columns, rows=((7, 4.0, 1.0, 0.0, 0.98),))
        >>> captions_of(table, ["cat", "dog"])
        [('dog', 'guess cat', '98 %')]
    """

    def name(number: Any) -> str:
        place = int(number)
        known = isinstance(classes, list | tuple) and 0 <= place < len(classes)
        return str(classes[place]) if known else str(place)

    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return [(name(row["target"]), f"guess {name(row['guess'])}", f"{100 * row['probability']:.0f} %") for row in rows]


@dataclass(frozen=True, kw_only=True)
class Plots(DrawnFigures):
    """`plots/lr.png` once; `plots/loss.png` and one of each metric at intervals, and at the end.

    A short-lived process draws them: matplotlib would cost the training process 28 MB and 0.3 s. It starts 5 s after
    the first row of metrics, so that a training of seconds starts only one, at its end.
    """

    _has_begun: bool = field(default=False, init=False, repr=False, compare=False)

    def log(self, run: Run, row: Row) -> None:
        """Draw the learning rate at the first row."""
        if run.is_owner and not self._has_begun:
            vars(self)["_has_begun"] = True
            rates = {name: lr_points(rate, run.num_steps) for name, rate in (run.rates or {"": run.rate}).items()}
            path = run.folder / "plots/lr.png"
            self._figures.ask(run, path, "lr", title=run.cfg.name, rates=rates)
        super().log(run, row)

    def eval_end(self, run: Run, metrics: Row) -> None:
        """Draw the metrics, if a drawing is due."""
        self.log(run, metrics)
        records, folder = run.folder / "metrics.jsonl", run.folder / "plots"
        if run.is_owner and records.exists():
            watched = MonitoredMetric.of(run.cfg.eval)
            modes = {watched.metric: watched.mode}
            self._figures.ask(run, folder, "metrics", title=run.cfg.name, records=records, modes=modes)

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Draw the metrics for the last time, and wait for it."""
        self.eval_end(run, {})
        super().run_end(run, result)
