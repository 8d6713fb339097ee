"""Compute the device layout of a model from a map, or balanced by bytes (`auto`); or the problems of the map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainkit.errors import Problem
from trainkit.numerics.precision import Precision
from trainkit.strategies.groups.devices import parse_device
from trainkit.strategies.partition.blocks import Block, blocks_of, distinct_tensors
from trainkit.strategies.partition.device_layout import DeviceLayout
from trainkit.strategies.partition.syntax import assign, leaders_of, validate_layout


def balanced(
    sizes: Sequence[int], capacities: Sequence[float], *, leaders: Sequence[int], fill: bool = False
) -> list[int] | None:
    """Partition blocks into consecutive ranges so that the largest place is as small as possible.

    Args:
        sizes: bytes of each block.
        capacities: byte limit of each place, `math.inf` if there is none; a place may stay empty.
        leaders: for each block, the block whose place it must share; usually itself.
        fill: whether every place must hold some bytes.

    Returns:
        The place of each block; None if they do not fit.

    Example:
        >>> balanced([4, 1, 1, 4], [math.inf, math.inf], leaders=[0, 1, 2, 3])
        [0, 0, 1, 1]
        >>> balanced([4, 1, 1, 4], [3, 20], leaders=[0, 1, 2, 3])
        [1, 1, 1, 1]
        >>> balanced([9, 1, 0, 1], [math.inf] * 3, leaders=[0, 1, 2, 3], fill=True)
        [0, 1, 1, 2]
    """
    free = [at for at, leader in enumerate(leaders) if leader == at]
    position = {at: number for number, at in enumerate(free)}
    weights = [0] * len(free)
    for size, leader in zip(sizes, leaders, strict=True):
        weights[position[leader]] += size
    cuts = _cuts(weights, capacities, least=1 if fill else 0)
    if cuts is None:
        return None
    place_of = [place for place, (start, end) in enumerate(cuts) for _ in range(start, end)]
    return [place_of[position[leader]] for leader in leaders]


def _cuts(weights: Sequence[int], capacities: Sequence[float], *, least: int) -> list[tuple[int, int]] | None:
    """Return (start, end) of each place's range: the partition with the least maximum, by dynamic programming."""
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    count = len(weights)
    # best[end]: the least maximum of the places so far, if they hold the first `end` blocks
    best = [0.0] + [math.inf] * count
    starts: list[list[int]] = []
    for capacity in capacities:
        reached, chosen = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(count + 1):
            for start in range(end, -1, -1):
                held = total[end] - total[start]
                if held > capacity or held >= reached[end]:
                    break
                if held < least:
                    continue
                worst = max(best[start], held)
                if worst < reached[end]:
                    reached[end], chosen[end] = worst, start
        best = reached
        starts.append(chosen)
    if math.isinf(best[count]):
        return None
    cuts, end = [], count
    for chosen in reversed(starts):
        cuts.append((chosen[end], end))
        end = chosen[end]
    return cuts[::-1]


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
    """Function that returns the bytes of a tensor."""
    activations: Callable[[nn.Module, Sequence[Block]], Sequence[int] | None] = lambda _model, _units: None
    """Function that returns the bytes that each block saves for backward of a shard; None if unknown."""
    counts_places: bool = False
    """Whether the values of the map are places, counted from 0 in `devices`; else they are names of devices."""

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
        assigned = assign(model, units, self.given)
        problems = assigned.problems or validate_layout(units, assigned, self.given, same=self._place)
        if problems:
            return problems
        places = tuple(None if given is None else self._place(given) for given in assigned.places)
        layout = DeviceLayout(units=units, group=tuple(self.devices), places=places, routed=True)
        return self._overfull(layout, sizes, counted) or layout

    def _place(self, given: int | str) -> int | None:
        """Return the place that a value of the map names; None if it names none."""
        if self.counts_places:
            return given if isinstance(given, int) and 0 <= given < len(self.devices) else None
        device = parse_device(given)
        return self.devices.index(device) if device in self.devices else None

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
        group, routed = tuple(self.devices), len(set(found)) > 1
        return DeviceLayout(units=tuple(units), group=group, places=tuple(found), routed=routed)

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
