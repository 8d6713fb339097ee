"""One replica on several devices: a map places its blocks, activations are moved between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.errors import ConfigError, Problem
from trainkit.fields import above, placement
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import Facts, PlanContext, SetupRequest, StagePart, Strategy
from trainkit.strategies.core.refusals import launch_problems
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.synchronous import (
    SynchronousExecutor,
    build_parts,
    synchronous_gradient_copies,
)
from trainkit.strategies.groups.devices import device_problems, parse_device
from trainkit.strategies.memory import ModelMemory, ReplicaPart
from trainkit.strategies.partition.activations import activations_in
from trainkit.strategies.partition.device_layout import DeviceLayout
from trainkit.strategies.partition.solver import PartitionSolver, model_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceMap(Strategy):
    """Train one replica on several devices, in one process.

    Example:
        >>> DeviceMap(map={"embed": "cpu", "rest": 0}).tasks(PlanContext(num_gpus=1))
        (Task(role='worker', index=0, rank=0, device='cuda:0'),)
    """

    facts: ClassVar[Facts] = Facts(shows_gradients=True, runs_hooks=True)

    map: Annotated[Mapping[str, int | str] | Literal["auto"], placement] = "auto"
    """Module names, prefixes, ranges (`blocks.0-5`) and `rest`, each with a device; `auto`: balanced by bytes."""
    devices: Annotated[tuple[int | str, ...] | None, placement] = None
    """Devices that `auto` fills, in this order; null: all GPUs, else the CPU."""
    max_memory: Annotated[Annotated[float, above(0)] | Mapping[str, float] | None, placement] = None
    """GiB of parameters, gradients, buffers and a shard's activations on a device: for all, or by device, `{0:20}`."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of the devices; `validate_model` checks the map."""
        if found := self.launch_problems(context.launch):
            return found
        problems = [
            found for key, device in self._named_devices() for found in device_problems(key, device, context.num_gpus)
        ]
        if self.map == {}:
            rule = "places nothing. Name modules and their devices, {embed:0,rest:1}, or use auto."
            problems.append(Problem(key="strategy.map", value="{}", rule=rule))
        if self.map != "auto" and self.devices is not None:
            rule = "has no effect with strategy.map, which names its devices itself. Leave one of the two out."
            problems.append(Problem(key="strategy.devices", value=list(self.devices), rule=rule))
        if self.devices == ():
            rule = "names no device. Name some, [0,1], or null for all."
            problems.append(Problem(key="strategy.devices", value=[], rule=rule))
        return problems or self._memory_problems(context.num_gpus)

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return problems of the map for this model."""
        layout = self._judged(model, context)
        return [] if isinstance(layout, DeviceLayout) else self._with_limits(layout)

    def describe_partition(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
        """Return each consecutive part of the model on one device."""
        precision = Precision(value=context.precision)  # type: ignore[arg-type]
        layout = self._judged(model, context)
        return layout.parts(model_bytes(precision)) if isinstance(layout, DeviceLayout) else ()

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> DeviceMap:
        """Return the strategy with a map instead of `auto`: the activations of each block are known only here."""
        if self.map != "auto" or len(self._used(context.num_gpus)) == 1:
            return self
        layout = self._judged(build(), context)
        if not isinstance(layout, DeviceLayout):
            raise ConfigError(self._with_limits(layout))
        placed = zip(layout.units, layout.devices_by_unit, strict=True)
        return replace(self, map={unit.name: device for unit, device in placed if device is not None}, devices=None)

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the memory of the device with the largest use, and the partial sums of a reproducible run."""
        parts = self._parts(model, context)
        if not parts:
            return ModelMemory.whole(model, gradient_copies=synchronous_gradient_copies(context.numerics, 1))
        return max((part.memory for part in parts), key=lambda memory: sum(memory.resident.values()))

    def replica_parts(self, model: nn.Module, context: PlanContext, *, num_shards: int) -> tuple[ReplicaPart, ...]:
        """Return the blocks of each device; one part for all if the map does not fit the model."""
        return self._parts(model, context) or super().replica_parts(model, context, num_shards=num_shards)

    def _parts(self, model: nn.Module, context: PlanContext) -> tuple[ReplicaPart, ...]:
        layout = self._judged(model, context)
        if not isinstance(layout, DeviceLayout):
            return ()
        return layout.held_parts(model, gradient_copies=synchronous_gradient_copies(context.numerics, 1))

    def _judged(self, model: nn.Module, context: PlanContext) -> DeviceLayout | list[Problem]:
        """Return the layout of a model, which may be on the meta device, or the problems."""
        precision = Precision(value=context.precision)  # type: ignore[arg-type]
        return self._fitting(precision, context.num_gpus, context).layout(model)

    def num_slots(self, num_gpus: int) -> int:
        """Return the number of GPUs in the map; on the CPU the parts run one after another."""
        return max(1, sum(device != "cpu" for device in self._used(num_gpus)))

    def launch_problems(self, launch: LaunchEnvironment | None) -> list[Problem]:
        """Return the problem of more than one process."""
        return launch_problems(launch, named="device_map", called="a device map")

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return one task; its device is the first GPU of the map, else the CPU."""
        found = self._used(context.num_gpus)
        first = min(found, key=lambda device: device == "cpu")
        return (Task(role="worker", index=0, rank=0, device=first, computes_on=tuple(found)),)

    def num_replicas(self, context: PlanContext) -> int:  # noqa: ARG002 - the same on any host
        """Return one."""
        return 1

    def setup(self, request: SetupRequest) -> SynchronousExecutor[Replica]:
        """Move each block to its device.

        Raises:
            ConfigError: the map does not fit the model.
        """
        return SynchronousExecutor(Replica(build_parts(request, placement=self._layout(request))), request.training)

    def _layout(self, request: SetupRequest) -> DeviceLayout:
        """Return the layout of this model on the devices of this host."""
        layout = self._fitting(request.precision, torch.cuda.device_count()).layout(request.model)
        if not isinstance(layout, DeviceLayout):
            raise ConfigError(self._with_limits(layout))
        return layout

    def _fitting(self, precision: Precision, num_gpus: int, context: PlanContext | None = None) -> PartitionSolver:
        given = None if self.map == "auto" else self.map
        alone = len(self._used(num_gpus)) == 1  # and nothing to balance
        return PartitionSolver(
            given=given if isinstance(given, Mapping) else None,
            devices=self._used(num_gpus),
            capacities=self._capacities(num_gpus),
            bytes_of=model_bytes(precision),
            activations=activations_in(None if alone else context, precision),
        )

    def _with_limits(self, problems: list[Problem]) -> list[Problem]:
        """Return problems, with the configured value for those of memory."""
        key, limits = "strategy.max_memory", self.max_memory
        if isinstance(limits, Mapping):
            shown: object = "{" + ",".join(f"{device}:{gib}" for device, gib in limits.items()) + "}"
        else:
            shown = limits
        return [replace(one, value=shown) if one.key == key else one for one in problems]

    def _used(self, num_gpus: int) -> tuple[str, ...]:
        """Return the devices of the map, in its order."""
        if isinstance(self.map, Mapping):
            named: Sequence[int | str] = tuple(self.map.values())
        else:
            named = self.devices or tuple(range(num_gpus)) or ("cpu",)
        return tuple(dict.fromkeys(device for one in named if (device := parse_device(one)) is not None)) or ("cpu",)

    def _capacities(self, num_gpus: int) -> dict[str, float]:
        """Return device -> its byte limit, if it has one."""
        if isinstance(self.max_memory, Mapping):
            limits = {parse_device(_as_given(device)): gib for device, gib in self.max_memory.items()}
            return {device: gib * 2**30 for device, gib in limits.items() if device is not None}
        limit = self.max_memory
        return {} if limit is None else dict.fromkeys(self._used(num_gpus), limit * 2**30)

    def _named_devices(self) -> Iterator[tuple[str, int | str]]:
        if isinstance(self.map, Mapping):
            yield from ((f"strategy.map.{word}", device) for word, device in self.map.items())
        yield from (("strategy.devices", device) for device in self.devices or ())

    def _memory_problems(self, num_gpus: int) -> list[Problem]:
        if not isinstance(self.max_memory, Mapping):
            return []
        problems, used = [], self._used(num_gpus)
        for device, gib in self.max_memory.items():
            key = f"strategy.max_memory.{device}"
            if gib <= 0:
                problems.append(Problem(key=key, value=gib, rule="must be more than 0."))
            if parse_device(_as_given(device)) not in used:
                rule = f"not a device of this run. There are: {', '.join(used)}."
                problems.append(Problem(key=key, value=gib, rule=rule))
        return problems


def _as_given(device: str) -> int | str:
    """Return a device that was given as a mapping key, which is always text."""
    return int(device) if str(device).isdigit() else device
