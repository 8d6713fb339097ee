"""The two halves of a strategy, and the values that they exchange with the trainer.

`Strategy` is what the user sets: frozen and pure. `Executor` is one task's share of a running training. `Facts` are
the values that tell one strategy from another; code outside of the strategies asks them, never the class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter, is_
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.adapters.average import Average
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Identity, Task
from trainkit.config.targets.allowed import TARGET
from trainkit.config.yaml_files import read_document, shipped_conf
from trainkit.data.reading.collate import CollateFunction, collate
from trainkit.errors import Problem, TrainingError, listed, refuse
from trainkit.names import name_of
from trainkit.numerics.batch import BatchPlan, Ticket, shards_of_rank
from trainkit.numerics.precision import LossScale, Precision
from trainkit.numerics.schedules import LearningRate
from trainkit.objectives.base import Access, Collective, Loss, Model, Objective, needs_of
from trainkit.strategies.model_transforms import Compiles, GraphSettings
from trainkit.strategies.tensor_shards import ShardedState, TensorShard


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """The arguments by which a strategy exchanges less, or over another path; None if it has no such option."""

    compression: str | None = None
    """Argument that sends gradients in 16 bits."""
    shared_memory: str | None = None
    """Argument that sums through memory of the host."""
    num_servers: int | None = None
    """Number of parameter servers."""
    spares: str | None = None
    """The key whose number adds replicas for which a step does not wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """A strategy with a number of replicas."""

    keys: Mapping[str, int]
    """The keys of `strategy` that set this number."""
    waits: bool = True
    """Whether a step ends only when all replicas have exchanged; they then share its samples."""
    remedies: Remedies = field(default_factory=Remedies)


Batch = object
"""A collated batch, in the form that the objective of the run takes."""


class Status(Enum):
    """The outcome of a try at a step."""

    applied = "applied"
    """The optimizer stepped."""
    retry = "retry"
    """Gradients overflowed: only the loss scale changed, and the same step is retried."""
    handed_out = "handed out"
    """The step is in progress; nothing changed."""
    skipped = "skipped"
    """The loss or gradient was not finite and `numerics.on_nonfinite` skips the step: only its number is used."""


@dataclass(frozen=True, slots=True)
class UpdateParams:
    """The parameters of an update."""

    lr_factor: float
    """The learning rate of this update divided by the base rate, the same factor for every parameter group."""
    max_norm: float | None
    """Clip the gradient to this global norm."""

    @classmethod
    def at(cls, rate: LearningRate, max_norm: float | None, version: int) -> UpdateParams:
        """Return the parameters of an update at the rate of its step."""
        return cls(rate.factor(version), max_norm)


UpdateRule = Callable[[int], UpdateParams]
"""Function from a version (number of earlier updates) to the parameters of the update."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An update that was skipped because its loss or gradient was not finite."""

    step: int
    """Number of updates before it, including skipped ones."""
    tickets: tuple[Ticket, ...]
    """Shards of the step."""

    @classmethod
    def whole(cls, plan: BatchPlan, step: int) -> LeftOut:
        """Return the step with all its shards."""
        return cls(step, (Ticket(step, tuple(range(plan.num_shards(step)))),))


@dataclass(slots=True)
class StepOutcome:
    """The result of a try at a step. Tensors stay on the device: reading one waits for it."""

    step: int
    status: Status
    loss_sum: Tensor | None
    """() this rank's sum over its targets, None if it had no shard."""
    weight: Tensor | float
    """This rank's total weight of targets: () tensor if it was counted, else a float."""
    grad_norm: Tensor | None = None
    """() global norm before clipping, if it was computed."""
    left_out: tuple[LeftOut, ...] = ()
    """The steps that all ranks know to be skipped: this one, or several since the last average."""
    tickets: tuple[Ticket, ...] = ()
    """The shards of this update, if they are not those of `step`."""
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """This rank's sums of the terms of the loss, () each, by name; empty if it had no shard."""
    phases: Mapping[str, tuple[Tensor | None, Tensor | float]] = field(default_factory=dict)
    """Loss sum and weight of each phase that ran, as `loss_sum` and `weight`; empty if the step has one phase."""


