"""Keep only the parameters and buffers that this rank's stages need; the rest of the model uses no memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainkit.strategies.tensors.layouts import dense_strides, in_layout


@dataclass(frozen=True, kw_only=True)
class StageParams:
    """The tensors of some stages on one device; all others are moved to torch's meta device."""

    device: torch.device
    names: frozenset[str]
    """Canonical names of the parameters and buffers that are kept."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices: only one."""
        return (self.device,)

    def device_of(self, name: str) -> torch.device:
        """Return the device of a tensor."""
        return self.device if name in self.names else torch.device("meta")

    def release(self, model: nn.Module, values: Mapping[str, Tensor] | None) -> None:
        """Release the tensors that are not kept, and initialise the others; tied tensors stay tied."""
        named = [*model.named_parameters(), *model.named_buffers()]
        name_of = {id(tensor): name for name, tensor in named}
        replaced: dict[int, Tensor] = {}

        def replacement(tensor: Tensor) -> Tensor:
            name = name_of[id(tensor)]
            if name in self.names and not (tensor.is_meta and values is not None):
                return tensor
            if id(tensor) not in replaced:
                replaced[id(tensor)] = _like(
                    tensor, values[name] if name in self.names and values is not None else None
                )
            return replaced[id(tensor)]

        for module in model.modules():
            for own in (module._parameters, module._buffers):  # noqa: SLF001 - without those of its children
                own.update({leaf: replacement(tensor) for leaf, tensor in own.items() if tensor is not None})  # type: ignore[misc]

    def move(self, model: nn.Module) -> nn.Module:
        """Move the kept tensors to the device."""
        for param in model.parameters():
            if not param.is_meta:
                param.data = param.data.to(self.device)  # the same Parameter object: tied tensors stay tied
        for module in model.modules():
            for leaf, buffer in module._buffers.items():  # noqa: SLF001
                if buffer is not None and not buffer.is_meta:
                    module._buffers[leaf] = buffer.to(self.device)  # noqa: SLF001
        return model


def _like(tensor: Tensor, value: Tensor | None) -> Tensor:
    """Return a tensor with these values, or without memory."""
    new = torch.empty_like(tensor, device="meta") if value is None else in_layout(value, dense_strides(tensor))
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
