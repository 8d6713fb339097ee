"""Tables: rows of a CSV file, and a synthetic one for regression."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.config.grammar import quoted_form
from trainkit.config.values import either
from trainkit.data.reading.files import alike, text_of
from trainkit.data.stored import InMemory
from trainkit.errors import DataError, listed
from trainkit.fields import a_file, below, maths, pattern, placement, unit

_LIKE_A_NUMBER: Final = re.compile(r"[-+$€£]?\s*(\d[\d.,' _]*|nan|inf|infinity)\s*%?", re.IGNORECASE)
"""Texts that a person or program wrote as a number, although Python may not read them as one."""


@dataclass(frozen=True, kw_only=True)
class CsvTable(InMemory):
    """Rows of a CSV file with a header: features of numbers and categories, and one target.

    A column of numbers becomes one feature, with mean 0 and deviation 1 over the training rows; a column of texts
    becomes one feature of 0 or 1 per text that it has in the training rows, and a text that they do not have is all
    zeros. A column with both is refused, and so is a missing cell. A sample is the features of a row, (features,)
    float32, and its target, () float32 or int64.
    """

    split: Literal["train", "val", "all"]
    """Part of the table to use; `all` are the rows of `path` in their order, which may lack the target."""
    path: Annotated[Path, a_file]
    """The file, with the names of the columns in its first line."""
    target: str
    """The column with the target."""
    target_kind: Literal["number", "class"] = "number"
    """`number` for regression; `class` for classification: classes are numbered in the order of their texts."""
    columns: list[str] | None = None
    """The columns that are features; null: all but the target."""
    categories: Annotated[list[str], maths(neutral=[])] = field(default_factory=list)
    """Columns whose cells are texts even if they look like numbers: one feature per text."""
    missing: Annotated[list[str], maths(neutral=[])] = field(default_factory=list)
    """Cells that hold no value, such as NA, in addition to empty ones."""
    on_missing: Annotated[Literal["refuse", "drop", "fill"], maths(neutral="refuse")] = "refuse"
    """Refuse a missing cell, leave its row out, or fill it: a number by the mean of the training rows, a text by 0."""
    encoding: Annotated[str, maths(neutral="utf-8")] = "utf-8"
    """Encoding of the file, as Python names it: utf-8, latin-1, cp1252, utf-16."""
    delimiter: Annotated[str, maths(neutral=","), pattern(r"(?s:.)|tab", "must be one character, or tab.")] = ","
    """Character between two cells; `tab` for a tabulator."""
    decimal: Annotated[Literal[".", ","], maths(neutral=".")] = "."
    """Character before the decimal places of a number."""
    strip: Annotated[bool, maths(neutral=False)] = False
    """Remove blanks at both ends of cells and names."""
    val_share: Annotated[float, below(0, 1), unit("a share, 0 to 1")] = 0.1
    """Share of the rows, drawn by `split_seed`, to validate on; with 0, train on all and do not validate."""
    split_seed: int = 0
    """Seed of the choice of validation rows, independent of the run's."""
    reference: Annotated[Path | None, placement, a_file] = None
    """The file whose training rows give means, deviations and categories, if `path` is another file; null: `path`."""
    notes: tuple[str, ...] = field(init=False, repr=False, compare=False)

    @classmethod
    def splits(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the splits: validation only if rows are held out for it, `all` for another file than the reference."""
        held_out = () if node.get("val_share") == 0 else ("val",)
        return ("train", *held_out, *(() if node.get("reference") is None else ("all",)))

    def __post_init__(self) -> None:
        table = _Table.read(self, self.path, "data.path")
        reference = table if self.reference is None else _Table.read(self, self.reference, "data.reference")
        names = [name for name in reference.names if name != self.target] if self.columns is None else self.columns
        if not names:
            raise DataError(f"{reference.where} has no column for a feature beside the target {self.target}.")
        if "" in names:
            rule = f"column {reference.names.index('') + 1} has no name. Name it, or list the features in data.columns."
            raise DataError(f"{reference.where}: {rule}")
        used = [*names, self.target] if self.split != "all" or self.target in table.names else list(names)
        reference.refuse_absent([*used, *self.categories])
        table.refuse_absent(used)
        notes = list(table.notes)
        full = table.without_missing(used, notes)
        train = full if self.reference is None else reference.without_missing(used, None)
        notes = [] if self.split == "val" else notes  # those of the file are notes of the training rows
        chosen = partial(rows_of_split, val_share=self.val_share, seed=self.split_seed)
        rows, train_rows = chosen(len(full.rows), self.split), chosen(len(train.rows), "train")
        part = _Part(keys=self, table=full, rows=rows, train=train, train_rows=train_rows, notes=notes)
        scales = {name: train.numbers(name) for name in names}
        features = {
            name: part.texts(name) if scale is None else part.scaled(name, scale) for name, scale in scales.items()
        }
        targets = [part.targets()] if self.target in used else []
        self._keep(torch.from_numpy(np.concatenate([*features.values()], axis=1).astype(np.float32)), *targets)
        if self.split == "train":
            numbers = listed(name for name, scale in scales.items() if scale is not None)
            texts = listed(f"{name} ({features[name].shape[1]})" for name, scale in scales.items() if scale is None)
            kinds = {"numbers in ": numbers, "one feature per text in ": texts}
            notes.insert(0, "; ".join(f"{kind}{columns}" for kind, columns in kinds.items() if columns))
        vars(self)["notes"] = tuple(f"{self.path.name} ({self.split}): {note}" for note in notes)


def rows_of_split(count: int, split: str, *, val_share: float, seed: int) -> NDArray[np.int64]:
    """Return the indices of the rows of a split, in their order: a share that is drawn by the seed validates."""
    if split == "all":
        return np.arange(count)
    order = np.random.default_rng(seed).permutation(count)
    held_out = round(count * val_share)
    return np.sort(order[:held_out] if split == "val" else order[held_out:])


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The cells of a file."""

    keys: CsvTable
    where: str
    """Key and path of the file, for messages."""
    names: list[str]
    rows: list[list[str]]
    """The cells of each row."""
    lines: list[int]
    """The line of the file on which each row ends."""
    notes: list[str]

    @classmethod
    def read(cls, keys: CsvTable, path: Path, key: str) -> _Table:
        """Read a file.

        Raises:
            DataError: it is missing, is no text of its encoding, has no rows or a name twice, or rows differ in their
                number of cells; names the first lines.
        """
        text, where = text_of(path, keys.encoding, key=key), f"{key}={path}"
        if (offset := text.find("\0")) >= 0:
            line = text.count("\n", 0, offset) + 1
            raise DataError(f"{where}: line {line} holds a null character. Correct it, or give data.encoding=utf-16.")
        comma = "\t" if keys.delimiter == "tab" else keys.delimiter
        rows, lines, blank = list[list[str]](), list[int](), 0
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=comma, strict=True, skipinitialspace=keys.strip)
        try:
            for row in reader:
                rows += [[cell.strip() for cell in row] if keys.strip else row] if row else []
                lines += [reader.line_num] if row else []
                blank += not row
        except csv.Error as error:
            raise DataError(f"{where}: line {reader.line_num} cannot be read as CSV: {error}.") from error
        names = rows.pop(0) if rows else []
        left_out = [f"{blank} blank lines are left out"] if blank else []
        table = cls(keys=keys, where=where, names=names, rows=rows, lines=lines[1:], notes=left_out)
        twice = [name for name, count in Counter(names).items() if count > 1]
        wrong = ["its first line holds numbers, and the names of the columns are needed there"]
        wrong = wrong if names and all(table.number(name) is not None for name in names) else []
        wrong += [] if rows else ["there are no rows below the header"]
        wrong += [f"two columns have the name {listed(map(repr, twice))}"] if twice else []
        cells = zip(table.lines, rows, strict=True)
        wrong += [f"line {line} has {len(row)} cells" for line, row in cells if len(row) != len(names)]
        if wrong:
            raise DataError(f"{where} has {len(names)} columns: {listed(wrong)}.")
        return table

    def refuse_absent(self, names: Sequence[str]) -> None:
        """Refuse columns that the file does not have.

        Raises:
            DataError: there is such a column.
        """
        if lacking := [name for name in dict.fromkeys(names) if name not in self.names]:
            comma = "\t" if self.keys.delimiter == "tab" else self.keys.delimiter
            other = next((sign for sign in ";\t|," if sign != comma and sign in "".join(self.names)), "")
            setting = "data.delimiter=tab" if other == "\t" else quoted_form(f"data.delimiter={other}")
            remedy = f" Give the character between its cells: {setting}." if other else ""
            blanks = any(name.strip() in lacking and name != name.strip() for name in self.names)
            remedy += " Names have blanks at their ends: give data.strip=true." if blanks else ""
            columns = listed(self.names, 20)
            raise DataError(f"{self.where} has no column {', '.join(lacking)}. Its columns are {columns}.{remedy}")

    def without_missing(self, names: Sequence[str], notes: list[str] | None) -> _Table:
        """Return the table without the rows that `on_missing` leaves out.

        Args:
            names: the columns that are used.
            notes: receives what was done; None for the reference, whose rows are not those to predict.

        Raises:
            DataError: a cell is missing that is neither left out nor filled; names its line and column.
        """
        keys, empty = self.keys, self.gaps
        gaps = {name: [row for row, cell in enumerate(self.cells(name)) if cell in empty] for name in names}
        gaps = {name: rows for name, rows in gaps.items() if rows}
        counts = listed(f"{name}: {len(rows)}" for name, rows in gaps.items())
        dropped, note, table = {row for rows in gaps.values() for row in rows}, "", self
        if gaps and keys.on_missing == "fill" and keys.target not in gaps:
            note = f"missing cells are filled ({counts})"
        elif gaps and keys.on_missing == "drop" and (keys.split != "all" or notes is None):
            note = f"{len(dropped)} of {len(self.rows)} rows are left out, since a cell is missing ({counts})"
            rest = [row for row in range(len(self.rows)) if row not in dropped]
            if not rest:
                raise DataError(f"{self.where}: a cell is missing in every row ({counts}).")
            table = replace(self, rows=[self.rows[row] for row in rest], lines=[self.lines[row] for row in rest])
        elif gaps:
            remedy = {
                "refuse": "Correct it, or give data.on_missing=drop or data.on_missing=fill.",
                "fill": "A target is not filled: give data.on_missing=drop.",
                "drop": "A row to predict is not left out: give data.on_missing=fill.",
            }[keys.on_missing]
            name = keys.target if keys.on_missing == "fill" else next(iter(gaps))
            raise self.error(gaps[name][0], name, f"is missing ({counts})", remedy)
        if note and notes is not None:
            notes.append(note)
        return table

    @property
    def gaps(self) -> frozenset[str]:
        """The texts of cells that hold no value."""
        return frozenset(["", *self.keys.missing])

    def number(self, cell: str) -> float | None:
        """Return the finite number that a cell holds; None if it holds something else."""
        if self.keys.decimal == ",":
            cell = "" if "." in cell else cell.replace(",", ".")
        try:
            number = float(cell)
        except ValueError:
            return None
        return number if math.isfinite(number) and "_" not in cell else None

    def numbers(self, name: str, *, must_be: str = "") -> NDArray[np.float64] | None:
        """Return (rows,) the numbers of a column, NaN for a missing cell; None for a column of texts.

        Args:
            name: the column.
            must_be: why it must hold numbers; "": it may hold texts.

        Raises:
            DataError: it holds both, or texts that look like numbers; names the line.
        """
        keys, gaps, cells = self.keys, self.gaps, self.cells(name)
        if name in keys.categories and not must_be:
            return None
        values = [math.nan if cell in gaps else self.number(cell) for cell in cells]
        odd = [row for row, number in enumerate(values) if number is None]
        if not odd:
            return np.array(values, dtype=np.float64)
        lookalikes = [row for row in odd if _LIKE_A_NUMBER.fullmatch(cells[row].strip())]
        present = sum(cell not in gaps for cell in cells)
        count = present - len(odd)
        if not must_be and not count and not lookalikes:
            return None
        row = odd[0] if count or must_be else lookalikes[0]
        rule = f"{cells[row]!r} is not a finite number, and {count} of {present} cells are"
        named = {"data.categories": name, "data.missing": cells[row]}
        remedies = [shlex.quote(f"{key}=[{json.dumps(text, ensure_ascii=False)}]") for key, text in named.items()]
        remedies[1] += " data.on_missing=drop"
        remedies[:1] = ["data.target_kind=class"] if name == keys.target else remedies[:1]
        remedies += [quoted_form("data.decimal=,")] if "," in cells[row] and keys.decimal == "." else []
        raise self.error(row, name, rule + must_be, f"Correct it, or give {either(remedies)}.")

    def cells(self, name: str) -> list[str]:
        """Return the cells of a column."""
        column = self.names.index(name)
        return [row[column] for row in self.rows]

    def error(self, row: int, name: str, rule: str, remedy: str) -> DataError:
        """Return the error about a cell."""
        return DataError(f"{self.where}: line {self.lines[row]}, column {name}: {rule}. {remedy}")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Rows of a table, and the training rows by which they are scaled, marked and numbered."""

    keys: CsvTable
    table: _Table
    rows: NDArray[np.int64]
    train: _Table
    """The table of the training rows."""
    train_rows: NDArray[np.int64]
    notes: list[str]

    def scaled(self, name: str, scale: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (rows, 1) of a column of numbers, which are `scale` in the table `train`; missing cells are 0."""
        must_be = f"; {self.train.where} has numbers there"
        numbers = scale if self.table is self.train else self.table.numbers(name, must_be=must_be)
        assert numbers is not None
        scale = scale[self.train_rows]
        scale = scale[~np.isnan(scale)]
        if not len(scale):
            raise DataError(f"{self.train.where}: column {name} holds no number in the training rows. Leave it out.")
        scaled = (numbers[self.rows] - scale.mean()) / (scale.std() or 1.0)
        return np.where(np.isnan(scaled), 0.0, scaled)[:, None]

    def texts(self, name: str) -> NDArray[np.float64]:
        """Return (rows, texts) of a column, 1 for the text of a row among those of the training rows."""
        column_of, cells, gaps = self._numbered(name), self.table.cells(name), self.train.gaps
        marks, unknown = np.zeros((len(self.rows), len(column_of))), []
        for index, row in enumerate(self.rows):
            if cells[row] in column_of:
                marks[index, column_of[cells[row]]] = 1
            elif cells[row] not in gaps:
                unknown.append(row)
        if unknown:
            example = f"line {self.table.lines[unknown[0]]}: {cells[unknown[0]]!r}"
            self.notes.append(f"{len(unknown)} cells of {name} hold a text of no training row: all zeros ({example})")
        return marks

    def targets(self) -> Tensor:
        """Return (rows,) the targets."""
        name = self.keys.target
        if self.keys.target_kind == "number":
            numbers = self.table.numbers(name, must_be=", as the target must be")
            assert numbers is not None
            with np.errstate(over="ignore"):
                targets = numbers[self.rows].astype(np.float32)
            if len(large := np.flatnonzero(~np.isfinite(targets))):
                raise self.table.error(int(self.rows[large[0]]), name, "is beyond the range of float32", "Scale it.")
            return torch.from_numpy(targets)
        classes, cells = self._numbered(name), self.table.cells(name)
        for row in self.rows:
            if cells[row] not in classes:
                rule = f"no training row has the class {cells[row]!r}"
                remedy = "Use another data.split_seed, or a larger share to train."
                raise self.table.error(int(row), name, rule, remedy)
        return torch.tensor([classes[cells[row]] for row in self.rows])

    def _numbered(self, name: str) -> dict[str, int]:
        """Return the texts of a column in the training rows -> their numbers; note those that differ in case only.

        Raises:
            DataError: two texts differ in blanks only; names the line.
        """
        cells = self.train.cells(name)
        for same in alike(cells):
            if len({text.strip() for text in same}) < len(same):
                odd = next(text for text in same if text != text.strip())
                rule = f"{listed(map(repr, same))} differ in blanks only"
                raise self.train.error(cells.index(odd), name, rule, "Correct it, or give data.strip=true.")
            if self.keys.split == "train":
                self.notes.append(f"texts of {name} differ in case only: {listed(map(repr, same))}")
        return {text: n for n, text in enumerate(sorted({cells[row] for row in self.train_rows} - self.train.gaps))}
