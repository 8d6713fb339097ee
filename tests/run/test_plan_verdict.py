"""A plan says whether the run fits into the memory of its hardware, and what makes it fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit import api
from trainkit.cli import main
from trainkit.run.estimates.hardware import hardware_of
from trainkit.run.estimates.memory import device_memory
from trainkit.run.estimates.verdict import verdict_of
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.plan import make_plan

GPT = (
    "recipe=python_source", "model.width=64", "model.num_layers=3", "model.context=64", "data.context=64",
    "data.max_bytes=20000", "hardware=laptop", "objective.cross_entropy=plain",
)  # fmt: skip
"""Some 20 MiB of tensors on top of a process; `hardware.memory_gib` decides whether that fits."""


@pytest.fixture
def planned(cwd: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def plan(*arguments: str, code: int = 0) -> dict[str, Any]:
        assert main(["plan", "--json", *arguments]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return plan


@pytest.mark.slow
def test_what_does_not_fit_ends_with_exit_code_2_where_that_is_asked(
    planned: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    large = ("model.hidden=[60000,60000]", "hardware=laptop")
    assert main(["plan", *large, "--fail-if-too-big"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "  fits             no: needs 94.3 GiB, laptop with eight cores has 16 GiB" in lines
    assert planned(*large)["fits"] is False
    assert planned("hardware=laptop", "--fail-if-too-big")["fits"] is True


def test_without_hardware_nothing_is_judged(
    planned: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned("recipe=digits")["fits"] is None
    assert main(["plan", "--fail-if-too-big"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        (
            "  --fail-if-too-big: needs the memory of a device. Name the hardware: hardware=this, hardware=h100_sxm. "
            "(command line)"
        )
    ]


@pytest.mark.slow
def test_every_remedy_makes_the_run_fit(planned: Callable[..., dict[str, Any]]) -> None:
    small = (*GPT, "hardware.memory_gib=0.33")
    found = planned(*small)
    assert found["fits"] is False
    changes = [one["overrides"] for one in found["remedies"]]
    assert changes[:2] == ["batch.micro_size=8", "activation_checkpointing=full"]
    for one in found["remedies"]:
        other = planned(*small, *one["overrides"].split())
        assert other["fits"] is True
        assert max(other["memory"]["peak"], other["memory"]["checkpoint"]) + 320 * 2**20 == one["needs"]


@pytest.mark.slow
def test_an_evaluation_that_alone_does_not_fit_gets_smaller_batches(planned: Callable[..., dict[str, Any]]) -> None:
    small = (*GPT, "batch.global_size=2", "eval.batch_size=16", "hardware.memory_gib=0.3186")
    found = planned(*small)
    assert (found["fits"], found["memory"]["moment"]) == (False, "evaluation")
    (only,) = found["remedies"]
    assert (only["overrides"], only["fits"]) == ("eval.batch_size=8", True)


@pytest.mark.slow
def test_changes_are_joined_where_none_is_enough_alone(planned: Callable[..., dict[str, Any]]) -> None:
    tight = (*GPT, "hardware.memory_gib=0.3158")
    (first, *_) = planned(*tight)["remedies"]
    assert (
        first["overrides"]
        == "batch.micro_size=1 checkpoint.background=false activation_checkpointing=full eval.batch_size=8"
    )
    assert planned(*tight, *first["overrides"].split())["fits"] is True


@pytest.mark.slow
def test_the_copy_of_a_checkpoint_counts_on_the_cpu(planned: Callable[..., dict[str, Any]]) -> None:
    wide = ("recipe=digits", "model.hidden=[4000,4000]", "hardware=laptop", "hardware.memory_gib=0.6")
    found, without = planned(*wide), planned(*wide, "checkpoint.background=false")
    assert found["memory"]["staging"] == 3 * found["memory"]["parameters"] + 24, "Adam's slots, and six counts of steps"
    assert found["memory"]["peak"] - without["memory"]["peak"] == found["memory"]["staging"]
    assert (found["fits"], without["fits"]) == (False, True)
    assert found["remedies"][0]["overrides"] == "checkpoint.background=false"


@pytest.mark.parametrize(("strategy", "copies"), [("mirrored", 1), ("fsdp", 2)])
def test_tasks_that_hold_the_whole_state_have_one_copy_of_it_together(strategy: str, copies: int) -> None:
    def needs(on: str) -> tuple[int, int]:
        own = ("recipe=digits", f"strategy={strategy}", "strategy.replicas=2", "hardware=laptop")
        plan = make_plan(api.compose([*own, f"checkpoint.background={on}"]).cfg)
        model, hardware = meta_model(plan), hardware_of(plan.cfg)
        assert hardware is not None
        memory = device_memory(plan.resolved(lambda: model), model)
        return verdict_of(plan, memory, hardware).needs, memory.held.staging_bytes

    (with_copy, staged), (without, none) = needs("true"), needs("false")
    assert none == 0 < staged
    assert with_copy - without == copies * staged


@pytest.mark.slow
def test_tasks_of_a_host_share_its_memory(planned: Callable[..., dict[str, Any]]) -> None:
    two = ("strategy=mirrored", "strategy.replicas=2", "hardware=laptop", "hardware.memory_gib=0.5")
    assert planned("hardware=laptop", "hardware.memory_gib=0.5")["fits"] is True
    assert planned(*two)["fits"] is False
