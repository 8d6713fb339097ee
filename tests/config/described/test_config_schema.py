"""`trainkit schema config`: it accepts every file that is right, and flags what the checks of a run refuse."""

from __future__ import annotations

import json
import textwrap
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
from trainkit.config.yaml_files import shipped_conf, shipped_recipes, shipped_template
from trainkit.fields import limits_in

SHIPPED = [
    *sorted(shipped_conf().glob("**/*.yaml")),
    *sorted(shipped_recipes().glob("*/recipe.yaml")),
    *sorted(shipped_template().glob("conf/*/*.yaml")),
]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def read(text: str) -> Any:
    """Return a document as OmegaConf reads it, where 1e-3 is a number."""
    from trainkit.config.yaml_files import _Loader

    return yaml.load(text, _Loader) or {}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_no_shipped_file_is_flagged(validator: jsonschema.Draft202012Validator, file: Path) -> None:
    assert [error.message for error in validator.iter_errors(read(file.read_text()))] == []


@pytest.mark.parametrize(
    "text",
    [
        "epochs: ${oc.env:EPOCHS,3}\nseed: ???",
        "optimizer: {_target_: mine.Optimizer, anything: [1, 2]}",
        "defaults: [{override /model: mine}, _self_]\nmodel: {_target_: mine.Net, width: 3}",
        "_target_: mine.Net\nwidth: 3",
        "callbacks: {mine: {_target_: mine.Callback, every: 3}, early_stop: {patience: 2}}",
        "optimizers: {head: {match: ['head.*'], lr: 0.1, ratio: 1/5}, rest: {lr: 0.2}}",
        "optimizer: {groups: {none: {match: ['*.bias'], weight_decay: 0}}}",
        "data: {collate: mine.collate, path: somewhere}",
        "strategy: {staleness: {policy: drop, bound: 3}}",
        "hydra: {run: {dir: x}}",
    ],
)
def test_files_of_users_are_not_flagged(validator: jsonschema.Draft202012Validator, text: str) -> None:
    assert [error.message for error in validator.iter_errors(read(text))] == []


@pytest.mark.parametrize(
    "text",
    [
        "epohs: 3",
        "epochs: three",
        "epochs: 0",
        "seed: 1.5",
        "batch: {global_size: -1}",
        "batch: {size: 3}",
        "compile: {mode: fast}",
        "quiet: 1",
        "model: {hiden: [3]}",
        "model: {hidden: 3}",
        "_target_: trainkit.models.mlp.Mlp\nwidth: 3",
        "_target_: torch.optim.SGD\nlr: fast",
        "defaults: [{override /model: gpt}]\nmodel: {hidden: [3]}",
        "model: {_target_: trainkit.models.gpt.Gpt, hidden: [3]}",
        "callbacks: {early_stop: {patience: 0}}",
        "optimizer: {groups: {none: {weight_dekay: 0}}}",
        "strategy: {staleness: {policy: never}}",
        "lr_scaling: [1]",
        "name: a/b",
        "defaults: mirrored",
    ],
)
def test_planted_mistakes_are_flagged(validator: jsonschema.Draft202012Validator, text: str) -> None:
    assert not validator.is_valid(read(text))


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
    (tmp_path / "schedule/mine.yaml").write_text("_target_: trainkit.numerics.schedules.Cosine\nend: 0.5\n")
    assert main(["schema", "config", "--config-dir", str(tmp_path)]) == 0
    schema = json.loads(capsys.readouterr().out)
    names = schema["$defs"]["defaults"]["items"]["anyOf"][1]["properties"]["override /schedule"]["anyOf"][0]["enum"]
    assert "mine" in names
    assert schema["version"] == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["schema", "confg"], "confg: no such schema. Did you mean config? (command line)"),
        (["schema", "config", "seed=1"], "schema: takes no key=value. (command line)"),
        (
            ["schema", "a", "b"],
            "schema: takes 1 argument, and got a, b. Set a key by key=value. (command line)",
        ),
    ],
)
def test_misuse_is_refused(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == textwrap.dedent(f"""\
        1 problem in the config
          {problem}
        """)
