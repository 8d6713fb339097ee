"""Figures of a run: its loss as a picture, confusion matrices, the samples with the highest loss."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.callbacks.tensorboard import EventFolder, grid, images_in, write_png
from trainkit.data.splits import read_sample
from trainkit.errors import Problem
from trainkit.files import naming
from trainkit.numerics.generators import Untouched
from trainkit.objectives.fields import input_of
from trainkit.objectives.metrics import WORST
from trainkit.objectives.tables import MAX_CELLS, Table
from trainkit.report.curves import MetricsReader
from trainkit.trainer.events import Callback, Planned, Run

_log = logging.getLogger(__name__)
TABLE: Final = "confusion"
"""Name of the metric, as `Objective.details` gives it."""


@dataclass(kw_only=True, eq=False)
class Confusion(Callback):
    """Counts which classes are mistaken for which, in each evaluation, each sample once on any number of ranks.

    The page of the run and TensorBoard show the matrix; `tables.jsonl` has the counts of every evaluation.
    """

    observes: ClassVar[bool] = True
    decides_by_figures: ClassVar[bool] = True  # an evaluator beside the training gives it no tables
    details: ClassVar[tuple[str, ...]] = (TABLE,)

    _warned: bool = field(default=False, init=False, repr=False)

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
        """Warn once if an evaluation has no matrix."""
        if run.is_owner and not self._warned and not any(is_confusion(name, table) for name, table in tables.items()):
            self._warned = True
            _log.warning("callbacks=[confusion] shows nothing: outputs are not (samples, classes), or have no targets.")


def is_confusion(name: str, table: Table) -> bool:
    """Return whether a table of an evaluation is a confusion matrix: of this name, and square.

    Example:
        >>> import torch
        >>> is_confusion("val/confusion", Table.of(torch.eye(2), ["cat", "dog"]))
        True
    """
    square = table.columns[1:] == tuple(str(row[0]) for row in table.rows)
    return name.rpartition("/")[2] == TABLE and bool(table.rows) and square


@dataclass(kw_only=True, eq=False)
class SamplePictures(Callback):
    """Draws the 16 samples with the highest loss, after each evaluation: `plots/worst_val.png`.

    Each has its class, the guess of the model, and the probability of the guess. Under cross entropy they are the
    mistakes that the model is most confident of. The run's page and TensorBoard show them.
    """

    decides_by_figures: ClassVar[bool] = True  # an evaluator beside the training gives it no tables
    observes: ClassVar[bool] = True
    details: ClassVar[tuple[str, ...]] = (WORST,)

    _events: EventFolder = field(default_factory=lambda: EventFolder("samples"), init=False, repr=False)

    def validate(self, planned: Planned) -> list[Problem]:
        """Return problems: an objective that has no worst samples, and samples that are no images or cannot be read."""
        objective, dataset, rule = planned.objective, planned.datasets["train"], ""
        streams = [split for split, data in planned.datasets.items() if not hasattr(data, "__getitem__")]
        if WORST not in objective.details(dataset, batch_size=1).metrics:
            rule = f"needs the loss of each sample, and {type(objective).__name__} returns none. Leave it out."
        elif planned.sample is None or streams:
            rule = f"reads samples by their numbers, and the split {(*streams, 'train')[0]} is a stream. Leave it out."
        elif not images_of([shown := input_of(planned.sample, getattr(objective, "input", None))]):
            actual = tuple(shown.shape) if isinstance(shown, Tensor | np.ndarray) else type(shown).__name__
            rule = f"needs images, (1 or 3, height, width) of 4 pixels or more, and a sample is {actual}. Leave it out."
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
            indices = [int(row[0]) for row in table.rows]
            images = images_of(inputs_at(dataset, indices, run.cfg.objective.get("input")))
            captions = captions_of(table, getattr(dataset, "classes", None))
            path = run.folder / "plots" / f"worst_{split.replace('/', '_')}.png"
            if images:
                pixels = captioned(images, captions)
                write_png(path, pixels)
                self._events.of(run).image(path.stem, pixels, step=run.state.step)

    def rolled_back(self, run: Run, step: int) -> None:
        """Replace the pictures of the steps that are trained again."""
        self._events.restart(run.state.step)

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Close the file of TensorBoard."""
        self._events.close()


