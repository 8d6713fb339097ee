"""A token that no window predicts, or predicts twice, and bytes read as other text are caught here alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from trainkit.data.sets.text import TextFile, TextLines, TokenMemmap
from trainkit.errors import ConfigError, DataError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 5, encoding="utf-8")
    return path


def test_a_text_is_numbered_by_its_sorted_characters(text: Path) -> None:
    data = TextFile(path=text, split="train", context=4)
    assert data.characters == "abcdefghij"
    assert [part.tolist() for part in data[1]] == [[4, 5, 6, 7], [5, 6, 7, 8]]
    assert data.decode(data.encode("fade!")) == "fade"


def test_a_text_is_read_as_its_encoding_and_ends_of_lines_are(tmp_path: Path) -> None:
    def characters(content: bytes, encoding: str = "utf-8") -> str:
        (tmp_path / "t.txt").write_bytes(content)
        return TextFile(path=tmp_path / "t.txt", split="train", context=4, encoding=encoding).characters

    assert characters("\ufeffaé\r\n".encode() * 9) == "\n\raé\ufeff"
    assert characters(b"\xef\xbb\xbfab\r\n" + b"ab" * 9) == "\n\rab"
    assert characters(("aé" * 9).encode("latin-1"), "latin-1") == "aé"
    with pytest.raises(DataError, match=r"line 1 holds the byte 0xe9, which is not utf-8\. Give its encoding"):
        characters(("aé" * 9).encode("latin-1"))


def test_windows_of_stride_one_start_at_every_character(text: Path) -> None:
    data = TextFile(path=text, split="train", context=4, stride=1)
    assert len(data) == 45 - 4
    assert data.decode(data[40][1].tolist()) == "bcde"


def test_validation_predicts_every_character_of_its_part_once(text: Path) -> None:
    data = TextFile(path=text, split="val", context=3)
    assert [data[index][1].tolist() for index in range(len(data))] == [[6, 7, 8], [9, -100, -100]]


def test_nothing_is_fetched_unless_asked_and_an_address_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.path: is not set\. Give a text file, or data\.download=true"):
        TextFile(split="train")
    with pytest.raises(DataError, match=r"^cannot download file:///nowhere: .*Download it yourself"):
        TextFile(split="train", download=True, url="file:///nowhere")


def test_a_download_is_kept_only_if_it_is_the_expected_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    right = hashlib.sha256(text.read_bytes()).hexdigest()

    with pytest.raises(DataError, match=rf"is not the expected file: its SHA-256 is {right}"):
        TextFile(split="train", context=4, download=True, url=text.as_uri(), sha256="00")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]

    data = TextFile(split="train", context=4, download=True, url=text.as_uri(), sha256=right)
    assert data.characters == "abcdefghij"
    text.unlink()
    assert len(TextFile(split="train", context=4, sha256=right)) == len(data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": Path("gone.txt")}, r"^data\.path=gone\.txt: there is no such file"),
        ({"path": Path()}, r"^data\.path=\.: is a folder"),
        ({"vocab_size": 9}, r"10 different characters, more than data\.vocab_size=9"),
        ({"context": 45}, r"the train part has 45 tokens, fewer than a sample needs \(data\.context=45 and one more\)"),
    ],
)
def test_a_text_that_does_not_do_is_refused(text: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TextFile(**{"path": text, "split": "train", **settings})


def test_a_text_at_the_bounds_is_read(text: Path) -> None:
    assert len(TextFile(path=text, split="train", vocab_size=10, context=44)) == 1


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_are_read_from_a_memory_map(tmp_path: Path, dtype: Literal["uint16", "uint32"]) -> None:
    np.arange(20).astype(f"<{dtype[0]}{int(dtype[4:]) // 8}").tofile(tmp_path / "train.bin")
    np.arange(8).astype(dtype).tofile(tmp_path / "val.bin")

    train = TokenMemmap(path=tmp_path, split="train", context=4, stride=2, dtype=dtype)
    val = TokenMemmap(path=tmp_path, split="val", context=4, dtype=dtype)

    assert (len(train), len(val)) == (8, 2)
    assert train[7][1].tolist() == [15, 16, 17, 18]
    assert val[1][1].tolist() == [5, 6, 7, -100]


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "train.bin")
    data = TokenMemmap(path=tmp_path, split="train", context=4, vocab_size=12)
    assert data[1][1].tolist() == [5, 6, 7, 8]
    with pytest.raises(DataError, match=r"^sample 2 holds token 12, but data\.vocab_size=12\.$"):
        data[2]


@pytest.mark.parametrize(
    ("tokens", "dtype", "message"),
    [
        (np.frombuffer(b"abc", dtype=np.uint8), "uint16", "its 3 bytes are not a whole number of uint16 tokens"),
        (
            np.frombuffer(b"abcd", dtype=np.uint8),
            "uint16",
            r"has 2 tokens, fewer than a sample needs \(data\.context=4 and",
        ),
        (np.arange(500, dtype=np.uint32), "uint16", r"every second uint16 is at most 0, .* Use data\.dtype=uint32"),
        (np.arange(0, 128_000, 256, dtype=np.uint32), "uint16", "every second uint16 is at most 1"),
        (np.arange(500, dtype=np.int64), "uint32", "every second uint32 is at most 0, .* Use uint32 for the tokens"),
        (np.frombuffer(b"\x93NUMPY" + b"ab" * 99, dtype=np.uint8), "uint16", "was written by numpy.save"),
        (np.array([20240520] + 255 * [1], dtype=np.uint32), "uint16", r"the header of llm\.c"),
    ],
    ids=["odd", "short", "wide", "wide with large numbers", "64 bits", "npy", "llm.c"],
)
def test_a_damaged_token_file_or_one_of_another_format_is_refused(
    tokens: Any, dtype: Literal["uint16", "uint32"], message: str, tmp_path: Path
) -> None:
    tokens.tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=message):
        TokenMemmap(path=tmp_path, split="train", context=4, dtype=dtype)


def test_small_tokens_of_16_bits_are_read(tmp_path: Path) -> None:
    (np.arange(500) % 3).astype(np.uint16).tofile(tmp_path / "train.bin")
    assert len(TokenMemmap(path=tmp_path, split="train", context=4)) == 124


def test_lines_have_the_tokens_of_the_text_that_the_model_knows(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("abc def\n")
    (tmp_path / "new.txt").write_text("fed\ncab\n")
    lines = TextLines(path=tmp_path / "new.txt", context=4, reference=tmp_path / "known.txt")
    trained = TextFile(split="train", path=tmp_path / "known.txt", context=2, val_share=0.5)
    assert lines[0].tolist() == [*trained.encode("fed"), 0]
    assert torch.equal(lines.gather(torch.arange(2))[1], lines[1])
    assert list(lines.ids) == [1, 2]
    assert TextLines(path=tmp_path / "new.txt", context=4)[0].tolist() == [*b"fed", 0]


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_bytes("\ufeffa\u2028b\r\n\n\x0cc".encode())
    lines = TextLines(path=tmp_path / "new.txt", context=8)
    rows = [bytes(lines[index].tolist()).rstrip(b"\0").decode() for index in range(len(lines))]
    assert rows == ["a\u2028b", "", "\x0cc"]


def test_a_line_that_is_too_long_or_has_an_unknown_character_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("fed\nz\n")
    (tmp_path / "known.txt").write_text("abcdef")
    with pytest.raises(DataError, match=r"line 1 of .*new.txt has 3 tokens, more than data\.context=2"):
        TextLines(path=tmp_path / "new.txt", context=2)
    with pytest.raises(DataError, match=r"line 2 of .*new.txt has the character 'z', which .*known.txt does not have"):
        TextLines(path=tmp_path / "new.txt", context=3, reference=tmp_path / "known.txt")
