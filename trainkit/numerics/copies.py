"""Copy tensors of the host to a device without a synchronisation, and models whose hooks or passes keep computed
tensors.

`tensor.to("cuda")` and `torch.tensor(..., device="cuda")` copy from pageable memory, for which the host waits;
page-locked memory is copied in the order of the stream.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor of the host on a device.

    Example:
        >>> sent_to(torch.device("cpu"), torch.arange(3))
        tensor([0, 1, 2])
    """
    return tensor.to(device) if device.type != "cuda" else tensor.pin_memory().to(device, non_blocking=True)


def constant_on(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (numbers,) a tensor on a device, which the caller must not change; an accelerator gets it once.

    A compiled graph would hold the numbers as a tensor of the host, and copy it from pageable memory in each run.

    Example:
        >>> constant_on([0.5, 2.0], torch.float32, torch.device("cpu"))
        tensor([0.5000, 2.0000])
    """
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype)
    key = tuple(numbers), dtype, device
    constant = _CONSTANTS.get(key)
    if constant is None:
        constant = sent_to(device, torch.tensor(numbers, dtype=dtype))
        if type(constant) is Tensor:  # and not one without data
            _CONSTANTS[key] = constant
    return constant


_CONSTANTS: Final[dict[tuple[tuple[float, ...], torch.dtype, torch.device], Tensor]] = {}


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a model, in which computed tensors have no graph: torch refuses to copy one that has.

    Args:
        model: the model, which does not change.
        memo: objects of the copy by the id of the original, as in `copy.deepcopy`.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.kept = layer.weight * 2
        >>> copied(layer).kept.requires_grad
        False
    """
    memo = {} if memo is None else memo
    for value in computed_tensors(model):
        memo.setdefault(id(value), value.detach().clone())
    return copy.deepcopy(model, memo)


def computed_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors with a graph that the modules of a model keep as attributes.

    Hooks of torch (`torch.nn.utils.prune`, `torch.nn.utils.weight_norm`) keep such tensors, and so does a forward pass
    that stores its activations.
    """
    for module in model.modules():
        for value in tree_leaves(vars(module)):
            if isinstance(value, Tensor) and not value.is_leaf:
                yield value
