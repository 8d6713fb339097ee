"""The devices of the tensors of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


class Placement(Protocol):
    """The devices of a replica, and the device of each tensor."""

    @property
    def device(self) -> torch.device:
        """The device of the batches and the loss."""
        ...

    @property
    def devices(self) -> Sequence[torch.device]:
        """All devices."""
        ...

    def device_of(self, name: str) -> torch.device:
        """Return the device of a parameter, by canonical name."""
        ...

    def move(self, model: nn.Module) -> nn.Module:
        """Move every tensor of the model to its device."""
        ...


@dataclass(frozen=True, kw_only=True)
class SingleDevicePlacement:
    """The whole model on one device.

    Example:
        >>> SingleDevicePlacement(device=torch.device("cpu")).device_of("any.weight")
        device(type='cpu')
    """

    device: torch.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The only device."""
        return (self.device,)

    def device_of(self, name: str) -> torch.device:  # noqa: ARG002 - the same for each
        """Return the only device."""
        return self.device

    def move(self, model: nn.Module) -> nn.Module:
        """Move the whole model."""
        return model.to(device=self.device)
