"""The two halves of a strategy, and the values that they exchange with the trainer.

`Strategy` is what the user sets: frozen and pure. `Executor` is one task's share of a running training. `Facts` are
the values that tell one strategy from another; code outside of the strategies asks them, never the class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Protocol

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
from trainkit.objectives.base import Access, Objective, needs_of
from trainkit.strategies.memory import ModelMemory, PlannedShard, RankPass, ReplicaPart
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
    Numerics,
    Phase,
    PhaseListener,
    Status,
    StepContext,
    StepOutcome,
    UpdateParams,
    UpdateRule,
    UpdateTensors,
    ignore_phase,
)
from trainkit.strategies.tensor_shards import ShardedState, TensorShard

__all__ = [
    "Batch",
    "Data",
    "Executor",
    "Facts",
    "GradientListener",
    "GraphSettings",
    "JsonMap",
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
    "UpdateParams",
    "UpdateRule",
    "UpdateTensors",
    "ignore_phase",
]

JsonMap = Mapping[str, object]
"""A JSON object."""

StateDict = Mapping[str, Tensor]
"""Parameters, buffers and optimizer state by canonical name, as a checkpoint keeps them."""


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
class Facts:
    """The properties of a strategy: of its class, and in `Strategy.facts_in` of its fields in a context."""

    place: int = 9
    """Position in texts that list strategies: smaller numbers first, from the simplest strategy on."""
    elastic: bool = False
    """Whether a run may continue with any number of its tasks, and later with all: a checkpoint has the whole state."""
    compiles: Compiles = "blocks"
    """Unit that torch.compile may compile: the whole model, its blocks, or nothing."""
    supports_meta_init: bool = False
    """Whether `setup` takes a model without data on each rank but 0, which sends its values."""
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
    observed: bool = False
    """Whether a plan takes its steps without data and observes them, instead of `rank_passes`."""
    shows_gradients: bool = False
    """Whether its steps call `StepContext.on_gradients`."""
    runs_hooks: bool = False
    """Whether its eager steps call hooks on the gradient of a parameter: it computes with those of the model."""
    keeps_memory_format: bool = True
    """Whether parameters keep the memory format of the model; parts of sharded ones are contiguous."""
    changes_maths: bool = False
    """Whether the strategy trains differently from one device: False for every synchronous one."""
    is_asynchronous: bool = False
    """Whether gradients are applied as they arrive: the loss of a step belongs to parameters of earlier updates."""
    shards_per_replica: int = 1
    """Shards of a step that keep a replica busy, if the config does not set the cut of a step."""
    withheld: Mapping[Access, str] = field(default_factory=dict)
    """The access to the model that an objective cannot have, each with the reason and an alternative."""
    withheld_calls: Mapping[LoopCall, str] = field(default_factory=dict)
    """The calls of a user's own loop that the strategy refuses, each with the reason and an alternative."""

    @property
    def refused_calls(self) -> Mapping[LoopCall, str]:
        """The calls of a user's own loop that cannot work, each with the reason. A loss of the loop calls the model."""
        if (reason := self.withheld.get(Access.calls)) is None:
            return self.withheld_calls
        return {LoopCall.own_loss: reason, **self.withheld_calls}

    def refused_access(self, needs: Collection[Access]) -> tuple[Access, str] | None:
        """Return the first of these needs that the strategy does not support, with the reason; None if none."""
        return next(((need, self.withheld[need]) for need in Access if need in needs and need in self.withheld), None)


WHOLE_REPLICAS: Final = Facts(
    compiles="model",
    several_optimizers=True,
    converts=True,
    compiles_step=True,
    shows_gradients=True,
    runs_hooks=True,
)
"""The facts of a strategy whose replicas hold the whole model, with gradients of whole parameters."""


