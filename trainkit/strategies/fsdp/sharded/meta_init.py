"""Memory for a model that was built without its numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["filled", "with_memory"]


def with_memory(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with memory below each of its tensors, cut or whole, and nothing in it yet.

    Unlike `to_empty` it leaves one tensor one: tied parameters stay tied.
    """
    made: dict[int, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            new = torch.empty_like(tensor.detach(), device=device)
            trains = tensor.requires_grad
            made[id(tensor)] = nn.Parameter(new, requires_grad=trains) if isinstance(tensor, nn.Parameter) else new
        return made[id(tensor)]

    for owner in model.modules():
        for own in (owner._parameters, owner._buffers):  # noqa: SLF001 - new tensors take their places
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta:
                    own[name] = replaced(tensor)  # type: ignore[assignment]
    return model


def filled(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """The whole model, on the CPU, with its numbers."""
    with_memory(model, torch.device("cpu"))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.detach().copy_(values[name])
    return model