class LoopCall(Enum):
    """Requests of a user's own loop; the values are the calls of `trainkit.session`."""

    session = "trainkit.session"
    """Run steps at all."""
    own_loss = "step(loss_fn)"
    """Run a step with a loss given by the loop."""
    apart = "forward_backward() and update()"
    """Compute the gradients of a step separately from its update."""


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
class LossWeighting:
    """The weight of a sample in the loss; from the objective and one sample, so that all ranks agree."""

    per_sample: float | None
    """The weight, if it is the same for all samples and known in advance; None: it is counted."""
    planned: float
    """The approximate weight: if weights are counted, a power of two near the planned total divides the loss."""
    exact: bool = False
    """Whether the planned total itself divides the loss: it is the counted weight unless a target is ignored."""

    @classmethod
    def of(cls, objective: Objective, sample: Any) -> LossWeighting:
        """Return the weighting of an objective, from one sample that is not collated."""
        return cls(
            per_sample=objective.weight_per_sample(sample),
            planned=objective.planned_weight_per_sample(sample),
            exact=objective.plans_exactly,
        )


@dataclass(frozen=True, kw_only=True)
class NamedOptimizer:
    """One of several optimizers of a run."""

    name: str
    """Key of the optimizer in `optimizers`."""
    params: frozenset[str]
    """Canonical names of the parameters of the optimizer."""
    make: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
    """Function that builds the optimizer over these parameters."""
    factor: Callable[[int], float]
    """Function from a step to its learning rate divided by the base rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a step: passes over its batch with one loss, each with an update of the optimizer with the name of the
    phase.

    Example:
        >>> [Phase(name="generator", every=2).num_passes(step) for step in range(4)]
        [0, 1, 0, 1]
    """

    name: str
    repeats: int = 1
    """Number of passes in a step in which the phase runs."""
    every: int = 1
    """Interval in steps between two steps in which the phase runs."""

    def num_passes(self, step: int) -> int:
        """Return the passes in a step, from 0: the first run ends a group of `every` steps."""
        return 0 if (step + 1) % self.every else self.repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTensors:
    """The tensors that a step is about to update, on this rank."""

    grads: Mapping[str, Tensor]
    """Gradients by canonical name, of the mean loss over all shards and replicas: not scaled, not clipped. A parameter
    without a gradient is absent.
    """
    weights: Mapping[str, Tensor]
    """The parameters that the optimizer updates, before the update."""
    counted: Mapping[str, bool] | None
    """If ranks hold parts of tensors: whether a sum over `ranks` counts the part of this rank (of several ranks with
    the same part, one counts it). None: every rank has whole tensors.
    """
    ranks: Collective
    """All processes that hold parts."""


class GradientListener(Protocol):
    """Receives the gradients of some steps, without changing them."""

    def wants(self, step: int) -> bool:
        """Return whether it needs this step, counted from 0; the same on every rank that holds parts."""

    def take(self, step: int, tensors: UpdateTensors) -> None:
        """Receive the tensors that the step is about to update; in a step of several passes, called before each
        update.
        """


PhaseListener = Callable[[str, int], None]
"""Callback that receives (phase, step) when a task begins a phase: forward, backward, reduce, update, data, idle."""


