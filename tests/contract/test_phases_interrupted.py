"""Phases of a step where a loss is not finite, where a replica is lost, and where the model is compiled.

A skipped, rolled back or lost phase that also takes back the update of the one before it is caught here alone.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

from tests.contract.running import run, weights
from tests.support import quick
from trainkit.fields import placement
from trainkit.objectives.adversarial import Adversarial
from trainkit.objectives.base import Loss, Model
from trainkit.trainer.checkpoint.tensors import load

GAN = ("recipe=gan", "epochs=null", "steps=5", "eval.every_epochs=null")
TWO = ("strategy=mirrored", "strategy.replicas=2")
CALLS = {"one_device": 4, "mirrored": 3}
"""Losses of a phase in a process before step 2, which has two shards; ranks compute one to agree on a layout."""


@dataclass(frozen=True, kw_only=True)
class Interrupted(Adversarial):
    """An adversarial objective with one loss that is not a number."""

    bad_phase: Annotated[str, placement] = ""
    """The phase of this loss."""
    bad_call: Annotated[int, placement] = 0
    """How often the phase has computed a loss before."""
    _calls: Any = field(default_factory=count, init=False, repr=False, compare=False)

    def phase_loss(self, phase: str, model: Model, batch: Any) -> Loss:
        loss = super().phase_loss(phase, model, batch)
        if phase == self.bad_phase and next(self._calls) == self.bad_call:
            return replace(loss, loss_sum=loss.loss_sum * torch.nan)
        return loss


def interrupted(phase: str, place: str, *more: str) -> tuple[str, ...]:
    """The settings of a training whose loss of one phase is once not a number, in step 2."""
    name = f"{Interrupted.__module__}.{Interrupted.__qualname__}"
    keys = f"{{_target_: {name}, latent: 16, bad_phase: {phase!r}, bad_call: {CALLS[place]}}}"
    return (*GAN, f"objective={keys}", *more, *(TWO if place == "mirrored" else ()))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["one_device", "mirrored"])
@pytest.mark.parametrize(("phase", "updates"), [("discriminator", (4, 4)), ("generator", (5, 4))])
def test_a_skipped_step_ends_at_its_phase_and_keeps_the_updates_before(
    phase: str, updates: tuple[int, int], place: str, tmp_path: Path
) -> None:
    result = run(tmp_path / "run", *interrupted(phase, place, "numerics.on_nonfinite=skip"))
    assert [one["step"] for one in result["skipped_steps"]] == [2]
    tensors = load(Path(result["last"])).tensors
    found = tuple(
        {float(tensor) for key, tensor in tensors.items() if key.startswith(f"optimizer/step/{name}")}
        for name in ("discriminator", "generator")
    )
    assert found == ({float(updates[0])}, {float(updates[1])})


@pytest.mark.parametrize("place", ["one_device", "mirrored"])
@pytest.mark.slow
def test_a_rollback_takes_every_phase_back(place: str, tmp_path: Path) -> None:
    rollback = ("numerics.on_nonfinite=rollback", "checkpoint.every_steps=1")
    healed = run(tmp_path / "healed", *interrupted("generator", place, *rollback))
    undisturbed = run(tmp_path / "undisturbed", *interrupted("none", place, *rollback))
    assert healed["rollbacks"] == [{"step": 2, "checkpoint": 2}]
    assert healed["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_a_compiled_model_trains_its_phases_as_it_does_eagerly(tmp_path: Path) -> None:
    eager = weights(run(tmp_path / "eager", *GAN))
    compiled = weights(run(tmp_path / "compiled", *GAN, "compile.mode=default", "compile.backend=aot_eager"))
    assert eager.keys() == compiled.keys()
    for name, tensor in eager.items():
        assert torch.allclose(compiled[name], tensor, rtol=1e-12, atol=1e-12), name


@pytest.mark.long
def test_a_replica_is_lost_between_phases_and_no_bit_differs(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = [*GAN[:2], "steps=60", GAN[3], "callbacks=[]", "logger=[]", "numerics.reproducible=true"]
    common.append("checkpoint.every_steps=10")
    subprocess.run(quick.command(*common, "hydra.run.dir=alone"), check=True, stdout=subprocess.DEVNULL)
    starts = [f"index=1,phase=start,attempt={number},action=kill" for number in range(1, 9)]
    monkeypatch.setenv("TRAINKIT_FAIL", ";".join(["index=1,step=35,phase=backward,attempt=0,action=kill", *starts]))
    elastic = [*TWO, "elastic.min_replicas=1", "elastic.retry_s=600"]
    subprocess.run(
        quick.command(*common, *elastic, "hydra.run.dir=elastic"), check=True, capture_output=True, timeout=300
    )
    found = [json.loads(Path(folder, "result.json").read_text()) for folder in ("alone", "elastic")]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    rows = [json.loads(line) for line in Path("elastic/metrics.jsonl").read_text().splitlines()]
    assert {row["replicas"] for row in rows if "replicas" in row} == {1, 2}
