"""A row of a Spark frame that is read twice, in another order, or as another number, is caught here alone."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainkit import errors, spark
from trainkit.data.sets.spark_frame import SparkFrame
from trainkit.data.splits import build_splits
from trainkit.errors import DataError, MissingExtraError
from trainkit.extras import install_command

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(folder: Path, name: str = "part-0", **columns: Any) -> None:
    file = folder / f"{name}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)


def rows(folder: Path, **keys: Any) -> SparkFrame:
    return SparkFrame(**{"split": "train", "path": folder, "target": "y", "val_share": 0.0, **keys})


def test_rows_of_all_files_come_once_in_the_order_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, "day=2/part-0", x=[3.0], v=[[4, 5]], y=[1.5])
    write(tmp_path, "day=1/part-0", x=[1, 2], v=[[2, 3], [4, 5]], y=[0.5, 1.0])
    write(tmp_path, "_temporary/part-0", x=[9], v=[[9, 9]], y=[9.0])
    found = rows(tmp_path, columns=["v", "x", "day"])
    assert found.tensors()[0].tolist() == [[2, 3, 1, 1], [4, 5, 2, 1], [4, 5, 3, 2]]
    assert (found[2][1].item(), found[2][1].dtype) == (1.5, torch.float32)


def test_each_row_is_in_one_split_and_classes_are_whole(tmp_path: Path) -> None:
    write(tmp_path, x=np.arange(10.0), flag=[True] * 10, price=[decimal.Decimal("1.25")] * 10, y=[0.0, 1.0] * 5)
    node = {"_target_": "trainkit.data.SparkFrame", "path": str(tmp_path), "target": "y", "target_kind": "class"}
    splits = build_splits({**node, "val_share": 0.2})
    assert {name: len(part) for name, part in splits.items()} == {"train": 8, "val": 2}
    assert sorted(sample[0][0].item() for part in splits.values() for sample in part) == [*range(10)]
    assert (splits["val"][0][0][1:].tolist(), splits["val"][0][1].dtype) == ([1.0, 1.25], torch.int64)
    assert SparkFrame.splits({**node, "target": None}) == ("all",)
    assert len(rows(tmp_path, split="all", target=None)[0]) == 1


@pytest.mark.parametrize(
    ("columns", "keys", "rule"),
    [
        ({"x": [1.0, None]}, {}, "column x holds 1 nulls: fill or drop them in Spark."),
        ({"x": ["a", "b"]}, {}, "column x holds string: make numbers of it in Spark, such as by StringIndexer."),
        ({"x": [[1], [2, 3]]}, {}, "column x holds arrays of several lengths: pad them in Spark."),
        ({"x": [1.0, 1e300]}, {}, "column x holds NaN, infinity or a number beyond float32."),
        ({"x": [1, 2]}, {"target": "z"}, "has no column z. Its columns are x, y."),
        ({"x": [1, 2]}, {"target": "x", "columns": ["y"]}, ""),
        ({"x": [0.5, 2]}, {"target": "x", "target_kind": "class"}, "column x holds other numbers than classes"),
    ],
)
def test_what_is_no_number_is_refused(tmp_path: Path, columns: dict[str, Any], keys: dict[str, Any], rule: str) -> None:
    write(tmp_path, **columns, y=[0, 1])
    if not rule:
        assert rows(tmp_path, **keys)[1][0].tolist() == [1.0]
        return
    with pytest.raises(DataError, match=rule):
        rows(tmp_path, **keys)


def test_a_folder_without_rows_and_one_with_a_log_of_changes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \.parquet\. Write the frame: trainkit\.spark\.save_frame"):
        rows(tmp_path)
    write(tmp_path, x=[1], y=[1])
    (tmp_path / "_delta_log").mkdir()
    with pytest.raises(DataError, match="its files also hold rows that were deleted"):
        rows(tmp_path)
    (tmp_path / "_delta_log").rmdir()
    (tmp_path / "part-1.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read"):
        rows(tmp_path)


def test_packages_that_are_missing_are_named_with_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda _: None)
    install = install_command("spark", "")
    calls: list[Callable[[], object]] = [
        lambda: spark.save_frame(None, tmp_path), lambda: spark.predict_udf("run", input_shape=(1,)),
        lambda: rows(tmp_path),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(MissingExtraError) as caught:
            call()
        assert install in str(caught.value)
