"""A key with the line of another one, and a scalar that YAML silently rewrites, are caught here alone.

A crafted YAML that hangs, exhausts memory or reads a file outside of the config folders is caught here alone.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.config.conftest import Write
from tests.support.refusing import Refuse
from trainkit.cli import main
from trainkit.config.yaml_files import Document, read_document
from trainkit.errors import ConfigError, Problem
from trainkit.files import MAX_YAML_BYTES, MAX_YAML_VALUES

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


@pytest.mark.parametrize(
    ("texts", "traps"),
    [
        (["1_000", "1e5", "true", "'0777'", '"on"', "0", "10", "-3", "0.5", "null", "x:1"], False),
        (["no", "Yes", "ON", "off", "1:30", "12:30:45", "0777", "-017", "190:20:30.15"], True),
    ],
)
def test_a_trap_is_what_yaml_reads_otherwise_than_it_looks(tmp_path: Path, texts: list[str], traps: bool) -> None:
    (tmp_path / "mine.yaml").write_text("".join(f"key{index}: {text}\n" for index, text in enumerate(texts)))
    problems: Sequence[Problem] = ()
    try:
        read_document(tmp_path / "mine.yaml")
    except ConfigError as error:
        problems = error.problems
    assert [problem.value for problem in problems] == (texts if traps else [])


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"defaults: mlp\n", "defaults: must be a list."),
        (b"- a\n", "must hold keys and values."),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, rule: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_document(tmp_path / "mine.yaml")
    assert rule in str(caught.value)
    assert "mine.yaml" in str(caught.value)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        (BOMB, f"holds more than {MAX_YAML_VALUES:,} values, aliases expanded.", 6),
        ("a: &a\n  b: *a\n", "holds the alias *a inside its own anchor.", 3),
        (f"a: {'[' * 900}", "nests mappings and lists more than 50 deep.", 2),
        ("a: !!python/name:os.system x\n", "holds the tag !!python/name:os.system;", 2),
        ("a: \x00\n", "holds the character \\x00, which YAML does not allow.", 2),
        ("a:\n\tb: 1\n", "is not YAML: found character that cannot start any token.", 3),
        (f"a: {'9' * 5000}\n", "holds a scalar that cannot be read: an integer has too many digits.", 2),
    ],
)
def test_yaml_that_breaks_a_bound_is_refused_with_its_line(
    write_conf: Write, refuse: Refuse, text: str, rule: str, line: int
) -> None:
    folder = write_conf({"model/bad.yaml": f"_target_: trainkit.models.Mlp\n{text}"})
    (problem,) = refuse("explain", "model", "--config-dir", str(folder), "recipe=null", "model=bad")
    assert problem.startswith(f"bad.yaml: {rule}")
    assert problem.endswith(f" ({folder}/model/bad.yaml:{line})")


def test_a_file_that_is_no_text_or_too_large_is_refused(write_conf: Write) -> None:
    file = write_conf({"model/bad.yaml": ""}) / "model/bad.yaml"
    for content, reason in (
        (b"a: \xff\n", "it is not UTF-8 text"),
        (b"#" * (MAX_YAML_BYTES + 1), f"it has {MAX_YAML_BYTES + 1:,}"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"bad.yaml: cannot be read: {reason}"):
            read_document(file)


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "bad.yaml"])
def test_what_is_no_regular_file_is_no_choice_and_stops_no_listing(
    write_conf: Write, refuse: Refuse, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder = write_conf({"model/good.yaml": "a: 1\n"})
    file = folder / "model" / "bad.yaml"
    os.mkfifo(file) if kind == "pipe" else file.symlink_to(kind)
    (problem,) = refuse("explain", "model", "--config-dir", str(folder), "model=bad")
    assert problem.startswith("model=bad: no such choice. There are: convnet,")
    assert main(["ls", "model", "--config-dir", str(folder)]) == 0
    out = capsys.readouterr()
    assert "bad.yaml: cannot be read: it " in out.err or kind == "bad.yaml"
    assert "good" in out.out


OUTSIDE = "names a file outside of the folders of the config."


@pytest.mark.parametrize(
    ("item", "rule"),
    [
        ("x", "defaults: files include one another without an end."),
        ("../../outside", f"defaults=../../outside: {OUTSIDE}"),
        ("override /model: ../mlp", f"defaults={{'override /model': '../mlp'}}: {OUTSIDE}"),
        ("3", "defaults=3: each item must be GROUP: CHOICE, or CHOICE."),
        ("override /model: [mlp, gpt]", "model=['mlp', 'gpt']: takes one choice, not a list."),
    ],
)
def test_a_defaults_list_leads_to_choices_and_not_back_to_itself(
    write_conf: Write, refuse: Refuse, item: str, rule: str
) -> None:
    folder = write_conf({"recipe/x.yaml": f"defaults:\n - {item}\n", "../outside.yaml": "name: read\n"})
    (problem,) = refuse("explain", "name", "--config-dir", str(folder), "recipe=x")
    assert problem.startswith(rule)
    assert problem.endswith("/recipe/x.yaml:2)")
