"""A key with the line of another one, and a scalar that YAML silently rewrites, are caught here alone."""

from pathlib import Path

import pytest

from trainkit.config.yaml_files import Document, read_document
from trainkit.errors import ConfigError

TEXT = """\
# @package _global_
# What it is for
defaults:
  - _self_
  - override /model: mlp
seed: 3
batch:
  global_size: 1e2   # a float, as OmegaConf reads it
  sizes:
    - no
    - 'no'
when: 2026-11-21
"""


@pytest.fixture
def document(tmp_path: Path) -> Document:
    (tmp_path / "mine.yaml").write_text(TEXT)
    return read_document(tmp_path / "mine.yaml")


def test_keys_and_defaults_are_read_with_their_lines(document: Document) -> None:
    lines = {".".join(path): line for path, line in document.lines.items()}
    assert (lines["seed"], lines["batch"], lines["batch.global_size"]) == (6, 7, 8)
    assert document.defaults == ["_self_", {"override /model": "mlp"}]
    assert document.defaults_lines == (4, 5)
    assert "defaults" not in document.values
    assert (document.package, document.description) == ("_global_", "What it is for")


def test_numbers_are_read_as_people_write_them_and_dates_stay_text(document: Document) -> None:
    assert document.values["batch"]["global_size"] == 100.0
    assert document.values["when"] == "2026-11-21"


def test_only_plain_scalars_are_traps(document: Document) -> None:
    assert [(one.path, one.line, one.text) for one in document.gotchas] == [(("batch", "sizes", "0"), 10, "no")]


@pytest.mark.parametrize(
    ("texts", "traps"),
    [
        (["1_000", "1e5", "true", "'0777'", '"on"', "0", "10", "-3", "0.5", "null", "x:1"], False),
        (["no", "Yes", "ON", "off", "1:30", "12:30:45", "0777", "-017", "190:20:30.15"], True),
    ],
)
def test_a_trap_is_what_yaml_reads_otherwise_than_it_looks(tmp_path: Path, texts: list[str], traps: bool) -> None:
    (tmp_path / "mine.yaml").write_text("".join(f"key{place}: {text}\n" for place, text in enumerate(texts)))
    found = [gotcha.text for gotcha in read_document(tmp_path / "mine.yaml").gotchas]
    assert found == (texts if traps else [])


def test_a_key_that_yaml_rewrites_is_a_trap_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("on: 3\n")
    assert [gotcha.line for gotcha in read_document(tmp_path / "mine.yaml").gotchas] == [1]


def test_an_empty_file_is_an_empty_choice(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# nothing yet\n")
    assert read_document(tmp_path / "mine.yaml").values == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"defaults: mlp\n", "defaults: must be a list."),
        (b"- a\n", "must hold keys and values."),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_document(tmp_path / "mine.yaml")
    assert words in str(caught.value)
    assert "mine.yaml" in str(caught.value)
