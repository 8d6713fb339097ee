"""`trainkit advise`: a printed command that does not plan, or advice that the model refuses, is caught here alone."""

from __future__ import annotations

import json
import shlex
from typing import Any

import jsonschema
import pytest

from tests.support.refusing import Refuse
from trainkit.advising import advice as planner
from trainkit.cli import main
from trainkit.run.planning.plan import RunPlan
from trainkit.verbs.looking.schema import schema_of


def advice(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["advise", *arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("advise")).validate(document)
    return document


@pytest.mark.slow
def test_a_small_model_needs_one_device_and_the_printed_command_plans(capsys: pytest.CaptureFixture[str]) -> None:
    document = advice(capsys, "--devices", "2", "--hardware", "h100_sxm", "precision=fp32")
    assert document["best"]["overrides"] == ["strategy=one_device"]
    assert document["best"]["reason"] == "the shortest step"
    assert [row["overrides"] for row in document["ways"] if row["reason"].startswith("not known")] == []
    command = shlex.split(document["best"]["command"])
    assert command[:2] == ["trainkit", "plan"]
    assert main(command[1:]) == 0
    assert "yes: needs" in capsys.readouterr().out


@pytest.mark.slow
def test_a_way_that_the_model_refuses_is_no_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[RunPlan] = []
    monkeypatch.setattr(planner, "refuse_misfits", lambda plan, _: trials.append(plan))
    layer = "model={_target_: torch.nn.Linear, in_features: 64, out_features: 10}"
    keys = (layer, "data=synthetic", "recipe=null", "steps=2")
    document = advice(capsys, *keys, "--devices", "2", "--hardware", "h100_sxm")
    reasons = {row["overrides"][0]: row["reason"] for row in document["ways"]}
    assert reasons["strategy=tensor_parallel"].startswith("refused: strategy.plan=auto: Linear has no plan.")
    assert [plan.components.precision.value for plan in trials] == ["fp32", "bf16_mixed"]  # once for several ways


def test_what_the_user_sets_stays(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("strategy=mirrored", "strategy.replicas=2", "precision=bf16_mixed")
    document = advice(capsys, *chosen, "--devices", "2", "--hardware", "l4")
    assert [row["overrides"] for row in document["ways"]] == [[]]
    assert document["best"]["devices"] == 2


def test_a_config_that_is_wrong_under_every_way_is_refused_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "model.hidden=[-1]", "--devices", "1", "--hardware", "l4"]) == 2
    assert capsys.readouterr().err.startswith("1 problem in the config\n  model.hidden")


def test_all_mistakes_of_a_command_are_shown_at_once(refuse: Refuse) -> None:
    keys = [problem.partition(": ")[0] for problem in refuse("advise", "--devices", "0", "--for", "speed")]
    assert keys == ["--devices=0", "--for=speed"]
    (twice,) = refuse("advise", "--hardware", "l4", "hardware=h200")
    assert twice.startswith("hardware=h200: is given together with --hardware.")
    assert "Name it: --hardware this" in refuse("advise", "hardware=none")[0]


# Models of 4 layers of a real width and few words, on devices with so much less memory: a plan is quick.
IMAGES = "recipe=resnet50_imagenet model.depth=18 precision=bf16_mixed --num-samples=1281167"
TEXT = (
    "recipe=null model=gpt data=synthetic_tokens objective=language_modelling optimizer=adamw model.vocab_size=8000 "
    "data.vocab_size=8000 model.context=1024 data.context=1024 data.num_samples=1280 model.num_layers=4"
)
HALF = f"{TEXT} model.width=4096 model.num_heads=32 batch.global_size=64 precision=bf16_mixed"
"""Half of the ways to plan."""
SINGLE = (
    f"{TEXT.removesuffix(' model.num_layers=4')} model.num_layers=2 model.width=4096 model.num_heads=32 "
    "batch.global_size=1 precision=bf16_mixed"
)
HOST = "--devices=8 --hardware=h100_sxm"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("training", "devices", "strategy", "count"), [
    pytest.param("recipe=digits", "--devices=2 --hardware=laptop", "one_device", 1, id="cores that replicas share"),
    pytest.param(IMAGES, HOST, "mirrored", 8, id="images on a strong host"),
    pytest.param(
        f"{HALF} hardware=h100_sxm hardware.memory_gib=12", "--devices=8", "fsdp", 8, id="state that no device holds",
    ),
    pytest.param(SINGLE, "--devices=4 --hardware=h100_sxm", "tensor_parallel", 4, id="one sample a step"),
])  # fmt: skip
def test_a_situation_leads_to_its_step_of_the_ladder_of_the_docs(
    training: str, devices: str, strategy: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    best = advice(capsys, *shlex.split(f"{training} {devices}"))["best"]
    assert (best["overrides"][0], best["devices"]) == (f"strategy={strategy}", count)
    assert best["reason"].startswith(("the shortest step", "the fewest device seconds", "the least memory"))
    assert main(shlex.split(best["command"])[1:]) == 0
    assert "yes: needs" in capsys.readouterr().out
