from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from trainkit.data.reading.windows import Windows, tile
from trainkit.data.sets.text import PythonSource, TextFile
from trainkit.data.sets.token_memmap import TokenMemmap
from trainkit.errors import ConfigError, DataError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 5, encoding="utf-8")
    return path


def test_a_text_is_numbered_by_its_sorted_characters(text: Path) -> None:
    data = TextFile(path=text, split="train", context=4)

    assert data.characters == "abcdefghij"
    expected: Any = (pytest.approx([4, 5, 6, 7]), pytest.approx([5, 6, 7, 8]))
    assert data[1] == expected
    assert data.decode(data.encode("fade!")) == "fade"


def test_a_text_is_read_as_its_encoding_and_ends_of_lines_are(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("\ufeffaé\r\n".encode() * 9)
    assert TextFile(path=tmp_path / "t.txt", split="train", context=4).characters == "\n\raé\ufeff"
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbfab\r\n" * 1 + b"ab" * 9)
    assert TextFile(path=tmp_path / "t.txt", split="train", context=4).characters == "\n\rab"
    (tmp_path / "t.txt").write_bytes(("aé" * 9).encode("latin-1"))
    assert TextFile(path=tmp_path / "t.txt", split="train", context=4, encoding="latin-1").characters == "aé"
    with pytest.raises(DataError, match=r"line 1 holds the byte 0xe9, which is not utf-8\. Give its encoding, such as"):
        TextFile(path=tmp_path / "t.txt", split="train", context=4)


def test_windows_of_stride_one_start_at_every_character(text: Path) -> None:
    data = TextFile(path=text, split="train", context=4, stride=1)

    assert len(data) == 45 - 4
    assert data.decode(data[40][1].tolist()) == "bcde"


def test_validation_predicts_every_character_of_its_part_once(text: Path) -> None:
    data = TextFile(path=text, split="val", context=3)

    assert [targets.tolist() for _, targets in (data[index] for index in range(len(data)))] == [
        [6, 7, 8],
        [9, -100, -100],
    ]


@pytest.mark.parametrize(("length", "context", "expected"), [(7, 3, 2), (8, 3, 3), (2, 3, 1), (1, 3, 0)])
def test_a_cover_has_as_many_windows_as_its_targets_need(length: int, context: int, expected: int) -> None:
    windows = tile(np.arange(length, dtype=np.uint8), context=context)

    assert len(windows) == expected
    assert sum(int((windows[index][1] >= 0).sum()) for index in range(expected)) == length - 1


@pytest.mark.parametrize("padded", [True, False])
def test_gathering_gives_what_reading_one_by_one_gives(padded: bool) -> None:
    windows = Windows(tokens=np.arange(20, dtype=np.uint16), context=3, stride=3, padded=padded)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))

    inputs, targets = windows.gather(order)

    for row, index in enumerate(order.tolist()):
        assert torch.equal(inputs[row], windows[index][0])
        assert torch.equal(targets[row], windows[index][1])


def test_nothing_is_fetched_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"data.path: is not set\. Give a text file, or data.download=true to fetch https"
    ):
        TextFile(split="train")


def test_a_download_is_kept_only_if_it_is_the_expected_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    right = hashlib.sha256(text.read_bytes()).hexdigest()

    with pytest.raises(DataError, match=rf"is not the expected file: its SHA-256 is {right}, expected 00\.$"):
        TextFile(split="train", context=4, download=True, url=text.as_uri(), sha256="00")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]

    data = TextFile(split="train", context=4, download=True, url=text.as_uri(), sha256=right)
    assert data.characters == "abcdefghij"
    text.unlink()
    assert len(TextFile(split="train", context=4, sha256=right)) == len(data)


