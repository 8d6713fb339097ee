"""A schema for editors that flags a right file, or accepts what the checks of a run refuse, is caught here alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainkit.cli import main
from trainkit.config.described.json_types import Definitions
from trainkit.config.described.run_schema import config_schema
from trainkit.config.schema import RunConfig, hints_of
from trainkit.config.values import misfit
from trainkit.config.yaml_files import _Loader, shipped_conf, shipped_recipes, shipped_template
from trainkit.fields import limits_in


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
        definitions = Definitions()
        schema = definitions.of(hint)
        if "$ref" in schema:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for value in values:
            fits = misfit(value, hint) is None and not any(limit.broken_by(value) for limit in limits_in(hint))
            assert validator.is_valid(value) == fits, (name, value)


def test_it_holds_documentation_default_range_and_tag(validator: jsonschema.Draft202012Validator) -> None:
    batch = validator.schema["$defs"]["trainkit.config.sections.BatchConfig"]["properties"]["global_size"]
    assert batch == {
        "type": ["integer", "null", "string"],
        "minimum": 1,
        "pattern": r"\$\{.+\}|^\?\?\?$",
        "patternErrorMessage": "must be a whole number or null, at least 1.",
        "description": "Samples per step, over all replicas. [maths; unit: samples; default: 64]",
        "default": 64,
        "x-tag": "maths",
    }


def test_the_verb_knows_choices_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule/mine.yaml").write_text("_target_: trainkit.schedules.Cosine\nend: 0.5\n")
    assert main(["schema", "config", "--config-dir", str(tmp_path)]) == 0
    schema = json.loads(capsys.readouterr().out)
    names = schema["$defs"]["defaults"]["items"]["anyOf"][1]["properties"]["override /schedule"]["anyOf"][0]["enum"]
    assert "mine" in names
    assert schema["version"] == 1
