"""The rows of a Spark frame, as Spark writes them to Parquet; Spark itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.data.reading.files import existing
from trainkit.data.sets.tables import rows_of_split
from trainkit.data.stored import InMemory
from trainkit.errors import DataError, first_line, listed, require_packages
from trainkit.fields import Reads, below, unit


@dataclass(frozen=True, kw_only=True)
class SparkFrame(InMemory):
    """Rows of a Spark frame in Parquet: features of numbers, and one target.

    A column of numbers is one feature, a column of arrays one per place; values stay as they are, in float32. The rows
    have the order of the files by name. A sample is the features of a row, (features,) float32, and its target, ()
    float32 or int64.
    """

    split: Literal["train", "val", "all"]
    """Part of the rows to use; `all` are those of a frame without a target."""
    path: Annotated[Path, Reads()]
    """What `trainkit.spark.save_frame` or `frame.write.parquet` wrote: a folder, or a file."""
    target: str | None
    """The column with the target; null: there is none, for predictions."""
    target_kind: Literal["number", "class"] = "number"
    """`number` for regression; `class` for classification: whole numbers from 0."""
    columns: list[str] | None = None
    """The columns that are features, in this order; null: all but the target."""
    val_share: Annotated[float, below(0, 1), unit("a share, 0 to 1")] = 0.1
    """Share of the rows, drawn by `split_seed`, to validate on; with 0, train on all and do not validate."""
    split_seed: int = 0
    """Seed of the choice of validation rows, independent of the run's."""

    @classmethod
    def splits(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the splits: validation only if rows are held out for it, `all` without a target."""
        return ("all",) if node.get("target") is None else ("train", *(() if node.get("val_share") == 0 else ("val",)))

    def __post_init__(self) -> None:
        table = self._read()
        names = [name for name in table.column_names if name != self.target] if self.columns is None else self.columns
        used = [*names, *(() if self.target is None else (self.target,))]
        if lacking := [name for name in used if name not in table.column_names]:
            present = listed(table.column_names, 20)
            raise DataError(f"data.path={self.path} has no column {', '.join(lacking)}. Its columns are {present}.")
        if not names:
            raise DataError(f"data.path={self.path} has no column for a feature beside the target {self.target}.")
        seed, share = self.split_seed, self.val_share
        rows = rows_of_split(table.num_rows, self.split, val_share=share, seed=seed)
        features = np.concatenate([self._numbers(table, name) for name in names], axis=1)
        if self.target is None:
            return self._keep(torch.from_numpy(features[rows]))
        targets = self._numbers(table, self.target)[rows]
        if targets.shape[1] != 1:
            raise self._error(self.target, "holds arrays, and a target is one number")
        classes = targets.astype(np.int64) if self.target_kind == "class" else targets
        if (classes != targets).any() or (self.target_kind == "class" and (classes < 0).any()):
            raise self._error(self.target, "holds other numbers than classes, 0, 1, 2 ...: use StringIndexer in Spark")
        return self._keep(torch.from_numpy(features[rows]), torch.from_numpy(classes[:, 0]))

    def _read(self) -> Any:
        """Return the table of all files, of which those that Spark hides, with `_` or `.`, are no part."""
        require_packages(["pyarrow"], key="data", extra="spark")
        import pyarrow.dataset  # noqa: PLC0415 - for this class only

        path, where = existing(self.path, Reads()), f"data.path={self.path}"
        files, base = [path], path.parent
        if path.is_dir():
            relative = (file.relative_to(path) for file in path.rglob("*.parquet"))
            files = sorted(path / file for file in relative if not any(part[0] in "_." for part in file.parts))
            base = path
        if not files or any((base / log).is_dir() for log in ("_delta_log", ".hoodie")):
            why = "has a log of changes, and its files also hold rows that were deleted" if files else "has no .parquet"
            raise DataError(f"{where} {why}. Write the frame: trainkit.spark.save_frame(frame, FOLDER).")
        try:
            read = pyarrow.dataset.dataset(
                [*map(str, files)], format="parquet", partitioning="hive", partition_base_dir=str(base)
            )
            used = read.schema.names if self.columns is None else [*self.columns, self.target]
            return read.to_table(columns=[name for name in read.schema.names if name in used])
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{where} cannot be read: {first_line(error)}") from error

    def _numbers(self, table: Any, name: str) -> NDArray[np.float32]:
        """Return (rows, places) of a column."""
        import pyarrow as pa  # noqa: PLC0415 - as above

        column = table.column(name).combine_chunks()
        is_list = pa.types.is_list(column.type)
        values = column.flatten() if is_list else column
        kind = values.type
        if column.null_count or values.null_count:
            raise self._error(name, f"holds {column.null_count or values.null_count} nulls: fill or drop them in Spark")
        if pa.types.is_decimal(kind) or pa.types.is_boolean(kind):
            values = values.cast(pa.float64() if pa.types.is_decimal(kind) else pa.uint8())
        elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise self._error(name, f"holds {kind}: make numbers of it in Spark, such as by StringIndexer")
        if is_list and len({*column.value_lengths().to_pylist()}) > 1:
            raise self._error(name, "holds arrays of several lengths: pad them in Spark")
        with np.errstate(over="ignore"):
            numbers: NDArray[np.float32] = values.to_numpy(zero_copy_only=False).astype(np.float32)
        if not np.isfinite(numbers).all():
            raise self._error(name, "holds NaN, infinity or a number beyond float32")
        return numbers.reshape(table.num_rows, -1)

    def _error(self, name: str, rule: str) -> DataError:
        return DataError(f"data.path={self.path}: column {name} {rule}.")
