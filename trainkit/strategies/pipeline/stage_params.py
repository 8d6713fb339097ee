"""Keeping of a model what this rank's stages need, and leaving the rest without memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainkit.strategies.tensors.layouts import dense_strides, in_layout

__all__ = ["StageParams"]


@dataclass(frozen=True, kw_only=True)
class StageParams:
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

    def release(self, model: nn.Module, values: Mapping[str, Tensor] | None) -> None:
        """Let go of what is not kept, and make the numbers of what is; what is tied stays tied.

        Args:
            model: the model.
            values: what it begins with, where it was built without; asked for one at a time.
        """
        named = [*model.named_parameters(), *model.named_buffers()]
        name_of = {id(tensor): name for name, tensor in named}
        settled: dict[int, Tensor] = {}

        def in_its_place(tensor: Tensor) -> Tensor:
            name = name_of[id(tensor)]
            if name in self.names and not (tensor.is_meta and values is not None):
                return tensor
            if id(tensor) not in settled:
                settled[id(tensor)] = _like(tensor, values[name] if name in self.names and values is not None else None)
            return settled[id(tensor)]

        for module in model.modules():
            for own in (module._parameters, module._buffers):  # noqa: SLF001 - its own, not those below
                own.update({leaf: in_its_place(tensor) for leaf, tensor in own.items() if tensor is not None})  # type: ignore[misc]

    def move(self, model: nn.Module) -> nn.Module:
        """Move what is kept to the device."""
        for param in model.parameters():
            if not param.is_meta:
                param.data = param.data.to(self.device)  # the same Parameter: what is tied stays tied
        for module in model.modules():
            for leaf, buffer in module._buffers.items():  # noqa: SLF001
                if buffer is not None and not buffer.is_meta:
                    module._buffers[leaf] = buffer.to(self.device)  # noqa: SLF001
        return model


def _like(tensor: Tensor, value: Tensor | None) -> Tensor:
    """A tensor with these numbers, or without memory."""
    new = torch.empty_like(tensor, device="meta") if value is None else in_layout(value, dense_strides(tensor))
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
