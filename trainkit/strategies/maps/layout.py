"""Move the blocks of a model to their devices, and activations between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.strategies.base import ModelMemory, ReplicaPart, StagePart
from trainkit.strategies.maps.blocks import Block, distinct_tensors, names_of
from trainkit.strategies.maps.syntax import collapsed
from trainkit.strategies.object_snapshot import ObjectSnapshot, refuse_changes
from trainkit.strategies.tensors.layouts import Placement, TensorPlaces


@dataclass(frozen=True, kw_only=True)
class DeviceLayout(Placement):
    """Blocks with the device of each."""

    units: tuple[Block, ...]
    group: tuple[str, ...]
    """The device of each place; two places may be on one device."""
    places: tuple[int | None, ...]
    """The place of each block; None for a block without tensors and key, which computes on the device of its inputs."""
    routed: bool
    """Whether activations are moved to each block; not needed if all are on one device."""

    @cached_property
    def placed(self) -> list[tuple[Block, int]]:
        """The blocks that have a place."""
        return [(unit, place) for unit, place in zip(self.units, self.places, strict=True) if place is not None]

    @cached_property
    def device(self) -> torch.device:  # type: ignore[override] # derived
        """The device of the inputs of the model, the outputs and the loss: that of the last block."""
        return torch.device(self.group[self.placed[-1][1]])

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices in use, in the order of the model."""
        return tuple(map(torch.device, dict.fromkeys(self.group[place] for _, place in self.placed)))

    @cached_property
    def _place_of(self) -> dict[str, int]:
        return {name: place for unit, place in self.placed for name, _ in unit.tensors()}

    def device_of(self, name: str) -> torch.device:
        """Return the device of a parameter or buffer."""
        return torch.device(self.group[self._place_of[name]])

    def places_of(self, names: Sequence[str]) -> TensorPlaces | None:
        """Return the places of parameters and buffers; None if all are on one device."""
        if len(set(self._place_of.values())) < 2:
            return None
        devices = tuple(map(torch.device, self.group))
        return TensorPlaces(places=tuple(self._place_of[name] for name in names), devices=devices)

    def move(self, model: nn.Module) -> nn.Module:
        """Move every tensor of the model to its device, in place, and register hooks that move activations."""
        for unit, place in self.placed:
            device = torch.device(self.group[place])
            for _, owner in unit.owners:
                _move(owner, device, unit.tensor)
            for module in unit.entries if self.routed else ():
                moved: list[ObjectSnapshot] = []
                module.register_forward_pre_hook(bring_inputs(device, moved), with_kwargs=True)
                module.register_forward_hook(_check_arguments(unit.name, moved))
        if self.routed:
            model.register_forward_hook(lambda _module, _args, outputs: _brought(outputs, self.device))
        return model

    def parts(self, bytes_of: Callable[[Tensor], int]) -> tuple[StagePart, ...]:
        """Return the consecutive parts of the model that are in one place, in the order of the model."""
        seen: set[int] = set()
        return tuple(
            part_of(stage, [unit for unit, _ in members], bytes_of, self.group[place], seen)
            for stage, (place, members) in enumerate(groupby(self.placed, key=lambda item: item[1]))
        )

    def held_parts(self, model: nn.Module, *, gradient_copies: float) -> tuple[ReplicaPart, ...]:
        """Return the part of a replica that each device holds and computes.

        Args:
            model: the model of this layout, possibly without data.
            gradient_copies: copies of a device's gradients at the peak of a step.
        """
        resident: dict[torch.device, dict[str, int]] = {}
        for name, param in model.named_parameters():
            resident.setdefault(self.device_of(name), {})[name] = param.numel()
        parts = []
        for device, held in resident.items():
            here = [unit for unit, place in self.placed if torch.device(self.group[place]) == device]
            entries = [entry for unit in here for entry in unit.entries]
            memory = ModelMemory(resident=held, gradient_copies=gradient_copies)
            parts.append(ReplicaPart(modules=names_of(model, entries), memory=memory))
        return tuple(parts)


def part_of(
    stage: int, units: Sequence[Block], bytes_of: Callable[[Tensor], int], device: str, seen: set[int] | None = None
) -> StagePart:
    """Return a part of a model for the plan; a tensor whose id is in `seen` was counted in an earlier part."""
    own = distinct_tensors(units, seen)
    return StagePart(
        stage=stage,
        modules=", ".join(collapsed([unit.name for unit in units])),
        num_params=sum(tensor.numel() for tensor in own if isinstance(tensor, nn.Parameter)),
        num_bytes=sum(map(bytes_of, own)),
        device=device,
    )


def _move(owner: nn.Module, device: torch.device, only: str | None) -> None:
    for leaf, param in owner._parameters.items():  # noqa: SLF001 - only its own tensors
        if param is not None and only in (None, leaf):
            param.data = param.data.to(device)  # the same Parameter object: tied tensors stay tied
    for leaf, buffer in owner._buffers.items():  # noqa: SLF001
        if buffer is not None and only in (None, leaf):
            owner._buffers[leaf] = buffer.to(device)  # noqa: SLF001


def bring_inputs(device: torch.device, moved: list[ObjectSnapshot]) -> Callable[..., Any]:
    """Return a forward pre-hook that moves every tensor among the arguments, at any depth of tuples and dicts."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if all(not isinstance(leaf, Tensor) or leaf.device == device for leaf in tree_leaves((args, kwargs))):
            return None  # the containers of the caller are passed unchanged
        brought = _brought((args, kwargs), device)
        moved[:] = [ObjectSnapshot([("", brought)])]
        return brought

    return hook


def _check_arguments(block: str, moved: list[ObjectSnapshot]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, _outputs: Any) -> None:
        for given in moved:
            refuse_changes(given, block, "and a device map gives it copies of lists and dicts on its device")
        moved.clear()

    return hook


def _brought(values: Any, device: torch.device) -> Any:
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)
