"""`trainkit ls --model` counts what each layer of a model returns, holds and computes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from trainkit.cli import main
from trainkit.verbs.looking.schema import schema_of


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["ls", "--model", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("model")).validate(found)
    return found


def test_the_layers_of_an_mlp(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys, "recipe=null", "model=mlp", "batch.global_size=32")
    layers = [(one["name"], one["kind"], one["output"], one["parameters"], one["flops"]) for one in found["layers"]]
    assert layers == [
        ("layers.0", "Linear", [32, 128], 64 * 128 + 128, 2 * 32 * 64 * 128),
        ("layers.1", "ReLU", [32, 128], 0, 0),
        ("layers.2", "Linear", [32, 10], 128 * 10 + 10, 2 * 32 * 128 * 10),
    ]
    assert (found["batch"], found["parameters"], found["trained"]) == (32, 9610, 9610)
    assert found["flops"] == sum(one["flops"] for one in found["layers"])


def test_a_table_ends_with_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--model", "recipe=null", "model=mlp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "class", "output", "parameters", "FLOPs"]
    assert lines[-1] == "9,610 parameters, 1.21 M FLOPs in a forward pass of 64 samples"


def test_a_wrong_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--model", "model.wdth=3"]) == 2
    assert "model.wdth" in capsys.readouterr().err


def test_a_group_beside_the_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "strategy", "--model"]) == 2
    assert "strategy" in capsys.readouterr().err
