"""Allocate memory for a model that was built without data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["filled", "with_memory"]


def with_memory(model: nn.Module, device: torch.device) -> nn.Module:
    """Allocate uninitialised memory for each tensor of a model, sharded or not; return the model.

    Unlike `to_empty`, tied parameters stay tied.
    """
    made: dict[int, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = torch.empty_like(tensor.detach(), device=device)
            trains = tensor.requires_grad
            made[id(tensor)] = nn.Parameter(new, requires_grad=trains) if isinstance(tensor, nn.Parameter) else new
        return made[id(tensor)]

    for owner in model.modules():
        for own in (owner._parameters, owner._buffers):  # noqa: SLF001 - tensors are replaced by new ones
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta:
                    own[name] = replaced(tensor)  # type: ignore[assignment]
    return model


def filled(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Return the full model on the CPU, with its initial values."""
    with_memory(model, torch.device("cpu"))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.detach().copy_(values[name])
    return model
