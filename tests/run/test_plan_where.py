"""A plan shows where tasks run, folded to one screen, also for hosts that are not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.cli import main

SMALL = ("recipe=null", "data=synthetic", "data.num_samples=4096", "model.in_features=64", "batch.global_size=1024")
GPT = (
    "recipe=null", "model=gpt", "objective=language_modelling", "data=synthetic_tokens", "model.vocab_size=64",
    "model.context=32", "model.num_layers=4", "model.num_heads=2", "model.width=16", "batch.global_size=32",
)  # fmt: skip


@pytest.fixture
def row(cwd: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def find(label: str, *arguments: str) -> str:
        assert main(["plan", *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        return next((line[2:].removeprefix(label).strip() for line in lines if line[2:].startswith(f"{label} ")), "")

    return find


def test_many_tasks_are_one_line(row: Callable[..., str]) -> None:
    hosts = ("--hosts", "8", "--gpus-per-host", "8", "strategy=multi_worker_mirrored")
    assert row("tasks", *SMALL, *hosts) == "worker:0 to worker:63 on cuda, 8 on each host"
    one_host = ("--world", "16", "strategy=mirrored")
    assert row("tasks", *SMALL, *one_host) == "worker:0 to worker:15 on cuda:0 to cuda:15"


@pytest.mark.slow
def test_a_pipeline_shows_its_mesh_and_its_bubble(row: Callable[..., str]) -> None:
    stages = ("strategy=pipeline", "strategy.stages=2", "strategy.replicas=2", "batch.micro_size=4")
    assert row("mesh", *GPT, *stages) == "2 replicas x 2 ranks"
    assert row("bubble", *GPT, *stages) == "20.0% of a step, with equal stages"
    assert row("bubble", *SMALL) == ""


def test_flags_about_hosts_that_need_or_exclude_each_other_are_refused(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> list[str]:
        assert main(["plan", *arguments]) == 2
        return [line.strip() for line in capsys.readouterr().err.splitlines()[1:]]

    assert refused("--hosts", "2") == ["--hosts: needs --gpus-per-host, too. (command line)"]
    assert refused("--gpus-per-host", "2") == ["--gpus-per-host: needs --hosts, too. (command line)"]
    both = ("--hosts", "2", "--gpus-per-host", "4")
    assert refused(*both, "--world", "2") == ["--world: plans for one host. Leave it out with --hosts. (command line)"]
    many = ("--hosts", "1000", "--gpus-per-host", "8")
    assert refused(*many) == ["--hosts: makes 8,000 tasks. Give 1,024 or fewer. (command line)"]
