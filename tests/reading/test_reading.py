"""Regular files only, bounded size and depth, and an error that names the file and the reason."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

import pytest

from trainkit.bounded import expect_map, expect_maps, parse_json
from trainkit.errors import AbsentFileError, UnreadableError
from trainkit.files import open_regular, read_bytes, read_json, read_lines, read_map, read_tail, refuse_link

LINK = "it is a symbolic link, and trainkit follows none inside its own folders"


def make(kind: str, path: Path) -> None:
    """Put a file of a kind at a path."""
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device link":
            path.symlink_to("/dev/zero")
        case "link":
            path.with_name("target").write_text("{}")
            path.symlink_to("target")
        case "dangling link":
            path.symlink_to("nowhere")
        case "directory":
            path.mkdir()
        case "socket":
            os.chdir(path.parent)  # the address of a socket has 108 bytes
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        case "large":
            with path.open("wb") as file:
                file.truncate(1 << 40)


KINDS = {
    "pipe": "it is a named pipe",
    "device link": LINK,
    "link": LINK,
    "dangling link": LINK,
    "directory": "it is a directory",
    "socket": "it is a socket",
    "large": "it has 1,099,511,627,776 bytes, and at most 16,777,216 are read",
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_regular_file_of_bounded_size_is_read(cwd: Path, kind: str) -> None:
    path = cwd / "file.json"
    make(kind, path)
    with pytest.raises(UnreadableError) as caught:
        read_json(path)
    assert str(caught.value) == f"{path} cannot be read: {KINDS[kind]}."
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "large"])
@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_only_a_regular_file_is_written_to(cwd: Path, kind: str, mode: Literal["ab", "wb"]) -> None:
    make(kind, cwd / "rows.jsonl")
    with pytest.raises(UnreadableError):
        open_regular(cwd / "rows.jsonl", mode)


def test_a_file_is_written_anew_or_at_its_end(tmp_path: Path) -> None:
    steps: list[tuple[Literal["ab", "wb"], bytes]] = [("ab", b"1"), ("ab", b"12"), ("wb", b"2")]
    for mode, content in steps:
        with open_regular(tmp_path / "rows", mode) as file:
            file.write(content[-1:])
        assert (tmp_path / "rows").read_bytes() == content


def test_an_absent_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(AbsentFileError, match=r"file cannot be read: it does not exist\."):
        read_bytes(tmp_path / "file")


def test_a_link_that_the_user_named_is_followed(tmp_path: Path) -> None:
    make("link", tmp_path / "file")
    assert read_bytes(tmp_path / "file", follow=True) == b"{}"


def test_a_device_that_the_user_named_is_not_read(tmp_path: Path) -> None:
    make("device link", tmp_path / "file")
    with pytest.raises(UnreadableError, match="it is a device"):
        read_bytes(tmp_path / "file", follow=True)


def test_a_folder_that_is_a_link_is_refused_and_an_absent_one_is_not(tmp_path: Path) -> None:
    make("link", tmp_path / "checkpoints")
    with pytest.raises(UnreadableError, match="it is a symbolic link"):
        refuse_link(tmp_path / "checkpoints")
    refuse_link(tmp_path / "absent")


JSON = {
    "nothing": (b" \n", "it is empty"),
    "no UTF-8": (b'{"a": "\xff"}', "it is not UTF-8 text (byte 8)"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "it is not UTF-8 text (byte 1)"),
    "half": (b'{"a": ', "it is not JSON: Expecting value: line 1 column 7 (char 6)"),
    "nested lists": (b"[" * 100_000, "its JSON is nested deeper than 64"),
    "nested lists that end": (b"[" * 66 + b"]" * 66, "its JSON is nested deeper than 64"),
    "nested maps": (b'{"a":' * 100_000, "its JSON is nested deeper than 64"),
    "a key twice": (b'{"step": 1, "step": 2}', "it holds the key 'step' twice"),
    "a long key twice": (b'{"%b": 1, "%b": 2}' % (b"x" * 99, b"x" * 99), f"it holds the key '{'x' * 40}...' twice"),
    "a large integer": (b"18446744073709551616", "it holds an integer beyond 64 bits"),
    "a huge integer": (b"-" + b"9" * 100_000, "it holds an integer beyond 64 bits"),
    "half a pair": (rb'{"a": "\ud800"}', "it holds half of a surrogate pair, which is not text"),
    "half a pair as key": (rb'{"\udfff": 1}', "it holds half of a surrogate pair, which is not text"),
}


@pytest.mark.parametrize("name", JSON)
def test_crafted_json_is_refused_in_one_line(name: str) -> None:
    text, reason = JSON[name]
    with pytest.raises(ValueError, match=r"^it") as caught:
        parse_json(text)
    assert str(caught.value) == reason


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


def test_an_item_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"^of item 2: its key job is missing$"):
        expect_maps([{"job": "0"}, {}], {"job": str})


def test_a_map_in_a_file_that_has_another_shape_is_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"step": 1.5}')
    with pytest.raises(UnreadableError) as caught:
        read_map(tmp_path / "a.json", {"step": int})
    reason = "its key step is a number, and an integer was expected"
    assert str(caught.value) == f"{tmp_path / 'a.json'} cannot be read: {reason}."


def test_whole_lines_are_read_and_an_endless_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"one\ntwo\nthr")
    assert list(read_lines(path)) == [b"one\n", b"two\n"]
    assert list(read_lines(path, start=4)) == [b"two\n"]
    with pytest.raises(UnreadableError, match="a line of it has more than 2 bytes"):
        list(read_lines(path, longest=2))


def test_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert read_tail(tmp_path / "log", 3) == (b"789", False)
    assert read_tail(tmp_path / "log", 10) == (b"0123456789", True)
