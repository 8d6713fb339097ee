from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainkit.data.sets.json_lines import JsonLines
from trainkit.errors import DataError


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
    ],
)
def test_a_line_that_differs_is_refused_by_its_number_in_the_file(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(source(tmp_path / "a.jsonl", '{"x": [1]}', "", line))
    assert message.replace("FILE", str(tmp_path / "a.jsonl")) in str(caught.value)
