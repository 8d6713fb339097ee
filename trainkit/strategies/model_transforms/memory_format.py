"""The memory format of a convnet's weights: channels first (contiguous), or last, as convolution kernels prefer it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import torch
from torch import nn

from trainkit.errors import ConfigError, Problem
from trainkit.numerics.precision import Precision

MemoryFormat = Literal["auto", "contiguous", "channels_last"]
"""Value of `memory_format`. Of a transform, `auto` is channels_last for models with 2-d convolutions."""

_CONVOLUTIONS: Final = (nn.Conv2d, nn.ConvTranspose2d)


def format_for(asked: MemoryFormat, precision: Precision, device: str, *, is_kept: bool = True) -> MemoryFormat:
    """Return the memory format that a run asks for on a device; auto: channels_last where tensor cores want it.

    Tensor cores take convolutions in 16 bits with the channels last; with the channels first, cuDNN transposes the
    inputs and outputs of each. Elsewhere which one is faster depends on the model, and contiguous keeps the bits of
    earlier versions.

    Args:
        asked: the value of `memory_format`.
        precision: of the run.
        device: of the model, such as cuda:0.
        is_kept: whether the strategy keeps the strides of parameters.

    Raises:
        ConfigError: channels_last is asked for, and the strategy does not keep it.

    Example:
        >>> mixed = Precision(value="bf16_mixed")
        >>> format_for("auto", mixed, "cuda:0"), format_for("auto", mixed, "cpu")
        ('auto', 'contiguous')
    """
    if asked == "channels_last" and not is_kept:
        rule = "has no effect where parameters are sharded, whose parts are contiguous. Use auto, or strategy=mirrored."
        raise ConfigError([Problem(key="memory_format", value=asked, rule=rule)])
    if asked != "auto":
        return asked
    in_16_bits = precision.compute_dtype in (torch.bfloat16, torch.float16)
    return "auto" if in_16_bits and is_kept and device.startswith("cuda") else "contiguous"


def puts_channels_last(model: nn.Module, memory_format: MemoryFormat) -> bool:
    """Return whether a memory format changes a model: contiguous does not, nor does any without convolutions."""
    return memory_format != "contiguous" and any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def apply_format(model: nn.Module, memory_format: MemoryFormat) -> None:
    """Give the 4-d parameters and buffers of a convnet their memory format; others keep theirs.

    A convolution with such a weight returns channels_last outputs, from inputs of any format: the first one converts
    the batch, and all features between it and the head stay channels_last.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> apply_format(model, "channels_last")
        >>> model[0].weight.stride(), model(torch.ones(2, 3, 8, 8)).stride()
        ((27, 1, 9, 3), (144, 1, 24, 4))
    """
    if puts_channels_last(model, memory_format):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # missing in torch's annotations


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
