"""Results of a metric that are more than one number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from torch import Tensor

from trainkit.errors import TrainingError

Cell = str | float
"""A cell of a table."""

MAX_CELLS: Final = 1_000_000
"""Most cells of a table."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text and numbers, such as one line per class.

    Example:
        >>> Table(columns=("class", "recall"), rows=(("cat", 0.5), ("dog", 1.0))).markdown().splitlines()[2]
        '| cat | 0.5 |'
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """The rows, with one cell per column."""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise TrainingError(f"every row of a table needs {len(self.columns)} cells, one per column.")

    @classmethod
    def of(cls, values: Tensor, names: Sequence[str] | None = None) -> Table:
        """Return the table of a tensor: a vector has one row per element, a matrix its own rows, and more dims are
        flattened with their indices.

        Args:
            values: a tensor on any device, of any dtype.
            names: names of the rows, and of the columns of a square matrix; their numbers by default.

        Example:
            >>> import torch
            >>> Table.of(torch.eye(2), ["cat", "dog"]).rows
            (('cat', 1.0, 0.0), ('dog', 0.0, 1.0))
        """
        shape = tuple(values.shape)
        if values.numel() > MAX_CELLS:
            raise TrainingError(f"a table of {values.numel():,} cells is too large: {MAX_CELLS:,} at most.")
        numbers = values.detach().double().cpu()
        if len(shape) > 2:
            places = map(str, product(*(range(size) for size in shape)))
            cells = zip(places, numbers.flatten().tolist(), strict=True)
            return cls(columns=("index", "value"), rows=tuple(cells))
        named = list(map(str, range(shape[0]))) if names is None else list(names)
        if len(shape) == 1:
            return cls(columns=("index", "value"), rows=tuple(zip(named, numbers.tolist(), strict=True)))
        square = names is not None and shape[1] == len(named)
        columns = named if square else list(map(str, range(shape[1])))
        rows = zip(named, numbers.tolist(), strict=True)
        return cls(columns=("", *columns), rows=tuple((name, *cells) for name, cells in rows))

    def to_json(self) -> dict[str, Any]:
        """Return columns and rows for JSON; NaN and infinity, which JSON cannot represent, become null."""
        finite = [[None if isinstance(c, float) and not math.isfinite(c) else c for c in row] for row in self.rows]
        return {"columns": list(self.columns), "rows": finite}

    @property
    def num_cells(self) -> int:
        """Cells, without the columns' names."""
        return len(self.columns) * len(self.rows)

    def markdown(self, most: int = 200) -> str:
        """Return the table as Markdown; if there are more than `most` rows, only the first ones."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows[:most]]
        text = "\n".join("| " + " | ".join(map(_text, line)) + " |" for line in lines)
        return text if len(self.rows) <= most else f"{text}\n\n{len(self.rows) - most:,} more rows"


Result = float | Tensor | Table | Mapping[str, Any]
"""Result of a metric: a number, a tensor, a table, or several of these by name."""


def results_of(name: str, value: Result | object) -> tuple[dict[str, float], dict[str, Table]]:
    """Sort the result of a metric into numbers and tables, by name; entries of a mapping are named `name/key`.

    Raises:
        TrainingError: the result is something else.

    Example:
        >>> import torch
        >>> figures, tables = results_of("val/f1", {"mean": 0.5, "each": torch.tensor([0.0, 1.0])})
        >>> figures, list(tables)
        ({'val/f1/mean': 0.5}, ['val/f1/each'])
    """
    if isinstance(value, Table):
        return {}, {name: value}
    if isinstance(value, int | float):
        return {name: float(value)}, {}
    if isinstance(value, Tensor):
        return ({name: float(value)}, {}) if value.numel() == 1 else ({}, {name: Table.of(value)})
    if not isinstance(value, Mapping):
        rule = "a number, a tensor, a Table, or a mapping of names to these"
        raise TrainingError(f"the metric {name} returns a {type(value).__name__}, and must return {rule}.")
    figures: dict[str, float] = {}
    tables: dict[str, Table] = {}
    for key, part in value.items():
        numbers, more = results_of(f"{name}/{key}", part)
        figures.update(numbers)
        tables.update(more)
    return figures, tables


def _text(cell: Cell) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell).replace("|", "\\|").replace("\n", " ")
