"""Crafted YAML and crafted compositions: exit code 2, one screen, the remedy, nothing written."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from trainkit.bounded import MAX_BYTES, MAX_VALUES, check_bounds, parse_yaml
from trainkit.cli import main

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)
PLAIN = "a config holds plain values only"


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Run a command in an empty folder; return what is on its screen, which is short, without its first line."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> list[str]:
        before = sorted(tmp_path.rglob("*"))
        assert main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
        assert len(lines) <= 40
        assert "Traceback" not in lines
        return [line.strip() for line in lines[1:]]

    return run


def write(tmp_path: Path, files: Mapping[str, str | bytes]) -> None:
    for name, text in files.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (BOMB, f"holds more than {MAX_VALUES:,} values, aliases expanded. (conf/model/bad.yaml:6)"),
        ("a: &a\n  b: *a\n", "holds the alias *a inside its own anchor. (conf/model/bad.yaml:3)"),
        (f"a: {'[' * 900}", "nests mappings and lists more than 50 deep. (conf/model/bad.yaml:2)"),
        ("a: *b\n", "holds the alias *b, and no anchor &b before it. (conf/model/bad.yaml:2)"),
        ("a: !!python/name:os.system x\n", f"holds the tag !!python/name:os.system; {PLAIN}. (conf/model/bad.yaml:2)"),
        ("a: !own x\n", f"holds the tag !own; {PLAIN}. (conf/model/bad.yaml:2)"),
        ("a: \x00\n", "holds the character \\x00, which YAML does not allow. (conf/model/bad.yaml:2)"),
        ("a:\n\tb: 1\n", "is not YAML: found character that cannot start any token. (conf/model/bad.yaml:3)"),
        ("b: 1\nb: 2\n", "is not YAML: key b is here twice, first in line 2. (conf/model/bad.yaml:3)"),
        ("? [a]\n: 1\n", "holds a key that is not text. (conf/model/bad.yaml:2)"),
        (
            f"a: {'9' * 5000}\n",
            "holds a scalar that cannot be read: an integer has too many digits. (conf/model/bad.yaml:2)",
        ),
    ],
)
def test_yaml_that_breaks_a_bound_is_refused_with_its_line(
    tmp_path: Path, refused: Callable[..., list[str]], text: str, rule: str
) -> None:
    write(tmp_path, {"model/bad.yaml": f"_target_: trainkit.models.mlp.Mlp\n{text}"})
    told = refused("explain", "model", "--config-dir", "conf", "recipe=null", "model=bad")
    assert [line.replace(f"{tmp_path}/", "") for line in told] == [f"bad.yaml: {rule}"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: \xff\n", "it is not UTF-8 text (byte 4)"),
        (b"#" * (MAX_BYTES + 1), f"it has {MAX_BYTES + 1:,} bytes, and at most {MAX_BYTES:,} are read"),
    ],
)
def test_a_file_that_is_no_text_or_too_large_is_refused(
    tmp_path: Path, refused: Callable[..., list[str]], content: bytes, reason: str
) -> None:
    write(tmp_path, {"model/bad.yaml": content})
    told = refused("explain", "model", "--config-dir", "conf", "recipe=null", "model=bad")
    rule = f"cannot be read: {reason}. A config is a regular file of UTF-8 text, {MAX_BYTES:,} bytes at most."
    assert told == [f"{tmp_path}/conf/model/bad.yaml: {rule}"]


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "bad.yaml"])
def test_what_is_no_regular_file_is_no_choice_and_stops_no_listing(
    tmp_path: Path, refused: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    file = tmp_path / "conf" / "model" / "bad.yaml"
    os.mkfifo(file) if kind == "pipe" else file.symlink_to(kind)
    told = refused("explain", "model", "--config-dir", "conf", "model=bad")
    assert told == ["model=bad: no such choice. There are: convnet, gan, gpt, mlp, resnet. (command line)"]
    told = refused("explain", "model", "--config-dir", "conf", "model.hiddn=3")
    assert told == ["model.hiddn: no such key in mlp. Did you mean model.hidden? (command line)"]
    assert main(["ls", "model", "--config-dir", "conf"]) == 0
    out = capsys.readouterr()
    assert "bad.yaml: cannot be read: it " in out.err or kind == "bad.yaml"
    assert "mlp" in out.out


ENDLESS = "Remove the entry that closes the cycle."
OUTSIDE = "names a file outside of the folders of the config. Give the name of a choice: GROUP: CHOICE."
ITEM = "each item must be GROUP: CHOICE, or CHOICE."


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"x": "defaults:\n - x\n"}, f"more than 200 files include one another (recipe/x, 198 times). {ENDLESS}"),
        (
            {"x": "defaults:\n - /recipe/y\n", "y": "defaults:\n - x\n"},
            f"more than 200 files include one another (recipe/x, recipe/y, 100 times). {ENDLESS}",
        ),
        (
            {"x": "defaults:\n - /recipe: digits\n"},
            f"more than 200 files include one another (recipe/x, 198 times). {ENDLESS}",
        ),
    ],
)
def test_defaults_that_lead_back_to_themselves_are_refused(
    tmp_path: Path, refused: Callable[..., list[str]], files: dict[str, str], told: str
) -> None:
    write(tmp_path, {f"recipe/{name}.yaml": text for name, text in files.items()})
    found = refused("explain", "name", "--config-dir", "conf", "recipe=x")
    assert found == [f"defaults: {told} ({tmp_path}/conf/recipe/x.yaml:2)"]


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ("../../outside", f"defaults=../../outside: {OUTSIDE}"),
        ("//etc/passwd", f"defaults=//etc/passwd: {OUTSIDE}"),
        ("override /model: ../mlp", f"defaults={{'override /model': '../mlp'}}: {OUTSIDE}"),
        ("3", f"defaults=3: {ITEM}"),
        ("{a: b, c: d}", f"defaults={{'a': 'b', 'c': 'd'}}: {ITEM}"),
        ("'': a", f"defaults={{'': 'a'}}: {ITEM}"),
    ],
)
def test_an_item_of_a_defaults_list_names_a_choice(
    tmp_path: Path, refused: Callable[..., list[str]], item: str, told: str
) -> None:
    (tmp_path / "outside.yaml").write_text("name: read\n")
    write(tmp_path, {"recipe/x.yaml": f"defaults:\n - {item}\n"})
    found = refused("explain", "name", "--config-dir", "conf", "recipe=x")
    assert found == [f"{told} ({tmp_path}/conf/recipe/x.yaml:2)"]


def test_a_list_of_choices_for_a_group_of_one_is_refused(tmp_path: Path, refused: Callable[..., list[str]]) -> None:
    write(tmp_path, {"recipe/x.yaml": "defaults:\n - override /model: [mlp, gpt]\n"})
    told = refused("explain", "name", "--config-dir", "conf", "recipe=x")
    assert told == ["model=['mlp', 'gpt']: takes one choice, not a list. (conf/recipe/x.yaml:2)"]


CHAIN = "".join(f"a{level}: ${{a{level + 1}}}\n" for level in range(300))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: ${name}\n", "name=${name}: cannot be resolved: Recursive interpolation detected."),
        (f"{CHAIN}name: ${{a0}}\n", "cannot be resolved"),
        (
            "name: '${a'\n",
            "name=${a: holds a reference that cannot be read. Write ${KEY}, ${oc.env:VARIABLE} or, for text, \\${.",
        ),
        ("name: ${oc.env:NOWHERE_AT_ALL}\n", "Environment variable 'NOWHERE_AT_ALL' not found"),
        ("hydra:\n  run:\n    dir: ${hydra.run.dir}\n", "hydra.run.dir=${hydra.run.dir}: refers to "),
        ("hydra:\n  job:\n    name: ${hydra.job.name}\n", "refers to itself. Write the value itself."),
    ],
)
def test_references_without_end_are_refused(
    tmp_path: Path, refused: Callable[..., list[str]], text: str, told: str
) -> None:
    write(tmp_path, {"recipe/x.yaml": text})
    assert any(told in line for line in refused("explain", "seed", "--config-dir", "conf", "recipe=x"))


def test_aliases_within_the_bounds_are_read() -> None:
    assert parse_yaml("a: &a {b: [1, 2]}\nc: *a\nd: {<<: *a, e: 3}\n") == {
        "a": {"b": [1, 2]}, "c": {"b": [1, 2]}, "d": {"b": [1, 2], "e": 3},
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_a_text_counts_by_its_length_each_time_that_an_alias_repeats_it(count: int) -> None:
    text = f"a: &a {'x' * 64 * (MAX_VALUES - 100)}\n" + "".join(f"b{i}: *a\n" for i in range(count - 1))
    if count == 1:
        check_bounds(text)
    else:
        with pytest.raises(ValueError, match=r"line 2 of it holds more than 20,000 values, aliases expanded"):
            parse_yaml(text)
