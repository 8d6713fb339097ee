"""Central storage: the variables in one place, computed with on several devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import RLock
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from trainkit.cluster.identity import Identity
from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import placement
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import draws_nothing
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Facts, Numerics, Outcome, Placed, Ticket, Training
from trainkit.strategies.central.copies import Central, computing_copy
from trainkit.strategies.central.step import central_step
from trainkit.strategies.collective import LocalCollective
from trainkit.strategies.devices import device_problems, parse_device
from trainkit.strategies.reducers import LaneReducer, LocalReducer, Reducer
from trainkit.strategies.replica import replica_state, restore_replica
from trainkit.strategies.shaping import Compiles
from trainkit.strategies.synchronous import Synchronous

__all__ = ["CentralStorage"]

_CPU_THREADS = 2
"""Copies on a host without GPUs, where nothing is said: as many as mirrored has."""


@dataclass(frozen=True, kw_only=True)
class CentralStorage(Synchronous):
    """Keep parameters and optimizer in one place, and compute on several devices, in one process.

    A thread a compute device works on a copy of the model that is refreshed from the variables after every update; the
    gradients of all shards are summed where the variables are, and make one update. GPUs then hold no optimizer state.
    Copies on the parameter device share the variables' memory.

    Example:
        >>> strategy = CentralStorage(compute_devices=("/gpu:0", "/gpu:1"))
        >>> strategy.num_replicas(Facts(num_gpus=2)), strategy.tasks(Facts(num_gpus=2))[0].device
        (2, 'cpu')

    Source: tf.distribute.experimental.CentralStorageStrategy; in-graph replication, Abadi et al. 2016,
    arXiv:1605.08695, section 4.4.
    """

    compiles: ClassVar[Compiles] = "nothing"

    parameter_device: Annotated[int | str, placement] = "auto"
    """Where parameters and optimizer are; `auto`: the CPU, or the compute device where there is one alone."""
    compute_devices: Annotated[tuple[int | str, ...] | None, placement] = None
    """A thread each, `[0,1]`; null: all GPUs, else two on the CPU. `cpu` may be named several times."""

    def problems(self, facts: Facts) -> list[Problem]:
        """Devices that do not exist or stand twice, and processes that there is no work for."""
        if facts.launch is not None and facts.launch.num_ranks > 1:
            started = f"{facts.launch.kind} started {facts.launch.num_ranks} processes"
            rule = f"{started}, and central storage has work for one. Use strategy=multi_worker_mirrored."
            return [Problem(key="strategy", value="central_storage", rule=rule)]
        key, names = "strategy.compute_devices", self.compute_devices
        problems = [p for name in names or () for p in device_problems(key, name, facts.num_gpus)]
        parsed = [parse_device(name) for name in names or ()]
        twice = sorted({str(name) for name in parsed if name not in ("cpu", None) and parsed.count(name) > 1})
        if twice:
            rule = f"names {', '.join(twice)} twice. A GPU computes one copy."
            problems.append(Problem(key=key, value=list(names or ()), rule=rule))
        if names == ():
            problems.append(Problem(key=key, value=[], rule="names no device. Leave it out for all."))
        if self.parameter_device != "auto":
            problems += device_problems("strategy.parameter_device", self.parameter_device, facts.num_gpus)
        if not problems and facts.numerics.reproducible and self.num_replicas(facts) > facts.numerics.lanes:
            rule = f"more devices than numerics.lanes={facts.numerics.lanes}. Use at most that many, or more lanes."
            problems.append(Problem(key=key, value=self.num_replicas(facts), rule=rule))
        return problems

    def num_replicas(self, facts: Facts) -> int:
        """A copy a compute device."""
        return len(self._computing(facts.num_gpus))

    def tasks(self, facts: Facts) -> tuple[Task, ...]:
        """One task, on the parameter device."""
        return (Task(role="worker", index=0, rank=0, device=self._home(facts.num_gpus)),)

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:
        """The gradients of the other copies and their sum; with lanes, those of every lane and the tree's."""
        if numerics.reproducible:
            return numerics.lanes + numerics.lanes.bit_length()
        return 0 if num_replicas == 1 else num_replicas

    def connect(self, identity: Identity) -> Collective:  # noqa: ARG002 - there is nobody to meet
        """Nobody to meet."""
        return LocalCollective()

    def make_reducer(self, collective: Collective, numerics: Numerics) -> Reducer:  # noqa: ARG002
        """The lanes of a reproducible run, else nothing: the threads' sums are one already."""
        if numerics.reproducible:
            return LaneReducer(lanes=numerics.lanes, rank=0, num_ranks=1)
        return LocalReducer()

    def place(
        self,
        model: nn.Module,
        *,
        identity: Identity,
        precision: Precision,
        numerics: Numerics,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
    ) -> Any:
        """Put the variables where they live, and a copy on each compute device."""
        variables = super().place(
            model, identity=identity, precision=precision, numerics=numerics, make_optimizer=make_optimizer
        )
        devices = [torch.device(name) for name in self._computing(torch.cuda.device_count())]
        for device in devices:
            precision.apply_globally(device.type)
        copies = [computing_copy(variables, device) for device in devices]
        on_cpu = sum(device.type == "cpu" for device in devices)
        central = Central(
            model=copies[0].model,
            device=devices[0],
            device_types=tuple(sorted({device.type for device in devices})),
            collective=variables.collective,
            loss_scale=variables.loss_scale,
            precision=precision,
            lanes=variables.lanes,
            variables=variables,
            copies=copies,
            threads=ThreadPoolExecutor(len(devices), thread_name_prefix="compute"),
            lock=RLock() if on_cpu > 1 and not draws_nothing(variables.model) else None,
        )
        torch.set_num_threads(max(central.had_threads // max(on_cpu, 1), 1))
        return central

    def assign(self, plan: BatchPlan, step: int, placed: Placed) -> tuple[int, ...]:
        """All of them: the threads share them out."""
        del placed
        return tuple(range(plan.num_shards(step)))

    def step(self, placed: Any, ticket: Ticket, batches: Sequence[Any], training: Training) -> Outcome:
        """Forward and backward by all threads, one update of the variables."""
        return central_step(placed, ticket, batches, training)

    def state(self, placed: Any) -> dict[str, Tensor]:
        """That of the variables."""
        return replica_state(placed.variables)

    def load_state(self, placed: Any, tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a checkpoint of any strategy, and give them to the copies."""
        restore_replica(placed.variables, tensors)
        placed.refresh()

    def leave(self, placed: Any) -> None:
        """End the threads."""
        placed.threads.shutdown()
        torch.set_num_threads(placed.had_threads)

    def _computing(self, num_gpus: int) -> list[str]:
        """The devices of the copies."""
        if self.compute_devices is None:
            return [f"cuda:{index}" for index in range(num_gpus)] or ["cpu"] * _CPU_THREADS
        return [parse_device(name) or "cpu" for name in self.compute_devices]

    def _home(self, num_gpus: int) -> str:
        """The parameter device."""
        if self.parameter_device != "auto":
            return parse_device(self.parameter_device) or "cpu"
        computing = self._computing(num_gpus)
        return computing[0] if len(computing) == 1 else "cpu"
