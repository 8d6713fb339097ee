"""Compute the device layout of a model from a map, or from `auto`; or the problems of the map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainkit.errors import Problem
from trainkit.numerics.precision import Precision
from trainkit.strategies.groups.devices import parse_device
from trainkit.strategies.partition.balance import balanced
from trainkit.strategies.partition.blocks import Block, blocks_of, distinct_tensors
from trainkit.strategies.partition.device_layout import DeviceLayout
from trainkit.strategies.partition.syntax import assign
from trainkit.strategies.partition.validation import leaders_of, validate_layout

_GIB = 2**30


def model_bytes(precision: Precision) -> Callable[[Tensor], int]:
    """Return a function for the bytes of a tensor in training: itself, its gradient, and separate master copies of
    both.

    Example:
        >>> model_bytes(Precision(value="bf16"))(nn.Parameter(Tensor(10)))
        120
    """
    width, master = precision.model_dtype.itemsize, precision.master_dtype.itemsize
    trained = 2 * width + (2 * master if precision.model_dtype is not precision.master_dtype else 0)

    def bytes_of(tensor: Tensor) -> int:
        if isinstance(tensor, nn.Parameter):
            return tensor.numel() * (trained if tensor.requires_grad else width)
        return tensor.numel() * (width if tensor.is_floating_point() else tensor.element_size())

    return bytes_of


def unit_bytes(units: Sequence[Block], bytes_of: Callable[[Tensor], int]) -> list[int]:
    """Return the bytes of each block; a tied tensor counts in the first one."""
    seen: set[int] = set()
    return [sum(map(bytes_of, distinct_tensors([unit], seen))) for unit in units]


@dataclass(frozen=True, kw_only=True)
class PartitionSolver:
    """The settings of a model's layout."""

    given: Mapping[str, Any] | None
    """The user's map; None: balanced by bytes."""
    devices: Sequence[str]
    """The devices in use, in order."""
    capacities: Mapping[str, float]
    """Device -> its byte limit; absent: no limit."""
    bytes_of: Callable[[Tensor], int]
    """Returns the bytes of a tensor."""
    activations: Callable[[nn.Module, Sequence[Block]], Sequence[int] | None] = lambda _model, _units: None
    """Returns the bytes that each block stores of a shard for backward; None if unknown."""

    def layout(self, model: nn.Module) -> DeviceLayout | list[Problem]:
        """Compute the layout of a model, which may be on the meta device; or return the problems."""
        units = blocks_of(model)
        counted = "parameters, gradients and buffers"
        sizes = unit_bytes(units, self.bytes_of)
        if (kept := self.activations(model, units)) is not None:
            counted = "parameters, gradients, buffers and the activations of a shard"
            sizes = [size + more for size, more in zip(sizes, kept, strict=True)]
        if self.given is None:
            return self._balanced(units, sizes, counted)
        assigned = assign(model, units, self.given, key="strategy.map")
        problems = assigned.problems or validate_layout(
            units, assigned, self.given, key="strategy.map", noun="device", same=parse_device
        )
        if problems:
            return problems
        devices = tuple(None if place is None else parse_device(place) for place in assigned.places)
        layout = DeviceLayout(units=units, devices_by_unit=devices, routed=True)
        return self._overfull(layout, sizes, counted) or layout

    def _balanced(self, units: Sequence[Block], sizes: Sequence[int], counted: str) -> DeviceLayout | list[Problem]:
        limits = [self.capacities.get(device, math.inf) for device in self.devices]
        found = balanced(sizes, limits, leaders=leaders_of(units))
        if found is None:
            largest = max(range(len(units)), key=sizes.__getitem__)
            rule = (
                f"too little: the model needs {gib(sum(sizes))} for {counted}, its largest "
                f"block, {units[largest].name}, {gib(sizes[largest])}; {', '.join(self.devices)} take "
                f"{gib(sum(limits))}. Give more memory or more devices."
            )
            return [Problem(key="strategy.max_memory", rule=rule)]
        devices = tuple(self.devices[place] for place in found)
        return DeviceLayout(units=tuple(units), devices_by_unit=devices, routed=len(set(devices)) > 1)

    def _overfull(self, layout: DeviceLayout, sizes: Sequence[int], counted: str) -> list[Problem]:
        problems = []
        for device, limit in self.capacities.items():
            held = sum(size for size, one in zip(sizes, layout.devices_by_unit, strict=True) if one == device)
            if held > limit:
                rule = (
                    f"{device} takes {gib(limit)}, and strategy.map puts {gib(held)} of {counted} there. "
                    "Move blocks to another device."
                )
                problems.append(Problem(key="strategy.max_memory", rule=rule))
        return problems


def gib(num_bytes: float) -> str:
    """Return bytes as text, `1.5 GiB`."""
    return f"{num_bytes / _GIB:.3g} GiB"