def ignore_phase(phase: str, step: int) -> None:
    """Do nothing: the listener of a task whose phases are not watched."""
    del phase, step


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The inputs of every step of a training; the same on every rank."""

    plan: BatchPlan
    """The cut of steps into shards."""
    objective: Objective
    """The objective, which scores a shard."""
    weighing: LossWeighting
    """The normalisation of the loss."""
    rule: UpdateRule
    """Function from a version to the parameters of its update."""
    phases: tuple[Phase, ...] = ()
    """The phases of a step, in order; empty: one pass, whose loss is `objective.loss`."""
    phase: str | None = None
    """The phase of this context; None if a step has no phases."""
    draw_key: int = 0
    """Number that keys the random numbers of this pass, in addition to step and shard; 0 if a step has one pass."""
    on_gradients: GradientListener | None = None
    """Listener that receives gradients before they are used (`Facts.shows_gradients`); None: nobody does."""

    def loss(self, model: Model, batch: Batch, step: int, shard: int) -> Loss:  # noqa: ARG002 - for other contexts
        """Run the model on a shard of a step, and return the loss of this phase."""
        if self.phase is None:
            return self.objective.loss(model, batch)
        return self.objective.phase_loss(self.phase, model, batch)


_REMEDY: Final = (
    "a run trains the parameters that required gradients when it started. Let an argument of the model's constructor "
    "decide it, and train in two runs, the second with init_from=RUN (docs/bring-your-own.md#freezing)."
)

_TRAINS: Final = attrgetter("requires_grad")


class ParamGuard:
    """The parameters of a model as a training started with them.

    An optimizer, an exchange of gradients and a checkpoint are made for these. Code of the user (a callback, a forward
    pass, a loop) that changes them later would train other ones than it seems to. Looking takes 2 us for a
    small model and 30 us for one of 200 modules, and nothing waits for the device.

    Args:
        model: the model on its devices, as it is trained.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).requires_grad_(False)
        >>> guard = ParamGuard(model)
        >>> model[1].bias.requires_grad_(True).requires_grad, guard.change()
        (True, 'requires_grad of 1.bias was changed to True')
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._all = [*self._params.values()]
        self._trains = [*map(_TRAINS, self._all)]
        self.frozen = frozenset(name for name, param in self._params.items() if not param.requires_grad)
        """Names of the parameters that are not trained."""
        self._watch()

    def _watch(self) -> None:
        """Store what the modules hold: while it stays, so do the names and the objects of all parameters."""
        modules = list(self._model.modules())
        self._tables = [table for module in modules for table in (module._modules, module._parameters)]  # noqa: SLF001
        self._sizes = [*map(len, self._tables)]
        entries = [(table, name, value) for table in self._tables for name, value in table.items()]
        self._entry_tables, self._entry_names, self._entry_values = (
            ([*column] for column in zip(*entries, strict=True)) if entries else ([], [], [])
        )

    def change(self, *, flags: bool = True) -> str | None:
        """Return what was changed, as a part of a sentence; None if nothing was.

        Args:
            flags: whether a changed `requires_grad` counts.
        """
        is_same = all(map(is_, map(dict.get, self._entry_tables, self._entry_names), self._entry_values))
        if not is_same or [*map(len, self._tables)] != self._sizes:
            params = dict(self._model.named_parameters(remove_duplicate=False))
            kinds = {
                "added": [name for name in params if name not in self._params],
                "removed": [name for name in self._params if name not in params],
                "replaced": [name for name, param in self._params.items() if params.get(name, param) is not param],
            }
            if changes := " and ".join(f"{listed(names)} was {kind}" for kind, names in kinds.items() if names):
                return f"the parameter {changes}"
            self._watch()  # only modules without parameters are new
        if not flags or [*map(_TRAINS, self._all)] == self._trains:
            return None
        changed = [name for name, param in self._params.items() if param.requires_grad is (name in self.frozen)]
        was_frozen = changed[0] in self.frozen
        names = [name for name in changed if (name in self.frozen) is was_frozen]
        return f"requires_grad of {listed(names)} was changed to {was_frozen}"

    def refuse_change(self, step: int, *, flags: bool = True) -> None:
        """Raise if a parameter was changed.

        Raises:
            TrainingError: names the step, the parameters and the remedy.
        """
        if (change := self.change(flags=flags)) is not None:
            raise TrainingError(f"after step {step}, {self.refusal(change)}")

    @staticmethod
    def refusal(change: str) -> str:
        """Return the sentence about a change that ends the run."""
        return f"{change} by the model's or your own code, but {_REMEDY}"


