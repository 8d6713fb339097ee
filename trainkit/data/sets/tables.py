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
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.config.grammar import quoted_form
from trainkit.config.values import either
from trainkit.data.reading.files import alike, listed, text_of
from trainkit.data.stored import InMemory
from trainkit.errors import DataError
from trainkit.fields import a_file, below, maths, pattern, placement

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
    val_share: Annotated[float, below(0, 1)] = 0.1
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
        table = self._table(self.path, "data.path")
        reference = table if self.reference is None else self._table(self.reference, "data.reference")
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
        full = self._without_missing(table, used, notes)
        known = full if self.reference is None else self._without_missing(reference, used, None)
        rows, training = self._chosen(len(full.rows), self.split), self._chosen(len(known.rows), "train")
        if self.split == "val":
            notes = []  # those of the file are notes of the training rows
        scales = {name: self._numbers(known, name) for name in names}
        features = {
            name: self._texts(name, full, rows, known=known, training=training, notes=notes)
            if scale is None
            else self._scaled(name, full, rows, known=known, scale=scale, training=training)
            for name, scale in scales.items()
        }
        targets = (
            [self._targets(full, rows, known=known, training=training, notes=notes)] if self.target in used else []
        )
        self._keep(torch.from_numpy(np.concatenate([*features.values()], axis=1).astype(np.float32)), *targets)
        if self.split == "train":
            numbers = listed(name for name, scale in scales.items() if scale is not None)
            texts = listed(f"{name} ({features[name].shape[1]})" for name, scale in scales.items() if scale is None)
            kinds = {"numbers in ": numbers, "one feature per text in ": texts}
            notes.insert(0, "; ".join(f"{kind}{columns}" for kind, columns in kinds.items() if columns))
        object.__setattr__(self, "notes", tuple(f"{self.path.name} ({self.split}): {note}" for note in notes))

    def _chosen(self, count: int, split: str) -> NDArray[np.int64]:
        """Return the indices of the rows of a split, in the order of the file."""
        if split == "all":
            return np.arange(count)
        order = np.random.default_rng(self.split_seed).permutation(count)
        held_out = round(count * self.val_share)
        return np.sort(order[:held_out] if split == "val" else order[held_out:])

    def _table(self, path: Path, key: str) -> _Table:
        """Read a file.

        Raises:
            DataError: it is missing, is no text of its encoding, has no rows or a name twice, or rows differ in their
                number of cells; names the first lines.
        """
        text, where = text_of(path, self.encoding, key=key), f"{key}={path}"
        if (at := text.find("\0")) >= 0:
            line = text.count("\n", 0, at) + 1
            raise DataError(f"{where}: line {line} holds a null character. Correct it, or give data.encoding=utf-16.")
        comma = "\t" if self.delimiter == "tab" else self.delimiter
        rows, lines, blank = list[list[str]](), list[int](), 0
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=comma, strict=True, skipinitialspace=self.strip)
        try:
            for row in reader:
                rows += [[cell.strip() for cell in row] if self.strip else row] if row else []
                lines += [reader.line_num] if row else []
                blank += not row
        except csv.Error as error:
            raise DataError(f"{where}: line {reader.line_num} cannot be read as CSV: {error}.") from error
        names = rows.pop(0) if rows else []
        wrong = [
            f"line {line} has {len(row)} cells"
            for line, row in zip(lines[1:], rows, strict=True)
            if len(row) != len(names)
        ]
        twice = [name for name, count in Counter(names).items() if count > 1]
        wrong[:0] = [f"two columns have the name {listed(map(repr, twice))}"] if twice else []
        wrong[:0] = ["there are no rows below the header"] if not rows else []
        if names and all(self._number(name) is not None for name in names):
            wrong.insert(0, "its first line holds numbers, and the names of the columns are needed there")
        if wrong:
            raise DataError(f"{where} has {len(names)} columns: {listed(wrong)}.")
        left_out = [f"{blank} blank lines are left out"] if blank else []
        return _Table(where=where, names=names, rows=rows, lines=lines[1:], comma=comma, notes=left_out)

    def _without_missing(self, table: _Table, names: Sequence[str], notes: list[str] | None) -> _Table:
        """Return the table without the rows that `on_missing` leaves out.

        Args:
            table: the file.
            names: the columns that are used.
            notes: receives what was done; None for the reference, whose rows are not those to predict.

        Raises:
            DataError: a cell is missing that is neither left out nor filled; names its line and column.
        """
        empty = self._gaps
        gaps = {name: [row for row, cell in enumerate(table.cells(name)) if cell in empty] for name in names}
        gaps = {name: rows for name, rows in gaps.items() if rows}
        counts = listed(f"{name}: {len(rows)}" for name, rows in gaps.items())
        if not gaps:
            return table
        if self.on_missing == "fill" and self.target not in gaps:
            if notes is not None:
                notes.append(f"missing cells are filled ({counts})")
            return table
        if self.on_missing == "drop" and (self.split != "all" or notes is None):
            dropped = {row for rows in gaps.values() for row in rows}
            if notes is not None:
                share = f"{len(dropped)} of {len(table.rows)} rows"
                notes.append(f"{share} are left out, since a cell is missing ({counts})")
            kept = [row for row in range(len(table.rows)) if row not in dropped]
            if not kept:
                raise DataError(f"{table.where}: a cell is missing in every row ({counts}).")
            return replace(table, rows=[table.rows[row] for row in kept], lines=[table.lines[row] for row in kept])
        remedy = {
            "refuse": "Correct it, or give data.on_missing=drop or data.on_missing=fill.",
            "fill": "A target is not filled: give data.on_missing=drop.",
            "drop": "A row to predict is not left out: give data.on_missing=fill.",
        }[self.on_missing]
        name = self.target if self.on_missing == "fill" else next(iter(gaps))
        raise table.error(gaps[name][0], name, f"is missing ({counts})", remedy)

    @property
    def _gaps(self) -> frozenset[str]:
        """The texts of cells that hold no value."""
        return frozenset(["", *self.missing])

    def _number(self, cell: str) -> float | None:
        """Return the finite number that a cell holds; None if it holds something else."""
        if self.decimal == ",":
            cell = "" if "." in cell else cell.replace(",", ".")
        try:
            number = float(cell)
        except ValueError:
            return None
        return number if math.isfinite(number) and "_" not in cell else None

    def _numbers(self, table: _Table, name: str, *, must_be: str = "") -> NDArray[np.float64] | None:
        """Return (rows,) the numbers of a column, NaN for a missing cell; None for a column of texts.

        Args:
            table: the file.
            name: the column.
            must_be: why it must hold numbers; "": it may hold texts.

        Raises:
            DataError: it holds both, or texts that look like numbers; names the line.
        """
        if name in self.categories and not must_be:
            return None
        cells = table.cells(name)
        gaps = self._gaps
        found = [math.nan if cell in gaps else self._number(cell) for cell in cells]
        odd = [row for row, number in enumerate(found) if number is None]
        if not odd:
            return np.array(found, dtype=np.float64)
        like = [row for row in odd if _LIKE_A_NUMBER.fullmatch(cells[row].strip())]
        present = sum(cell not in gaps for cell in cells)
        count = present - len(odd)
        if not must_be and not count and not like:
            return None
        row = odd[0] if count or must_be else like[0]
        rule = f"{cells[row]!r} is not a finite number, and {count} of {present} cells are"
        named = {"data.categories": name, "data.missing": cells[row]}
        remedies = [shlex.quote(f"{key}=[{json.dumps(text, ensure_ascii=False)}]") for key, text in named.items()]
        remedies[1] += " data.on_missing=drop"
        remedies[:1] = ["data.target_kind=class"] if name == self.target else remedies[:1]
        remedies += [quoted_form("data.decimal=,")] if "," in cells[row] and self.decimal == "." else []
        raise table.error(row, name, rule + must_be, f"Correct it, or give {either(remedies)}.")

    def _scaled(
        self,
        name: str,
        table: _Table,
        rows: NDArray[np.int64],
        *,
        known: _Table,
        scale: NDArray[np.float64],
        training: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return (rows, 1) of a column of numbers, scaled by training rows of a known table; missing cells are 0."""
        numbers = scale if table is known else self._numbers(table, name, must_be=f"; {known.where} has numbers there")
        assert numbers is not None
        scale = scale[training]
        scale = scale[~np.isnan(scale)]
        if not len(scale):
            raise DataError(f"{known.where}: column {name} holds no number in the training rows. Leave it out.")
        scaled = (numbers[rows] - scale.mean()) / (scale.std() or 1.0)
        return np.where(np.isnan(scaled), 0.0, scaled)[:, None]

    def _texts(
        self,
        name: str,
        table: _Table,
        rows: NDArray[np.int64],
        *,
        known: _Table,
        training: NDArray[np.int64],
        notes: list[str],
    ) -> NDArray[np.float64]:
        """Return (rows, texts) of a column, 1 for the text of a row among those of training rows of a known table."""
        self._check_spelling(known, name, notes)
        texts, cells = known.cells(name), table.cells(name)
        gaps = self._gaps
        places = {text: at for at, text in enumerate(sorted({texts[row] for row in training} - gaps))}
        marks, unknown = np.zeros((len(rows), len(places))), []
        for at, row in enumerate(rows):
            if cells[row] in places:
                marks[at, places[cells[row]]] = 1
            elif cells[row] not in gaps:
                unknown.append(row)
        if unknown:
            example = f"line {table.lines[unknown[0]]}: {cells[unknown[0]]!r}"
            notes.append(f"{len(unknown)} cells of {name} hold a text of no training row: all zeros ({example})")
        return marks

    def _targets(
        self,
        table: _Table,
        rows: NDArray[np.int64],
        *,
        known: _Table,
        training: NDArray[np.int64],
        notes: list[str],
    ) -> Tensor:
        if self.target_kind == "number":
            numbers = self._numbers(table, self.target, must_be=", as the target must be")
            assert numbers is not None
            with np.errstate(over="ignore"):
                targets = numbers[rows].astype(np.float32)
            if len(large := np.flatnonzero(~np.isfinite(targets))):
                raise table.error(int(rows[large[0]]), self.target, "is beyond the range of float32", "Scale it.")
            return torch.from_numpy(targets)
        self._check_spelling(known, self.target, notes)
        texts, cells = known.cells(self.target), table.cells(self.target)
        classes = {text: number for number, text in enumerate(sorted({texts[row] for row in training}))}
        for row in rows:
            if cells[row] not in classes:
                rule = f"no training row has the class {cells[row]!r}"
                raise table.error(
                    int(row), self.target, rule, "Use another data.split_seed, or a larger share to train."
                )
        return torch.tensor([classes[cells[row]] for row in rows])

    def _check_spelling(self, table: _Table, name: str, notes: list[str]) -> None:
        """Note texts that differ in case only.

        Raises:
            DataError: two texts differ in blanks only; names the line.
        """
        cells = table.cells(name)
        for same in alike(cells):
            if len({text.strip() for text in same}) < len(same):
                odd = next(text for text in same if text != text.strip())
                rule = f"{listed(map(repr, same))} differ in blanks only"
                raise table.error(cells.index(odd), name, rule, "Correct it, or give data.strip=true.")
            if self.split == "train":
                notes.append(f"texts of {name} differ in case only: {listed(map(repr, same))}")


@dataclass(frozen=True, kw_only=True)
class _Table:
    where: str
    """Key and path of the file, for messages."""
    names: list[str]
    rows: list[list[str]]
    """The cells of each row."""
    lines: list[int]
    """The line of the file on which each row ends."""
    comma: str
    notes: list[str]

    def refuse_absent(self, names: Sequence[str]) -> None:
        """Refuse columns that the file does not have.

        Raises:
            DataError: there is such a column.
        """
        if lacking := [name for name in dict.fromkeys(names) if name not in self.names]:
            other = next((sign for sign in ";\t|," if sign != self.comma and sign in "".join(self.names)), "")
            given = "data.delimiter=tab" if other == "\t" else quoted_form(f"data.delimiter={other}")
            remedy = f" Give the character between its cells: {given}." if other else ""
            blanks = any(name.strip() in lacking and name != name.strip() for name in self.names)
            remedy += " Names have blanks at their ends: give data.strip=true." if blanks else ""
            columns = listed(self.names, 20)
            raise DataError(f"{self.where} has no column {', '.join(lacking)}. Its columns are {columns}.{remedy}")

    def cells(self, name: str) -> list[str]:
        """Return the cells of a column."""
        place = self.names.index(name)
        return [row[place] for row in self.rows]

    def error(self, row: int, name: str, rule: str, remedy: str) -> DataError:
        """Return the error about a cell."""
        return DataError(f"{self.where}: line {self.lines[row]}, column {name}: {rule}. {remedy}")
