"""The trainings that are measured on a GPU: overrides for trainkit, a model and a batch for a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training."""

    title: str
    batch: int
    """Samples of a step."""
    parts: int
    """Parts in which a step is computed, one after the other."""
    mixed: bool
    """Whether it computes in bfloat16, with weights in fp32."""
    units: int
    """What a sample counts as: tokens of a text, 1 for an image."""
    overrides: tuple[str, ...]
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, Tensor]]

    @property
    def sizes(self) -> tuple[str, ...]:
        """The overrides of the batch and the precision."""
        return (
            f"batch.global_size={self.batch}",
            f"batch.micro_size={self.batch // self.parts}",
            f"precision={'bf16_mixed' if self.mixed else 'fp32'}",
        )


def gpt(small: bool) -> Workload:
    """Return GPT-2 124M on 64 rows of 1024 tokens, or a tiny one."""
    layers, heads, width, context, vocabulary, batch = (
        (2, 2, 64, 32, 256, 8) if small else (12, 12, 768, 1024, 50304, 64)
    )

    def make_model() -> nn.Module:
        from trainkit.models.gpt import Gpt

        return Gpt(vocab_size=vocabulary, context=context, num_layers=layers, num_heads=heads, width=width)

    def make_batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(vocabulary, (batch, context + 1), generator=torch.Generator().manual_seed(0))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return Workload(
        title=f"GPT, {layers} layers of width {width}, {batch} x {context} tokens",
        batch=batch, parts=1 if small else 4, mixed=True, units=context,
        overrides=(
            "model=gpt", f"model.num_layers={layers}", f"model.num_heads={heads}", f"model.width={width}",
            f"model.context={context}", f"model.vocab_size={vocabulary}", "data=synthetic_tokens",
            f"data.vocab_size={vocabulary}", f"data.context={context}", "data.num_samples=512", "data.val_samples=1",
            "objective=language_modelling", "objective.padding=false",
        ),
        make_model=make_model, make_batch=make_batch,
    )  # fmt: skip


def resnet(small: bool) -> Workload:
    """Return ResNet-50 on 256 images of 224 x 224, or ResNet-18 on a few small ones."""
    size, batch, classes = (32, 4, 10) if small else (224, 256, 1000)
    depth: Literal[18, 50] = 18 if small else 50

    def make_model() -> nn.Module:
        from trainkit.models.resnet import ResNet

        return ResNet(depth=depth, num_classes=classes)

    def make_batch() -> tuple[Tensor, Tensor]:
        images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
        return images, torch.arange(batch) % classes

    return Workload(
        title=f"ResNet-{depth}, {batch} images of {size} x {size}",
        batch=batch, parts=1, mixed=True, units=1,
        overrides=(
            "model=resnet", f"model.depth={depth}", f"model.num_classes={classes}", "data=synthetic",
            f"data.shape=[3,{size},{size}]", f"data.num_classes={classes}", f"data.num_samples={4 * batch}",
            "data.val_samples=1", "objective=classification",
        ),
        make_model=make_model, make_batch=make_batch,
    )  # fmt: skip


def mlp(small: bool) -> Workload:
    """Return the MLP of the digits, batch 64: the overhead of a step."""

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def make_batch() -> tuple[Tensor, Tensor]:
        return torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10

    return Workload(
        title="MLP 64-128-10, batch 64",
        batch=64, parts=1, mixed=False, units=1,
        overrides=("data=digits", "model=mlp", "model.in_features=64", "model.hidden=[128]", "model.out_features=10"),
        make_model=make_model, make_batch=make_batch,
    )  # fmt: skip


WORKLOADS: Mapping[str, Callable[[bool], Workload]] = {"gpt": gpt, "resnet": resnet, "mlp": mlp}
