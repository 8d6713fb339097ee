"""Move the blocks of a model to their devices, and activations between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.errors import ConfigError, Problem
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import ModelMemory, PlanContext, ReplicaPart, SetupRequest, StagePart
from trainkit.strategies.groups.process_group import device_list_problems, parse_device
from trainkit.strategies.maps.syntax import (
    Block,
    assign,
    blocks_of,
    collapsed,
    distinct_tensors,
    leaders_of,
    names_of,
    validate_layout,
)
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
            model.register_forward_hook(lambda _module, _args, outputs: _moved_to(outputs, self.device))
        return model

    def parts(self, bytes_of: Callable[[Tensor], int]) -> tuple[StagePart, ...]:
        """Return the consecutive parts of the model that are in one place, in the order of the model."""
        counted: set[int] = set()
        return tuple(
            part_of(stage, [unit for unit, _ in members], bytes_of, self.group[place], counted)
            for stage, (place, members) in enumerate(groupby(self.placed, key=lambda item: item[1]))
        )

    def device_parts(self, model: nn.Module, *, gradient_copies: float) -> tuple[ReplicaPart, ...]:
        """Return the part of a replica that each device holds and computes.

        Args:
            model: the model of this layout, possibly without data.
            gradient_copies: copies of a device's gradients at the peak of a step.
        """
        resident: dict[torch.device, dict[str, int]] = {}
        for name, param in model.named_parameters():
            resident.setdefault(self.device_of(name), {})[name] = param.numel()
        parts = []
        for device, elements in resident.items():
            units = [unit for unit, place in self.placed if torch.device(self.group[place]) == device]
            entries = [entry for unit in units for entry in unit.entries]
            memory = ModelMemory(resident=elements, gradient_copies=gradient_copies)
            parts.append(ReplicaPart(modules=names_of(model, entries), memory=memory))
        return tuple(parts)


def part_of(
    stage: int, units: Sequence[Block], bytes_of: Callable[[Tensor], int], device: str, counted: set[int] | None = None
) -> StagePart:
    """Return a part of a model for the plan; a tensor whose id is in `counted` was counted in an earlier part."""
    tensors = distinct_tensors(units, counted)
    return StagePart(
        stage=stage,
        modules=", ".join(collapsed([unit.name for unit in units])),
        num_params=sum(tensor.numel() for tensor in tensors if isinstance(tensor, nn.Parameter)),
        num_bytes=sum(map(bytes_of, tensors)),
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
        brought = _moved_to((args, kwargs), device)
        moved[:] = [ObjectSnapshot([("", brought)])]
        return brought

    return hook


def _check_arguments(block: str, moved: list[ObjectSnapshot]) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, _outputs: Any) -> None:
        for snapshot in moved:
            refuse_changes(snapshot, block, "and a device map gives it copies of lists and dicts on its device")
        moved.clear()

    return hook


def _moved_to(values: Any, device: torch.device) -> Any:
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)


_META = torch.device("meta")


def activation_bytes(
    model: nn.Module, units: Sequence[Block], forward: Callable[[Callable[..., Any]], Any], precision: Precision
) -> list[int] | None:
    """Return the bytes that autograd saves for the backward pass of one shard, by the block that computes them.

    The pass runs on torch's `meta` device: it takes no memory, and no arithmetic. A tensor that several blocks save
    counts in the first; tensors computed between blocks count in the previous block.

    Args:
        model: the model, with or without data; unchanged.
        units: the blocks of the model.
        forward: runs the given model function on a shard that has shapes and no data, and computes the loss.
        precision: defines the dtype of the model; an autocast to a narrower one is not simulated.

    Returns:
        None if the model cannot run without data.
    """
    dtype = precision.model_dtype
    state = {
        name: _without_numbers(tensor, dtype)
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    }
    sizes, storages = [0] * len(units), {_storage(tensor) for tensor in state.values()}
    alive: list[Any] = []  # so that no new storage reuses a known address
    running = 0

    def note(tensor: Tensor) -> Tensor:
        if (storage := _storage(tensor)) not in storages and sizes:
            storages.add(storage)
            alive.append(tensor)
            sizes[running] += tensor.untyped_storage().nbytes()
        return tensor

    def enter(index: int, *_: object) -> None:
        nonlocal running
        running = index

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
        return functional_call(model, state, args, kwargs)

    handles = [
        module.register_forward_pre_hook(partial(enter, index))
        for index, unit in enumerate(units)
        for module in unit.entries
    ]
    try:
        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            alive.append(forward(run))
    except Exception:  # noqa: BLE001 - a forward pass that reads data may fail in any way
        return None
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def activations_of(
    model: nn.Module, units: Sequence[Block], context: PlanContext | None, precision: Precision
) -> list[int] | None:
    """Return `activation_bytes` for a shard of a config; None if no sample or objective is known.

    The last result for a model is cached, because planning needs it several times.
    """
    if context is None or context.objective is None or context.sample is None:
        return None
    objective, key = context.objective, (context.micro_size, precision.value, *(unit.name for unit in units))
    sample, known_objective, known_key, sizes = _KNOWN.get(model, (None, None, None, None))
    if sample is not context.sample or known_objective is not objective or known_key != key:
        batch = tree_map(lambda value: _with_rows(value, context.micro_size), context.collate([context.sample], [0]))
        sizes = activation_bytes(model, units, lambda run: objective.loss(run, batch), precision)
        _KNOWN[model] = context.sample, objective, key, sizes
    return sizes


_KNOWN: WeakKeyDictionary[nn.Module, tuple[object, object, object, list[int] | None]] = WeakKeyDictionary()
"""Model -> a sample, the objective, (size of the shard, precision, names of the blocks), and the estimate for these."""


def _with_rows(value: Any, count: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty((count, *value.shape[1:]), dtype=value.dtype, device=_META)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - meta tensors have no address


def _without_numbers(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    empty = torch.empty_like(tensor, device=_META, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
    return empty.requires_grad_(tensor.requires_grad)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


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
    free = [index for index, leader in enumerate(leaders) if leader == index]
    total = [0]  # bytes of the first blocks that are free to move, each with those that must share its place
    for index in free:
        total.append(total[-1] + sum(size for size, leader in zip(sizes, leaders, strict=True) if leader == index))
    count = len(free)
    # best[end]: the least maximum of the places so far, if they hold the first `end` blocks
    best = [0.0] + [math.inf] * count
    starts: list[list[int]] = []
    for capacity in capacities:
        reached, chosen = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(count + 1):
            for start in range(end, -1, -1):
                load = total[end] - total[start]
                if load > capacity or load >= reached[end]:
                    break
                if fill and not load:
                    continue
                worst = max(best[start], load)
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
    counted: set[int] = set()
    return [sum(map(bytes_of, distinct_tensors([unit], counted))) for unit in units]


def with_activations(sizes: Sequence[int], activations: Sequence[int] | None) -> tuple[list[int], str]:
    """Return bytes of blocks with those of their activations, if these are known, and in words what they count."""
    if activations is None:
        return list(sizes), "parameters, gradients and buffers"
    return [size + more for size, more in zip(sizes, activations, strict=True)], (
        "parameters, gradients, buffers and the activations of a shard"
    )


def gib(num_bytes: float) -> str:
    """Return bytes as text, `1.5 GiB`."""
    return f"{num_bytes / 2**30:.3g} GiB"


@dataclass(frozen=True, kw_only=True)
class MemoryLimits:
    """Memory that the devices or the ranks of a replica may take, for all or by name.

    Example:
        >>> MemoryLimits(limits={"1": 2.0}, names=("0", "1"), noun="rank").of("1") == 2 * 2**30
        True
    """

    limits: float | Mapping[str, float] | None
    """Limits in GiB; None: no limit."""
    names: Sequence[str]
    """The devices, or the numbers of the ranks."""
    noun: str
    """What the names are."""
    spelled: Callable[[str], str | None] = lambda name: name
    """Function that returns the name for a key of the user; None for a key that names nothing."""

    def of(self, name: str) -> float:
        """Return a limit in bytes, `math.inf` if there is none."""
        if isinstance(self.limits, Mapping):
            return {self.spelled(key): limit for key, limit in self.limits.items()}.get(name, math.inf) * 2**30
        return math.inf if self.limits is None else self.limits * 2**30

    def problems(self) -> list[Problem]:
        """Return problems: names that do not exist, and limits that are not positive."""
        problems = []
        for name, limit in self.limits.items() if isinstance(self.limits, Mapping) else ():
            key = f"strategy.max_memory.{name}"
            if limit <= 0:
                problems.append(Problem(key=key, value=limit, rule="must be more than 0."))
            if self.spelled(name) not in self.names:
                rule = f"no such {self.noun}: there are {', '.join(self.names)}."
                problems.append(Problem(key=key, value=limit, rule=rule))
        return problems

    def exceeded(self, loads: Mapping[str, int], rule: str) -> list[Problem]:
        """Return a problem for each device or rank that holds more than its limit.

        Args:
            loads: name -> bytes.
            rule: text with {name}, {limit} and {held}, and what the user may do.
        """
        return [
            self.problem(rule.format(name=name, limit=gib(self.of(name)), held=gib(size)))
            for name, size in loads.items()
            if size > self.of(name)
        ]

    def problem(self, rule: str) -> Problem:
        """Return a problem of the limits, with the value as the command line writes it."""
        value: object = self.limits
        if isinstance(self.limits, Mapping):
            value = "{" + ",".join(f"{name}:{limit}" for name, limit in self.limits.items()) + "}"
        return Problem(key="strategy.max_memory", value=value, rule=rule)


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
        return MemoryLimits(limits=self.max_memory, names=self.devices, noun="device", spelled=_device_named)

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
        activations = activations_of(model, units, None if alone else context, precision)
        sizes, counted = with_activations(unit_bytes(units, model_bytes(precision)), activations)
        if self.blocks is None:
            return self._balanced(units, sizes, counted)
        assigned = assign(model, units, self.blocks)
        if problems := assigned.problems or validate_layout(units, assigned, self.blocks, same=self._place):
            raise ConfigError(problems)
        places = tuple(None if value is None else self._place(value) for value in assigned.places)
        layout = DeviceLayout(units=units, group=self.devices, places=places, routed=True)
        loads = dict.fromkeys(self.devices, 0)
        for size, place in zip(sizes, places, strict=True):
            if place is not None:
                loads[self.devices[place]] += size
        rule = f"{{name}} takes {{limit}}, and strategy.map puts {{held}} of {counted} there. "
        rule += "Move blocks to another device."
        if problems := self.limits.exceeded(loads, rule):
            raise ConfigError(problems)
        return layout

    def _place(self, value: int | str) -> int | None:
        """Return the place that a value of the map names; None if it names none."""
        if self.counts_places:
            return value if isinstance(value, int) and 0 <= value < len(self.devices) else None
        device = parse_device(value)
        return self.devices.index(device) if device in self.devices else None

    def _balanced(self, units: tuple[Block, ...], sizes: Sequence[int], counted: str) -> DeviceLayout:
        capacities = list(map(self.limits.of, self.devices))
        places = balanced(sizes, capacities, leaders=leaders_of(units))
        if places is None:
            largest = max(range(len(units)), key=sizes.__getitem__)
            rule = (
                f"too little: the model needs {gib(sum(sizes))} for {counted}, its largest "
                f"block, {units[largest].name}, {gib(sizes[largest])}; {', '.join(self.devices)} take "
                f"{gib(sum(capacities))}. Give more memory or more devices."
            )
            raise ConfigError([self.limits.problem(rule)])
        return DeviceLayout(units=units, group=self.devices, places=tuple(places), routed=len(set(places)) > 1)

    def problems(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return the problems of the map for a model."""
        try:
            self.layout(model, context.formats, context)
        except ConfigError as error:
            return list(error.problems)
        return []

    def fitting(self, model: nn.Module, context: PlanContext) -> DeviceLayout | None:
        """Return the layout of a planned model; None if the map does not fit."""
        try:
            return self.layout(model, context.formats, context)
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
        bytes_of = model_bytes(context.formats)
        return () if layout is None else replace(layout, group=tuple(shown) or self.devices).parts(bytes_of)

    def device_parts(
        self, model: nn.Module, context: PlanContext, *, gradient_copies: float
    ) -> tuple[ReplicaPart, ...]:
        """Return the part of a replica that each device holds and computes; none if the map does not fit."""
        layout = self.fitting(model, context)
        return () if layout is None else layout.device_parts(model, gradient_copies=gradient_copies)


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
        >>> replica_map = ReplicaMap.of({"embed": 0, "rest": 1}, None, "auto", PlanContext(num_gpus=4))
        >>> replica_map.groups, replica_map.first_devices
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
            named = (entry if isinstance(entry, tuple | list) else (entry,) for entry in devices)
            groups = tuple(tuple(parse_device(device) or "cpu" for device in group) for group in named)
            return cls(blocks=blocks, groups=groups)
        count, size = _count_and_size(blocks, replicas, context)
        names = [f"cuda:{index}" if context.num_gpus else "cpu" for index in range(count * size)]
        groups = tuple(tuple(names[start : start + size]) for start in range(0, count * size, size))
        return cls(blocks=blocks, groups=groups)

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
        group = next(group for group in self.groups if _first(group) == request.identity.task.device)
        return self.on(group).layout(request.model, request.precision)


