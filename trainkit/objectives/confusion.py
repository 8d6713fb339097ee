"""The confusion matrix of classes, and precision and recall of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.objectives.base import Collective, Loss, Metric
from trainkit.objectives.tables import Table


class ConfusionMatrix(Metric):
    """One row per true class: the number of its samples predicted as each class. Counts are exact on any number of
    ranks.

    Outputs are scores with the classes in the dim `Loss.class_dim`, by default the last, targets class numbers of the
    other dims, or probabilities, of which the most likely class counts.

    Args:
        num_classes: number of classes.
        names: names of the classes; their numbers by default.
        ignore_index: the target of a padded place, which does not count.
    """

    gives_table: ClassVar[bool] = True

    def __init__(self, num_classes: int, names: Sequence[str] | None = None, ignore_index: int = -100) -> None:
        if num_classes < 2:
            raise ConfigError([Problem(key="num_classes", value=num_classes, rule="must be 2 or more.")])
        if names is not None and len(names) != num_classes:
            raise ConfigError([Problem(key="names", value=list(names), rule=f"must be {num_classes}, one per class.")])
        self._size, self._ignored = num_classes, ignore_index
        self._names = list(map(str, range(num_classes))) if names is None else list(names)
        self._counts = torch.zeros(num_classes * num_classes + 1, dtype=torch.float64)

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        scores, labels, size = loss.outputs.detach(), loss.classes.flatten(), loss.outputs.shape[loss.class_dim]
        if size != self._size:
            raise TrainingError(f"a confusion matrix of {self._size} classes got scores of {size}.")
        guesses = scores.argmax(dim=loss.class_dim).flatten()
        counted = labels != self._ignored
        if loss.counted is not None:
            counted &= loss.counted.flatten()
        # Ignored targets are added to the last place.
        places = torch.where(counted, labels * self._size + guesses, self._size * self._size)
        self._counts = self._counts.to(scores.device)
        self._counts.index_add_(0, places, torch.ones_like(places, dtype=torch.float64))

    def compute(self, collective: Collective) -> Table:
        """Return the counts over all ranks."""
        return Table.of(self._matrix(collective), self._names)

    def _matrix(self, collective: Collective) -> Tensor:
        """Return (true class, guessed class) float64 counts over all ranks."""
        total = collective.sum(self._counts)[:-1]
        return total.reshape(self._size, self._size)


class PerClass(ConfusionMatrix):
    """Precision, recall, F1 and number of samples of each class; NaN where a share is 0 / 0."""

    def compute(self, collective: Collective) -> Table:
        """Return one row per class."""
        matrix = self._matrix(collective).cpu()
        hits, true, guessed = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
        columns = (hits / guessed, hits / true, 2 * hits / (true + guessed), true)
        rows = zip(self._names, *(column.tolist() for column in columns), strict=True)
        return Table(columns=("class", "precision", "recall", "f1", "samples"), rows=tuple(rows))
