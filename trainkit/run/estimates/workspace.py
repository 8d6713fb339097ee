"""Temporary memory of a convolution on the CPU, in addition to its outputs.

oneDNN computes with weights in blocks of channels, and with images in blocks of channels or in channels_last: tensors
in another layout are copied. Counted with one thread; with more threads, the backward pass takes buffers for each.

Source: torch 2.13, aten/src/ATen/native/Convolution.cpp and mkldnn/Conv.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

_PLAIN_CHANNELS: Final = 3
"""Largest number of channels of images that oneDNN reads without a copy."""


def workspace_of(func: Callable[..., Any], args: tuple[Any, ...], found: Any) -> int:
    """Return the bytes that an operation takes while it runs, in addition to its outputs; 0 for all but convolutions.

    Args:
        func: the operation.
        args: its arguments, which may be without data.
        found: its outputs.

    Example:
        >>> images, weight = torch.zeros(2, 8, 4, 4), torch.zeros(16, 8, 3, 3)
        >>> args = (images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        >>> workspace_of(torch.ops.aten.convolution.default, args, torch.zeros(2, 16, 4, 4))
        5632
    """
    compute = _CONVOLUTIONS.get(func)
    return 0 if compute is None else compute(args, found)


def _forward(args: tuple[Any, ...], found: Tensor) -> int:
    images, weight = args[:2]
    if _is_plain(images, weight, args[3:9]):
        return _columns(images, weight, found, args[3:9])
    size = _num_bytes(weight)
    if _is_channels_last(images, weight):
        return size + _copied(weight)  # the weights in channels_last, and these in blocks
    return max(_blocks(images) + size, _num_bytes(found))  # the images and the weights, and then the outputs in blocks


def _backward(args: tuple[Any, ...], found: tuple[Tensor | None, ...]) -> int:
    grads, images, weight = args[:3]
    if _is_plain(images, weight, args[4:10]):
        return _columns(images, weight, grads, args[4:10])
    for_images, for_weight = found[0] is not None, found[1] is not None
    size = _num_bytes(weight)
    if _is_channels_last(images, weight):
        return _copied(weight) + (2 * size if for_weight else size)
    given, taken, outputs = _num_bytes(grads), for_images * _num_bytes(images), for_weight * size
    in_turn = [given + size + taken, 2 * taken] if for_images else []
    if for_weight:
        in_turn += [taken + given + _blocks(images) + size, taken + 2 * size]
    return max([*in_turn, taken + outputs]) - taken - outputs


def _is_plain(images: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> bool:
    """Return whether torch's own kernel runs, and not oneDNN's."""
    backend = torch._C._select_conv_backend(images, weight, None, *settings)  # noqa: SLF001 - as torch's fake tensors do
    return "Mkldnn" not in str(backend)


def _columns(images: Tensor, weight: Tensor, outputs: Tensor, settings: tuple[Any, ...]) -> int:
    """Return the bytes of the patches of the images that torch's own kernel multiplies; images of 1 x 1 need no such
    copy.
    """
    stride, padding = settings[:2]
    if all(one == 1 for one in (*weight.shape[2:], *stride)) and not any(padding):
        return 0
    return outputs.numel() // max(outputs.shape[1], 1) * weight[0].numel() * images.element_size()


def _is_channels_last(*tensors: Tensor) -> bool:
    return any(one.is_contiguous(memory_format=_last(one)) and not one.is_contiguous() for one in tensors)


def _copied(weight: Tensor) -> int:
    """Return the bytes of weights if they are copied to channels_last."""
    return 0 if weight.is_contiguous(memory_format=_last(weight)) else _num_bytes(weight)


def _last(tensor: Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats.get(tensor.dim(), torch.contiguous_format)


def _blocks(images: Tensor) -> int:
    return _num_bytes(images) if images.shape[1] > _PLAIN_CHANNELS else 0


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_CONVOLUTIONS: Final[Mapping[Any, Callable[..., int]]] = {
    torch.ops.aten.convolution.default: _forward,
    torch.ops.aten.convolution_backward.default: _backward,
}