def group_problems(
    blocks: BlockMap | None, devices: Devices | None, replicas: int | Literal["auto"], context: PlanContext
) -> list[Problem]:
    """Return the problems of a map and of groups of devices; `ReplicaMap.of` needs that there are none."""
    if blocks is None:
        if not any(isinstance(entry, tuple | list) for entry in devices or ()):
            return []
        rule = "names a group of devices for a replica, and no map spreads it over them. Add strategy.map=auto."
        return [Problem(key="strategy.devices", value=_shown(devices), rule=rule)]
    if not blocks:
        rule = "places nothing. Name modules and their places, {embed:0,rest:1}, or use auto."
        return [Problem(key="strategy.map", value="{}", rule=rule)]
    places = blocks.items() if isinstance(blocks, Mapping) else ()
    rule = "must be a place in a replica's group of devices, counted from 0: strategy.devices names the devices."
    named = [(f"strategy.map.{word}", place) for word, place in places]
    problems = [Problem(key=key, value=place, rule=rule) for key, place in named if isinstance(place, str) or place < 0]
    problems = problems or list(
        _device_problems(devices, context) if devices is not None else _size_problems(blocks, replicas, context)
    )
    if problems:
        return problems
    size = len(ReplicaMap.of(blocks, devices, replicas, context).groups[0])
    rule = f"no such place: a replica has {size} device{'' if size == 1 else 's'}, counted from 0."
    return [
        Problem(key=key, value=place, rule=rule) for key, place in named if isinstance(place, int) and place >= size
    ]


