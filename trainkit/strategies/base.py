"""The two halves of a strategy, and the values that they exchange with the trainer.

`Strategy` is what the user sets: frozen and pure. `Executor` is one task's share of a running training. What only some
of them can do is a protocol in `trainkit.strategies.capabilities`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from trainkit.adapters.average import Average
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Identity, Task
from trainkit.data.reading.collate import CollateFunction, collate
from trainkit.errors import Problem
from trainkit.moved import moved_attribute
from trainkit.numerics.batch import Ticket
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Objective
from trainkit.strategies.model_transforms import Compiles
from trainkit.strategies.step_values import (
    Batch,
    GradientListener,
    GraphSettings,
    LeftOut,
    LocalModel,
    LoopCall,
    LossWeighting,
    NamedOptimizer,
    NoGradientListener,
    Phase,
    Status,
    StepContext,
    StepOutcome,
    UpdateParams,
    UpdateRule,
    UpdateTensors,
)

__all__ = [
    "Batch",
    "Data",
    "Executor",
    "GradientListener",
    "GraphSettings",
    "LeftOut",
    "LocalModel",
    "LoopCall",
    "LossWeighting",
    "NamedOptimizer",
    "NoGradientListener",
    "Numerics",
    "Phase",
    "PhaseListener",
    "PlanContext",
    "SetupRequest",
    "StagePart",
    "StateDict",
    "Status",
    "StepContext",
    "StepCounter",
    "StepOutcome",
    "Strategy",
    "TaskContext",
    "Ticket",
    "Traits",
    "UpdateParams",
    "UpdateRule",
    "UpdateTensors",
    "ignore_phase",
]

StateDict = Mapping[str, Tensor]
"""Parameters, buffers and optimizer state by canonical name, as a checkpoint keeps them."""

PhaseListener = Callable[[str, int], None]
"""Receives (phase, step) when a task begins another phase: forward, backward, reduce, update, data, idle."""


def ignore_phase(phase: str, step: int) -> None:
    """Do nothing: the listener of a task whose phases are not watched."""
    del phase, step


class Data(Protocol):
    """Gives the batches of a ticket."""

    def fetch(self, ticket: Ticket) -> Sequence[Batch]:
        """Return one collated batch per shard, on the device; a ticket always gives the same batches."""
        ...


class StepCounter(Protocol):
    """The position of a training."""

    @property
    def step(self) -> int:
        """Updates completed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The numbers settings that a strategy carries out."""

    seed: int = 0
    """The run's seed."""
    reproducible: bool = False
    """Sum in the order of the lanes."""
    lanes: int = 8
    """Lanes of that order, a power of two."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What follows a loss or gradient that is not finite."""

    @property
    def leaves_out(self) -> bool:
        """Whether a strategy leaves out a step that is not finite."""
        return self.on_nonfinite != "stop"


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """What a strategy knows of a config before any process starts."""

    numerics: Numerics = field(default_factory=Numerics)
    """The numbers settings."""
    num_gpus: int = 0
    """CUDA devices of this host."""
    precision: str = "fp32"
    """The precision's name."""
    optimizer: type | None = None
    """The optimizer's class; None where it is not known."""
    optimizers: Mapping[str, type | None] = field(default_factory=dict)
    """The classes of several optimizers, by their keys in `optimizers`; empty where a run has one."""
    objective: Objective | None = None
    """What scores a shard; None where it is not known."""
    sample: object = None
    """A sample of the training data, for shapes; None if there is none."""
    collate: CollateFunction = collate
    """Makes a batch of samples."""
    average: Average | None = None
    """The average of the weights that is kept beside them."""
    micro_size: int = 1
    """Samples of the largest shard; 1 if that is not decided yet."""
    launch: LaunchEnvironment | None = None
    """The processes that something else started for this run; None: the supervisor starts what it needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePart:
    """A part of a model on one device, where a replica spans several."""

    stage: int
    """Its number, in the order of the model."""
    modules: str
    """Its blocks, `embed, blocks.0-5`."""
    num_params: int
    num_bytes: int
    """Parameters, gradients and buffers, as the run holds them."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """The properties of a strategy that do not depend on its fields."""

    place: int = 9
    """Where texts that list strategies name it: smaller numbers first, from the simplest strategy on."""
    elastic: bool = False
    """Whether a run may continue with fewer of its tasks, and later with all: every rank holds the whole state."""
    compiles: Compiles = "blocks"
    """What it calls as a unit, which torch.compile may compile: the whole model, its blocks, or nothing."""
    supports_meta_init: bool = False
    """Whether `setup` takes a model without data, and computes what it needs by `lazy_init_values(model)`."""
    is_sharded: bool = False
    """Whether each rank holds a part of the state, so that all write a checkpoint and hash the weights together."""
    forward_is_collective: bool = False
    """Whether ranks communicate in a forward pass, so that every rank runs the model or none does."""
    several_optimizers: bool = False
    """Whether a run may have several optimizers, and its objective several phases."""
    converts: bool = False
    """Whether it takes layers that compute in another number format (`convert`): it neither cuts nor traces them."""
    compiles_step: bool = False
    """Whether it may compute gradients and update of a step as graphs of torch.compile."""
    shows_gradients: bool = False
    """Whether its steps call `StepContext.on_gradients`."""
    keeps_memory_format: bool = True
    """Whether parameters keep the memory format of the model; parts of sharded ones are contiguous."""


@dataclass(frozen=True, kw_only=True)
class SetupRequest:
    """What a task needs to build its share of a training."""

    model: nn.Module
    """Initialised on the CPU in float32, alike in every task, and shaped (`trainkit.strategies.model_transforms`):
    forward passes that are recomputed or compiled are in place. On the meta device where the strategy supports that,
    unless the constructor does not allow it: `lazy_init_values(model)` is None then."""
    identity: Identity
    """The task of this process, and where it finds the others."""
    precision: Precision
    """The numbers to use."""
    numerics: Numerics
    """The numbers settings."""
    make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
    """Builds the optimizer over parameters by canonical name."""
    training: StepContext
    """Plan, objective and update rule."""
    optimizers: tuple[NamedOptimizer, ...] = ()
    """Several optimizers, which replace the one of `make_optimizer`; empty: that one."""
    open_data: Callable[[torch.device], Data]
    """Opens training data for tickets that are not known in advance; closed when the task ends."""
    folder: Path | None = None
    """The run folder, for a strategy that keeps a record of its own; None where there is no run."""
    graphs: GraphSettings | None = None
    """What the executor compiles as a whole (`Traits.compiles_step`); None: nothing."""
    on_phase: PhaseListener = ignore_phase
    """Receives (phase, step) when forward, backward, reduce or update begins, so that a hang can be located."""


@dataclass(frozen=True, kw_only=True)
class TaskContext(SetupRequest):
    """What a task needs that assists the rank that trains, in a separate process.

    In the phase `idle` such a task waits for work, as long as it takes; in any other phase it counts as hanging once it
    has not reported a phase for longer than the limit of that phase.
    """

    num_steps: int
    """Steps of the whole training."""
    requested: Callable[[], str | None]
    """Why this process was asked to stop, or None. The rank that trains was asked too, and ends the others itself."""


class Executor(ABC):
    """One task's share of a running training: the model, its optimizer, the connections to other tasks."""

    @property
    @abstractmethod
    def local(self) -> LocalModel:
        """The model of this task, and the ranks that it computes with."""

    @abstractmethod
    def assign(self, step: int) -> tuple[int, ...]:
        """Return the shards of a step that this rank computes, as far as that is known in advance."""

    @abstractmethod
    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:
        """Yield what to compute here, step after step; the same ticket again while the position does not move.

        Args:
            position: of the training; it advances meanwhile.
            until: updates after which this start ends: later steps are not needed.
        """

    @abstractmethod
    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Compute a ticket and update the parameters; collective.

        Args:
            ticket: the step and the shards to compute here.
            batches: one collated batch a shard of the ticket, on the device of the local model.

        Returns:
            The outcome; an overflowed step leaves parameters, buffers and optimizer as they were.
        """

    @abstractmethod
    def state_dict(self) -> StateDict:
        """Return parameters, buffers and optimizer state, whole; no copies.

        Collective if the state is sharded (`Traits.is_sharded`): the model must then fit on every rank.
        """

    @abstractmethod
    def load_state_dict(self, state: StateDict) -> None:
        """Restore the tensors of a checkpoint of any strategy; also in the middle of a training that rolls back.

        Args:
            state: reads a tensor on access.
        """

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """End threads and process groups.

        Args:
            failed: whether this rank has failed: it breaks its connections, without waiting for the other ranks.
        """


class Strategy(ABC):
    """How shards are spread over replicas and how their gradients become one update.

    A strategy is a frozen, keyword-only dataclass: its fields are what the user may set. It is pure; its `Executor`
    holds what belongs to a process. What only some strategies can do is in `trainkit.strategies.capabilities`.
    """

    changes_maths: ClassVar[bool] = False
    """Whether choosing this strategy changes the result: False for every synchronous one."""

    traits: ClassVar[Traits] = Traits()
    """Its properties."""

    @abstractmethod
    def validate(self, context: PlanContext) -> list[Problem]:
        """Return the problems of this strategy in this context; before any process starts."""

    @abstractmethod
    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return the processes it needs, by role; a single one runs in the calling process.

        In a launch these are its processes, each with its device; only that of this process must be exact.
        """

    def num_processes(self, num_gpus: int) -> int:
        """Return the number of processes that it starts on a host with `num_gpus` GPUs."""
        return len(self.tasks(PlanContext(num_gpus=num_gpus)))

    @abstractmethod
    def num_replicas(self, context: PlanContext) -> int:
        """Return the number of replicas that get shards of their own."""

    @abstractmethod
    def setup(self, request: SetupRequest) -> Executor:
        """Put the model where it is computed; collective over the ranks of the run."""


__getattr__ = partial(moved_attribute, __name__)
"""Returns a class by the name that it once had."""