@dataclass(kw_only=True)
class LocalModel:
    """One task's copy or part of the model: its devices, its precision, and its group of ranks."""

    model: nn.Module
    """The model that the objective calls; its parameters are in the precision's model dtype."""
    device: torch.device
    """The device on which batches must be."""
    device_types: tuple[str, ...] = ()
    """The types of all devices that the model is on; empty: that of `device`."""
    data_ranks: Collective
    """Sums of small tensors over the data ranks; every process of the run takes part and gets the result."""
    all_ranks: Collective = None  # type: ignore[assignment]  # set below
    """Sums over all processes of the run, if several compute a replica; None: `data_ranks`."""
    precision: Precision
    """The number formats of the training."""
    lanes: int | None = None
    """Number of lanes of the order of summation; None if the order is free."""
    loss_scale: LossScale = None  # type: ignore[assignment]  # set below
    """The current loss scale; None: the initial one of the precision."""
    step_metrics: dict[str, float] = field(default_factory=dict)
    """Measurements of the latest step, for the next row of metrics."""

    def __post_init__(self) -> None:
        """Assume one device and one process per replica, unless given otherwise."""
        self.device_types = self.device_types or (self.device.type,)
        self.all_ranks = self.all_ranks or self.data_ranks
        self.loss_scale = self.loss_scale or self.precision.loss_scale()
        self.guard = ParamGuard(self.model)

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes the files that a run writes once."""
        return self.all_ranks.rank == 0

    @property
    def rank(self) -> int:
        """The data rank of this process."""
        return self.data_ranks.rank

    @property
    def num_ranks(self) -> int:
        """Number of data ranks of the run."""
        return self.data_ranks.num_ranks

    def refuse_changed_params(self, step: int, *, flags: bool = True) -> None:
        """Raise if code of the user has changed which parameters there are, or (`flags`) which of them are trained.

        Raises:
            TrainingError: names the step, the parameters and the remedy.
        """
        self.guard.refuse_change(step, flags=flags)

    def set_loss_scale(self, scale: LossScale) -> None:
        """Compute with another loss scale from now on."""
        self.loss_scale = scale


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """The elements on the device of a strategy with the largest memory use."""

    resident: Mapping[str, int]
    """Elements of each parameter, by canonical name."""
    transient: int = 0
    """Elements of parameters and gradients that a device holds temporarily, in addition."""
    gradient_copies: float = 0
    """Copies of all gradients at the peak of a step, in addition to the gradients themselves."""
    kept_copies: float = 0
    """Of these copies, those that outlive a step."""
    bucket: int | None = None
    """Elements of gradients that are alive in addition to the vector that holds all gradients and outlives the step;
    None: there is no such vector.
    """

    @classmethod
    def whole(cls, model: nn.Module, *, gradient_copies: float = 0, bucket: int | None = None) -> ModelMemory:
        """Return the memory of a device with a whole replica."""
        resident = {name: param.numel() for name, param in model.named_parameters()}
        return cls(resident=resident, gradient_copies=gradient_copies, bucket=bucket)


Flows = Mapping[tuple[int, int], float]
"""(sender, receiver) -> bytes; the ranks are those of the tasks."""


Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
"""What ranks do together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCall:
    """A collective of an observed rank in a step."""

    kind: Kind
    ranks: tuple[int, ...]
    """The ranks that take part; the sender and the receiver of a send."""
    num_bytes: int
    """Bytes of the whole tensor, of which each rank has a part before or after, or which is summed."""
    shard: int | None
    """Number of the observed shard of the rank; None: between the last backward pass and the next step."""
    is_in_update: bool = False
    """Whether the update makes it."""
    times: float = 1
    """Number of shards of the rank with the same one."""


