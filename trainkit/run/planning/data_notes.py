"""Notes about the data of a plan: what of it is not used."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from trainkit.objectives.base import Objective, Supervised
from trainkit.objectives.fields import named_fields, unused_fields
from trainkit.run.planning.build import Components


def data_notes(parts: Components) -> list[str]:
    """Return notes for the user about fields that neither the model nor the loss receives."""
    return _fields_left_out(parts)


def refuse_unknown_fields(parts: Components) -> None:
    """Refuse an objective whose fields are not those of a sample, before anything starts.

    Raises:
        ConfigError: a field that the objective names does not exist.
        DataError: the structure of a sample leaves open which fields are meant.
    """
    if _selects(parts.objective) and parts.example is not None:
        parts.objective.split_batch(parts.example)  # type: ignore[attr-defined]


def _selects(objective: Objective) -> bool:
    """Return whether an objective selects its fields by name; one with a loss of its own may do otherwise."""
    return isinstance(objective, Supervised) and type(objective).loss is Supervised.loss


def _fields_left_out(parts: Components) -> list[str]:
    if not _selects(parts.objective) or parts.example is None:
        return []
    named = named_fields(parts.example)
    left_out = unused_fields(parts.example, *parts.objective.field_names)  # type: ignore[attr-defined]
    numbers = [name for name in left_out if _is_number(named[name])]
    if not numbers:
        return []
    return [
        f"not used, of each sample: {', '.join(numbers)}. objective.input=[NAME,NAME] gives the model several fields."
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | np.generic | int | float | list)
