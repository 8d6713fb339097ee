"""A class that declares other samples to a plan than its data has, or a plan that opens data, is caught here alone."""

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
from trainkit.data.declared import declared_data
from trainkit.data.splits import build_splits

SETS = "trainkit.data"
NODES: list[Mapping[str, Any]] = [
    {"_target_": f"{SETS}.Digits", "scaling": "unit"},
    {"_target_": f"{SETS}.Synthetic", "shape": [3, 8, 8], "num_samples": 20, "val_samples": 7},
    {"_target_": f"{SETS}.SyntheticTokens", "context": 9, "num_samples": 20, "val_samples": 7},
    {"_target_": f"{SETS}.Friedman", "num_samples": 20, "val_samples": 7},
    {"_target_": f"{SETS}.PythonSource", "context": 16, "max_bytes": 9000},
    {"_target_": f"{SETS}.Splits", "train": {"_target_": f"{SETS}.Digits", "split": "train"}},
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


@pytest.fixture
def plan(cwd: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    (cwd / "conf/data").mkdir(parents=True)
    (cwd / "conf/data/undeclared.yaml").write_text("_target_: tests.data.test_declared.Opens\n")

    def planned(*arguments: str, code: int = 0) -> str:
        assert main(["plan", *arguments, "--config-dir", "conf"]) == code
        return "".join(capsys.readouterr())

    return planned


def test_data_that_declares_nothing_is_not_opened_either(plan: Callable[..., str]) -> None:
    own = ("recipe=null", "data=undeclared", "--allow-package", "tests")
    out = plan(*own)
    assert "note: data: Opens does not declare its length, and no data is opened" in out
    assert "note: data: Opens does not declare its samples, and no data is opened" in out
    assert json.loads(plan(*own, "--json", "--num-samples", "640"))["steps"] == 10
    with pytest.raises(AssertionError):
        plan(*own, "--open-data")


def test_an_unset_key_of_the_data_is_a_note(plan: Callable[..., str]) -> None:
    found = json.loads(plan("data=token_memmap", "model=gpt", "objective=language_modelling", "recipe=null", "steps=3",
        "model.vocab_size=9", "model.context=8", "model.num_layers=1", "model.num_heads=1", "model.width=8",
        "data.context=8", "--json"))  # fmt: skip
    assert "data.path is not set: a training needs it" in found["notes"]
    assert (found["steps"], found["memory"]["activations"] > 0) == (3, True)


def test_a_length_that_contradicts_the_class_is_refused(plan: Callable[..., str]) -> None:
    assert "--num-samples=5: Digits declares 1,437 training samples" in plan("--num-samples", "5", code=2)
    assert "--num-samples=none: must be a number of samples" in plan("--num-samples", "none", code=2)
