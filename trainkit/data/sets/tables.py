"""Tables: rows of a CSV file, and a synthetic one for regression."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.data.declaration import Declared, image
from trainkit.data.reading.files import existing
from trainkit.data.stored import InMemory
from trainkit.errors import DataError
from trainkit.fields import at_least, below, placement

_NAMED: Final = 5
"""Number of problems of a file that an error names."""


@dataclass(frozen=True, kw_only=True)
class CsvTable(InMemory):
    """Rows of a CSV file with a header: features of numbers and categories, and one target.

    A column of numbers becomes one feature, with mean 0 and deviation 1 over the training rows; any other becomes one
    feature of 0 or 1 per text that it has in the training rows, and a text that they do not have is all zeros. A sample
    is the features of a row, (features,) float32, and its target, () float32 or int64.
    """

    split: Literal["train", "val", "all"]
    """Part of the table to use; `all` are the rows of `path` in their order, which may lack the target."""
    path: Path
    """The file, UTF-8, with the names of the columns in its first line."""
    target: str
    """The column with the target."""
    target_kind: Literal["number", "class"] = "number"
    """`number` for regression; `class` for classification: classes are numbered in the order of their texts."""
    columns: list[str] | None = None
    """The columns that are features; null: all but the target."""
    val_share: Annotated[float, below(0, 1)] = 0.1
    """Share of the rows, drawn by `split_seed`, to validate on; with 0, train on all and do not validate."""
    split_seed: int = 0
    """Seed of the choice of validation rows, independent of the run's."""
    reference: Annotated[Path | None, placement] = None
    """The file whose training rows give means, deviations and categories, if `path` is another file; null: `path`."""

    @classmethod
    def splits(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the splits: validation only if rows are held out for it, `all` for another file than the reference."""
        held_out = () if node.get("val_share") == 0 else ("val",)
        return ("train", *held_out, *(() if node.get("reference") is None else ("all",)))

    def __post_init__(self) -> None:
        table = _Table.read(self.path)
        reference = table if self.reference is None else _Table.read(self.reference, key="data.reference")
        names = [name for name in reference.names if name != self.target] if self.columns is None else self.columns
        has_targets = self.split != "all" or self.target in table.names
        table.check([*names, self.target] if has_targets else names)
        training = reference.rows(self._chosen(len(reference), "train"))
        rows = table.rows(self._chosen(len(table), self.split))
        features = [_encoded(training[name], rows[name]) for name in names]
        stacked = torch.from_numpy(np.concatenate(features, axis=1).astype(np.float32))
        targets = (self._targets(training[self.target], rows[self.target]),) if has_targets else ()
        self._keep(stacked, *targets)

    def _chosen(self, count: int, split: str) -> NDArray[np.int64]:
        """Return the indices of the rows of a split, in the order of the file."""
        if split == "all":
            return np.arange(count)
        order = np.random.default_rng(self.split_seed).permutation(count)
        held_out = round(count * self.val_share)
        return np.sort(order[:held_out] if split == "val" else order[held_out:])

    def _targets(self, training: Sequence[str], texts: Sequence[str]) -> Tensor:
        if self.target_kind == "class":
            classes = {text: number for number, text in enumerate(sorted(set(training)))}
            if unknown := sorted({text for text in texts if text not in classes}):
                raise DataError(f"data.target={self.target}: no training row has the class {unknown[0]!r}.")
            return torch.tensor([classes[text] for text in texts])
        numbers = _numbers(texts)
        if numbers is None:
            text = next(text for text in texts if _numbers([text]) is None)
            raise DataError(
                f"data.target={self.target}: {text!r} is not a finite number. Use data.target_kind=class, or correct "
                f"it."
            )
        return torch.from_numpy(numbers.astype(np.float32))


@dataclass(frozen=True)
class _Table:
    path: Path
    names: list[str]
    cells: list[list[str]]
    """One list per row."""

    @classmethod
    def read(cls, path: Path, *, key: str = "data.path") -> _Table:
        """Read a file.

        Raises:
            DataError: it is missing, is not UTF-8, has no rows or the same name twice, or a row has another number of
                cells or an empty one; names the first lines.
        """
        try:
            with existing(path, key=key).open(encoding="utf-8-sig", newline="") as file:
                rows = csv.reader(file)
                names = next(rows, [])
                numbered = [(rows.line_num, row) for row in rows if row]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{key}={path}: cannot be read as CSV: {error}.") from error
        wrong = [f"line {line} has {len(row)} cells" for line, row in numbered if len(row) != len(names)]
        wrong += [f"line {line} has an empty cell" for line, row in numbered if "" in row]
        if len(set(names)) < len(names):
            wrong.insert(0, "two columns have one name")
        if not numbered:
            wrong.insert(0, "there are no rows below the header")
        if wrong:
            more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise DataError(f"{key}={path} has {len(names)} columns: {', '.join(wrong[:_NAMED])}{more}.")
        return cls(path, names, [row for _, row in numbered])

    def __len__(self) -> int:
        return len(self.cells)

    def check(self, names: Sequence[str]) -> None:
        """Refuse columns that the file does not have.

        Raises:
            DataError: there is such a column.
        """
        if lacking := [name for name in names if name not in self.names]:
            raise DataError(f"{self.path} has no column {', '.join(lacking)}. Its columns are {', '.join(self.names)}.")

    def rows(self, chosen: NDArray[np.int64]) -> dict[str, list[str]]:
        """Return the texts of some rows, by column."""
        kept = [self.cells[row] for row in chosen]
        return {name: [row[place] for row in kept] for place, name in enumerate(self.names)}


def _encoded(training: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
    """Return (rows, features) of a column."""
    known, numbers = _numbers(training), _numbers(texts)
    if known is None:
        categories = {text: place for place, text in enumerate(sorted(set(training)))}
        marks = np.zeros((len(texts), len(categories)))
        for row, text in enumerate(texts):
            if text in categories:
                marks[row, categories[text]] = 1
        return marks
    if numbers is None:
        text = next(text for text in texts if _numbers([text]) is None)
        raise DataError(f"a cell is {text!r}, and the other rows of its column have finite numbers.")
    scaled: NDArray[np.float64] = ((numbers - known.mean()) / (known.std() or 1.0))[:, None]
    return scaled


def _numbers(texts: Sequence[str]) -> NDArray[np.float64] | None:
    """Return the finite numbers that texts write, or None."""
    try:
        found = np.array([float(text) for text in texts])
    except ValueError:
        return None
    return found if np.isfinite(found).all() else None


@dataclass(frozen=True, kw_only=True)
class Friedman(InMemory):
    """A synthetic regression of ten uniform features, of which five matter, with Gaussian noise.

    The target is 10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4 + noise: the best root mean squared error is the
    deviation of the noise. Features have mean 0 and deviation 1. A sample is its features, (10,) float32, and its
    target, () float32.

    Source: Friedman 1991, "Multivariate adaptive regression splines", section 4.3.

    Example:
        >>> Friedman(split="val")[0][0].shape
        torch.Size([10])
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    split: Literal["train", "val"]
    """Part of the dataset to use."""
    num_samples: Annotated[int, at_least(1)] = 8000
    """Number of training rows."""
    val_samples: Annotated[int, at_least(1)] = 2000
    """Number of validation rows."""
    noise: Annotated[float, at_least(0)] = 1.0
    """Standard deviation of the noise; that of the target without it is 4.9."""
    seed: int = 0
    """Seed of the data, independent of the run's."""

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return length and samples, without the data."""
        count = keys.get("num_samples", 8000) if split == "train" else keys.get("val_samples", 2000)
        return Declared(num_samples=count, draw=lambda g: (image(g, 10), image(g)))

    def __post_init__(self) -> None:
        count = self.num_samples if self.split == "train" else self.val_samples
        drawn = np.random.default_rng([self.seed, self.split == "val"])
        x = drawn.random((count, 10))
        target = 10 * np.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        target += self.noise * drawn.standard_normal(count)
        features = (x - 0.5) * math.sqrt(12)
        self._keep(*(torch.from_numpy(values.astype(np.float32)) for values in (features, target)))