def _first(group: Sequence[str]) -> str:
    return next((device for device in group if device != "cpu"), "cpu")


def _shown(devices: Devices | None) -> list[object]:
    """Return the configured devices as lists, as messages show them."""
    return [list(entry) if isinstance(entry, tuple | list) else entry for entry in devices or ()]


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
    if not all(isinstance(entry, list) and entry for entry in shown) or not shown:
        rule = f"must name a group of devices for each replica where strategy.map is set: {_EXAMPLE}."
        yield Problem(key=key, value=shown, rule=rule)
        return
    groups = [entry for entry in shown if isinstance(entry, list)]
    flat = [name for group in groups for name in group]
    because = "A GPU is in one place of one replica."
    if problems := device_list_problems(key, flat, context.num_gpus, because=because):
        yield from (replace(problem, value=shown) if problem.value == flat else problem for problem in problems)
        return
    kinds = [[(parse_device(name) or "cpu").partition(":")[0] for name in group] for group in groups]
    if other := next((kind for kind in kinds if kind != kinds[0]), None):
        rule = f"has a group of {', '.join(kinds[0])} and one of {', '.join(other)}. Replicas have the same devices, "
        yield Problem(key=key, value=shown, rule=f"{rule}in the same order: one map serves all.")
    launch = context.launch
    if launch is not None and not launch.takes_devices and len(groups) != launch.num_local:
        rule = f"names {len(groups)} groups, and {launch.kind} started {launch.num_local} processes on this host, a "
        yield Problem(key=key, value=shown, rule=f"{rule}replica each. Name as many groups.")
