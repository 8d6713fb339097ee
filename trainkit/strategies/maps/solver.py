"""Compute the device layout of a model from a map, or balanced by bytes (`auto`); or the problems of the map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from trainkit.errors import ConfigError, Problem
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import PlanContext, ReplicaPart, StagePart
from trainkit.strategies.groups.devices import parse_device
from trainkit.strategies.maps.activations import activations_of
from trainkit.strategies.maps.blocks import Block, blocks_of, distinct_tensors
from trainkit.strategies.maps.layout import DeviceLayout
from trainkit.strategies.maps.syntax import assign, leaders_of, validate_layout


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
    total = [0]  # bytes of the first blocks that are free to move, each with those that must share its place
    for at in free:
        total.append(total[-1] + sum(size for size, leader in zip(sizes, leaders, strict=True) if leader == at))
    count = len(free)
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
                if fill and not held:
                    continue
                worst = max(best[start], held)
                if worst < reached[end]:
                    reached[end], chosen[end] = worst, start
        best = reached
        starts.append(chosen)
    if math.isinf(best[count]):
        return None
    place_of, end = dict[int, int](), count
    for place, chosen in reversed(list(enumerate(starts))):
        place_of.update(dict.fromkeys(free[chosen[end] : end], place))
        end = chosen[end]
    return [place_of[leader] for leader in leaders]


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


def with_activations(sizes: Sequence[int], kept: Sequence[int] | None) -> tuple[list[int], str]:
    """Return bytes of blocks with those of their activations, if these are known, and in words what they count."""
    if kept is None:
        return list(sizes), "parameters, gradients and buffers"
    return [size + more for size, more in zip(sizes, kept, strict=True)], (
        "parameters, gradients, buffers and the activations of a shard"
    )


def gib(num_bytes: float) -> str:
    """Return bytes as text, `1.5 GiB`."""
    return f"{num_bytes / 2**30:.3g} GiB"


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Memory that the devices or the ranks of a replica may take, for all or by name.

    Example:
        >>> MemoryLimits(given={"1": 2.0}, names=("0", "1"), noun="rank").of("1") == 2 * 2**30
        True
    """

    given: float | Mapping[str, float] | None
    """Limits in GiB; None: no limit."""
    names: Sequence[str]
    """The devices, or the numbers of the ranks."""
    noun: str
    """What the names are."""
    spelled: Callable[[str], str | None] = lambda name: name
    """Function that returns the name for a key of the user; None for a key that names nothing."""

    def of(self, name: str) -> float:
        """Return a limit in bytes, `math.inf` if there is none."""
        if isinstance(self.given, Mapping):
            return {self.spelled(key): limit for key, limit in self.given.items()}.get(name, math.inf) * 2**30
        return math.inf if self.given is None else self.given * 2**30

    def problems(self) -> list[Problem]:
        """Return problems: names that do not exist, and limits that are not positive."""
        found = []
        for name, limit in self.given.items() if isinstance(self.given, Mapping) else ():
            key = f"strategy.max_memory.{name}"
            if limit <= 0:
                found.append(Problem(key=key, value=limit, rule="must be more than 0."))
            if self.spelled(name) not in self.names:
                rule = f"no such {self.noun}: there are {', '.join(self.names)}."
                found.append(Problem(key=key, value=limit, rule=rule))
        return found

    def exceeded(self, held: Mapping[str, int], rule: str) -> list[Problem]:
        """Return a problem for each device or rank that holds more than its limit.

        Args:
            held: name -> bytes.
            rule: text with {name}, {limit} and {held}, and what the user may do.
        """
        return [
            self.problem(rule.format(name=name, limit=gib(self.of(name)), held=gib(size)))
            for name, size in held.items()
            if size > self.of(name)
        ]

    def problem(self, rule: str) -> Problem:
        """Return a problem of the limits, with the value as the command line writes it."""
        value: object = self.given
        if isinstance(self.given, Mapping):
            value = "{" + ",".join(f"{name}:{limit}" for name, limit in self.given.items()) + "}"
        return Problem(key="strategy.max_memory", value=value, rule=rule)


def _precision(context: PlanContext) -> Precision:
    return Precision(value=context.precision)  # type: ignore[arg-type]


def _device_named(key: str) -> str | None:
    return parse_device(int(key) if str(key).isdigit() else key)


