"""Central storage: the variables on one device, copies that compute on several devices of one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import maths, placement
from trainkit.strategies.base import (
    Facts,
    LocalModel,
    LoopCall,
    PlanContext,
    SetupRequest,
    Strategy,
    ignore_phase,
)
from trainkit.strategies.central_storage.executor import AsyncCentralExecutor, CentralExecutor
from trainkit.strategies.core.copies import ComputingCopies, computing_copy
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.refusals import async_problems, launch_problems
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.synchronous import build_parts
from trainkit.strategies.groups.devices import device_list_problems, device_problems, parse_device
from trainkit.strategies.memory import ModelMemory
from trainkit.strategies.model_transforms import uncompiled

_CPU_THREADS = 2
"""Default number of copies on a host without GPUs: as many as mirrored has."""


@dataclass(frozen=True, kw_only=True)
class CentralStorage(Strategy):
    """Keep parameters and optimizer in one place, and compute on several devices, in one process.

    One thread per compute device works on a copy of the model. In `sync` the copies are refreshed after every update,
    the gradients of all shards are summed where the variables are, and make one update: the training of one device. In
    `async` a thread computes whole steps from the current variables, and each gradient is applied when it arrives, by
    the optimizer of that thread: a different training, which depends on the speed of the threads. GPUs hold no
    optimizer state.

    Example:
        >>> strategy = CentralStorage(compute_devices=("/gpu:0", "/gpu:1"))
        >>> strategy.num_replicas(PlanContext(num_gpus=2)), strategy.tasks(PlanContext(num_gpus=2))[0].device
        (2, 'cpu')

    Source: tf.distribute.experimental.CentralStorageStrategy; in-graph replication, Abadi et al. 2016,
    arXiv:1605.08695, section 4.4.
    """

    facts: ClassVar[Facts] = Facts(compiles="model")

    parameter_device: Annotated[int | str, placement] = "auto"
    """Device of the parameters and the optimizer; `auto`: the CPU, or the only compute device."""
    compute_devices: Annotated[tuple[int | str, ...] | None, placement] = None
    """Devices with one thread each, `[0,1]`; null: all GPUs, else two on the CPU. `cpu` may be named several times."""
    mode: Annotated[Literal["sync", "async"], maths(neutral="sync")] = "sync"
    """`sync`: one update of all gradients of a step; `async`: one update per gradient, when it arrives."""

    def validate(self, context: PlanContext) -> list[Problem]:
        """Return problems: devices that do not exist or are repeated, and processes that have no work."""
        if found := self.launch_problems(context.launch):
            return found
        key, names = "strategy.compute_devices", self.compute_devices
        problems = device_list_problems(key, names, context.num_gpus, because="A GPU computes one copy.")
        if self.parameter_device != "auto":
            problems += device_problems("strategy.parameter_device", self.parameter_device, context.num_gpus)
        if self.mode == "async":
            problems += async_problems(context)
            if context.average is not None:
                rule = "each copy has its own optimizer, which averages only its own updates. Use strategy.mode=sync."
                problems.append(Problem(key="average", rule=rule))
        if not problems and context.numerics.reproducible and self.num_replicas(context) > context.numerics.lanes:
            rule = f"more devices than numerics.lanes={context.numerics.lanes}. Use at most that many, or more lanes."
            problems.append(Problem(key=key, value=self.num_replicas(context), rule=rule))
        return problems

    def facts_in(self, context: PlanContext) -> Facts:
        """Return whether threads update as gradients arrive; a step of its own loop ends with `step()` alone."""
        if self.mode == "sync":
            rule = "its threads compute and update as one. Use step(), or strategy=mirrored."
            return replace(super().facts_in(context), withheld_calls={LoopCall.apart: rule})
        rule = "strategy.mode=async has no step that ends before the next one. Use mode=sync."
        return replace(
            super().facts_in(context),
            changes_maths=len(self._computing(context.num_gpus)) > 1,
            is_asynchronous=True,
            withheld_calls={LoopCall.session: rule},
        )

    def num_replicas(self, context: PlanContext) -> int:
        """Return the number of compute devices, which share a step; 1 in `async`, where each computes whole steps."""
        return 1 if self.mode == "async" else len(self._computing(context.num_gpus))

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:  # noqa: ARG002 - the same of any
        """Return a note if asynchronous updates train differently."""
        if not self.facts_in(context).changes_maths:
            return ()
        count = len(self._computing(context.num_gpus))
        line = f"central_storage: {count} threads apply gradients as they arrive"
        return (f"{line}: a different training from that of one device, and another every time.",)

    def num_slots(self, num_gpus: int) -> int:
        """Return the number of devices, or of CPU cores, that have their own thread."""
        return max(1, len(self._computing(num_gpus)))

    def launch_problems(self, launch: LaunchEnvironment | None) -> list[Problem]:
        """Return the problem of more than one process."""
        return launch_problems(launch, named="central_storage", called="central storage")

    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return one task, on the parameter device; it computes on the devices of the copies."""
        computing = tuple(dict.fromkeys(self._computing(context.num_gpus)))
        return (Task(role="worker", index=0, rank=0, device=self._home(context.num_gpus), computes_on=computing),)

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:
        """Return a whole replica, the gradients of the other copies and their sum."""
        copies = self._gradient_copies(context)
        return ModelMemory.whole(model, gradient_copies=copies)

    def _gradient_copies(self, context: PlanContext) -> int:
        """Return the copies of all gradients: with lanes, those of each lane and of the tree; in `async` also copies of
        parameters.
        """
        if self.mode == "async":
            return 2 * len(self._computing(context.num_gpus))
        if context.numerics.reproducible:
            return context.numerics.lanes + context.numerics.lanes.bit_length()
        count = self.num_replicas(context)
        return 0 if count == 1 else count

    def setup(self, request: SetupRequest) -> CentralExecutor:
        """Put the variables on the parameter device, and a copy on each compute device."""
        variables = Replica(build_parts(request))
        devices = [torch.device(name) for name in self._computing(torch.cuda.device_count())]
        for device in devices:
            request.precision.apply_globally(device.type, reproducible=request.numerics.reproducible)
        is_async = self.mode == "async"
        phases = [ignore_phase if is_async or place else request.on_phase for place in range(len(devices))]
        copies = [
            computing_copy(variables, device, shares=not is_async, on_phase=on_phase)
            for device, on_phase in zip(devices, phases, strict=True)
        ]
        local = LocalModel(
            # the evaluated model must not change during evaluation, nor be compiled: in `async` the copies compute all
            # the time
            model=uncompiled(variables.model) if is_async else copies[0].model,
            device=variables.device if is_async else devices[0],
            device_types=tuple(sorted({device.type for device in (*devices, variables.device)})),
            data_ranks=variables.data_ranks,
            precision=request.precision,
            lanes=variables.lanes,
        )
        computing = ComputingCopies(variables, copies)
        if not is_async:
            return CentralExecutor(computing, local, request.training)
        masters = variables.masters
        more = [OptimizerStepper(request.make_optimizer(masters), list(masters.values())) for _ in devices[1:]]
        return AsyncCentralExecutor(computing, local, request.training, [variables.stepper, *more])

    def _computing(self, num_gpus: int) -> list[str]:
        """Return the devices of the model copies."""
        if self.compute_devices is None:
            return [f"cuda:{index}" for index in range(num_gpus)] or ["cpu"] * _CPU_THREADS
        return [parse_device(name) or "cpu" for name in self.compute_devices]

    def _home(self, num_gpus: int) -> str:
        """Return the parameter device."""
        if self.parameter_device != "auto":
            return parse_device(self.parameter_device) or "cpu"
        computing = self._computing(num_gpus)
        return computing[0] if len(computing) == 1 else "cpu"
