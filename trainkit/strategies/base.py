"""What every strategy is: the interface that the engine, the plan and the supervisor speak."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from trainkit.cluster.identity import Identity
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.moved import moved_attribute
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.precision import LossScale, Precision
from trainkit.objectives.base import Collective, Objective
from trainkit.strategies.model_transforms import Compiles
from trainkit.strategies.tensors.sharded import ShardedState, TensorShard

__all__ = [
    "Data",
    "LeftOut",
    "LossWeighting",
    "Numerics",
    "Placed",
    "PlanContext",
    "StagePart",
    "Status",
    "StepContext",
    "StepCounter",
    "StepOutcome",
    "Strategy",
    "TaskContext",
    "Ticket",
    "UpdateParams",
    "UpdateRule",
]


class Status(Enum):
    """What became of a try at a step."""

    applied = "applied"
    """The optimizer stepped."""
    retry = "retry"
    """Gradients overflowed: nothing changed but the loss scale, and the same step comes again."""
    handed_out = "handed out"
    """It is under way; nothing changed."""
    skipped = "skipped"
    """The loss or gradient was not finite and `numerics.on_nonfinite` leaves the step out: only its number is used."""


@dataclass(frozen=True, slots=True)
class UpdateParams:
    """What an update needs to know, where it happens."""

    lr_factor: float
    """The learning rate of this update over the base rate; every parameter group is multiplied alike."""
    max_norm: float | None
    """Clip the gradient to this global norm."""


UpdateRule = Callable[[int], UpdateParams]
"""Update of a version: the number of updates the parameters have seen."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An update that was not made because its loss or gradient was not finite."""

    step: int
    """Updates before it, those that were left out among them."""
    tickets: tuple[Ticket, ...]
    """The shards it would have been made of."""

    @classmethod
    def whole(cls, plan: BatchPlan, step: int) -> LeftOut:
        """Return the step with all its shards."""
        return cls(step, (Ticket(step, tuple(range(plan.num_shards(step)))),))


@dataclass(slots=True)
class StepOutcome:
    """What a try at a step gave. Tensors stay on the device: reading one waits for it."""

    step: int
    status: Status
    loss_sum: Tensor | None
    """() this rank's sum over its targets, None where it had no shard."""
    weight: Tensor | float
    """This rank's total weight of targets: () tensor where it was counted, else a float."""
    grad_norm: Tensor | None = None
    """() global norm before clipping, where it was computed."""
    left_out: tuple[LeftOut, ...] = ()
    """The steps that all ranks now know to be left out: this one, or those since the replicas last met."""
    tickets: tuple[Ticket, ...] = ()
    """The shards this update is made of, where they are not those of `step`."""


@dataclass(frozen=True, kw_only=True)
class LossWeighting:
    """How much a sample weighs in the loss; from the objective and one sample, so that every rank agrees."""

    per_sample: float | None
    """Its weight where that is the same for all and known beforehand; None: it is counted."""
    planned: float
    """About its weight: where weights are counted, a power of two near the planned total divides the loss."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What every step of a training needs; the same on every rank."""

    plan: BatchPlan
    """How steps are cut into shards."""
    objective: Objective
    """Scores a shard."""
    weighing: LossWeighting
    """How the loss is normalised."""
    rule: UpdateRule
    """The update of a version."""


class Data(Protocol):
    """Gives the batches of a ticket."""

    def fetch(self, ticket: Ticket) -> list[Any]:
        """One collated batch a shard, on the device; the same again for the same ticket."""
        ...


class StepCounter(Protocol):
    """How far the training is."""

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
        """Whether a strategy leaves out a step that is not finite, instead of updating with what it has."""
        return self.on_nonfinite != "stop"


