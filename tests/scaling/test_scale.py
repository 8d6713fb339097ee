"""`trainkit scale`: a mistake that starts a measurement of minutes is caught here alone.
Published speed-ups: a model of a step whose intervals no longer hold them is caught here alone.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.scaling.published import PUBLISHED, Published
from tests.support.refusing import Refuse
from trainkit.cli import main
from trainkit.verbs.looking.schema import schema_of


def test_all_mistakes_of_a_command_are_shown_at_once(refuse: Refuse) -> None:
    arguments = ["a", "model=mlp", "--simulate"]
    problems = refuse("scale", *arguments, "--assume", "gbit=0,latancy_us=3,spread,compute_s=nan")
    parts = [
        "--to-replicas: is needed", "scale: takes 0 arguments, and got a.", "model=mlp: ",
        "gbit=0: must be a number above 0", "Did you mean latency_us?", "spread: needs a value", "compute_s=nan: ",
    ]  # fmt: skip
    assert all(part in line for part, line in zip(parts, problems, strict=True)), problems


def test_mistakes_of_a_measurement_are_shown_with_those_of_the_config(refuse: Refuse) -> None:
    arguments = ["strategy=mirrored", "optimizer.lr=-1", "--to-replicas=64", "--assume=compute_s=1"]
    assert [line.partition(": ")[0] for line in refuse("scale", *arguments)] == ["compute_s=1", "optimizer.lr=-1"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["strategy=one_device", "--to-replicas=4"], "OneDevice has one replica"),
        (["strategy=pipeline", "--to-replicas=4"], "Pipeline has one replica"),
        (["batch.micro_size=null", "--to-replicas=64"], "a step has 32 samples, and each replica needs one"),
        (["batch.micro_size=8", "--to-replicas=64"], "a step has 4 shards, and each replica needs one"),
    ],
)
def test_replicas_that_a_training_cannot_have_are_refused(arguments: list[str], rule: str, refuse: Refuse) -> None:
    keys = [] if arguments[0].startswith("strategy") else ["strategy=mirrored", "batch.global_size=32"]
    (problem,) = refuse("scale", *keys, *arguments)
    assert rule in problem


def test_a_prediction_without_measurement_prints_its_inputs_and_its_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--simulate", "--to-replicas", "16", "--assume", "gbit=100,price_h=2"]) == 0
    printed = capsys.readouterr().out
    assert "  gbit         100 Gbit/s  given " in printed
    assert "  spread              0.1  assumed " in printed
    assert "cost of a million samples" in printed
    assert "spares gain nothing: the slowest replica costs less\n" in printed
    assert "write a checkpoint every 7:12:41: checkpoint.every_s=25961\n" in printed


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["scale", "--simulate", "--to-replicas", "16", "--json", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    Draft202012Validator(schema_of("scale")).validate(document)
    return document


def test_json_has_a_version_and_the_same_answers(capsys: pytest.CaptureFixture[str]) -> None:
    document = simulated(capsys)
    assert (document["version"], document["to_replicas"], document["seed"]) == (2, 16, 0)
    assert document["inputs"]["gbit"] == {"value": 10, "unit": "Gbit/s", "origin": "assumed"}
    assert (document["spares"], document["servers_needed"], document["knee"]["middle"]) == (0, 4, 16)


def test_inputs_that_are_given_narrow_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assumption = "--assume=compute_s=0.3,spread=0.1,megabytes=100,gbit=10,latency_us=50,overlap=0.5"
    usual, exact = (simulated(capsys, *arguments)["predictions"][-1]["speedup"] for arguments in ([], [assumption]))
    assert usual["middle"] == pytest.approx(exact["middle"])
    assert usual["high"] > 1.5 * usual["low"]
    assert exact["high"] == pytest.approx(exact["low"])


@pytest.mark.long
def test_a_training_is_measured_fitted_and_drawn(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["strategy=mirrored", "--to-replicas=4", "--steps=10", "--rounds=1", "--assume=price_h=2", "--out=here"]
    assert main(["scale", *arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    Draft202012Validator(schema_of("scale")).validate(document)
    assert document == json.loads((cwd / "here" / "scale.json").read_text())
    assert (cwd / "here" / "scale.png").read_bytes().startswith(b"\x89PNG")
    assert [check["replicas"] for check in document["checks"]] == [2, 4]
    assert [prediction["replicas"] for prediction in document["predictions"]] == [1, 2, 4]
    assert document["predictions"][0]["speedup"]["middle"] == 1.0
    assert all(prediction["cost_per_million"] > 0 for prediction in document["predictions"])


PAGE = Path(__file__).resolve().parents[2] / "docs" / "bench.md"


@pytest.mark.parametrize("result", PUBLISHED, ids=lambda result: f"{result.name} {result.replicas}")
def test_a_published_speedup_lies_in_the_predicted_interval_which_the_page_shows(result: Published) -> None:
    speedup = result.predicted()
    assert all(speedup.contains(value) for value in result.speedup)
    assert speedup.high < 2 * speedup.low  # an interval that holds everything says nothing
    published = " to ".join(f"{value:.3g}" for value in dict.fromkeys(result.speedup))
    predicted = f"{speedup.low:.3g} to {speedup.high:.3g}"
    assert f"| {result.name} | {result.replicas} | {published} | {predicted} | {result.source} |" in PAGE.read_text()
