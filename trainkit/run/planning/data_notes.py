"""Notes about the data of a plan: what of it is not used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor

from trainkit.data.splits import test_splits, validation_splits
from trainkit.objectives.base import Objective, Supervised
from trainkit.objectives.fields import named_fields, unused_fields
from trainkit.run.planning.build import Components


def data_notes(parts: Components) -> list[str]:
    """Return notes for the user about fields that neither the model nor the loss receives, and unused splits."""
    return [*_fields_left_out(parts), *_splits_left_out(parts.datasets)]


def refuse_unknown_fields(parts: Components) -> None:
    """Refuse an objective whose fields are not those of a sample, before anything starts.

    Raises:
        ConfigError: a field that the objective names does not exist.
        DataError: the structure of a sample leaves open which fields are meant.
    """
    if _selects(parts.objective) and parts.example is not None:
        parts.objective.split_batch(parts.example)


def _selects(objective: Objective) -> TypeGuard[Supervised]:
    """Return whether an objective selects its fields by name; one with a loss of its own may do otherwise."""
    return isinstance(objective, Supervised) and type(objective).loss is Supervised.loss


def _fields_left_out(parts: Components) -> list[str]:
    if not _selects(parts.objective) or parts.example is None:
        return []
    named = named_fields(parts.example)
    left_out = unused_fields(parts.example, parts.objective.input, parts.objective.target)
    numbers = [name for name in left_out if _is_number(named[name])]
    if not numbers:
        return []
    return [
        f"not used, of each sample: {', '.join(numbers)}. objective.input=[NAME,NAME] gives the model several fields."
    ]


def _splits_left_out(names: Iterable[str]) -> list[str]:
    used = {"train", *validation_splits(names), *test_splits(names)}
    return [
        f"the split {name} is not evaluated: only val, test, val_NAME and test_NAME are"
        for name in names
        if name not in used
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | np.generic | int | float | list)