class DryRun(Protocol):
    """Runs the largest shard of a step, or an update, on tensors without data."""

    def collectives(self) -> Mapping[int, Sequence[CollectiveCall]] | None:
        """Return the collectives of each of `Strategy.observed_ranks` in a step; None if it cannot run without data."""

    def lookups(self, names: Collection[str]) -> Mapping[str, Sequence[tuple[int, bool]]] | None:
        """Return (number of indices, whether backward recomputes it) of each lookup of a shard, by the names of tables;
        None if it cannot run without data.
        """


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The bytes of a step that serve one purpose."""

    what: str
    """Kind of data: gradients, parameters, activations or variables."""
    how: str
    """The operation, such as `all-reduce` or `pull`."""
    flows: Flows
    """Bytes of a step by sender and receiver."""
    messages: int = 1
    """Number of messages of a rank in sequence in a step; each costs the latency of a link."""
    overlaps: bool = False
    """Whether ranks compute during the transfer."""
    by: Literal["network", "memory"] = "network"
    """Path: the links between devices, or memory of a host that all ranks map."""
    first_step: int = 0
    """The first step with this transfer."""
    end_step: int | None = None
    """The first later step without it; None: it lasts to the end."""
    every: int = 1
    """Interval in steps between two transfers, counted from `first_step`; the last step of each interval has it."""
    note: str | None = None
    """Note about the limits of its figures."""

    @property
    def num_bytes(self) -> float:
        """Bytes that all ranks together send in a step with this transfer."""
        return sum(self.flows.values())

    def lasts_at(self, step: int) -> bool:
        """Return whether a step lies between `first_step` and `end_step`."""
        return self.first_step <= step and (self.end_step is None or step < self.end_step)

    def occurs_at(self, step: int) -> bool:
        """Return whether a step has this transfer.

        Example:
            >>> average = Transfer(what="parameters", how="all-reduce", flows={}, first_step=2, every=4)
            >>> [step for step in range(12) if average.occurs_at(step)]
            [5, 9]
        """
        return self.lasts_at(step) and (step - self.first_step + 1) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class StepCut:
    """The division of a full step, as far as it determines the bytes of transfers."""

    num_shards: int
    """Number of shards of the step, over all replicas."""
    num_replicas: int = 1
    """Number of replicas that share the shards."""
    dry_run: DryRun | None = field(default=None, compare=False)
    """The dry run of the largest shard; None: facts that need it are unknown."""

    def shards_of(self, replica: int) -> int:
        """Return the shards of a replica: the replicas take them in turn.

        Example:
            >>> [StepCut(num_shards=5, num_replicas=2).shards_of(replica) for replica in (0, 1)]
            [3, 2]
        """
        return len(shards_of_rank(self.num_shards, rank=replica, num_ranks=self.num_replicas, lanes=None))

    @property
    def shards_a_replica(self) -> int:
        """Number of shards of the replica with the most.

        Example:
            >>> StepCut(num_shards=5, num_replicas=2).shards_a_replica
            3
        """
        return -(-self.num_shards // self.num_replicas)


@dataclass(frozen=True, kw_only=True)
class WorkShare:
    """The share of a replica's work that each of its ranks computes."""

    operations: float = 1.0
    """Fraction of the operations of a replica that a rank runs (< 1 if it has only some layers); waiting counts as
    operations.
    """
    size: float = 1.0
    """Fraction of each operation that a rank computes (< 1 if layers are sharded); kernel launches do not decrease."""


