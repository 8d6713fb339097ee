"""A field that becomes another type in another line, or a line that is read as none, is caught here alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from trainkit.data.sets.json_lines import JsonLines
from trainkit.errors import DataError, MissingExtraError


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def source(path: Path, *lines: str) -> JsonLines:
    path.write_text("\n".join(lines), encoding="utf-8")
    return JsonLines(path=str(path))


def test_a_field_has_the_dtype_of_its_first_line(tmp_path: Path) -> None:
    lines = ('\ufeff{"x": [1.5], "y": 1, "z": [[1]], "w": 2.0}', "", '{"x": [1, 2], "y": 2, "z": [], "w": 3}')
    first, second = source(tmp_path / "a.jsonl", *lines)
    assert [sample["x"].dtype for sample in (first, second)] == [np.float32, np.float32]
    assert [sample["z"].dtype for sample in (first, second)] == [np.int64, np.int64]
    assert [sample["w"] for sample in (first, second)] == [2.0, 3.0]
    assert isinstance(second["w"], float)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"x": [1.5]}', "line 3 of FILE: x holds decimal places, and the first line of all files has whole numbers"),
        ('{"x": [[1], [1, 2]]}', "line 3 of FILE: x holds lists of several lengths."),
        ("[1]", "line 3 of FILE is not a JSON object."),
        ("{", "line 3 of FILE is not JSON: "),
    ],
)
def test_a_line_that_differs_is_refused_by_its_number_in_the_file(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(source(tmp_path / "a.jsonl", '{"x": [1]}', "", line))
    assert message.replace("FILE", str(tmp_path / "a.jsonl")) in str(caught.value)


def test_json_lines_reads_local_files_by_pattern(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines({"x": [3, 4], "y": 1}) + b"\n")
    (tmp_path / "a.jsonl").write_bytes(lines({"x": [0.5, 2], "y": 0}, {"x": [1.0, 2], "y": 1}).rstrip())
    source = JsonLines(path=str(tmp_path / "*.jsonl"))
    assert [Path(file).name for file in source.files] == ["a.jsonl", "b.jsonl"]
    assert source.sizes == (2, 1)
    samples = list(source)
    assert [sample["y"] for sample in samples] == [0, 1, 1]
    assert [sample["x"].dtype.name for sample in samples] == ["float32", "float32", "float32"]


def test_json_lines_reads_the_memory_of_fsspec() -> None:
    fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")
    with fsspec.open("memory://dealt/a.jsonl", "wb") as file:
        file.write(lines({"y": 1}, {"y": 2}))
    source = JsonLines(path="memory://dealt/*.jsonl", num_samples=[2])
    assert [sample["y"] for file in source.files for sample in source.read(file)] == [1, 2]


def test_without_fsspec_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"data\.source\.path: needs the package fsspec\. Install it:"):
        next(iter(JsonLines(path="s3://bucket/a.jsonl")))
