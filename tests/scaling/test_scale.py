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
    found = refuse("scale", *arguments, "--assume", "gbit=0,latancy_us=3,spread,compute_s=nan")
    words = [
        "--to-replicas: is needed", "scale: takes 0 arguments, and got a.", "model=mlp: ",
        "gbit=0: must be a number above 0", "Did you mean latency_us?", "spread: needs a value", "compute_s=nan: ",
    ]  # fmt: skip
    assert all(word in line for word, line in zip(words, found, strict=True)), found


def test_mistakes_of_a_measurement_are_shown_with_those_of_the_config(refuse: Refuse) -> None:
    arguments = ["strategy=mirrored", "optimizer.lr=-1", "--to-replicas=64", "--assume=compute_s=1"]
    keys = [line.partition(": ")[0] for line in refuse("scale", *arguments)]
    assert keys == ["compute_s=1", "optimizer.lr=-1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["strategy=one_device", "--to-replicas=4"], "OneDevice has one replica"),
        (["strategy=pipeline", "--to-replicas=4"], "Pipeline has one replica"),
        (["batch.micro_size=null", "--to-replicas=64"], "a step has 32 samples, and each replica needs one"),
        (["batch.micro_size=8", "--to-replicas=64"], "a step has 4 shards, and each replica needs one"),
    ],
)
def test_replicas_that_a_training_cannot_have_are_refused(arguments: list[str], words: str, refuse: Refuse) -> None:
    keys = [] if arguments[0].startswith("strategy") else ["strategy=mirrored", "batch.global_size=32"]
    (found,) = refuse("scale", *keys, *arguments)
    assert words in found


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
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    Draft202012Validator(schema_of("scale")).validate(found)
    return found


def test_json_has_a_version_and_the_same_answers(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys)
    assert (found["version"], found["to_replicas"], found["seed"]) == (2, 16, 0)
    assert found["inputs"]["gbit"] == {"value": 10, "unit": "Gbit/s", "origin": "assumed"}
    assert (found["spares"], found["servers_needed"], found["knee"]["middle"]) == (0, 4, 16)


def test_inputs_that_are_given_narrow_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--assume=compute_s=0.3,spread=0.1,megabytes=100,gbit=10,latency_us=50,overlap=0.5"
    usual, exact = (simulated(capsys, *one)["predictions"][-1]["speedup"] for one in ([], [given]))
    assert usual["middle"] == pytest.approx(exact["middle"])
    assert usual["high"] > 1.5 * usual["low"]
    assert exact["high"] == pytest.approx(exact["low"])


@pytest.mark.long
def test_a_training_is_measured_fitted_and_drawn(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["strategy=mirrored", "--to-replicas=4", "--steps=10", "--rounds=1", "--assume=price_h=2", "--out=here"]
    assert main(["scale", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    Draft202012Validator(schema_of("scale")).validate(found)
    assert found == json.loads((cwd / "here" / "scale.json").read_text())
    assert (cwd / "here" / "scale.png").read_bytes().startswith(b"\x89PNG")
    assert [check["replicas"] for check in found["checks"]] == [2, 4]
    assert [one["replicas"] for one in found["predictions"]] == [1, 2, 4]
    assert found["predictions"][0]["speedup"]["middle"] == 1.0
    assert all(one["cost_per_million"] > 0 for one in found["predictions"])


PAGE = Path(__file__).resolve().parents[2] / "docs" / "bench.md"


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: f"{one.name} {one.replicas}")
def test_a_published_speedup_lies_in_the_predicted_interval_which_the_page_shows(one: Published) -> None:
    found = one.predicted()
    assert all(found.contains(value) for value in one.speedup)
    assert found.high < 2 * found.low  # an interval that holds everything says nothing
    published = " to ".join(f"{value:.3g}" for value in dict.fromkeys(one.speedup))
    row = f"| {one.name} | {one.replicas} | {published} | {found.low:.3g} to {found.high:.3g} | {one.source} |"
    assert row in PAGE.read_text()
