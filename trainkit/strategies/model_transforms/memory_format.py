"""The memory format of a convnet's weights: channels first (contiguous), or last, as convolution kernels prefer it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import torch
from torch import nn

from trainkit.errors import Problem

MemoryFormat = Literal["auto", "contiguous", "channels_last"]
"""Value of `memory_format`. In a transform, `auto` is channels_last for models with 2-d convolutions."""

_CONVOLUTIONS: Final = (nn.Conv2d, nn.ConvTranspose2d)


def puts_channels_last(model: nn.Module, memory_format: MemoryFormat) -> bool:
    """Return whether a memory format changes a model: contiguous does not, and no format does without convolutions."""
    return memory_format != "contiguous" and any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def apply_format(model: nn.Module, memory_format: MemoryFormat) -> None:
    """Give the 4-d parameters and buffers of a convnet their memory format; other tensors keep theirs.

    A convolution with such a weight returns channels_last outputs, from inputs of any format: the first one converts
    the batch, and all features between it and the head stay channels_last.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> apply_format(model, "channels_last")
        >>> model[0].weight.stride(), model(torch.ones(2, 3, 8, 8)).stride()
        ((27, 1, 9, 3), (144, 1, 24, 4))
    """
    if puts_channels_last(model, memory_format):
        # not `model.to`, which refuses models that also have 5-d tensors
        model._apply(lambda one: one.to(memory_format=torch.channels_last) if one.dim() == 4 else one)  # type: ignore[no-untyped-call]  # noqa: SLF001


def format_problems(model: nn.Module, memory_format: MemoryFormat) -> Iterator[Problem]:
    """Yield the problem of a format that would change nothing."""
    if memory_format == "channels_last" and not puts_channels_last(model, memory_format):
        rule = "has no effect: the model has no nn.Conv2d. Leave it out."
        yield Problem(key="memory_format", value=memory_format, rule=rule)


def format_notes(model: nn.Module, memory_format: MemoryFormat) -> tuple[str, ...]:
    """Return the note about the chosen format for the plan and the startup summary."""
    if not puts_channels_last(model, memory_format):
        return ()
    chosen = " (auto: convolutions in 16 bits on CUDA)" if memory_format == "auto" else ""
    return (f"memory_format: channels_last{chosen}. Results differ from contiguous ones by rounding.",)
