"""A plan says whether the run fits into the memory of its hardware, and what makes it fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli import main

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


def test_what_does_not_fit_ends_with_exit_code_2_where_that_is_asked(
    planned: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    large = ("model.hidden=[60000,60000]", "hardware=laptop")
    assert main(["plan", *large, "--fail-if-too-big"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "  fits             no: needs 80.9 GiB, laptop with eight cores has 16 GiB" in lines
    assert planned(*large)["fits"] is False
    assert planned("hardware=laptop", "--fail-if-too-big")["fits"] is True


def test_without_hardware_nothing_is_judged(
    planned: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned("recipe=digits")["fits"] is None
    assert main(["plan", "--fail-if-too-big"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        (
            "  --fail-if-too-big: has nothing to compare with. Name the hardware: hardware=this, hardware=h100_sxm. "
            "(command line)"
        )
    ]


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


def test_changes_are_joined_where_none_is_enough_alone(planned: Callable[..., dict[str, Any]]) -> None:
    tight = (*GPT, "hardware.memory_gib=0.3158")
    (first, *_) = planned(*tight)["remedies"]
    assert first["overrides"] == "batch.micro_size=1 checkpoint.background=false activation_checkpointing=full"
    assert planned(*tight, *first["overrides"].split())["fits"] is True


def test_the_copy_of_a_checkpoint_counts_on_the_cpu(planned: Callable[..., dict[str, Any]]) -> None:
    wide = ("recipe=digits", "model.hidden=[4000,4000]", "hardware=laptop", "hardware.memory_gib=0.6")
    found = planned(*wide)
    assert found["memory"]["peak"] < found["memory"]["checkpoint"]
    assert found["fits"] is False
    assert found["remedies"][0]["overrides"] == "checkpoint.background=false"
    assert planned(*wide, "checkpoint.background=false")["fits"] is True


def test_tasks_of_a_host_share_its_memory(planned: Callable[..., dict[str, Any]]) -> None:
    two = ("strategy=mirrored", "strategy.replicas=2", "hardware=laptop", "hardware.memory_gib=0.5")
    assert planned("hardware=laptop", "hardware.memory_gib=0.5")["fits"] is True
    assert planned(*two)["fits"] is False
