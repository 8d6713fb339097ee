"""A sharded checkpoint that is not what its ranks wrote, or that a killed rank spoils, is caught here alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.contract.running import run, weights
from tests.support.verdicts import plain
from trainkit.trainer.checkpoint.loading import load
from trainkit.trainer.checkpoint.tensor_file import weights_sha256

POINTS = ("model=net", "model.width=8", "data=points", "batch.global_size=16", "batch.micro_size=4", "optimizer=adamw",
          "optimizer.lr=0.05", "steps=9", "checkpoint.every_steps=2")  # fmt: skip
FSDP = ("strategy=fsdp", "strategy.replicas=4")


@pytest.mark.long
def test_a_sharded_run_keeps_the_hash_best_and_last_of_what_its_ranks_wrote(tmp_path: Path) -> None:
    watched = ("eval.every_steps=3", "eval.batch_size=4")  # 11 samples: a rank of four has no batch of its own
    result = run(tmp_path / "run", *POINTS, *FSDP, *watched, "checkpoint.keep_last=1")
    last = load(Path(result["last"]))
    assert result["status"] == "finished"
    assert result["metrics"] == pytest.approx(run(tmp_path / "one", *POINTS, *watched)["metrics"], rel=1e-12)
    assert result["weights_sha256"] == weights_sha256(last.tensors)
    assert len([name for name in last.checkpoint.files if name.startswith("rank_")]) == 4
    names = json.loads((tmp_path / "run/checkpoints/index.json").read_text())
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == sorted(
        {"index.json", names["last"], names["best"]}
    )


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_saves_costs_that_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path / "whole", *POINTS)
    monkeypatch.setenv("TRAINKIT_FAIL", "rank=1,step=4,phase=save,action=kill,attempt=0")
    saved = "checkpoint.background=false"  # or the save before may be under way as well
    result = run(tmp_path / "run", *POINTS, "strategy=fsdp", "strategy.replicas=2", saved)
    assert (result["status"], result["steps"]) == ("finished", 9)
    said = "rank 1 was ended by SIGKILL in step 4 (save)."
    assert said in (text := plain(capfd.readouterr().err))
    assert "Restarting from the checkpoint of step 3" in text  # the first epoch's, being the best
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(result)[name], tensor, rtol=1e-12, atol=1e-14)
