"""A strategy that holds the whole model in each process, however small its shard, is caught here alone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 1000 * 2**20
"""Bytes that a process may have; it has about 300 MiB before there is a model."""

GPT = (
    "recipe=null", "model=gpt", "model.vocab_size=64", "model.context=16", "model.num_layers=24", "model.num_heads=4",
    "model.width=512", "data=synthetic_tokens", "data.vocab_size=64", "data.context=16",
    "objective=language_modelling", "batch.global_size=4", "batch.micro_size=1", "steps=2", "eval.every_epochs=null",
    "checkpoint.background=false", "callbacks=[]", "logger=[]", "hydra.run.dir=run",
)  # fmt: skip
"""76 million parameters: 1.13 GiB with their gradients and the state of AdamW."""


def train(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Train under the limit, which the processes of the run inherit."""
    return subprocess.run(
        [sys.executable, "-m", "trainkit", *GPT, *settings],
        cwd=folder, capture_output=True, text=True, timeout=580, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT)),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_device_says_what_it_needs_and_what_needs_less(cwd: Path) -> None:
    done = train(cwd, "strategy=one_device")
    assert done.returncode == 1
    (head,) = [line for line in done.stderr.splitlines() if "cpu is out of memory. The run needs 1.13 GiB" in line][-1:]
    assert head.endswith("optimizer 577 MiB. To need less, try one of:")
    for way in (
        "strategy=fsdp strategy.replicas=4",
        "activation_checkpointing=full",
        "strategy=pipeline strategy.stages=4",
    ):
        assert f"\n  {way}  " in done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [("fsdp", "replicas"), ("pipeline", "stages")], ids=lambda pair: pair[0])
def test_strategies_that_cut_it_train_it(cwd: Path, settings: tuple[str, str]) -> None:
    strategy, count = settings
    done = train(cwd, f"strategy={strategy}", f"strategy.{count}=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished after 2 steps" in done.stdout
