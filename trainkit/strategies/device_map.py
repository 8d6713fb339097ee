"""One replica on several devices: a map places its blocks, activations are moved between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import above, placement, unit
from trainkit.strategies.base import Facts, ModelMemory, PlanContext, ReplicaPart, SetupRequest, StagePart
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.synchronous import (
    OneProcess,
    SynchronousExecutor,
    build_parts,
    synchronous_gradient_copies,
)
from trainkit.strategies.groups.process_group import device_problems, parse_device
from trainkit.strategies.maps.layout import ModelMap


@dataclass(frozen=True, kw_only=True)
class DeviceMap(OneProcess):
    """Train one replica on several devices, in one process.

    Example:
        >>> DeviceMap(map={"embed": "cpu", "rest": 0}).tasks(PlanContext(num_gpus=1))
        (Task(role='worker', index=0, rank=0, device='cuda:0'),)
    """

    called: ClassVar[str] = "a device map"
    facts: ClassVar[Facts] = Facts(several_optimizers=True, shows_gradients=True, runs_hooks=True)

    map: Annotated[Mapping[str, int | str] | Literal["auto"], placement] = "auto"
    """Module names, prefixes, ranges (`blocks.0-5`) and `rest`, each with a device; `auto`: balanced by bytes."""
    devices: Annotated[tuple[int | str, ...] | None, placement] = None
    """Devices that `auto` fills, in this order; null: all GPUs, else the CPU."""
    max_memory: Annotated[Annotated[float, above(0)] | Mapping[str, float] | None, placement, unit("GiB")] = None
    """GiB of parameters, gradients, buffers and a shard's activations on a device: for all, or by device, `{0:20}`."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems of the devices; `validate_model` checks the map."""
        if problems := self.launch_problems(context.launch):
            return problems
        named: list[tuple[str, int | str]] = [("strategy.devices", device) for device in self.devices or ()]
        if isinstance(self.map, Mapping):
            named += [(f"strategy.map.{word}", device) for word, device in self.map.items()]
        problems = [problem for key, device in named for problem in device_problems(key, device, context.num_gpus)]
        if self.map == {}:
            rule = "places nothing. Name modules and their devices, {embed:0,rest:1}, or use auto."
            problems.append(Problem(key="strategy.map", value="{}", rule=rule))
        if self.map != "auto" and self.devices is not None:
            rule = "has no effect with strategy.map, which names its devices itself. Leave one of the two out."
            problems.append(Problem(key="strategy.devices", value=list(self.devices), rule=rule))
        if self.devices == ():
            rule = "names no device. Name some, [0,1], or null for all."
            problems.append(Problem(key="strategy.devices", value=[], rule=rule))
        return problems or self._map(context.num_gpus).limits.problems()

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:
        """Return problems of the map for this model."""
        return self._map(context.num_gpus).problems(model, context)

    def describe_partition(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:
        """Return each consecutive part of the model on one device."""
        return self._map(context.num_gpus).parts(model, context)

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> DeviceMap:
        """Return the strategy with a map instead of `auto`: the activations of each block are known only here."""
        if self.map != "auto" or len(self._used_devices(context.num_gpus)) == 1:
            return self
        layout = self._map(context.num_gpus).layout(build(), context.formats, context)
        return replace(self, map={unit.name: layout.group[index] for unit, index in layout.placed}, devices=None)

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return the memory of the device with the largest use, and the partial sums of a reproducible run."""
        memories = (part.memory for part in self.replica_parts(model, context))
        return max(memories, key=lambda memory: sum(memory.resident.values()))

    def replica_parts(self, model: nn.Module, context: PlanContext) -> tuple[ReplicaPart, ...]:
        """Return the blocks of each device; one part for all if the map does not fit the model."""
        copies = synchronous_gradient_copies(context.numerics, 1)
        parts = self._map(context.num_gpus).device_parts(model, context, gradient_copies=copies)
        return parts or (ReplicaPart(modules=(), memory=super().estimate_memory(model, context)),)

    def num_slots(self, num_gpus: int) -> int:
        """Return the number of GPUs in the map; on the CPU the parts run one after another."""
        return max(1, sum(device != "cpu" for device in self._used_devices(num_gpus)))

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return one task; its device is the first GPU of the map, else the CPU."""
        devices = self._used_devices(context.num_gpus)
        first = min(devices, key=lambda device: device == "cpu")
        return (Task(role="worker", index=0, rank=0, device=first, computes_on=tuple(devices)),)

    def setup(self, request: SetupRequest) -> SynchronousExecutor[Replica]:
        """Move each block to its device.

        Raises:
            ConfigError: the map does not fit the model.
        """
        layout = self._map(torch.cuda.device_count()).layout(request.model, request.precision)
        return SynchronousExecutor(Replica(build_parts(request, placement=layout)), request.training)

    def _map(self, num_gpus: int) -> ModelMap:
        """Return the map over the devices of a host."""
        blocks = self.map if isinstance(self.map, Mapping) else None
        return ModelMap(blocks=blocks, devices=self._used_devices(num_gpus), max_memory=self.max_memory)

    def _used_devices(self, num_gpus: int) -> tuple[str, ...]:
        """Return the devices of the map, in its order."""
        if isinstance(self.map, Mapping):
            named: Sequence[int | str] = tuple(self.map.values())
        else:
            named = self.devices or tuple(range(num_gpus)) or ("cpu",)
        return tuple(dict.fromkeys(device for name in named if (device := parse_device(name)) is not None)) or ("cpu",)