def test_an_address_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        DataError, match=r"^cannot download file:///nowhere: .*Download it yourself and give its path as"
    ):
        TextFile(split="train", download=True, url="file:///nowhere")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": Path("gone.txt")}, r"^data.path=gone.txt: there is no such file below /.*\.$"),
        ({"path": Path()}, r"^data.path=\.: is a folder, and a file is needed\.$"),
        ({"vocab_size": 5}, r"^the text has 10 different characters, more than data.vocab_size=5\. Use 10 for it"),
        ({"context": 60}, r"^the train part has 45 tokens, fewer than a sample needs \(data.context=60 and one more\)"),
    ],
)
def test_a_text_that_does_not_do_is_refused(
    text: Path, settings: dict[str, Path] | dict[str, int], message: str
) -> None:
    given: dict[str, Any] = {"path": text, "split": "train", **settings}
    with pytest.raises(DataError, match=message):
        TextFile(**given)


def test_the_library_of_the_interpreter_is_a_text_of_bytes() -> None:
    train = PythonSource(split="train", context=32, max_bytes=50_000)
    val = PythonSource(split="val", context=32, max_bytes=50_000)

    assert (len(train), len(val)) == ((45_000 - 33) // 32 + 1, 157)
    assert train.decode(train.encode("def")) == "def"
    assert train[0][0].tolist() == PythonSource(split="train", context=32, max_bytes=50_000)[0][0].tolist()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_are_read_from_a_memory_map(tmp_path: Path, dtype: Literal["uint16", "uint32"]) -> None:
    np.arange(20).astype(f"<{dtype[0]}{int(dtype[4:]) // 8}").tofile(tmp_path / "train.bin")
    np.arange(8).astype(dtype).tofile(tmp_path / "val.bin")

    train = TokenMemmap(path=tmp_path, split="train", context=4, stride=2, dtype=dtype)
    val = TokenMemmap(path=tmp_path, split="val", context=4, dtype=dtype)

    assert (len(train), len(val)) == (8, 2)
    assert train[7][1].tolist() == [15, 16, 17, 18]
    assert val[1][1].tolist() == [5, 6, 7, -100]


def test_a_damaged_or_short_token_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"train.bin: its 3 bytes are not a whole number of uint16 tokens\.$"):
        TokenMemmap(path=tmp_path, split="train")
    (tmp_path / "train.bin").write_bytes(b"abcd")
    with pytest.raises(DataError, match=r"train.bin has 2 tokens, fewer than a sample of 1024 and one more\.$"):
        TokenMemmap(path=tmp_path, split="train")


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "train.bin")
    data = TokenMemmap(path=tmp_path, split="train", context=4, vocab_size=10)

    with pytest.raises(DataError, match=r"^sample 2 holds token 12, but data.vocab_size=10\.$"):
        data[2]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            np.arange(500, dtype=np.uint32),
            r"every second uint16 is at most 0, as of tokens of twice the bytes\. Use data\.d",
        ),
        (
            np.arange(0, 128_000, 256, dtype=np.uint32),
            r"every second uint16 is at most 1, .* Use data\.dtype=uint32\.$",
        ),
        (np.frombuffer(b"\x93NUMPY" + b"ab" * 99, dtype=np.uint8), r"was written by numpy\.save, with a header"),
        (np.array([20240520] + 255 * [1], dtype=np.uint32), r"begins with the 1,024 bytes of the header of llm\.c"),
    ],
)
def test_a_token_file_of_another_format_is_refused(tokens: Any, message: str, tmp_path: Path) -> None:
    tokens.tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=message):
        TokenMemmap(path=tmp_path, split="train", context=4)


def test_tokens_of_64_bits_are_refused_as_32_and_small_tokens_of_16_are_read(tmp_path: Path) -> None:
    np.arange(500, dtype=np.int64).tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"every second uint32 is at most 0, .* Use uint32 for the tokens\.$"):
        TokenMemmap(path=tmp_path, split="train", context=4, dtype="uint32")
    (np.arange(500) % 3).astype(np.uint16).tofile(tmp_path / "train.bin")
    assert len(TokenMemmap(path=tmp_path, split="train", context=4)) == 124
