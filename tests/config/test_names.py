"""The public names of trainkit's classes: what a config may name, wherever the code is."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import trainkit
from trainkit import names
from trainkit.cli import main
from trainkit.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(rf"\btrainkit\.(?:{'|'.join({name.split('.')[1] for name in names.NAMES})})\.[A-Z]\w+")
EXAMPLE = "trainkit.strategies.MyStrategy"  # docs/adding-a-strategy.md


@pytest.mark.parametrize("public", names.NAMES)
def test_a_name_is_that_of_its_class(public: str) -> None:
    package, _, kind = public.rpartition(".")
    found = getattr(import_module(package), kind)
    assert (found.__module__, found.__qualname__) == (names.NAMES[public], kind)
    assert names.name_of(found) == public


def test_the_names_are_those_of_the_shipped_files() -> None:
    files = [
        file for room in ("conf", "docs", "recipes", "template", "trainkit") for file in (ROOT / room).rglob("*.*")
    ]
    texts = [file.read_text() for file in files if file.suffix in (".yaml", ".md", ".py") and file.name != "names.py"]
    assert {name for text in texts for name in NAMED.findall(text)} == {*names.NAMES, EXAMPLE}
    assert len({name.rpartition(".")[2] for name in names.NAMES}) == len(names.NAMES)


@pytest.mark.slow
def test_each_verb_refuses_a_run_of_an_earlier_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    assert main(["recipe=digits", "steps=1", "warmup.epochs=0", "quiet=true", f"hydra.run.dir={old}"]) == 0
    config = old / "resolved.yaml"
    config.write_text(config.read_text().replace("trainkit.data.Digits", "trainkit.data.sets.images.Digits"))
    capsys.readouterr()
    problem = (
        f"{config}: names trainkit.data.sets.images.Digits: a version before 0.1.0 wrote this run, with other names "
        f"and fingerprints. Read and resume it with that version, or train on from its weights, init_from={old}."
    )
    for command in ("resume", "evaluate", "predict --out=x.jsonl", "report", "generate --prompt=x", "export --to=onnx",
        *(["quantize --to=int8_weight"] if find_spec("torchao") else []), f"diff {old}", f"report {old}"):  # fmt: skip
        verb, *rest = command.split()
        assert main([verb, str(old), *rest]) == 2, command
        assert capsys.readouterr().err.splitlines() == ["1 problem in the config", f"  {problem}"], command
    with pytest.raises(ConfigError) as caught:
        trainkit.load(old)
    assert str(caught.value.problems[0]) == problem
    assert main(["recipe=digits", "steps=1", "quiet=true", f"init_from={old}", f"hydra.run.dir={tmp_path}/new"]) == 0
