"""The inputs of a step, its outcome, and the model of a task, with the guard of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter, is_
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn

from trainkit.errors import TrainingError
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.precision import LossScale, Precision
from trainkit.objectives.base import Collective, Loss, Model, Objective

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSettings:
    """Settings of the graph of loss and gradients of a shard, in addition to compiled modules."""

    covers: Literal["step", "shard"]
    """`step`: every step has such a graph; `shard`: only if a step draws no random numbers."""
    backend: str
    """The backend of torch.compile."""
    mode: str | None = None
    """A mode of the inductor backend; None for any other."""
    cuda_graphs: bool = False
    """Whether the kernels of the graph are captured, and replayed by one call."""

    @property
    def key(self) -> str:
        """The key that requested the graphs, for messages."""
        return "compile.mode=step" if self.covers == "step" else "compile.mode"


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


class NoGradientListener:
    """A listener without interest in gradients."""

    def wants(self, step: int) -> bool:
        """Return False."""
        del step
        return False

    def take(self, step: int, tensors: UpdateTensors) -> None:
        """Do nothing."""


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
    on_gradients: GradientListener = field(default_factory=NoGradientListener)
    """Listener that receives gradients before they are used (`Facts.shows_gradients`)."""

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
        held = [(table, name, one) for table in self._tables for name, one in table.items()]
        self._places, self._names, self._held = (
            ([*column] for column in zip(*held, strict=True)) if held else ([], [], [])
        )

    def change(self, *, flags: bool = True) -> str | None:
        """Return what was changed, as a part of a sentence; None if nothing was.

        Args:
            flags: whether a changed `requires_grad` counts.
        """
        is_same = all(map(is_, map(dict.get, self._places, self._names), self._held))
        if not is_same or [*map(len, self._tables)] != self._sizes:
            params = dict(self._model.named_parameters(remove_duplicate=False))
            kinds = {
                "added": [name for name in params if name not in self._params],
                "removed": [name for name in self._params if name not in params],
                "replaced": [name for name, param in self._params.items() if params.get(name, param) is not param],
            }
            if said := " and ".join(f"{_listed(names)} was {kind}" for kind, names in kinds.items() if names):
                return f"the parameter {said}"
            self._watch()  # only modules without parameters are new
        if not flags or [*map(_TRAINS, self._all)] == self._trains:
            return None
        changed = {
            name: one.requires_grad for name, one in self._params.items() if one.requires_grad is (name in self.frozen)
        }
        trains = next(iter(changed.values()))
        names = [name for name, value in changed.items() if value is trains]
        return f"requires_grad of {_listed(names)} was changed to {trains}"

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


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


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

    @property
    def counted_parts(self) -> Mapping[str, bool] | None:
        """Whether this rank counts its part of each parameter in sums over ranks; None if it holds whole parameters."""
        return None

    def refuse_changed_params(self, step: int, *, flags: bool = True) -> None:
        """Raise if code of the user has changed which parameters there are, or (`flags`) which of them are trained.

        Raises:
            TrainingError: names the step, the parameters and the remedy.
        """
        self.guard.refuse_change(step, flags=flags)

    def set_loss_scale(self, scale: LossScale) -> None:
        """Compute with another loss scale from now on."""
        self.loss_scale = scale
