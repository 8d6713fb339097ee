"""A value of the wrong type that a key takes, such as true for a number, is caught here alone.

A key without a type, a meaning or the right unit in `explain` is caught here alone.
A schema for editors that flags a right file, or accepts what the checks of a run refuse, is caught here alone.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypeVar, Union

import jsonschema
import pytest
import yaml
from omegaconf import OmegaConf

from tests.config.conftest import Write
from trainkit.cli import main
from trainkit.config.annotations import misfit, schema_of
from trainkit.config.compose import compose
from trainkit.config.described.key_facts import facts_of
from trainkit.config.described.run_schema import config_schema
from trainkit.config.schema import RunConfig, hints_of
from trainkit.config.targets.allowed import allow_packages
from trainkit.config.targets.choices import REQUIRED
from trainkit.config.yaml_files import _Loader, shipped_conf, shipped_recipes, shipped_template
from trainkit.fields import at_least

T = TypeVar("T")


class Colour(enum.Enum):
    red = "r"
    green = "g"


@dataclass(frozen=True)
class Staleness:
    policy: str = "drop"
    bound: int = 3


class Tensor:
    pass


def test_a_value_fits() -> None:
    fitting: list[tuple[object, Any]] = [
        (3, int), (3, float), (0.5, float), (True, bool), ("x", str), (None, type(None)),
        (None, int | None), (3, Optional[int]), ("auto", int | Literal["auto"]), (True, Literal["auto", True]),  # noqa: UP045
        ([1, 2], list[int]), ((1, 2), list[int]), ([0.9, 1], tuple[float, float]), ([1, 2, 3], tuple[int, ...]),
        ([], list[int]), ([1, "x"], Sequence[int | str]), ({"a": 1}, dict[str, int]), ({}, dict),
        ("r", Colour), ("g", Colour), ("/x", Path), ("x", Any), (3, T), (3, Callable[[], int]),
        (3, Tensor), (0.1, Union[float, Tensor]), ({"bound": 3}, Staleness), (3, Annotated[int, at_least(1)]),  # noqa: UP007
    ]  # fmt: skip
    assert [(value, hint) for value, hint in fitting if misfit(value, hint) is not None] == []
    handed_over = OmegaConf.create({"map": {"a": 1}, "list": [1, 2], "none": {}})  # as Hydra gives keys of a launcher
    hints = {"map": dict[str, int], "list": list[int], "none": dict[str, Any]}
    assert [name for name, hint in hints.items() if misfit(handed_over[name], hint) is not None] == []


@pytest.mark.parametrize(
    ("value", "hint", "rule"),
    [
        (True, int, "must be a whole number."),
        (1, bool, "must be true or false."),
        ("3", int, "is text: it must be a whole number."),
        ("x", float, "must be a number."),
        ("sqr", Literal["linear", "sqrt"], "must be linear or sqrt. Did you mean sqrt?"),
        (1, Literal["auto"] | bool, "must be auto, true or false."),
        ("blue", Colour, "must be r or g."),
        ("abc", list[int], "must be a list of whole numbers."),
        ([1, "x"], list[int], "must be a list of whole numbers."),
        (3, Staleness, "must be a mapping with the keys policy, bound."),
        ("x", int | Literal["auto"] | None, "must be a whole number, auto or null."),
    ],
)
def test_a_value_does_not_fit_in_these_words(value: object, hint: Any, rule: str) -> None:
    assert misfit(value, hint) == rule


@pytest.mark.parametrize(
    ("key", "argument", "type_", "unit", "default"),
    [
        ("data.path", "data=csv_table", "a path", "none", REQUIRED),
        ("optimizer.lr", "optimizer=sgd", "a number", "a plain number", 0.1),
        ("strategy.staleness.bound", "strategy=parameter_server", "a whole number or null, at least 0", "steps", None),
        ("hardware.memory_gb_s", "hardware=l4", "a number, more than 0", "10^9 bytes/s", 300.0),
        ("precision.value", "precision=bf16", "fp64, fp32, tf32, bf16, bf16_mixed or fp16_mixed", "none", "bf16"),
    ],
)
def test_facts_come_from_annotation_documentation_and_yaml(
    key: str, argument: str, type_: str, unit: str, default: object
) -> None:
    composition = compose(list(dict.fromkeys(["recipe=null", argument])))
    facts = facts_of(composition, tuple(key.split(".")))
    assert (facts.type, facts.unit, facts.default) == (type_, unit, default)


def test_a_class_of_the_users_needs_an_args_section_only(
    write_conf: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "explained_net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        '    """A net.\n\n    Args:\n        size: Outputs of the layer.\n    """\n\n'
        "    def __init__(self, size: int = 3) -> None:\n        super().__init__()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    conf = write_conf({"model/own.yaml": "_target_: explained_net.Net\nsize: 4\n"})
    with allow_packages(["explained_net"]):
        composition = compose(["recipe=null", "model=own"], config_dirs=[conf], packages=["explained_net"])
        facts = facts_of(composition, ("model", "size"))
    assert (facts.type, facts.unit, facts.default) == ("a whole number", "a plain number", 4)
    assert facts.meaning == "Outputs of the layer."


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


RIGHT = (
    "epochs: ${oc.env:EPOCHS,3}\nseed: ???",
    "optimizer: {_target_: mine.Optimizer, anything: [1, 2]}",
    "defaults: [{override /model: mine}, _self_]\nmodel: {_target_: mine.Net, width: 3}",
    "callbacks: {mine: {_target_: mine.Callback, every: 3}, early_stop: {patience: 2}}",
    "optimizers: {head: {match: ['head.*'], lr: 0.1, ratio: 1/5}, rest: {lr: 0.2}}",
    "optimizer: {groups: {none: {match: ['*.bias'], weight_decay: 0}}}",
    "data: {collate: mine.collate, path: somewhere}",
    "strategy: {staleness: {policy: drop, bound: 3}}",
)
WRONG = (
    "epohs: 3",
    "epochs: three",
    "batch: {size: 3}",
    "compile: {mode: fast}",
    "model: {hiden: [3]}",
    "_target_: trainkit.models.Mlp\nwidth: 3",
    "defaults: [{override /model: gpt}]\nmodel: {hidden: [3]}",
    "model: {_target_: trainkit.models.Gpt, hidden: [3]}",
    "callbacks: {early_stop: {patience: 0}}",
    "optimizer: {groups: {none: {weight_dekay: 0}}}",
    "strategy: {staleness: {policy: never}}",
    "name: a/b",
    "defaults: mirrored",
)


@pytest.mark.slow
def test_right_files_are_not_flagged_and_planted_mistakes_are(validator: jsonschema.Draft202012Validator) -> None:
    conf, recipes, template = shipped_conf(), shipped_recipes(), shipped_template()
    files = [*conf.glob("**/*.yaml"), *recipes.glob("*/recipe.yaml"), *template.glob("conf/*/*.yaml")]
    for text in (*RIGHT, *(file.read_text() for file in files)):
        assert [error.message for error in validator.iter_errors(read(text))] == [], text
    assert [text for text in WRONG if validator.is_valid(read(text))] == []


def read(text: str) -> Any:
    """Return a document as OmegaConf reads it, where 1e-3 is a number."""
    return yaml.load(text, _Loader) or {}


def test_a_run_level_key_is_valid_exactly_where_the_check_accepts_it() -> None:
    values: tuple[object, ...] = (None, True, 0, 1, -1, 0.5, "auto", "x", "linear", [], [1], ["a"], {"a": 1})
    for name, hint in hints_of(RunConfig).items():
        schema = schema_of(hint)
        if "$ref" in schema:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for value in values:
            fits = misfit(value, hint) is None
            assert validator.is_valid(value) == fits, (name, value)


def test_it_holds_documentation_default_range_and_tag(validator: jsonschema.Draft202012Validator) -> None:
    batch = validator.schema["$defs"]["BatchConfig"]["properties"]["global_size"]
    assert batch == {
        "type": ["integer", "null", "string"],
        "minimum": 1,
        "pattern": r"\$\{.+\}|^\?\?\?$",
        "patternErrorMessage": "must be a whole number or null, at least 1.",
        "description": "Samples per step, over all replicas. [maths; unit: samples; default: 64]",
        "default": 64,
        "x-tag": "maths",
    }


UNITS = ("_s", "_us", "_steps", "_epochs", "_samples", "_share", "_gib", "_mib", "_mb")


def test_a_key_that_is_named_by_its_unit_declares_it(validator: jsonschema.Draft202012Validator) -> None:
    nodes = validator.schema["$defs"].values()
    keys = [(name, key) for node in nodes for name, key in node.get("properties", {}).items() if name.endswith(UNITS)]
    assert [name for name, key in keys if "; unit: " not in key.get("description", "; unit: ")] == []
    assert len(keys) > 50


def test_the_verb_knows_choices_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule/mine.yaml").write_text("_target_: trainkit.schedules.Cosine\nend: 0.5\n")
    assert main(["schema", "config", "--config-dir", str(tmp_path)]) == 0
    schema = json.loads(capsys.readouterr().out)
    names = schema["$defs"]["defaults"]["items"]["anyOf"][1]["properties"]["override /schedule"]["anyOf"][0]["enum"]
    assert "mine" in names
    assert schema["version"] == 1
