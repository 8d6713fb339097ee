"""Files of predictions: a part that was cut off and counts as whole is caught here alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainkit.errors import ConfigError, DataError, MissingExtraError
from trainkit.inference.parts import Chunks, Parts, format_of, ids_of, write_rows

CHUNKS = Chunks(num_rows=100, batch_size=3)
VALUES = np.arange(200, dtype=np.float32).reshape(100, 2) / 3


def complete(folder: Path, values: Any = VALUES) -> Parts:
    parts = Parts(folder=folder, chunks=CHUNKS)
    for chunk in range(CHUNKS.count):
        with parts.writing(chunk) as part:
            for start in CHUNKS.batches_of(chunk):
                part.append(values[start : start + CHUNKS.batch_size])
    return parts


def numbers() -> Iterator[int]:
    return iter(range(100))


def names() -> Iterator[str]:
    return (f"é{place}" for place in range(100))


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    (tmp_path / "parts").mkdir()
    return complete(tmp_path / "parts")


def test_every_row_is_in_one_batch_of_one_chunk() -> None:
    starts = [start for chunk in range(CHUNKS.count) for start in CHUNKS.batches_of(chunk)]
    assert starts == list(range(0, 100, 3))
    assert sum(map(CHUNKS.rows_of, range(CHUNKS.count))) == 100


def test_npy_holds_the_rows_and_ids_beside_them(tmp_path: Path, parts: Parts) -> None:
    write_rows(tmp_path / "out.npy", parts, names, name="logits")
    assert (np.load(tmp_path / "out.npy") == VALUES).all()
    assert np.load(tmp_path / "out.ids.npy").tolist() == list(names())


def test_jsonl_holds_a_row_a_line_and_null_where_json_has_no_number(tmp_path: Path, parts: Parts) -> None:
    values = VALUES.copy()
    values[7, 1] = np.nan
    write_rows(tmp_path / "out.jsonl", complete(parts.folder, values), numbers, name="logits")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(100))
    assert rows[7]["logits"] == [float(VALUES[7, 0]), None]


def test_parquet_holds_ids_and_lists_of_one_length(tmp_path: Path, parts: Parts) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_rows(tmp_path / "out.parquet", parts, names, name="logits")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column("id").to_pylist() == list(names())
    assert np.array_equal(np.array(table.column("logits").to_pylist(), dtype=np.float32), VALUES)


def test_a_part_that_was_cut_off_counts_as_absent(parts: Parts) -> None:
    with parts.file(1).open("r+b") as file:
        file.truncate(parts.file(1).stat().st_size - 1)
    assert parts.done() == [0, 2]


def test_a_part_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    parts = Parts(folder=tmp_path, chunks=CHUNKS)
    with suppress(KeyboardInterrupt), parts.writing(0) as part:
        part.append(VALUES[:3])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_rows_of_several_shapes_are_refused_by_their_place(tmp_path: Path, parts: Parts) -> None:
    with parts.writing(1) as part:
        for start in CHUNKS.batches_of(1):
            part.append(np.zeros((min(3, 100 - start), 5), dtype=np.float32))
    with pytest.raises(DataError, match=r"\(2,\) at the beginning, and \(5,\) from sample 48 on. Pad the samples"):
        write_rows(tmp_path / "out.npy", parts, numbers, name="logits")
    assert not (tmp_path / "out.npy").exists()


def test_other_endings_and_an_absent_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--out=out.csv: must end in"):
        format_of(Path("out.csv"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match='pip install "pyarrow>='):
        format_of(Path("out.parquet"))


def test_a_dataset_may_name_its_rows() -> None:
    class Files(list[int]):
        ids = ("a", "b")

    assert list(ids_of(Files([1, 2]))) == ["a", "b"]