@dataclass(frozen=True, kw_only=True)
class ReplicaPart:
    """The part of a replica that one of several devices holds and computes."""

    modules: tuple[str, ...]
    """Names of the modules that the device computes."""
    memory: ModelMemory
    """Memory of the device for parameters."""


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

    @property
    def formats(self) -> Precision:
        """The number formats of the precision."""
        return Precision(value=self.precision)  # type: ignore[arg-type]


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

    position: int = 9
    """Position in texts that list strategies: smaller numbers first, from the simplest strategy on."""
    elastic: bool = False
    """Whether a run may continue with some of its replicas, and later with all: a checkpoint has the whole state."""
    ranks_a_replica: int = 1
    """Tasks that compute a replica together; an elastic run has a multiple of them."""
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
        """Return the number of processes that the strategy starts on a host with `num_gpus` GPUs.

        Raises:
            ConfigError: its settings have problems.
        """
        context = PlanContext(num_gpus=num_gpus)
        refuse(self.validate(context))
        return len(self.tasks(context))

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

    def replica_parts(self, model: nn.Module, context: PlanContext) -> tuple[ReplicaPart, ...]:
        """Return the part of each device that computes a replica; pure.

        By default one device computes all, and the part names no modules.
        """
        return (ReplicaPart(modules=(), memory=self.estimate_memory(model, context)),)

    def describe_partition(self, model: nn.Module, context: PlanContext) -> tuple[StagePart, ...]:  # noqa: ARG002
        """Return the parts of a replica that spans several devices, for the plan; empty if it is not split; pure."""
        return ()

    def traffic(self, model: nn.Module, context: PlanContext, cut: StepCut) -> tuple[Transfer, ...] | None:  # noqa: ARG002
        """Return the transfers of a step; None if they are not known before the run; pure."""
        return None

    def work_share(self, cut: StepCut) -> WorkShare:  # noqa: ARG002 - one rank computes all of a replica
        """Return the share of a replica's work that each of its ranks computes; pure."""
        return WorkShare()

    def bubble(self, cut: StepCut) -> float | None:  # noqa: ARG002 - no device waits for another
        """Return the share of a step that each device waits, if all stages take equally long; None: none does; pure."""
        return None

    @classmethod
    def sharded_over(cls, count: int) -> Mapping[str, int]:  # noqa: ARG003 - by default it cannot
        """Return the keys of `strategy` that shard the model over `count` devices; empty: it cannot; pure.

        Recommended to a run that ran out of memory.
        """
        return {}

    @classmethod
    def spread_over(cls, count: int) -> Mapping[str, int] | None:  # noqa: ARG003 - by default it cannot
        """Return the keys of `strategy` that use `count` devices, for `advise`; empty for a strategy of one device.

        None if keys alone cannot spread it; pure.
        """
        return None

    def scaled(self, replicas: int, context: PlanContext) -> Scaled | None:  # noqa: ARG002 - by default it does not
        """Return the strategy with `replicas` replicas, each on one device; None if it does not scale; pure."""
        return None

    # In each process.

    def resolve(self, build: Callable[[], nn.Module], context: PlanContext) -> Strategy:  # noqa: ARG002 - all are set
        """Return the strategy with the fields set that depend on the model or the launch; called before `setup`; pure.

        Args:
            build: makes the model without its data.
            context: the context of the plan.
        """
        return self

    def observed_ranks(self, context: PlanContext) -> tuple[int, ...]:  # noqa: ARG002 - by default none
        """Return the ranks whose steps a plan observes without the others, one for each of `replica_parts`; pure.

        Empty: a plan observes one device in their place.
        """
        return ()

    def observed_shards(self, count: int) -> int:
        """Return the number of shards of a rank that a plan observes in the place of `count`; pure."""
        return min(count, 3)

    def as_observed(self) -> Strategy:
        """Return the strategy whose step a plan observes without the other ranks; pure."""
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


def choice_of(kind: type) -> str:
    """Return the choice of `strategy` that builds a class, without importing the others; the class for one of a user.

    Example:
        >>> from trainkit.strategies.one_device import OneDevice
        >>> choice_of(OneDevice)
        'one_device'
    """
    files = (shipped_conf() / "strategy").glob("*.yaml")
    choices = {read_document(file).values[TARGET]: file.stem for file in files}
    return choices.get(name_of(kind), kind.__name__)