@dataclass(frozen=True, kw_only=True)
class SetupRequest:
    """The input of a task for building its share of a training."""

    model: nn.Module
    """The model, initialised on the CPU in float32, the same in every task, and transformed
    (`trainkit.strategies.model_transforms`): forward passes that are recomputed or compiled are in place. On the meta
    device on ranks above 0 if the strategy and the constructor support it.
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
    """Settings of whole-step graphs (`Facts.compiles_step`); None: nothing is compiled as a whole."""
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

        Collective if the state is sharded (`Facts.is_sharded`): the model must then fit on every rank.
        """

    @abstractmethod
    def load_state_dict(self, state: StateDict) -> None:
        """Restore the tensors of a checkpoint of any strategy; also in the middle of a training that rolls back.

        Args:
            state: mapping that reads a tensor on access.
        """

    def sharded_state_dict(self) -> ShardedState:
        """Return the shards that this rank writes into a checkpoint; each part of a tensor is written by one rank.

        By default rank 0 writes the whole state.
        """
        if not self.local.is_rank0:
            return {}
        return {name: (TensorShard.whole(tensor),) for name, tensor in self.state_dict().items()}

    def state_dict_extra(self) -> JsonMap:
        """Return the state other than tensors for a checkpoint, so that a resumed run makes the same choices; JSON."""
        return {}

    def load_state_extra(self, extra: JsonMap) -> None:  # noqa: B027 - optional
        """Restore what `state_dict_extra` returned; before `tune`.

        Raises:
            ValueError: the state is malformed.
        """

    def tune(self) -> tuple[str, ...]:
        """Make choices by measuring, before the first step and after a checkpoint was restored; collective.

        Returns:
            Lines for the summary about the choices and their reasons.
        """
        return ()

    def sync(self) -> tuple[LeftOut, ...]:
        """Make replicas identical at the end of a training; collective.

        Returns:
            The skipped steps that no outcome has reported.
        """
        return ()

    def recover(self, step: int) -> bool:  # noqa: ARG002 - not by default
        """Restore the state after `step` updates, without another rank; return whether that was possible.

        It is impossible if the state is uncertain: an update had begun, or other ranks hold a part of it.
        """
        return False

    def refresh_model(self) -> None:  # noqa: B027 - optional
        """Bring the local model up to date, before it is evaluated or sampled from."""

    def swap_averages(self) -> bool:
        """Exchange the parameters of the local model and their averages, a second call undoes this exactly.

        Returns:
            Whether there are averages on this rank.
        """
        return False

    def check_replicas(self) -> str | None:
        """Return the parameter in which replicas differ, with the ranks; None if all are equal. Collective."""
        return None

    def expect_unchanged(self) -> None:  # noqa: B027 - optional
        """Leave out the check for changes by a user before the next step: only code of the trainer has run."""

    def result_extra(self) -> JsonMap:
        """Return keys and values to add to result.json; JSON."""
        return {}

    def forward_backward(self, ticket: Ticket, batches: Sequence[Batch]) -> tuple[Tensor | None, Tensor | float]:
        """Compute the gradients of a step; return loss sum and weight of this rank, as in `StepOutcome`. Collective.

        This, `gradients` and `update` are the halves of a step for a user's own loop, unless the strategy refuses
        `LoopCall.apart`.
        """
        raise NotImplementedError

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the mean gradients of the step over all ranks, for this rank's parts, by canonical name."""
        raise NotImplementedError

    def update(self) -> StepOutcome:
        """Update the parameters with these gradients; collective."""
        raise NotImplementedError

    @abstractmethod
    def close(self, *, failed: bool = False) -> None:
        """End threads and process groups.

        Args:
            failed: whether this rank has failed: it then closes its connections without waiting for the other ranks.
        """


