"""Keeping of a model what this rank's stages need, and leaving the rest without memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Kept"]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The tensors of some stages on one device; those of all others go to torch's meta device."""

    device: torch.device
    names: frozenset[str]
    """Canonical names of the parameters and buffers that are kept."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The one."""
        return (self.device,)

    def device_of(self, name: str) -> torch.device:
        """Where a tensor is."""
        return self.device if name in self.names else torch.device("meta")

    def move(self, model: nn.Module) -> nn.Module:
        """Move what is kept, and let go of the rest; what is tied stays tied."""
        named = [*model.named_parameters(), *model.named_buffers()]
        kept = {id(tensor) for name, tensor in named if name in self.names}
        released: dict[int, Tensor] = {}
        for module in model.modules():
            params, buffers = module._parameters, module._buffers  # noqa: SLF001 - its own, not those below
            for leaf, param in params.items():
                if param is not None and id(param) in kept:
                    param.data = param.data.to(self.device)
                elif param is not None:
                    params[leaf] = _without_memory(param, released)  # type: ignore[assignment]
            for leaf, buffer in _present(buffers.items()):
                buffers[leaf] = buffer.to(self.device) if id(buffer) in kept else _without_memory(buffer, released)
        return model


def _present(items: Iterable[tuple[str, Tensor | None]]) -> list[tuple[str, Tensor]]:
    return [(leaf, tensor) for leaf, tensor in items if tensor is not None]


def _without_memory(tensor: Tensor, released: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in released:
        empty = torch.empty_like(tensor, device="meta")
        is_param = isinstance(tensor, nn.Parameter)
        released[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty
    return released[id(tensor)]
