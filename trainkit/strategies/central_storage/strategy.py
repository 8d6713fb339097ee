"""Central storage: the variables in one place, computed with on several devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from trainkit.bounded_json import whole_numbers
from trainkit.cluster.identity import Identity
from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import maths, placement
from trainkit.numerics.batch import BatchPlan
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import Numerics, Placed, PlanContext, StepContext, StepCounter, StepOutcome, Ticket
from trainkit.strategies.central_storage.asynchronous import (
    InFlightSteps,
    dispatch_or_apply,
    dispatched,
    flight_state,
    restore_flight,
    tickets_to_dispatch,
)
from trainkit.strategies.central_storage.step import central_step
from trainkit.strategies.central_storage.variables import CentralVariables, computing_copy
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.strategies.core.refusals import no_rollback
from trainkit.strategies.core.replica import Replica, replica_state, restore_replica
from trainkit.strategies.groups.devices import device_list_problems, device_problems, parse_device
from trainkit.strategies.groups.single_process import SingleProcess
from trainkit.strategies.model_transforms import Compiles

__all__ = ["CentralStorage"]

_CPU_THREADS = 2
"""Copies on a host without GPUs, where nothing is said: as many as mirrored has."""


@dataclass(frozen=True, kw_only=True)
class CentralStorage(SingleProcess):
    """Keep parameters and optimizer in one place, and compute on several devices, in one process.

    A thread a compute device works on a copy of the model. In `sync` the copies are refreshed after every update, the
    gradients of all shards are summed where the variables are, and make one update: the training of one device. In
    `async` a thread takes whole steps, from the variables as it finds them, and each gradient is applied when it comes,
    by an optimizer of that thread: another training, which depends on who is faster. GPUs hold no optimizer state.

    Example:
        >>> strategy = CentralStorage(compute_devices=("/gpu:0", "/gpu:1"))
        >>> strategy.num_replicas(PlanContext(num_gpus=2)), strategy.tasks(PlanContext(num_gpus=2))[0].device
        (2, 'cpu')

    Source: tf.distribute.experimental.CentralStorageStrategy; in-graph replication, Abadi et al. 2016,
    arXiv:1605.08695, section 4.4.
    """

    named: ClassVar[str] = "central_storage"
    called: ClassVar[str] = "central storage"
    compiles: ClassVar[Compiles] = "nothing"

    parameter_device: Annotated[int | str, placement] = "auto"
    """Where parameters and optimizer are; `auto`: the CPU, or the compute device where there is one alone."""
    compute_devices: Annotated[tuple[int | str, ...] | None, placement] = None
    """A thread each, `[0,1]`; null: all GPUs, else two on the CPU. `cpu` may be named several times."""
    mode: Annotated[Literal["sync", "async"], maths(neutral="sync")] = "sync"
    """`sync`: one update of all gradients of a step; `async`: an update a gradient, when it comes."""

    def problems(self, facts: PlanContext) -> list[Problem]:
        """Devices that do not exist or stand twice, and processes that there is no work for."""
        if found := self.launch_problems(facts):
            return found
        key, names = "strategy.compute_devices", self.compute_devices
        problems = device_list_problems(key, names, facts.num_gpus, because="A GPU computes one copy.")
        if self.parameter_device != "auto":
            problems += device_problems("strategy.parameter_device", self.parameter_device, facts.num_gpus)
        if self.mode == "async":
            problems += _async_problems(facts)
        if not problems and facts.numerics.reproducible and self.num_replicas(facts) > facts.numerics.lanes:
            rule = f"more devices than numerics.lanes={facts.numerics.lanes}. Use at most that many, or more lanes."
            problems.append(Problem(key=key, value=self.num_replicas(facts), rule=rule))
        return problems

    def num_replicas(self, facts: PlanContext) -> int:
        """A copy a compute device shares a step; in `async` each takes whole ones."""
        return 1 if self.mode == "async" else len(self._computing(facts.num_gpus))

    @property
    def is_another_training(self) -> bool:
        """In `async`, unless one thread is alone."""
        return self.mode == "async" and len(self._computing(torch.cuda.device_count())) > 1

    def notes(self) -> tuple[str, ...]:
        """That asynchronous updates are another training."""
        if not self.is_another_training:
            return ()
        count = len(self._computing(torch.cuda.device_count()))
        said = f"central_storage: {count} threads update as they come"
        return (f"{said}: another training than that of one device, and another every time.",)

    def num_slots(self, num_gpus: int) -> int:
        """A device, or a core, a thread that computes."""
        return max(1, len(self._computing(num_gpus)))

    def tasks(self, facts: PlanContext) -> tuple[Task, ...]:
        """One task, on the parameter device."""
        return (Task(role="worker", index=0, rank=0, device=self._home(facts.num_gpus)),)

    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:
        """The gradients of the other copies and their sum; with lanes, those of every lane and the tree's.

        In `async` the parameters that each copy has of its own are counted too.
        """
        if self.mode == "async":
            return 2 * len(self._computing(torch.cuda.device_count()))
        if numerics.reproducible:
            return numerics.lanes + numerics.lanes.bit_length()
        return 0 if num_replicas == 1 else num_replicas

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
        is_async = self.mode == "async"
        copies = [computing_copy(variables, device, shares=not is_async) for device in devices]
        on_cpu = sum(device.type == "cpu" for device in devices)
        central = CentralVariables(
            # what is evaluated must not change meanwhile: in `async` the copies are always at work
            model=variables.model if is_async else copies[0].model,
            device=variables.device if is_async else devices[0],
            device_types=tuple(sorted({device.type for device in (*devices, variables.device)})),
            data_ranks=variables.data_ranks,
            loss_scale=variables.loss_scale,
            precision=precision,
            lanes=variables.lanes,
            variables=variables,
            copies=copies,
            threads=ThreadPoolExecutor(len(devices), thread_name_prefix="compute"),
            flight=self._flight(variables, len(devices), make_optimizer) if is_async else None,
        )
        torch.set_num_threads(max(central.had_threads // max(on_cpu, 1), 1))
        return central

    def assign(self, plan: BatchPlan, step: int, placed: Placed) -> tuple[int, ...]:
        """All of them: the threads share them out."""
        del placed
        return tuple(range(plan.num_shards(step)))

    def tickets(
        self, plan: BatchPlan, position: StepCounter, placed: Any, until: int | None = None
    ) -> Iterator[Ticket]:
        """The position's step; in `async` the next step for whoever is free."""
        if placed.flight is None:
            return super().tickets(plan, position, placed, until)
        return tickets_to_dispatch(placed.flight, plan, position, until)

    def step(self, placed: Any, ticket: Ticket, batches: Sequence[Any], training: StepContext) -> StepOutcome:
        """Forward and backward by all threads, one update of the variables; in `async`, the next gradient's update."""
        if placed.flight is None:
            return central_step(placed, ticket, batches, training)
        return dispatch_or_apply(placed, placed.flight, ticket, batches, training)

    def state(self, placed: Any) -> dict[str, Tensor]:
        """That of the variables; in `async` with the state of every thread's optimizer."""
        if placed.flight is None:
            return replica_state(placed.variables)
        return flight_state(placed, placed.flight)

    def recover(self, placed: Any, step: int) -> bool:
        """Put the buffers of an interrupted step back; in `async` other threads are in the middle of theirs."""
        recovered: bool = placed.flight is None and placed.variables.recover(step)
        return recovered

    def load_state(self, placed: Any, tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a checkpoint of any strategy, and give them to the copies."""
        if placed.flight is None:
            restore_replica(placed.variables, tensors)
        else:
            restore_flight(placed, placed.flight, tensors)
        placed.refresh(frozen=True)

    def remember(self, placed: Any) -> dict[str, Any]:
        """The steps that are handed out and not applied."""
        return {} if placed.flight is None else {"handed_out": dispatched(placed.flight)}

    def recall(self, placed: Any, remembered: Mapping[str, Any]) -> None:
        """Hand them out again, before any other."""
        if placed.flight is not None:
            placed.flight.left_over = whole_numbers(remembered.get("handed_out", []))

    def leave(self, placed: Any) -> None:
        """End the threads."""
        placed.threads.shutdown()
        torch.set_num_threads(placed.had_threads)

    def _flight(
        self,
        variables: Replica,
        count: int,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
    ) -> InFlightSteps:
        """An optimizer for every thread, over the same variables."""
        masters = variables.masters
        more = [OptimizerStepper(make_optimizer(masters), list(masters.values())) for _ in range(count - 1)]
        return InFlightSteps(steppers=[variables.stepper, *more], free=list(reversed(range(count))))

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


def _async_problems(facts: PlanContext) -> list[Problem]:
    """What updates that come when they come cannot keep."""
    problems = no_rollback("strategy.mode=async applies gradients as they come", facts)
    if facts.numerics.reproducible:
        rule = "asynchronous updates come in another order every time. Use strategy.mode=sync, or false."
        problems.append(Problem(key="numerics.reproducible", value=True, rule=rule))
    if facts.precision == "fp16_mixed":
        rule = "has one loss scale, and gradients under way were computed at several. Use precision=bf16_mixed."
        problems.append(Problem(key="precision", value="fp16_mixed", rule=rule))
    return problems
