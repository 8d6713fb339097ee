"""Models that write into their inputs: every pass of a step computes what the samples say.

A repeated step, or a second phase, that is computed from samples that the model has overwritten is caught here alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

import trainkit
from tests.contract.running import run, weights
from tests.support.zoo import Net, Points, fill
from trainkit.models.gan import Gan

HERE = __name__
OVERFLOWS = ("precision=fp16_mixed", "precision.initial_scale=4e9", "batch.micro_size=2")
PLACES = [
    (),
    ("strategy=mirrored", "strategy.replicas=2"),
    ("strategy=fsdp", "strategy.replicas=2"),
    ("strategy=parameter_server",),
]


class Scaling(Net):
    """Scales its inputs, in place from a call on; never: by a new tensor."""

    def __init__(self, *, writes_from: float = 0.0) -> None:
        super().__init__()
        self.calls, self.writes_from = 0, writes_from

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        outputs: Tensor = super().forward(  # type: ignore[no-untyped-call]
            x.mul_(2).sub_(1) if self.calls > self.writes_from else x * 2 - 1
        )
        return outputs


class ScalingGan(Gan):
    """Its discriminator scales the images, in place or by a new tensor."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__(latent=4, hidden=[8])
        self.writes = writes
        fill(self)

    def forward(self, x: Tensor, part: Literal["generator", "discriminator"] = "generator") -> Tensor:
        if part == "discriminator" and not x.requires_grad:
            x = x.mul_(0.5).add_(0.25) if self.writes else x * 0.5 + 0.25
        return super().forward(x, part)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[0] if place else "one_device")
@pytest.mark.slow
def test_a_step_that_overflowed_is_repeated_with_the_samples_as_they_were_read(
    place: tuple[str, ...], tmp_path: Path
) -> None:
    steps = ("data=points", "steps=4", "batch.global_size=8", "eval.every_epochs=null", *OVERFLOWS, *place)
    found = [
        weights(run(tmp_path / str(k), *steps, f"model={{_target_: {HERE}.Scaling, writes_from: {k}}}"))
        for k in ((0, 1e9) if place else (0, 5, 1e9))
    ]
    for written in found[:-1]:
        torch.testing.assert_close(written, found[-1], rtol=0, atol=0)


@pytest.mark.slow
def test_each_phase_of_a_step_gets_the_samples_as_they_were_read(tmp_path: Path) -> None:
    keys = ["recipe=gan", "objective.latent=4", "epochs=null", "steps=4", "eval.every_epochs=null", "precision=fp32"]
    keys += ["optimizers.discriminator.ratio=2"]
    found = [
        weights(run(tmp_path / str(writes), *keys, f"model={{_target_: {HERE}.ScalingGan, writes: {writes}}}"))
        for writes in (True, False)
    ]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_loop_of_ones_own_repeats_a_step_with_what_it_has_written_itself(tmp_path: Path) -> None:
    found = []
    for writes_from in (0.0, 1e9):
        keys = ["recipe=null", "steps=3", "batch.global_size=8", "eval.every_epochs=null", "callbacks=[]", *OVERFLOWS]
        model, folder = Scaling(writes_from=writes_from), tmp_path / str(writes_from)
        with trainkit.session(keys, model=model, data={"train": Points()}, run_dir=folder) as session:
            for shards in session.batches():
                for x, _ in shards:
                    x.add_(0.5)
                session.step()
            assert isinstance(session.model, Scaling)
            assert session.model.calls > 4  # one a step, one before the first, and the repeated ones
            found.append({name: tensor.clone() for name, tensor in session.model.state_dict().items()})
    torch.testing.assert_close(*found, rtol=0, atol=0)
