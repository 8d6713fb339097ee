"""Replicas of several devices each: the group of devices of every replica, and the map of blocks over a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import Problem
from trainkit.strategies.base import PlanContext, SetupRequest, StagePart
from trainkit.strategies.groups.devices import device_list_problems, parse_device
from trainkit.strategies.maps.layout import DeviceLayout
from trainkit.strategies.maps.solver import ModelMap

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
            named = (one if isinstance(one, tuple | list) else (one,) for one in devices)
            groups = tuple(tuple(parse_device(device) or "cpu" for device in group) for group in named)
            return cls(blocks=blocks, groups=groups)
        count, size = _count_and_size(blocks, replicas, context)
        names = [f"cuda:{place}" if context.num_gpus else "cpu" for place in range(count * size)]
        return cls(blocks=blocks, groups=tuple(tuple(names[at : at + size]) for at in range(0, count * size, size)))

    def on(self, group: tuple[str, ...]) -> ModelMap:
        """Return the map over the devices of one replica."""
        return ModelMap(blocks=None if self.blocks == "auto" else self.blocks, devices=group, counts_places=True)

    @property
    def planned(self) -> ModelMap:
        """The map over the devices of the first replica, which serves all."""
        return self.on(self.groups[0])

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

    def parts(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
        """Return each consecutive part of a replica, with its device in every one; none if the map does not fit."""
        shown = [", ".join(dict.fromkeys(column)) for column in zip(*self.groups, strict=True)]
        return self.planned.parts(model, context, shown)

    def placement(self, request: SetupRequest) -> DeviceLayout:
        """Return the layout of the model on the devices of this rank.

        Raises:
            ConfigError: the map does not fit the model.
        """
        group = next(one for one in self.groups if _first(one) == request.identity.task.device)
        return self.on(group).layout(request.model, request.precision)


def group_problems(
    blocks: BlockMap | None, devices: Devices | None, replicas: int | Literal["auto"], context: PlanContext
) -> list[Problem]:
    """Return the problems of a map and of groups of devices; `ReplicaMap.of` needs that there are none."""
    if blocks is None:
        if not any(isinstance(one, tuple | list) for one in devices or ()):
            return []
        rule = "names a group of devices for a replica, and no map spreads it over them. Add strategy.map=auto."
        return [Problem(key="strategy.devices", value=_shown(devices), rule=rule)]
    if not blocks:
        rule = "places nothing. Name modules and their places, {embed:0,rest:1}, or use auto."
        return [Problem(key="strategy.map", value="{}", rule=rule)]
    places = blocks.items() if isinstance(blocks, Mapping) else ()
    rule = "must be a place in a replica's group of devices, counted from 0: strategy.devices names the devices."
    named = [(f"strategy.map.{word}", place) for word, place in places]
    found = [Problem(key=key, value=place, rule=rule) for key, place in named if isinstance(place, str) or place < 0]
    found = found or list(
        _device_problems(devices, context) if devices is not None else _size_problems(blocks, replicas, context)
    )
    if found:
        return found
    size = len(ReplicaMap.of(blocks, devices, replicas, context).groups[0])
    rule = f"no such place: a replica has {size} device{'' if size == 1 else 's'}, counted from 0."
    return [
        Problem(key=key, value=place, rule=rule) for key, place in named if isinstance(place, int) and place >= size
    ]


def _first(group: Sequence[str]) -> str:
    return next((device for device in group if device != "cpu"), "cpu")


def _shown(devices: Devices | None) -> list[object]:
    """Return the configured devices as lists, as messages show them."""
    return [list(one) if isinstance(one, tuple | list) else one for one in devices or ()]


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
    flat = [name for group in groups for name in group]
    because = "A GPU is in one place of one replica."
    if found := device_list_problems(key, flat, context.num_gpus, because=because):
        yield from (replace(one, value=shown) if one.value == flat else one for one in found)
        return
    kinds = [[(parse_device(name) or "cpu").partition(":")[0] for name in group] for group in groups]
    if other := next((kind for kind in kinds if kind != kinds[0]), None):
        rule = f"has a group of {', '.join(kinds[0])} and one of {', '.join(other)}. Replicas have the same devices, "
        yield Problem(key=key, value=shown, rule=f"{rule}in the same order: one map serves all.")
    launch = context.launch
    if launch is not None and not launch.takes_devices and len(groups) != launch.num_local:
        rule = f"names {len(groups)} groups, and {launch.kind} started {launch.num_local} processes on this host, a "
        yield Problem(key=key, value=shown, rule=f"{rule}replica each. Name as many groups.")