@dataclass(frozen=True, kw_only=True)
class ModelMap:
    """A map of the blocks of a model over the devices of a replica."""

    blocks: Mapping[str, Any] | None
    """The user's map; None: balanced by bytes."""
    devices: tuple[str, ...]
    """The devices in use, in order."""
    max_memory: float | Mapping[str, float] | None = None
    """GiB that the devices may take: for all, or by device; None: no limit."""
    counts_places: bool = False
    """Whether the values of the map are places, counted from 0 in `devices`; else they are names of devices."""

    @property
    def limits(self) -> MemoryLimits:
        """The memory that the devices may take."""
        return MemoryLimits(given=self.max_memory, names=self.devices, noun="device", spelled=_device_named)

    def layout(self, model: nn.Module, precision: Precision, context: PlanContext | None = None) -> DeviceLayout:
        """Return the layout of a model, which may be on the meta device.

        Args:
            model: the model.
            precision: the precision of the run.
            context: used for the activations of a shard, which `auto` counts; None: not counted.

        Raises:
            ConfigError: the map does not fit the model.
        """
        units, alone = blocks_of(model), len(self.devices) == 1  # and nothing to balance
        kept = activations_of(model, units, None if alone else context, precision)
        sizes, counted = with_activations(unit_bytes(units, model_bytes(precision)), kept)
        if self.blocks is None:
            return self._balanced(units, sizes, counted)
        assigned = assign(model, units, self.blocks)
        if problems := assigned.problems or validate_layout(units, assigned, self.blocks, same=self._place):
            raise ConfigError(problems)
        places = tuple(None if given is None else self._place(given) for given in assigned.places)
        layout = DeviceLayout(units=units, group=self.devices, places=places, routed=True)
        held = dict.fromkeys(self.devices, 0)
        for size, place in zip(sizes, places, strict=True):
            if place is not None:
                held[self.devices[place]] += size
        rule = f"{{name}} takes {{limit}}, and strategy.map puts {{held}} of {counted} there. "
        rule += "Move blocks to another device."
        if problems := self.limits.exceeded(held, rule):
            raise ConfigError(problems)
        return layout

    def _place(self, given: int | str) -> int | None:
        """Return the place that a value of the map names; None if it names none."""
        if self.counts_places:
            return given if isinstance(given, int) and 0 <= given < len(self.devices) else None
        device = parse_device(given)
        return self.devices.index(device) if device in self.devices else None

    def _balanced(self, units: tuple[Block, ...], sizes: Sequence[int], counted: str) -> DeviceLayout:
        capacities = list(map(self.limits.of, self.devices))
        found = balanced(sizes, capacities, leaders=leaders_of(units))
        if found is None:
            largest = max(range(len(units)), key=sizes.__getitem__)
            rule = (
                f"too little: the model needs {gib(sum(sizes))} for {counted}, its largest "
                f"block, {units[largest].name}, {gib(sizes[largest])}; {', '.join(self.devices)} take "
                f"{gib(sum(capacities))}. Give more memory or more devices."
            )
            raise ConfigError([self.limits.problem(rule)])
        return DeviceLayout(units=units, group=self.devices, places=tuple(found), routed=len(set(found)) > 1)

    def problems(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return the problems of the map for a model."""
        try:
            self.layout(model, _precision(context), context)
        except ConfigError as error:
            return list(error.problems)
        return []

    def fitting(self, model: nn.Module, context: PlanContext) -> DeviceLayout | None:
        """Return the layout of a planned model; None if the map does not fit."""
        try:
            return self.layout(model, _precision(context), context)
        except ConfigError:
            return None

    def parts(self, model: nn.Module, context: PlanContext, shown: Sequence[str] = ()) -> tuple[StagePart, ...]:
        """Return each consecutive part of a replica; none if the map does not fit.

        Args:
            model: the model.
            context: the planned run.
            shown: the text for each device; empty: its name.
        """
        layout = self.fitting(model, context)
        bytes_of = model_bytes(_precision(context))
        return () if layout is None else replace(layout, group=tuple(shown) or self.devices).parts(bytes_of)

    def held_parts(self, model: nn.Module, context: PlanContext, *, gradient_copies: float) -> tuple[ReplicaPart, ...]:
        """Return the part of a replica that each device holds and computes; none if the map does not fit."""
        layout = self.fitting(model, context)
        return () if layout is None else layout.held_parts(model, gradient_copies=gradient_copies)
