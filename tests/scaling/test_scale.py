"""`trainkit scale`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from trainkit.cli import main
from trainkit.verbs.looking.schema import schema_of


def test_all_mistakes_of_a_command_are_shown_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["a", "--to-replicas", "0", "model=mlp", "--simulate", "--seed", "-1"]
    assert main(["scale", *arguments, "--assume", "gbit=0,latancy_us=3,spread,bread=1,compute_s=nan,gbit=2"]) == 2
    assert capsys.readouterr().err == (
        "9 problems in the config\n"
        "  --to-replicas=0: must be a whole number, 1 to 10,000: the largest number of replicas. (command line)\n"
        "  --seed=-1: must be a whole number, 0 to 4,294,967,295: seed of the simulation and of the intervals; 0 "
        "without it. (command line)\n"
        "  a: is not an argument of scale. Set a key by key=value. (command line)\n"
        "  model=mlp: has no meaning with --simulate, which trains nothing: --assume NAME=VALUE,... sets its inputs. "
        "(command line)\n"
        "  gbit=0: must be a number above 0 Gbit/s: the link of a replica, in each direction. (--assume)\n"
        "  latancy_us=3: is not an input here. Did you mean latency_us? (--assume)\n"
        "  spread: needs a value: spread=NUMBER. (--assume)\n"
        "  bread=1: is not an input here. Did you mean spread? (--assume)\n"
        "  compute_s=nan: must be a number above 0 s: a replica's forward and backward pass of a step. (--assume)\n"
    )


@pytest.mark.parametrize("text", ["many", "10001", "1.5", ""])
def test_a_target_is_a_whole_number_within_the_limit(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--simulate", *([f"--to-replicas={text}"] if text else [])]) == 2
    shown = f"={text}" if text else ""
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"  --to-replicas{shown}: must be a whole number, 1 to 10,000: the largest number of replicas. (command line)"
    ]


@pytest.mark.slow
def test_a_simulation_prints_its_inputs_and_its_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--simulate", "--to-replicas", "16", "--assume", "gbit=100,price_h=2"]) == 0
    printed = capsys.readouterr().out
    assert "  gbit         100 Gbit/s  given    the link of a replica, in each direction\n" in printed
    assert (
        "  spread       0.1         assumed  standard deviation of these times by their mean (lognormal)\n" in printed
    )
    assert "cost of a million samples" in printed
    assert "  spares gain nothing: the slowest replica costs less than a spare\n" in printed
    assert "  write one every 7:12:41: checkpoint.every_s=25961\n" in printed


@pytest.mark.slow
def test_json_has_a_version_and_the_same_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--simulate", "--to-replicas", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["to_replicas"], found["seed"]) == (1, 16, 0)
    assert found["inputs"]["gbit"] == {"value": 10, "unit": "Gbit/s", "origin": "assumed"}
    assert found["simulation"]["best_spares"] == 0
    assert found["simulation"]["servers_needed"] == 4
    Draft202012Validator(schema_of("scale_simulate")).validate(found)


def test_mistakes_of_a_measurement_are_shown_with_those_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["strategy=mirrored", "optimizer.lr=-1", "--to-replicas=x", "--rounds=0", "--assume=compute_s=1"]
    assert main(["scale", *arguments]) == 2
    assert capsys.readouterr().err == (
        "4 problems in the config\n"
        "  --to-replicas=x: must be a whole number, 1 to 10,000: the largest number of replicas. (command line)\n"
        "  --rounds=0: must be a whole number, 1 to 1,000: turns of each measurement; 2 without it. (command line)\n"
        "  compute_s=1: is not an input here. There are: per_host, gbit, latency_us, price_h. (--assume)\n"
        "  optimizer.lr=-1: must not be negative. (command line)\n"
    )


@pytest.mark.parametrize(("strategy", "named"), [("one_device", "OneDevice"), ("pipeline", "Pipeline")])
def test_a_strategy_without_other_numbers_of_replicas_is_refused(
    strategy: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", f"strategy={strategy}", "--to-replicas=4"]) == 2
    assert capsys.readouterr().err == (
        "1 problem in the config\n"
        f"  strategy: {named} has one replica, or an exchange that scale has no figures for. Use mirrored, "
        f"multi_worker_mirrored, fsdp or parameter_server; --simulate needs none of them. "
        f"(conf/strategy/{strategy}.yaml:2)\n"
    )


@pytest.mark.parametrize(
    ("cut", "has", "way"),
    [("batch.micro_size=null", "32 samples", ""), ("batch.micro_size=8", "4 shards", " a smaller batch.micro_size,")],
)
def test_more_replicas_than_a_step_has_work_for_are_refused(
    cut: str, has: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "strategy=mirrored", "batch.global_size=32", cut, "--to-replicas=64"]) == 2
    assert capsys.readouterr().err == (
        f"1 problem in the config\n  --to-replicas=64: a step has {has}, and each replica needs one. "
        f"Give a larger batch.global_size,{way} or fewer replicas. (command line)\n"
    )


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
