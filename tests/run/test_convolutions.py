"""A convolution whose gradient torch computes wrongly in bfloat16 on a CPU, and that trains, is caught here alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from trainkit import api
from trainkit.config.check import checked
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError
from trainkit.run.planning import convolutions
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import make_plan

FIXED = ("recipe=null", "data=synthetic", "data.num_classes=10", "data.num_samples=8", "data.val_samples=1",
         "objective=classification", "batch.global_size=4", "steps=1", "eval.every_epochs=null", "logger=[]",
         "callbacks=[]", "quiet=true")  # fmt: skip
SMALL = (*FIXED, "model=resnet", "model.depth=18", "model.num_classes=10")


class Summed(nn.Module):
    """Sums the outputs of a convolution over all positions; volumes are images whose channels are the depth."""

    def __init__(self, kind: str, padding_mode: Literal["zeros", "replicate"]) -> None:
        super().__init__()
        self.kind = kind
        if kind == "transposed":
            self.layer: nn.Module = nn.ConvTranspose2d(3, 10, 3, stride=2, padding=1)
        else:
            self.layer = nn.Conv3d(1, 10, 3, padding="same", padding_mode=padding_mode)

    def forward(self, images: Tensor) -> Tensor:
        volumes = images if isinstance(self.layer, nn.ConvTranspose2d) else images.unsqueeze(1)
        parts = [volumes[:, :, :2], volumes] if self.kind == "called twice" else [volumes]
        return torch.stack([self.layer(input=part).flatten(2).sum(2) for part in parts]).sum(0)


def check(*overrides: str) -> None:
    """Check a run before it starts. It is not trained: with the kernel, its weights would be random."""
    composition = checked(api.compose([*overrides], packages=["tests"]))
    with allow_packages(composition.packages):
        plan = make_plan(composition.cfg)
        model_notes(plan, meta_model(plan))


@pytest.mark.parametrize(
    ("shape", "precision", "has_the_kernel", "refused"),
    [
        ("[3,16,16]", "bf16_mixed", True, True),
        ("[3,32,1]", "bf16_mixed", True, True),
        ("[3,32,32]", "bf16_mixed", True, False),
        ("[3,16,16]", "fp32", True, False),
        ("[3,16,16]", "bf16_mixed", False, False),
    ],
)
def test_images_that_become_smaller_than_a_stride_are_refused_in_bfloat16_alone(
    shape: str, precision: str, has_the_kernel: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "has_the_kernel", lambda: has_the_kernel)
    message = r"precision=bf16_mixed: may have a wrong gradient on this CPU in \w+\.\d"
    with pytest.raises(ConfigError, match=message) if refused else nullcontext():
        check(*SMALL, f"data.shape={shape}", f"precision={precision}")


@pytest.mark.parametrize(
    ("kind", "shape", "padding_mode", "refused"),
    [
        ("volume", "[2,4,4]", "zeros", True),
        ("volume", "[2,4,4]", "replicate", False),
        ("volume", "[3,2,2]", "zeros", False),
        ("called twice", "[3,4,4]", "zeros", True),
        ("transposed", "[3,1,4]", "zeros", True),
        ("transposed", "[3,2,4]", "zeros", False),
    ],
)
def test_volumes_smaller_than_a_kernel_and_outputs_smaller_than_a_stride_are_refused(
    kind: str, shape: str, padding_mode: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "has_the_kernel", lambda: True)
    model = (f"model._target_={Summed.__module__}.Summed", f"model.kind={kind}", f"model.padding_mode={padding_mode}")
    message = "may have a wrong gradient on this CPU in layer"
    with pytest.raises(ConfigError, match=message) if refused else nullcontext():
        check(*FIXED, *model, f"data.shape={shape}", "precision=bf16_mixed")
