"""A plan knows a split by what its class declares, without opening the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from trainkit.cli import main
from trainkit.config.sections import CvConfig
from trainkit.data.splits import build_splits, declared_data

NODES: list[Mapping[str, Any]] = [
    {"_target_": "trainkit.data.Digits", "scaling": "unit"},
    {"_target_": "trainkit.data.Synthetic", "shape": [3, 8, 8], "num_samples": 20, "val_samples": 7},
    {"_target_": "trainkit.data.SyntheticTokens", "context": 9, "num_samples": 20, "val_samples": 7},
    {"_target_": "trainkit.data.Friedman", "num_samples": 20, "val_samples": 7},
    {"_target_": "trainkit.data.PythonSource", "context": 16, "max_bytes": 9000},
    {"_target_": "trainkit.data.Splits", "train": {"_target_": "trainkit.data.Digits", "split": "train"}},
]


def shapes(sample: Any) -> Any:
    return tree_map(lambda leaf: (tuple(torch.as_tensor(leaf).shape), torch.as_tensor(leaf).dtype), sample)


@pytest.mark.parametrize("node", NODES, ids=[node["_target_"].rpartition(".")[2] for node in NODES])
def test_what_a_class_declares_is_what_its_data_has(node: Mapping[str, Any]) -> None:
    real, declared = build_splits(node), declared_data(node, CvConfig())
    assert declared.splits.keys() == real.keys()
    for name, split in declared.splits.items():
        assert shapes(split[0]) == shapes(real[name][0])
        if declared.knows_length:
            assert len(split) == len(real[name])


def test_folds_of_declared_data_have_the_sizes_of_folds() -> None:
    parts = declared_data(NODES[0], CvConfig(folds=5, fold=0)).splits
    assert {name: len(part) for name, part in parts.items()} == {"train": 1149, "val": 288}


class Opens:
    """A dataset that must not be made."""

    def __init__(self) -> None:
        raise AssertionError


OWN = ("recipe=null", "data=undeclared", "--allow-package", "tests")


@pytest.fixture
def plan(cwd: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    (cwd / "conf/data").mkdir(parents=True)
    (cwd / "conf/data/undeclared.yaml").write_text("_target_: tests.data.test_declared.Opens\n")

    def planned(*arguments: str, code: int = 0) -> tuple[str, str]:
        assert main(["plan", *arguments, "--config-dir", "conf"]) == code
        printed = capsys.readouterr()
        return printed.out, printed.err

    return planned


def test_data_that_declares_nothing_is_not_opened_either(plan: Callable[..., tuple[str, str]]) -> None:
    out, _ = plan(*OWN)
    lines = [line.strip() for line in out.splitlines()]
    assert (
        "note: data: Opens does not declare its length, and no data is opened: the number of steps, and time and cost "
        "to the end, are left out. --num-samples N gives it."
    ) in lines
    assert (
        "note: data: Opens does not declare its samples, and no data is opened: activations, and the check that model "
        "and data fit, are left out. --open-data reads the data."
    ) in lines
    assert not [line for line in lines if line.startswith(("samples", "steps", "rate curve"))]
    assert json.loads(plan(*OWN, "--json", "--num-samples", "640")[0])["steps"] == 10
    with pytest.raises(AssertionError):
        plan(*OWN, "--open-data")


def test_an_unset_key_of_the_data_is_a_note(plan: Callable[..., tuple[str, str]]) -> None:
    found = json.loads(plan("data=token_memmap", "model=gpt", "objective=language_modelling", "recipe=null", "steps=3",
        "model.vocab_size=9", "model.context=8", "model.num_layers=1", "model.num_heads=1", "model.width=8",
        "data.context=8", "--json")[0])  # fmt: skip
    assert "data.path is not set: a training needs it" in found["notes"]
    assert found["steps"] == 3
    assert found["memory"]["activations"] > 0


def test_a_length_that_contradicts_the_class_is_refused(plan: Callable[..., tuple[str, str]]) -> None:
    _, err = plan("--num-samples", "5", code=2)
    rule = "Digits declares 1,437 training samples. Leave the flag out. (command line)"
    assert err.splitlines()[1:] == [f"  --num-samples=5: {rule}"]
    _, err = plan("--num-samples", "none", code=2)
    assert "--num-samples=none: must be a whole number, 1 to 1,000,000,000,000,000. (command line)" in err
