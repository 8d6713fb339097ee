"""The samples with the highest loss as pictures, after each evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trainkit.callbacks.figures.shown import EvaluationFigures, figure_path
from trainkit.callbacks.tensorboard import grid, images_in, png_bytes
from trainkit.data.splits import read_sample
from trainkit.errors import Problem
from trainkit.numerics.generators import Untouched
from trainkit.objectives.fields import input_of
from trainkit.objectives.metrics import WORST
from trainkit.objectives.tables import Table
from trainkit.report.drawing import samples_request
from trainkit.trainer.events import Planned, Run


@dataclass(frozen=True, kw_only=True)
class SamplePictures(EvaluationFigures):
    """Draws the 16 samples with the highest loss, after each evaluation: `plots/worst_val.png`.

    Each has its class, the guess of the model, and the probability of the guess. Under cross entropy they are the
    mistakes that the model is most confident of. The run's page and TensorBoard show them.
    """

    details: ClassVar[tuple[str, ...]] = (WORST,)
    events_name: ClassVar[str] = "samples"

    def validate(self, planned: Planned) -> list[Problem]:
        """Return problems: an objective that has no worst samples, and samples that are no images or cannot be read."""
        objective, dataset = planned.objective, planned.datasets["train"]
        if WORST not in objective.details(dataset, batch_size=1).metrics:
            rule = f"needs the loss of each sample, and {type(objective).__name__} returns none. Leave it out."
            return [Problem(key=planned.key, rule=rule)]
        indexed = [split for split, one in planned.datasets.items() if not hasattr(one, "__getitem__")]
        if planned.sample is None or indexed:
            rule = f"reads samples by their numbers, and the split {(*indexed, 'train')[0]} is a stream. Leave it out."
            return [Problem(key=planned.key, rule=rule)]
        shown = input_of(planned.sample, getattr(objective, "input", None))
        if not images_of([shown]):
            found = tuple(shown.shape) if isinstance(shown, Tensor | np.ndarray) else type(shown).__name__
            rule = f"needs images, (1 or 3, height, width) of 4 pixels or more, and a sample is {found}. Leave it out."
            return [Problem(key=planned.key, rule=rule)]
        return []

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
            path = figure_path(run, WORST, split)
            title = f"{run.cfg.name}: highest losses of {split}, step {run.state.step:,}"
            shown = [(png_bytes(grid(one[None])), caption) for one, caption in zip(images, captions, strict=False)]
            if shown:
                self._figures.ask(run, path, samples_request(path, title=title, samples=shown))


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
