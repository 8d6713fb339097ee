"""A pipe, a device or a terabyte that `trainkit.files` opens, or JSON without bounds, is caught here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.support.crafted import KINDS, put, within
from trainkit.errors import UnreadableError
from trainkit.files import (
    expect_map,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_lines,
    refuse_link,
)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_regular_file_is_read_or_written_to(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file.json"
    path.write_text("{}")
    put(kind, path)
    with within(20), pytest.raises(UnreadableError) as caught:
        read_json(path)
    assert str(caught.value) == f"{path} cannot be read: {KINDS[kind]}."
    assert caught.value.exit_code == 4
    modes: tuple[Literal["ab", "wb"], ...] = ("ab", "wb")
    for mode in modes:
        with within(20), pytest.raises(UnreadableError):
            open_regular(path, mode)


def test_a_file_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnreadableError, match="it has 1,099,511,627,776 bytes, and at most 16,777,216 are read"):
        read_json(tmp_path / "file.json")


def test_a_link_that_the_user_named_is_followed_but_not_to_a_device(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("{}")
    (tmp_path / "file").symlink_to("target")
    assert read_bytes(tmp_path / "file", follow=True) == b"{}"
    (tmp_path / "device").symlink_to("/dev/zero")
    with within(20), pytest.raises(UnreadableError, match="it is a device"):
        read_bytes(tmp_path / "device", follow=True)


def test_a_folder_that_is_a_link_is_refused_and_an_absent_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(UnreadableError, match="it is a symbolic link"):
        refuse_link(tmp_path / "checkpoints")
    refuse_link(tmp_path / "absent")


JSON: list[tuple[bytes, str]] = [
    (b" \n", "empty"),
    (b'{"a": "\xff"}', r"not UTF-8 text \(byte 8\)"),
    (b'{"a": ', "not JSON: Expecting value"),
    (b"[" * 100_000, "deeper than 64"),
    (b"[" * 66 + b"]" * 66, "deeper than 64"),
    (b'{"%b": 1, "%b": 2}' % (b"x" * 99, b"x" * 99), rf"key '{'x' * 40}\.\.\.' twice"),
    (b"18446744073709551616", "an integer beyond 64 bits"),
    (b"-" + b"9" * 100_000, "an integer beyond 64 bits"),
    (rb'{"a": "\ud800"}', "surrogate pair"),
    (rb'{"\udfff": 1}', "surrogate pair"),
]


@pytest.mark.parametrize(("text", "reason"), JSON, ids=[reason for _, reason in JSON])
def test_crafted_json_is_refused_in_one_line(text: bytes, reason: str) -> None:
    with within(20), pytest.raises(ValueError, match=rf"^it.*{reason}[^\n]*$"):
        parse_json(text)


def test_json_at_the_bounds_is_read() -> None:
    assert parse_json("18446744073709551615") == 2**64 - 1
    assert parse_json(r'"\ud83d\ude00"') == "\N{GRINNING FACE}"
    assert parse_json("[" * 64 + "]" * 64)[0][0]


SHAPES = {
    "it is a list, and a map with the keys step, name was expected": [],
    "its key name is missing": {"step": 1},
    "its key step is true or false, and an integer was expected": {"step": True, "name": ""},
    "its key step is NaN, and an integer was expected": {"step": float("nan"), "name": ""},
    "its key name is null, and a text was expected": {"step": 1, "name": None},
    "its key seed is a text, and an integer or null was expected": {"step": 1, "name": "", "seed": "1"},
}


@pytest.mark.parametrize("reason", SHAPES)
def test_a_map_of_another_shape_is_refused(reason: str) -> None:
    with pytest.raises(ValueError, match=r"was expected|missing") as caught:
        expect_map(SHAPES[reason], {"step": int, "name": str}, optional={"seed": (int, type(None))})
    assert str(caught.value) == reason


def test_whole_lines_are_read_and_an_endless_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"one\ntwo\nthr")
    assert list(read_lines(path)) == [b"one\n", b"two\n"]
    assert list(read_lines(path, start=4)) == [b"two\n"]
    with pytest.raises(UnreadableError, match="a line of it has more than 2 bytes"):
        list(read_lines(path, longest=2))