@dataclass(frozen=True, kw_only=True)
class PlanContext:
    """What a strategy may judge a config by, before any process starts."""

    numerics: Numerics = field(default_factory=Numerics)
    """The numbers settings."""
    num_gpus: int = 0
    """CUDA devices of this host."""
    precision: str = "fp32"
    """The precision's name."""
    optimizer: type | None = None
    """The optimizer's class; None where it is not known."""
    objective: Objective | None = None
    """What scores a shard; None where it is not known."""
    sample: Any = None
    """A sample of the training data, for shapes; None where none can be had."""
    micro_size: int = 1
    """Samples of the largest shard, where that is decided."""
    launch: LaunchEnvironment | None = None
    """The processes that something else started for this run; None: the supervisor starts what it needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePart:
    """A stretch of a model that is on one device, where a replica spans several."""

    stage: int
    """Its number, in the order of the model."""
    modules: str
    """Its blocks, `embed, blocks.0-5`."""
    num_params: int
    num_bytes: int
    """Parameters, gradients and buffers, as the run holds them."""
    device: str


@dataclass(kw_only=True)
class Placed:
    """A model placed where its strategy computes it: all that lives as long as the process group."""

    model: nn.Module
    """Called by the objective; its parameters are in the precision's model dtype."""
    device: torch.device
    """Where batches must be."""
    device_types: tuple[str, ...] = ()
    """The types of all devices that the model is on; that of `device` where nothing is said."""
    data_ranks: Collective
    """Sums of small tensors over the data ranks; every process of the run takes part and gets the answer."""
    all_ranks: Collective = None  # type: ignore[assignment]  # set below
    """The same over all processes of the run, where several compute a replica; else `collective`."""
    loss_scale: LossScale
    """The current loss scale."""
    precision: Precision
    """The numbers the training is made of."""
    lanes: int | None = None
    """Lanes of the order of summation; None where it is free."""
    step_metrics: dict[str, float] = field(default_factory=dict)
    """What the strategy has measured of the latest step, for the next row of metrics."""
    on_phase: Callable[[str, int], None] | None = None
    """Is told (phase, step) when forward, backward, reduce or update begins, so that a hang can be located."""
    make_loader: Callable[[torch.device], Data] | None = None
    """Opens training data by tickets that nobody knows beforehand, for what computes beside the loop."""
    folder: Path | None = None
    """The run folder, for a strategy that keeps a record of its own; set once it is placed."""

    def __post_init__(self) -> None:
        """One device and one process a replica, where nothing else is said."""
        self.device_types = self.device_types or (self.device.type,)
        self.all_ranks = self.all_ranks or self.data_ranks

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes what a run writes once."""
        return self.all_ranks.rank == 0

    @property
    def rank(self) -> int:
        """The data rank of this process."""
        return self.data_ranks.rank

    @property
    def num_ranks(self) -> int:
        """Data ranks of the run."""
        return self.data_ranks.num_ranks


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """What a task works with that assists the rank that trains, in a process of its own (`Strategy.assist`)."""

    identity: Identity
    """Who this process is, and where it finds the others."""
    model: nn.Module
    """As `Strategy.place` takes it: initialised on the CPU in float32 alike in every task, and shaped."""
    make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
    """Builds the optimizer over parameters by canonical name."""
    precision: Precision
    """The numbers to use."""
    numerics: Numerics
    """The numbers settings."""
    training: StepContext
    """Plan, objective and update rule."""
    num_steps: int
    """Steps of the whole training."""
    open_data: Callable[[torch.device], Data]
    """Opens training data by tickets that nobody knows beforehand; closed when the task ends."""
    requested: Callable[[], str | None]
    """Why this process was asked to stop, or None. The rank that trains was asked too, and ends the others itself."""
    on_phase: Callable[[str, int], None]
    """Is told (phase, step) whenever something else begins. In `idle` a task waits to be asked, as long as it takes; in
    any other phase it counts as hanging once it has not beaten for longer than the limit of that phase."""


class Strategy(ABC):
    """How shards are spread over replicas and how their gradients become one update.

    A strategy is a frozen, keyword-only dataclass: its fields are what the user may set. What lives with the
    processes is in `Placed`.
    """

    changes_maths: ClassVar[bool] = False
    """Whether choosing this strategy changes the result: False for every synchronous one."""

    elastic: ClassVar[bool] = False
    """Whether a run may go on with fewer of its tasks, and with all again: where no rank holds what others lack."""

    compiles: ClassVar[Compiles] = "blocks"
    """What it calls as one, and torch.compile may make one of: the whole model, its blocks, or nothing."""

    defers: ClassVar[bool] = False
    """Whether `place` takes a model without numbers, and makes those it needs from `lazy_init_values(model)`."""

    holds_pieces: ClassVar[bool] = False
    """Whether ranks hold what others lack, so that a checkpoint is written and weights are hashed by all together."""

    computes_together: ClassVar[bool] = False
    """Whether a forward pass is an exchange between ranks: whoever runs the model then does so on every rank."""

    @property
    def shards_a_replica(self) -> int:
        """Shards of a step that keep a replica busy, where the config leaves the cut of a step open."""
        return 1

    @property
    def is_another_training(self) -> bool:
        """Whether, as it is set, it is another training than that of one device."""
        return self.changes_maths

    @abstractmethod
    def problems(self, facts: PlanContext) -> list[Problem]:
        """What is wrong with this strategy in these surroundings; pure, before any process starts."""

    def problems_with(self, model: nn.Module, facts: PlanContext) -> list[Problem]:  # noqa: ARG002 - most take any model
        """What is wrong with it for this model, which may be on the meta device; pure, before any process starts.

        Asked where `problems` found none.
        """
        return []

    def proof_problems(self, facts: PlanContext) -> list[Problem]:  # noqa: ARG002 - most compute in another way than one device
        """Return why a comparison with one device shows nothing, where this strategy runs the same code; pure."""
        return []

    def decided(self, build: Callable[[], nn.Module], facts: PlanContext) -> Strategy:  # noqa: ARG002 - most leave nothing open
        """The strategy with what it leaves to be decided by the model, which `build` makes without its numbers; pure.

        Asked where `problems_with` found none, in every process before `place`.
        """
        return self

    def parts(self, model: nn.Module, facts: PlanContext) -> tuple[StagePart, ...]:  # noqa: ARG002 - most keep a replica whole
        """How a replica is cut, for the plan; nothing where it is whole. Pure."""
        return ()

    def held(self, model: nn.Module, facts: PlanContext) -> Mapping[str, int]:  # noqa: ARG002 - most hold all of it
        """Elements of each parameter that a device holds, of those that hold most, by canonical name; pure.

        All of them, unless ranks hold parts of the model.
        """
        return {name: param.numel() for name, param in model.named_parameters()}

    def gathered(self, model: nn.Module, facts: PlanContext) -> int:  # noqa: ARG002 - most have all of it all the time
        """Elements of parameters and of gradients that a device has for a while, besides those it holds; pure."""
        return 0

    @abstractmethod
    def tasks(self, facts: PlanContext) -> tuple[Task, ...]:
        """The processes it needs, by role; a single one runs in the process that asks.

        In a launch these are the launch's own, each with its device; only that of this process need be exact.
        """

    def trains(self, task: Task) -> bool:  # noqa: ARG002 - in most strategies all do
        """Return whether a task runs the training loop; pure. The others run `run_auxiliary`. Rank 0 always trains."""
        return True

    def replaces(self, task: Task) -> bool:  # noqa: ARG002 - in most strategies none can be
        """Whether a task that dies is started again alone, while the others go on; pure. It joins them by itself."""
        return False

    def assist(self, bench: TaskContext) -> None:
        """Do the part of a task that does not train, until the rank that trains has ended it.

        Raises:
            ConnectionError: the rank that trains is gone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no task that assists")

    def num_processes(self, num_gpus: int) -> int:
        """The processes it starts on a host of so many GPUs."""
        return len(self.tasks(PlanContext(num_gpus=num_gpus)))

    def num_slots(self, num_gpus: int) -> int:
        """The GPUs that a job of a sweep needs on a host of so many; where it uses none, a core a process."""
        tasks = self.tasks(PlanContext(num_gpus=num_gpus))
        return len({task.device for task in tasks if task.device.startswith("cuda")}) or len(tasks)

    @abstractmethod
    def num_replicas(self, facts: PlanContext) -> int:
        """Replicas that get their own shards."""

    @abstractmethod
    def gradient_copies(self, numerics: Numerics, num_replicas: int) -> int:
        """Copies of all gradients that a device holds at the peak of a step, besides the gradients themselves."""

    @abstractmethod
    def place(
        self,
        model: nn.Module,
        *,
        identity: Identity,
        precision: Precision,
        numerics: Numerics,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
    ) -> Placed:
        """Put the model where it is computed; collective over the ranks of the run.

        Args:
            model: initialised on the CPU in float32, alike on every rank, and shaped
                (`trainkit.strategies.model_transforms`): forward passes that are recomputed or compiled are in place.
                On the meta device where the strategy `defers`, unless the constructor does not allow it:
                `lazy_init_values(model)` is None then.
            identity: who this process is.
            precision: the numbers to use.
            numerics: the numbers settings.
            make_optimizer: builds the optimizer over parameters by canonical name.
        """

    def prepare(self, placed: Any) -> tuple[str, ...]:  # noqa: ARG002 - most have nothing to prepare
        """The last chance to choose before the first step, when a checkpoint has been restored; collective.

        Returns:
            Lines for the summary: what was chosen, and why.
        """
        return ()

    @abstractmethod
    def assign(self, plan: BatchPlan, step: int, placed: Placed) -> tuple[int, ...]:
        """The shards of a step that this rank computes."""

    @abstractmethod
    def tickets(
        self, plan: BatchPlan, position: StepCounter, placed: Any, until: int | None = None
    ) -> Iterator[Ticket]:
        """What to compute here, step after step, from the position on; the same again while it does not move.

        Args:
            plan: how steps are cut.
            position: how far the training is; it moves.
            placed: what `place` returned.
            until: updates after which this start ends: steps past it are not worth handing out.
        """

    @abstractmethod
    def step(
        self,
        placed: Any,
        ticket: Ticket,
        batches: Sequence[Any],
        training: StepContext,
    ) -> StepOutcome:
        """Compute a ticket and update the parameters; collective.

        Args:
            placed: what `place` returned.
            ticket: the step and the shards to compute here.
            batches: one collated batch a shard of the ticket, on `placed.device`.
            training: plan, objective and update rule.

        Returns:
            What became of it; an overflowed step leaves parameters, buffers and optimizer as they were.
        """

    @abstractmethod
    def state(self, placed: Any) -> dict[str, Tensor]:
        """Parameters, buffers and optimizer state by canonical name, as a checkpoint keeps them, whole.

        Collective where ranks hold what others lack (`holds_pieces`); then it is for models that fit on every rank.
        """

    def recover(self, placed: Any, step: int) -> bool:  # noqa: ARG002 - most hold what other ranks or threads change
        """Bring what `state` gives back to the end of the last complete step, after an error; needs no other rank.

        Args:
            placed: what `place` returned.
            step: updates completed, as the training counts them.

        Returns:
            Whether that was possible. False where it is not certain: an update had begun, or others hold a part.
        """
        return False

    def pieces(self, placed: Any) -> ShardedState:
        """What this rank writes of `state` into a checkpoint; every part of it is written by one rank.

        All of it by the owner, unless ranks hold what others lack (`holds_pieces`).
        """
        return (
            {name: (TensorShard.whole(tensor),) for name, tensor in self.state(placed).items()}
            if placed.is_rank0
            else {}
        )

    @abstractmethod
    def load_state(self, placed: Any, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors of a checkpoint of any strategy.

        Also in the middle of a training that rolls back: `recall` and `tickets` are then called again, too.
        """

    def notes(self) -> tuple[str, ...]:
        """Lines that the plan and the summary shall say of it; pure."""
        return ()

    def notes_with(self, model: nn.Module) -> tuple[str, ...]:  # noqa: ARG002 - most say the same of any model
        """Lines that they shall say of it and this model, which may be on the meta device; pure."""
        return ()

    def settles_at(self, step: int) -> int:
        """The first step from this one on after which replicas are alike; pure.

        There a run is evaluated, saved and stopped. After every step, unless replicas train apart.
        """
        return step

    def settle(self, placed: Any) -> tuple[LeftOut, ...]:  # noqa: ARG002 - most have nothing to settle
        """Make the replicas alike at the end of a training, wherever it ends; collective.

        Returns:
            The steps that were left out and that no outcome has named.
        """
        return ()

    def remember(self, placed: Any) -> dict[str, Any]:  # noqa: ARG002 - most have nothing to remember
        """What a checkpoint shall keep besides tensors, so that a resumed run chooses the same; JSON."""
        return {}

    def recall(self, placed: Any, remembered: Mapping[str, Any]) -> None:  # noqa: ARG002 - see `remember`
        """Take up what `remember` gave; called before `prepare`."""
        return

    def catch_up(self, placed: Any) -> None:  # noqa: ARG002 - in most strategies it is trained itself
        """Bring `placed.model` up to date, before somebody looks at it: evaluates it, samples from it."""
        return

    def findings(self, placed: Any) -> dict[str, Any]:  # noqa: ARG002 - most have found nothing
        """What result.json shall say of how it went, by keys of its own; JSON."""
        return {}

    def check_replicas(self, placed: Any) -> str | None:  # noqa: ARG002 - one that keeps no copies has none to compare
        """The parameter in which replicas differ, with the ranks that do; None: they are equal. Collective."""
        return None

    @abstractmethod
    def leave(self, placed: Any) -> None:
        """End the process group."""

    def abort(self, placed: Any) -> None:
        """Break the connections of a rank that has failed, without waiting for the other ranks."""
        self.leave(placed)


def __getattr__(name: str) -> Any:
    """Return a class by the name that it once had."""
    return moved_attribute(__name__, name)
