"""The two halves of a strategy, and the values that they exchange with the trainer.

`Strategy` is what the user sets: frozen and pure. `Executor` is one task's share of a running training. Capabilities
that only some have are protocols in `trainkit.strategies.capabilities`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.adapters.average import Average
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Identity, Task
from trainkit.data.reading.collate import CollateFunction, collate
from trainkit.errors import Problem
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
"""Callback that receives (phase, step) when a task begins a phase: forward, backward, reduce, update, data, idle."""


def ignore_phase(phase: str, step: int) -> None:
    """Do nothing: the listener of a task whose phases are not watched."""
    del phase, step


class Data(Protocol):
    """Source of the batches of a ticket."""

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
    """The `numerics` settings that a strategy applies."""

    seed: int = 0
    """The run's seed."""
    reproducible: bool = False
    """Whether gradients are summed in the order of the lanes."""
    lanes: int = 8
    """Number of lanes of that order, a power of two."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a loss or gradient that is not finite."""

    @property
    def leaves_out(self) -> bool:
        """Whether a step that is not finite is skipped."""
        return self.on_nonfinite != "stop"


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """The facts about a config that a strategy gets before any process starts."""

    numerics: Numerics = field(default_factory=Numerics)
    """The `numerics` settings."""
    num_gpus: int = 0
    """CUDA devices of this host."""
    precision: str = "fp32"
    """Name of the precision."""
    optimizer: type | None = None
    """Class of the optimizer; None if unknown."""
    optimizers: Mapping[str, type | None] = field(default_factory=dict)
    """The classes of several optimizers, by their keys in `optimizers`; empty if the run has one."""
    optimizer_makers: Mapping[str, Sequence[Callable[[list[nn.Parameter]], Optimizer]]] = field(default_factory=dict)
    """Full key of each `_target_` -> functions that build the optimizer, one per group of parameters."""
    objective: Objective | None = None
    """The objective; None if unknown."""
    sample: object = None
    """A sample of the training data, for shapes; None if there is none."""
    collate: CollateFunction = collate
    """Function that makes a batch of samples."""
    average: Average | None = None
    """The average of the weights that is kept in addition to them."""
    micro_size: int = 1
    """Samples of the largest shard; 1 if that is not decided yet."""
    launch: LaunchEnvironment | None = None
    """The external launch of this run, without its evaluator; None: the supervisor starts the processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePart:
    """A part of a model on one device, if a replica spans several."""

    stage: int
    """Number of the part, in the order of the model."""
    modules: str
    """Blocks of the part, `embed, blocks.0-5`."""
    num_params: int
    num_bytes: int
    """Parameters, gradients and buffers, as the run holds them."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """The properties of a strategy that do not depend on its fields."""

    place: int = 9
    """Position in texts that list strategies: smaller numbers first, from the simplest strategy on."""
    elastic: bool = False
    """Whether a run may continue with fewer of its tasks, and later with all: every rank holds the whole state."""
    compiles: Compiles = "blocks"
    """Unit that torch.compile may compile: the whole model, its blocks, or nothing."""
    supports_meta_init: bool = False
    """Whether `setup` takes a model without data, and computes what it needs by `lazy_init_values(model)`."""
    is_sharded: bool = False
    """Whether each rank holds a part of the state, so that all write a checkpoint and hash the weights together."""
    forward_is_collective: bool = False
    """Whether ranks communicate in a forward pass, so that every rank runs the model or none does."""
    several_optimizers: bool = False
    """Whether a run may have several optimizers, and its objective several phases."""
    converts: bool = False
    """Whether it takes layers that compute in another number format (`convert`): because it neither cuts nor traces
    them.
    """
    compiles_step: bool = False
    """Whether it may compute gradients and update of a step as graphs of torch.compile."""
    shows_gradients: bool = False
    """Whether its steps call `StepContext.on_gradients`."""
    runs_hooks: bool = False
    """Whether its eager steps call hooks on the gradient of a parameter: it computes with those of the model."""
    keeps_memory_format: bool = True
    """Whether parameters keep the memory format of the model; parts of sharded ones are contiguous."""


WHOLE_REPLICAS: Final = Traits(
    compiles="model",
    several_optimizers=True,
    converts=True,
    compiles_step=True,
    shows_gradients=True,
    runs_hooks=True,
)
"""The traits of a strategy whose replicas hold the whole model, with gradients of whole parameters."""


@dataclass(frozen=True, kw_only=True)
class SetupRequest:
    """The input of a task for building its share of a training."""

    model: nn.Module
    """The model, initialised on the CPU in float32, the same in every task, and transformed
    (`trainkit.strategies.model_transforms`): forward passes that are recomputed or compiled are in place. On the meta
    device if the strategy and the constructor support it: otherwise `lazy_init_values(model)` is None.
    """
    identity: Identity
    """The task of this process, and the addresses of the others."""
    precision: Precision
    """The precision to use."""
    numerics: Numerics
    """The `numerics` settings."""
    make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
    """Function that builds the optimizer over parameters by canonical name."""
    training: StepContext
    """Plan, objective and update rule."""
    optimizers: tuple[NamedOptimizer, ...] = ()
    """Several optimizers, which replace the one of `make_optimizer`; empty: use that one."""
    open_data: Callable[[torch.device], Data]
    """Function that opens training data for tickets that are not known in advance; closed when the task ends."""
    folder: Path | None = None
    """The run folder, for a strategy with records of its own; None without a run."""
    graphs: GraphSettings | None = None
    """Settings of whole-step graphs (`Traits.compiles_step`); None: nothing is compiled as a whole."""
    on_phase: PhaseListener = ignore_phase
    """Callback that receives (phase, step) when forward, backward, reduce or update begins, so that a hang can be
    located.
    """


@dataclass(frozen=True, kw_only=True)
class TaskContext(SetupRequest):
    """The input of an auxiliary task, which serves the training rank in a separate process.

    In the phase `idle` such a task waits for work without a limit; in any other phase it counts as hanging once it has
    not reported a phase for longer than the limit of that phase.
    """

    num_steps: int
    """Steps of the whole training."""
    requested: Callable[[], str | None]
    """Function that returns why this process was asked to stop, or None. The training rank gets the same request, and
    ends the others itself.
    """


class Executor(ABC):
    """One task's share of a running training: the model, its optimizer, the connections to other tasks."""

    @property
    @abstractmethod
    def local(self) -> LocalModel:
        """The model of this task, and its group of ranks."""

    @abstractmethod
    def assign(self, step: int) -> tuple[int, ...]:
        """Return the shards of a step that this rank computes, as far as known in advance."""

    @abstractmethod
    def tickets(self, position: StepCounter, until: int | None = None) -> Iterator[Ticket]:
        """Yield the tickets of this rank, step after step; a ticket is repeated while the position does not advance.

        Args:
            position: the position of the training, which advances meanwhile.
            until: updates after which this start ends: later steps are not needed.
        """

    @abstractmethod
    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Compute a ticket and update the parameters; collective.

        Args:
            ticket: the step and the shards to compute here.
            batches: one collated batch per shard of the ticket, on the device of the local model.

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
            state: mapping that reads a tensor on access.
        """

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """End threads and process groups.

        Args:
            failed: whether this rank has failed: it then closes its connections without waiting for the other ranks.
        """


class Strategy(ABC):
    """The distribution of shards over replicas, and the combination of their gradients into one update.

    A strategy is a frozen, keyword-only dataclass: its fields are what the user may set. It is pure; its `Executor`
    holds what belongs to a process. Capabilities that only some strategies have are in
    `trainkit.strategies.capabilities`.
    """

    changes_maths: ClassVar[bool] = False
    """Whether choosing this strategy changes the result: False for every synchronous one."""

    traits: ClassVar[Traits] = Traits()
    """Properties of the strategy."""

    @abstractmethod
    def validate(self, context: PlanContext) -> list[Problem]:
        """Return the problems of this strategy in this context; before any process starts."""

    def launch_problems(self, launch: LaunchEnvironment) -> list[Problem]:  # noqa: ARG002 - a strategy of the user
        """Return why it cannot train in a launch, by the roles and the number of its tasks alone.

        `validate` returns these problems too. Each process asks before it waits for the others, which may never come.
        """
        return []

    @abstractmethod
    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return the processes it needs, by role; a single one runs in the calling process.

        In a launch these are its processes, each with its device; only that of this process must be exact.
        """

    def num_processes(self, num_gpus: int) -> int:
        """Return the number of processes that the strategy starts on a host with `num_gpus` GPUs."""
        return len(self.tasks(PlanContext(num_gpus=num_gpus)))

    @abstractmethod
    def num_replicas(self, context: PlanContext) -> int:
        """Return the number of replicas that get their own shards."""

    @abstractmethod
    def setup(self, request: SetupRequest) -> Executor:
        """Place the model on its devices; collective over the ranks of the run."""