class Strategy(ABC):
    """The distribution of shards over replicas, and the combination of their gradients into one update.

    A strategy is a frozen, keyword-only dataclass: its fields are what the user may set. It is pure; its `Executor`
    holds what belongs to a process.
    """

    facts: ClassVar[Facts] = Facts()
    """Properties of the class."""

    def facts_in(self, context: PlanContext) -> Facts:  # noqa: ARG002 - by default those of the class
        """Return the properties with the current fields in a context; pure."""
        return self.facts

    # Before any process starts.

    @abstractmethod
    def validate(self, context: PlanContext) -> list[Problem]:
        """Return the problems of this strategy in this context."""

    def validate_model(self, model: nn.Module, context: PlanContext) -> list[Problem]:  # noqa: ARG002 - any model
        """Return the problems for a model, which may be on the meta device, if `validate` finds none; pure."""
        return []

    def access_problems(self, context: PlanContext) -> list[Problem]:
        """Return the problem of an objective that needs access to the model that the strategy cannot give."""
        objective = context.objective
        refused = self.facts_in(context).refused_access(() if objective is None else needs_of(objective))
        if refused is None:
            return []
        rule = f"{refused[0].value}, and {refused[1]}"
        return [Problem(key="objective", value=type(objective).__name__, rule=rule)]

    def launch_problems(self, launch: LaunchEnvironment) -> list[Problem]:  # noqa: ARG002 - a strategy of the user
        """Return why it cannot train in a launch, by the roles and the number of its tasks alone.

        `validate` returns these problems too. Each process asks before it waits for the others, which may never come.
        """
        return []

    def proof_problems(self, context: PlanContext) -> list[Problem]:  # noqa: ARG002 - by default it shows something
        """Return why a comparison with one device would show nothing; pure."""
        return []

    def sum_of_gradients(self, context: PlanContext) -> str | None:  # noqa: ARG002 - by default no key decides
        """Return the reducer and the compression in words, for the summary; None where no key decides; pure."""
        return None

    def notes(self, model: nn.Module, context: PlanContext) -> tuple[str, ...]:  # noqa: ARG002 - by default none
        """Return lines for the plan and the summary; the model may be on the meta device; pure."""
        return ()

    # Tasks.

    @abstractmethod
    def tasks(self, context: PlanContext) -> tuple[Task, ...]:
        """Return the processes it needs, by role; a single one runs in the calling process.

        In a launch these are its processes, each with its device; only that of this process must be exact.
        """

    def num_processes(self, num_gpus: int) -> int:
        """Return the number of processes that the strategy starts on a host with `num_gpus` GPUs."""
        return len(self.tasks(PlanContext(num_gpus=num_gpus)))

    def num_slots(self, num_gpus: int) -> int:
        """Return the number of GPUs that a job of a sweep needs on a host with `num_gpus`; without GPUs, of cores."""
        tasks = self.tasks(PlanContext(num_gpus=num_gpus))
        return len({task.device for task in tasks if task.device.startswith("cuda")}) or len(tasks)

    @abstractmethod
    def num_replicas(self, context: PlanContext) -> int:
        """Return the number of replicas that get their own shards."""

    def runs_loop(self, task: Task) -> bool:  # noqa: ARG002 - by default all
        """Return whether a task runs the training loop; rank 0 does; pure."""
        return True

    def restarts_alone(self, task: Task) -> bool:  # noqa: ARG002 - by default none
        """Return whether a task that dies is restarted while the others continue, and then rejoins them; pure."""
        return False

    def next_sync_step(self, step: int) -> int:
        """Return the first step >= `step` at which replicas hold identical parameters; pure."""
        return step

    # Memory and devices, for the plan.

    def estimate_memory(self, model: nn.Module, context: PlanContext) -> ModelMemory:  # noqa: ARG002 - the same in any
        """Return the memory of the device with the largest use; pure."""
        return ModelMemory.whole(model)

    def replica_parts(self, model: nn.Module, context: PlanContext, *, num_shards: int) -> tuple[ReplicaPart, ...]:  # noqa: ARG002
        """Return the part of each device, if a replica has this many shards of a step; pure.

        By default one device computes all, and the part names no modules.
        """
        return (ReplicaPart(modules=(), memory=self.estimate_memory(model, context)),)

    def rank_passes(self, model: nn.Module, context: PlanContext, shard: PlannedShard) -> tuple[RankPass, ...]:  # noqa: ARG002
        """Return the pass of each part of a replica, in the order of `replica_parts`; pure.

        Empty if each device computes like a single device.

        Args:
            model: the model, with or without data; unchanged.
            context: the context of the plan.
            shard: a shard of the step.
        """
        return ()

    def describe_partition(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:  # noqa: ARG002
        """Return the parts of a replica that spans several devices, for the plan; empty if it is not split; pure."""
        return ()

    @classmethod
    def sharded_over(cls, count: int) -> Mapping[str, int]:  # noqa: ARG003 - by default it cannot
        """Return the keys of `strategy` that shard the model over `count` devices; empty: it cannot; pure.

        Recommended to a run that ran out of memory.
        """
        return {}

    # In each process.

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> Strategy:  # noqa: ARG002 - all are set
        """Return the strategy with the fields set that depend on the model or the launch; called before `setup`; pure.

        Args:
            build: makes the model without its data.
            context: the context of the plan.
        """
        return self

    def as_observed(self) -> Strategy:
        """Return the strategy whose step a plan observes without the other ranks (`Facts.observed`); pure."""
        return self

    @abstractmethod
    def setup(self, request: SetupRequest) -> Executor:
        """Place the model on its devices; collective over the ranks of the run."""

    def run_auxiliary(self, context: TaskContext) -> None:
        """Run a task without a loop, until rank 0 ends it.

        Raises:
            ConnectionError: rank 0 has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} has no auxiliary tasks")