_TILE: Final = 96
"""Width and height of a picture of a sample, in pixels."""
_CAPTION: Final = 44
"""Height of the three lines below it."""


def captioned(images: Sequence[Any], captions: Sequence[Sequence[str]]) -> NDArray[np.uint8]:
    """Return images with the lines of their captions below them, eight in a row: (height, width, 3).

    Example:
        >>> captioned([np.zeros((1, 8, 8), np.float32)], [("dog", "guess cat", "98 %")]).shape
        (140, 104, 3)
    """
    from PIL import Image, ImageDraw  # noqa: PLC0415 - 50 ms, where a picture is drawn only

    width, height = _TILE + 8, _TILE + _CAPTION
    canvas = Image.new("RGB", (width * min(8, len(images)), height * -(-len(images) // 8)), "white")
    pen = ImageDraw.Draw(canvas)
    for index, (image, lines) in enumerate(zip(images, captions, strict=False)):
        pixels = grid(image[None])
        tile = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        corner = (width * (index % 8), height * (index // 8))
        canvas.paste(tile.resize((_TILE, _TILE), Image.Resampling.NEAREST), corner)
        text = "\n".join(line if len(line) <= 17 else f"{line[:16]}…" for line in lines)
        pen.multiline_text((corner[0], corner[1] + _TILE + 2), text, fill="black", font_size=11, spacing=2)
    return np.asarray(canvas)


def dataset_of(run: Run, split: str) -> Any:
    """Return the dataset of a split; that of `val` for the averages' `val_ema`, None if the split does not exist."""
    names = [name for name in run.datasets if split == name or split.startswith(f"{name}_")]
    return run.datasets[max(names, key=len)] if names else None


def inputs_at(dataset: Any, indices: Sequence[int], fields: Any = None) -> list[Any]:
    """Return the inputs of samples by their indices; no generator of the training draws meanwhile.

    Args:
        dataset: a dataset that can be indexed.
        indices: indices of the samples.
        fields: input field named by the objective; None: the common names.
    """
    with Untouched(seed=0):
        return [input_of(read_sample(dataset, index), fields) for index in indices]


def images_of(inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs as images, each (1 or 3, height, width) float32; empty if one of them is not an image.

    Example:
        >>> images_of([torch.zeros(1, 8, 8)])[0].shape, images_of([torch.zeros(8)])
        ((1, 8, 8), [])
    """
    images = []
    for item in inputs:
        tensor = torch.as_tensor(item) if isinstance(item, Tensor | np.ndarray) else None
        image = None if tensor is None or tensor.dim() != 3 else next(images_in(tensor[None]), None)
        if image is None:
            return []
        images.append(image[0].numpy())
    return images


def captions_of(table: Table, classes: Any) -> list[tuple[str, str, str]]:
    """Return the lines of a caption for each row of a table of worst samples: class, guess, probability of the guess.

    Example:
        >>> columns = ("sample", "loss", "target", "guess", "probability")
        >>> table = Table(columns=columns, rows=((7, 4.0, 1.0, 0.0, 0.98),))
        >>> captions_of(table, ["cat", "dog"])
        [('dog', 'guess cat', '98 %')]
    """

    def name(number: Any) -> str:
        index = int(number)
        has_name = isinstance(classes, list | tuple) and 0 <= index < len(classes)
        return str(classes[index]) if has_name else str(index)

    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return [(name(row["target"]), f"guess {name(row['guess'])}", f"{100 * row['probability']:.0f} %") for row in rows]


class Plots(Callback):
    """Draws `plots/loss.png` at the end of a run: its losses over the steps. The page of the run shows every metric."""

    observes: ClassVar[bool] = True

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Draw the losses."""
        if not run.is_owner:
            return
        curves = MetricsReader(run.folder / "metrics.jsonl").read().curves
        if losses := {name: curve.points() for name, curve in curves.items() if name.rpartition("/")[2] == "loss"}:
            from trainkit.report.plots import draw_loss  # noqa: PLC0415 - matplotlib, where it draws only

            path = run.folder / "plots/loss.png"
            with naming(path):
                draw_loss(path, title=run.cfg.name, losses=losses)
