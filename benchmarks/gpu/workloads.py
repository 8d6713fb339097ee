"""The trainings that are measured on a GPU: overrides for trainkit, a model and a batch for a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
    """Parts in which a step is computed, one after the other: shards."""
    mixed: bool
    """Whether it computes in bfloat16, with weights in fp32."""
    units: int
    """What a sample counts as: tokens of a text, 1 for an image."""
    steps: int = 36
    """Steps of a training that is timed; the first third of them is not."""
    channels_last: bool = False
    """Whether a hand-written loop puts the channels of weights and images last."""
    overrides: tuple[str, ...]
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, Tensor]]

    @property
    def window(self) -> int:
        """Steps that are timed together."""
        return max(2, self.steps // 9)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The overrides of the batch and the precision."""
        return (
            f"batch.global_size={self.batch}",
            f"batch.micro_size={self.batch // self.parts}",
            f"precision={self.precision}",
        )

    @property
    def precision(self) -> str:
        """The value of `precision`."""
        return "bf16_mixed" if self.mixed else "fp32"


def gpt(small: bool) -> Workload:
    """Return GPT-2 124M on 64 rows of 1024 tokens, or a tiny one."""
    if small:
        return _language_model(layers=2, heads=2, width=64, context=32, vocabulary=256, batch=8, parts=1, steps=9)
    return _language_model(layers=12, heads=12, width=768, context=1024, vocabulary=50304, batch=64, parts=4)


def gpt_large(small: bool) -> Workload:
    """Return a GPT of 1.3 B parameters on 16 rows of 2048 tokens, or a tiny one."""
    if small:
        return _language_model(layers=2, heads=2, width=64, context=64, vocabulary=256, batch=4, parts=2, steps=9)
    return _language_model(layers=24, heads=16, width=2048, context=2048, vocabulary=50304, batch=16, parts=2)


def _language_model(
    *, layers: int, heads: int, width: int, context: int, vocabulary: int, batch: int, parts: int, steps: int = 36
) -> Workload:
    def make_model() -> nn.Module:
        from trainkit.models.gpt import Gpt

        return Gpt(vocab_size=vocabulary, context=context, num_layers=layers, num_heads=heads, width=width)

    def make_batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(vocabulary, (batch, context + 1), generator=torch.Generator().manual_seed(0))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    return Workload(
        title=f"GPT, {layers} layers of width {width}, {batch} x {context} tokens",
        batch=batch, parts=parts, mixed=True, units=context, steps=steps,
        overrides=(
            "model=gpt", f"model.num_layers={layers}", f"model.num_heads={heads}", f"model.width={width}",
            f"model.context={context}", f"model.vocab_size={vocabulary}", "data=synthetic_tokens",
            f"data.vocab_size={vocabulary}", f"data.context={context}", "data.num_samples=512", "data.val_samples=1",
            "objective=language_modelling", "objective.padding=false",
        ),
        make_model=make_model, make_batch=make_batch,
    )  # fmt: skip


def resnet(small: bool, *, parts: int = 1) -> Workload:
    """Return ResNet-50 on 256 images of 224 x 224, or ResNet-18 on a few small ones.

    The hand-written loop has its images on the device: those of trainkit are drawn once and kept there, too, since a
    host draws 256 of them in several times the duration of a step. The small one is in fp32: in bf16 a CPU takes a
    second for a step.
    """
    parts = min(parts, 2) if small else parts
    size, batch, classes = (32, 4 * parts, 10) if small else (224, 256, 1000)
    depth: Literal[18, 50] = 18 if small else 50

    def make_model() -> nn.Module:
        from trainkit.models.resnet import ResNet

        return ResNet(depth=depth, num_classes=classes)

    def make_batch() -> tuple[Tensor, Tensor]:
        images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
        return images, torch.arange(batch) % classes

    return Workload(
        title=f"ResNet-{depth}, {batch} images of {size} x {size}, shards: {parts}",
        batch=batch, parts=parts, mixed=not small, units=1, steps=9 if small else 36, channels_last=True,
        overrides=(
            "model=resnet", f"model.depth={depth}", f"model.num_classes={classes}", "data=synthetic",
            f"data.shape=[3,{size},{size}]", f"data.num_classes={classes}", f"data.num_samples={4 * batch}",
            "data.val_samples=1", "loader.cache=true", "objective=classification", "optimizer.lr=0.0001",
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
        batch=64, parts=1, mixed=False, units=1, steps=9 if small else 450,
        overrides=(
            "data=digits", "batch.drop_last=true", "model=mlp", "model.in_features=64", "model.hidden=[128]",
            "model.out_features=10",
        ),
        make_model=make_model, make_batch=make_batch,
    )  # fmt: skip


WORKLOADS: Mapping[str, Callable[[bool], Workload]] = {
    "gpt": gpt,
    "gpt_large": gpt_large,
    "resnet": resnet,
    "resnet_shards": partial(resnet, parts=8),
    "mlp": mlp,
}
