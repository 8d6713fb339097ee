"""Replicas of several devices each: the group of devices of every replica, and the map of blocks over a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import ConfigError, Problem
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import PlanContext, SetupRequest, StagePart
from trainkit.strategies.groups.devices import device_problems, parse_device
from trainkit.strategies.memory import ReplicaPart
from trainkit.strategies.partition.activations import activations_in
from trainkit.strategies.partition.device_layout import DeviceLayout
from trainkit.strategies.partition.solver import PartitionSolver, model_bytes
from trainkit.strategies.traffic import precision_of

BlockMap = Mapping[str, int | str] | Literal["auto"]
"""Names of blocks, each with a place in the group of a replica, counted from 0; auto: balanced by bytes."""

Devices = tuple[int | str | tuple[int | str, ...], ...]
"""A device for each replica, or a group of devices for each."""

_EXAMPLE = "strategy.devices=[[0,1],[2,3]]"


@dataclass(frozen=True, kw_only=True)
class ReplicaMap:
    """The devices of each replica of a host, and the place of each block in such a group.

    The groups have as many devices each, of the same types in the same order: one map serves every replica.

    Example:
        >>> found = ReplicaMap.of({"embed": 0, "rest": 1}, None, "auto", PlanContext(num_gpus=4))
        >>> found.groups, found.first_devices
        ((('cuda:0', 'cuda:1'), ('cuda:2', 'cuda:3')), ('cuda:0', 'cuda:2'))
    """

    blocks: BlockMap
    """The configured map."""
    groups: tuple[tuple[str, ...], ...]
    """The devices of each replica of this host, in torch's spelling."""

    @classmethod
    def of(
        cls, blocks: BlockMap, devices: Devices | None, replicas: int | Literal["auto"], context: PlanContext
    ) -> ReplicaMap:
        """Return the groups in `devices`, else groups of neighbouring GPUs, else groups of the CPU."""
        if devices is not None:
            named = (one if isinstance(one, Sequence) and not isinstance(one, str) else (one,) for one in devices)
            groups = tuple(tuple(parse_device(device) or "cpu" for device in group) for group in named)
            return cls(blocks=blocks, groups=groups)
        count, size = _count_and_size(blocks, replicas, context)
        gpus = context.num_gpus > 0
        groups = tuple(
            tuple(f"cuda:{first + place}" if gpus else "cpu" for place in range(size))
            for first in range(0, count * size, size)
        )
        return cls(blocks=blocks, groups=groups)

    @property
    def first_devices(self) -> tuple[str, ...]:
        """The device of each replica's task: the first GPU of its group, else the CPU."""
        return tuple(map(_first, self.groups))

    @property
    def mixes_types(self) -> bool:
        """Whether a group has GPUs and the CPU."""
        return len({device.partition(":")[0] for group in self.groups for device in group}) > 1

    @property
    def spans_gpus(self) -> bool:
        """Whether a group has several GPUs."""
        return any(len(set(group) - {"cpu"}) > 1 for group in self.groups)

    def problems(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return the problems of the map for a model, which may be on the meta device."""
        layout = self._planned(model, context)
        return [] if isinstance(layout, DeviceLayout) else layout

    def places_by_name(self, model: nn.Module, context: PlanContext) -> dict[str, int]:
        """Return the place of each block that has one, by its name.

        Raises:
            ConfigError: the map does not fit the model.
        """
        layout = _fitting(self._planned(model, context))
        placed = zip(layout.units, layout.places, strict=True)
        return {unit.name: place for unit, place in placed if place is not None}

    def parts(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
        """Return each consecutive part of a replica, with its device in every one; none if the map does not fit."""
        layout = self._planned(model, context)
        if not isinstance(layout, DeviceLayout):
            return ()
        shown = tuple(", ".join(dict.fromkeys(column)) for column in zip(*self.groups, strict=True))
        return replace(layout, group=shown).parts(model_bytes(precision_of(context)))

    def held_parts(self, model: nn.Module, context: PlanContext, *, gradient_copies: float) -> tuple[ReplicaPart, ...]:
        """Return the part of a replica that each device holds and computes; none if the map does not fit."""
        layout = self._planned(model, context)
        return layout.held_parts(model, gradient_copies=gradient_copies) if isinstance(layout, DeviceLayout) else ()

    def placement(self, request: SetupRequest) -> DeviceLayout:
        """Return the layout of the model on the devices of this rank.

        Raises:
            ConfigError: the map does not fit the model.
        """
        group = next(one for one in self.groups if _first(one) == request.identity.task.device)
        return _fitting(self.layout(request.model, group, request.precision))

    def _planned(self, model: nn.Module, context: PlanContext) -> DeviceLayout | list[Problem]:
        return self.layout(model, self.groups[0], precision_of(context), context)

    def layout(
        self, model: nn.Module, group: Sequence[str], precision: Precision, context: PlanContext | None = None
    ) -> DeviceLayout | list[Problem]:
        """Return the layout of a model on a group, or the problems of the map.

        Args:
            model: the model, possibly on the meta device.
            group: the devices of one replica.
            precision: the precision of the run.
            context: used for the activations of a shard, which `auto` counts; None: not counted.
        """
        return PartitionSolver(
            given=None if self.blocks == "auto" else self.blocks,
            devices=group,
            capacities={},
            bytes_of=model_bytes(precision),
            activations=activations_in(context if len(group) > 1 else None, precision),
            counts_places=True,
        ).layout(model)


def group_problems(
    blocks: BlockMap | None, devices: Devices | None, replicas: int | Literal["auto"], context: PlanContext
) -> list[Problem]:
    """Return the problems of a map and of groups of devices; `ReplicaMap.of` needs that there are none."""
    if blocks is None:
        if not any(_is_group(one) for one in devices or ()):
            return []
        rule = "names a group of devices for a replica, and no map spreads it over them. Add strategy.map=auto."
        return [Problem(key="strategy.devices", value=_shown(devices), rule=rule)]
    if not blocks:
        rule = "places nothing. Name modules and their places, {embed:0,rest:1}, or use auto."
        return [Problem(key="strategy.map", value="{}", rule=rule)]
    if found := list(_value_problems(blocks)):
        return found
    found = list(
        _device_problems(devices, context) if devices is not None else _size_problems(blocks, replicas, context)
    )
    if found:
        return found
    return list(_place_problems(blocks, len(ReplicaMap.of(blocks, devices, replicas, context).groups[0])))


def _fitting(layout: DeviceLayout | list[Problem]) -> DeviceLayout:
    if not isinstance(layout, DeviceLayout):
        raise ConfigError(layout)
    return layout


def _first(group: Sequence[str]) -> str:
    return next((device for device in group if device != "cpu"), "cpu")


def _is_group(one: object) -> bool:
    return isinstance(one, Sequence) and not isinstance(one, str)


def _shown(devices: Devices | None) -> list[object]:
    """Return the configured devices as lists, as messages show them."""
    return [list(one) if isinstance(one, Sequence) and not isinstance(one, str) else one for one in devices or ()]


def _count_and_size(blocks: BlockMap, replicas: int | Literal["auto"], context: PlanContext) -> tuple[int, int]:
    """Return the replicas of this host, and the number of devices of each."""
    launch, gpus = context.launch, context.num_gpus
    count = replicas if replicas != "auto" else _started_here(launch)
    if isinstance(blocks, Mapping):
        size = max(place for place in blocks.values() if isinstance(place, int)) + 1
    else:
        size = max(gpus // count if count and gpus else 1, 1)
    return max(count or (gpus // size if gpus else 2), 1), size


def _started_here(launch: LaunchEnvironment | None) -> int | None:
    """Return the replicas that a launch starts on this host; None if the number of devices decides."""
    return None if launch is None or (launch.takes_devices and launch.num_local == 1) else launch.num_local


def _size_problems(blocks: BlockMap, replicas: int | Literal["auto"], context: PlanContext) -> Iterator[Problem]:
    """Yield the problems of groups that are not given explicitly."""
    gpus = context.num_gpus
    if blocks == "auto" and not gpus:
        rule = "has no GPU to spread a replica over. Name the devices: strategy.devices=[[cpu,cpu],[cpu,cpu]]."
        yield Problem(key="strategy.map", value="auto", rule=rule)
    elif blocks == "auto" and replicas == "auto" and _started_here(context.launch) is None:
        rule = (
            f"spreads each replica over a group of GPUs, whose size is open. Name the groups, {_EXAMPLE}, or replicas."
        )
        yield Problem(key="strategy.map", value="auto", rule=rule)
    elif gpus:
        count, size = _count_and_size(blocks, replicas, context)
        if count * size > gpus:
            rule = f"{count} replicas of {size} devices need {count * size}, and this host has {gpus} GPUs."
            yield Problem(key="strategy.map", rule=f"{rule} Use fewer replicas, or name devices: {_EXAMPLE}.")


def _device_problems(devices: Devices, context: PlanContext) -> Iterator[Problem]:
    """Yield the problems of groups that `strategy.devices` names."""
    key, shown = "strategy.devices", _shown(devices)
    if not all(isinstance(one, list) and one for one in shown) or not shown:
        rule = f"must name a group of devices for each replica where strategy.map is set: {_EXAMPLE}."
        yield Problem(key=key, value=shown, rule=rule)
        return
    groups = [one for one in shown if isinstance(one, list)]
    found = [problem for group in groups for name in group for problem in device_problems(key, name, context.num_gpus)]
    if found:
        yield from found
        return
    parsed = [[parse_device(name) or "cpu" for name in group] for group in groups]
    named = [device for group in parsed for device in group if device != "cpu"]
    if twice := sorted({device for device in named if named.count(device) > 1}):
        yield Problem(
            key=key, value=shown, rule=f"names {', '.join(twice)} twice. A GPU is in one place of one replica."
        )
    kinds = [[device.partition(":")[0] for device in group] for group in parsed]
    if other := next((kind for kind in kinds if kind != kinds[0]), None):
        rule = f"has a group of {', '.join(kinds[0])} and one of {', '.join(other)}. Replicas have the same devices, "
        yield Problem(key=key, value=shown, rule=f"{rule}in the same order: one map serves all.")
    launch = context.launch
    if launch is not None and not launch.takes_devices and len(groups) != launch.num_local:
        rule = f"names {len(groups)} groups, and {launch.kind} started {launch.num_local} processes on this host, a "
        yield Problem(key=key, value=shown, rule=f"{rule}replica each. Name as many groups.")


def _value_problems(blocks: BlockMap) -> Iterator[Problem]:
    """Yield a problem for each value that is not a place."""
    for word, place in blocks.items() if isinstance(blocks, Mapping) else ():
        if not isinstance(place, int) or place < 0:
            rule = (
                "must be a place in a replica's group of devices, counted from 0: strategy.devices names the devices."
            )
            yield Problem(key=f"strategy.map.{word}", value=place, rule=rule)


def _place_problems(blocks: BlockMap, size: int) -> Iterator[Problem]:
    """Yield a problem for each place that a group does not have."""
    for word, place in blocks.items() if isinstance(blocks, Mapping) else ():
        if isinstance(place, int) and place >= size:
            rule = f"no such place: a replica has {size} device{'' if size == 1 else 's'}, counted from 0."
            yield Problem(key=f"strategy.map.{word}", value=place, rule=rule)
