"""A remedy that does not make the run fit, or a memory counted by task instead of by host, is caught here alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.present import present
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
def test_what_does_not_fit_exits_with_2(
    planned: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    large = ("model.hidden=[60000,60000]", "hardware=laptop")
    assert main(["plan", *large, "--fail-if-too-big"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "  fits             no: needs 94.3 GiB, laptop with eight cores has 16 GiB" in lines
    assert planned(*large)["fits"] is False
    assert planned("hardware=laptop", "--fail-if-too-big")["fits"] is True


def test_no_hardware_no_verdict(planned: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("recipe=digits")["fits"] is None
    assert main(["plan", "--fail-if-too-big"]) == 2
    assert "--fail-if-too-big: needs the memory of a device" in capsys.readouterr().err


@pytest.mark.slow
def test_every_remedy_makes_the_run_fit(planned: Callable[..., dict[str, Any]]) -> None:
    tight = (*GPT, "hardware.memory_gib=0.3158")
    (first, *_) = planned(*tight)["remedies"]
    keys = [change.partition("=")[0] for change in first["overrides"].split()]  # joined where none is enough alone
    assert keys == ["batch.micro_size", "checkpoint.background", "activation_checkpointing", "eval.batch_size"]
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
        model, hardware = meta_model(plan), present(hardware_of(plan.cfg))
        memory = device_memory(plan.resolved(lambda: model), model)
        return verdict_of(plan, memory, hardware).needs, memory.held.staging_bytes

    (with_copy, staged), (without, none) = needs("true"), needs("false")
    assert none == 0 < staged
    assert with_copy - without == copies * staged


@pytest.mark.parametrize(("replicas", "fits"), [(1, True), (2, False)])
def test_tasks_of_a_host_share_its_memory(replicas: int, fits: bool) -> None:
    own = ("strategy=mirrored", f"strategy.replicas={replicas}", "hardware=laptop", "hardware.memory_gib=0.5")
    plan = make_plan(api.compose(["recipe=digits", *own]).cfg)
    model = meta_model(plan)
    memory = device_memory(plan.resolved(lambda: model), model)
    assert verdict_of(plan, memory, present(hardware_of(plan.cfg))).fits is fits


@pytest.mark.parametrize(
    ("flags", "tasks"),
    [
        (["--hosts", "8", "--gpus-per-host", "8", "strategy=multi_worker_mirrored"],
         "worker:0 to worker:63 on cuda, 8 on each host"),
        (["--world", "16", "strategy=mirrored"], "worker:0 to worker:15 on cuda:0 to cuda:15"),
        (["--world", "4", "strategy=pipeline", "strategy.stages=2", "strategy.replicas=2", "model.hidden=[8,8,8]",
          "batch.micro_size=64"], "2 replicas of 2 each"),
    ],
)  # fmt: skip
def test_many_tasks_are_one_line(flags: list[str], tasks: str, cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("recipe=null", "data=synthetic", "data.num_samples=4096", "model.in_features=64", "batch.global_size=1024")
    assert main(["plan", *small, *flags]) == 0
    shown = capsys.readouterr().out
    assert tasks in shown
    assert ("\n  bubble " in shown) == ("strategy=pipeline" in flags)


def test_flags_that_exclude_each_other_are_refused(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, key in (
        ("--hosts 2", "--hosts: needs --gpus-per-host"),
        ("--gpus-per-host 2", "--gpus-per-host: needs --hosts"),
        ("--hosts 2 --gpus-per-host 4 --world 2", "--world: plans for one host"),
        ("--hosts 1000 --gpus-per-host 8", "--hosts: makes 8,000 tasks"),
    ):
        assert main(["plan", *flags.split()]) == 2
        assert f"  {key}" in capsys.readouterr().err
