"""Interface of objectives: the loss to train on, and the metrics to monitor.

An objective returns the loss as a *sum* together with its weight, never as a mean: means of unequal shards cannot be
combined, sums can. The trainer divides by the weight of the whole global batch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import reduce
from operator import add
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves

from trainkit.errors import Problem, TrainingError
from trainkit.objectives.fields import Fields, input_of, scores_of, split_batch, unused_fields
from trainkit.objectives.linear_cross_entropy import OutputLayer, output_layer_of, reason_for_scores, scored_inside
from trainkit.objectives.tables import Result

Model = Callable[..., Any]
"""The model that an objective runs: an nn.Module, or a strategy's wrapper of it."""


@dataclass(slots=True)
class Loss:
    """The loss of one shard.

    Example:
        >>> import torch
        >>> Loss(loss_sum=torch.tensor(6.0), weight=3.0).weight
        3.0
    """

    loss_sum: Tensor
    """() float32 (float64 in fp64 runs): the sum over this shard's targets, with its graph."""
    weight: Tensor | float
    """The number or weight of the summands: samples, tokens or class weights. A float needs no device work; a tensor is
    ().
    """
    extra: Tensor | None = None
    """() auxiliary loss, already a mean over the shard; the trainer scales it by the shard's share of the weight."""
    outputs: Any = None
    """The model's predictions, for metrics only, which must not use the graph."""
    targets: Any = None
    """The targets of the predictions, aligned with `outputs`."""
    terms: Mapping[str, Tensor] | None = None
    """Parts of the loss to log, by the names in `Objective.term_names`: each () a sum over this shard's targets.

    Gradients come from `loss_sum` alone.
    """
    counted: Tensor | None = None
    """Which targets count in the sum and the weight, for metrics: bool, one for each; None: all of them."""
    class_dim: int = -1
    """The dim of `outputs` with the classes, if they are scores of classes."""

    @property
    def total(self) -> Tensor:
        """() the sum whose gradients are those of this shard: `loss_sum`, and `extra` by the weight."""
        return self.loss_sum if self.extra is None else self.loss_sum + self.extra * self.weight

    @property
    def classes(self) -> Tensor:
        """The class of each target, for metrics: of probabilities, the most likely one."""
        targets: Tensor = self.targets
        return targets.argmax(self.class_dim) if targets.is_floating_point() else targets

    @classmethod
    def of_terms(
        cls,
        terms: Mapping[str, Tensor],
        weight: Tensor | float,
        *,
        factors: Mapping[str, float] | None = None,
        outputs: Any = None,
        targets: Any = None,
        counted: Tensor | None = None,
        class_dim: int = -1,
    ) -> Loss:
        """Return the loss that adds up several terms, each logged without its factor.

        Args:
            terms: name -> () the sum over this shard's targets, with its graph.
            weight: the number or weight of the targets; the same for all terms.
            factors: name -> factor of the term in the loss; 1 if not given.
            outputs: as in `Loss`.
            targets: as in `Loss`.
            counted: as in `Loss`.
            class_dim: as in `Loss`.

        Raises:
            TrainingError: a factor is given for an unknown term.

        Example:
            >>> import torch
            >>> terms = {"labels": torch.tensor(6.0), "norm": torch.tensor(10.0)}
            >>> float(Loss.of_terms(terms, 3.0, factors={"norm": 0.1}).loss_sum)
            7.0
        """
        factors = factors or {}
        if unknown := ", ".join(sorted(factors.keys() - terms.keys())):
            raise TrainingError(f"a factor is given for {unknown}, and the terms are {', '.join(terms)}.")
        parts = [term * factors[name] if name in factors else term for name, term in terms.items()]
        if not parts:
            raise TrainingError("a loss without terms was given.")
        return cls(reduce(add, parts), weight, None, outputs, targets, terms, counted, class_dim)


_PARTS: Final = tuple(field.name for field in fields(Loss))
# An output layer may return a loss, and FSDP and device maps walk through the outputs of modules.
register_pytree_node(
    Loss,
    lambda loss: ([getattr(loss, name) for name in _PARTS], None),
    lambda values, _: Loss(*values),
    serialized_type_name="trainkit.objectives.base.Loss",
)


def loss_in(outputs: object) -> Loss:
    """Return the loss among the outputs of a model.

    Raises:
        TrainingError: the outputs do not hold exactly one.
    """
    leaves = tree_leaves(outputs, is_leaf=lambda leaf: isinstance(leaf, Loss))
    losses = [leaf for leaf in leaves if isinstance(leaf, Loss)]
    if len(losses) != 1:
        raise TrainingError(
            f"the outputs of the model contain the result of its output_layer() {len(losses)} times, and once was "
            "expected. Use objective.cross_entropy=plain."
        )
    return losses[0]


class Access(Enum):
    """Access to the model that an objective may need besides outputs for one input; the values are parts of
    sentences.
    """

    calls = "runs the model itself"
    """`loss` calls the model itself (repeatedly, or with other inputs), which a pipeline's last stage cannot do."""
    methods = "calls methods or parts of the model"
    """`model.encode(x)`, `model.layers[0](x)`: not through `forward` of the model."""
    parameters = "reads the parameters of the model"
    """`model.parameters()`, unsharded and with their gradients, for example for a penalty on weights."""
    derivatives = "differentiates the model by its inputs"
    """`torch.autograd.grad(outputs, inputs, create_graph=True)`, for a gradient penalty; gradients are then on in
    evaluation, too.
    """


class Collective(Protocol):
    """The collectives that a metric needs, over the data ranks. Both calls are collective and keep the dtype."""

    @property
    def rank(self) -> int:
        """The data rank of the caller."""

    @property
    def num_ranks(self) -> int:
        """Number of data ranks."""

    def sum(self, tensor: Tensor, /) -> Tensor:
        """Return the elementwise sum over ranks; the shape is the same on each. The tensor may be on any device."""

    def gather(self, tensor: Tensor, /) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks; the shape is the same on each."""


class Metric(ABC):
    """One metric of an evaluation, counted batch by batch, combined over ranks once at its end."""

    gives_table: ClassVar[bool] = False
    """Whether it gives a table and no number, so that `eval.metric` cannot name it."""

    @abstractmethod
    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch. Must not call a collective or synchronize with the device."""

    @abstractmethod
    def compute(self, collective: Collective) -> Result:
        """Return the value over all ranks, the same on each. Collective; synchronizes with the device.

        A number is logged as it is; a tensor of more elements and a `Table` become tables; of a mapping, each value
        under `name/key`.
        """


@dataclass(frozen=True, kw_only=True)
class Details:
    """Additional metrics that an evaluation after the training reports."""

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """New metrics, by name."""
    notes: tuple[str, ...] = ()
    """Notes about metrics that are not reported, with the reason."""


class Objective(ABC):
    """The task: how a batch is scored, and which metrics are reported."""

    couples_samples: ClassVar[bool] = False
    """Whether the loss of a sample depends on the others of its shard (contrastive losses)."""
    by_position: ClassVar[bool] = False
    """Whether the loss of a sample is a sum over the positions of its sequence, each scored from its own output and
    target, without random numbers: its sequences may be cut over ranks. A derived class must declare it again.
    """
    term_names: ClassVar[tuple[str, ...]] = ()
    """The names in `Loss.terms` of every shard; the mean of each over all targets is logged: `train/NAME`, `val/NAME`.
    """
    needs: ClassVar[frozenset[Access]] = frozenset()
    """Access to the model that `loss` needs besides outputs; a strategy that cannot provide it refuses the objective.

    Every class that overrides `loss` needs `Access.calls`; it need not list it.
    """
    log_scores: ClassVar[bool] = False
    """Whether outputs are scores whose softmax over `class_dim` gives probabilities, which an ensemble averages."""
    class_dim: ClassVar[int] = -1
    """The dim of the outputs with the classes, where they are scores of classes."""

    draws_nothing: ClassVar[bool] = False
    """Whether the code of this class itself draws no random number, so that it needs no key; a derived class must
    declare it again.
    """

    phases: ClassVar[tuple[str, ...]] = ()
    """Names of the phases of a step, in order: each has its own loss (`phase_loss`) and the optimizer with its name in
    `optimizers`. Empty: a step is one pass with `loss`.
    """

    @abstractmethod
    def loss(self, model: Model, batch: Any) -> Loss:
        """Run the model on one collated shard and sum its loss.

        Random numbers drawn here are keyed by (seed, step, shard, `objective`), and again whenever the model returns.
        """

    @property
    def takes_hidden(self) -> bool:
        """Whether `loss` may be computed inside the output layer of a model that supports this."""
        return True

    def phase_loss(self, phase: str, model: Model, batch: Any) -> Loss:
        """Run the model on one collated shard and sum the loss of one phase of a step; evaluation calls `loss`.

        Only the parameters of the phase's optimizer get gradients meanwhile. Random numbers are keyed by phase, too.

        Args:
            phase: one of `phases`.
            model: the model.
            batch: the shard, the same in every phase of a step.
        """
        raise NotImplementedError(f"{type(self).__name__} has the phases {self.phases}, and no phase_loss")

    def predict(self, model: Model, batch: Any) -> Any:
        """Return the outputs of the model for a batch; a supervised objective needs no targets in it."""
        return self.loss(model, batch).outputs

    def weight_per_sample(self, sample: Any) -> float | None:
        """Return the weight of a sample if it is the same for all and does not depend on its targets.

        Args:
            sample: any one sample of the dataset, not collated; None if `data.collate` makes the batches; then only a
                weight independent of the sample is known.

        Returns:
            The weight; None if it must be counted batch by batch; the loss is then divided by a planned power of two.
        """
        del sample
        return 1.0

    def planned_weight_per_sample(self, sample: Any) -> float:
        """Return the approximate weight of a sample; if weights are counted, the divisor of the loss is derived from
        it.
        """
        weight = self.weight_per_sample(sample)
        return 1.0 if weight is None else weight

    @property
    def plans_exactly(self) -> bool:
        """Whether `planned_weight_per_sample` is the weight of a sample whose targets all count.

        The loss is then divided by the planned weight itself, and not by a power of two: where every target counts, a
        step has the bits of one whose weight is known.
        """
        return False

    def metrics(self) -> dict[str, Metric]:
        """Return new metrics for one evaluation, by name. The trainer computes the loss itself."""
        return {}

    def details(self, dataset: Any, *, batch_size: int) -> Details:
        """Return the additional metrics of an evaluation after the training.

        Args:
            dataset: the split, which may have the names of its classes or the bytes of its tokens.
            batch_size: samples of a batch of the evaluation.
        """
        del dataset, batch_size
        return Details()

    def validate_model(self, model: nn.Module, sample: Any) -> list[Problem]:
        """Return the problems of this objective for a model and its samples, before anything starts.

        Args:
            model: the model, possibly without data, on the meta device.
            sample: any one sample of the dataset, not collated; None if no sample can be read beforehand.
        """
        del model, sample
        return []

    def notes(self, model: nn.Module, sample: Any) -> list[str]:
        """Return lines for the plan and the summary; arguments as in `validate_model`."""
        del model, sample
        return []


class Supervised(Objective):
    """An objective that needs only the model's outputs and the targets, which may be on different devices.

    A class that sets the attributes `input` and `target` names the fields of a batch by them (docs/data.md).
    """

    input: Fields = None
    """The field of the input, or several; None: the common names."""
    target: Fields = None
    """The field of the targets; None: the common names."""
    _has_hidden_loss: ClassVar[bool] = False
    """The value of `takes_hidden`, computed when a class is defined."""

    def __init_subclass__(cls, **settings: Any) -> None:
        """Record whether `loss_from_hidden` is as specific as `score`, so that it may replace it."""
        super().__init_subclass__(**settings)
        names = ("loss_from_hidden", "score", "loss")
        hidden, score, loss = (next(i for i, kind in enumerate(cls.__mro__) if name in vars(kind)) for name in names)
        cls._has_hidden_loss = hidden <= score and cls.__mro__[loss] is Supervised

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the targets of a sample or batch; several inputs are a tuple.

        Raises:
            ConfigError: there is no field of a given name.
            DataError: no name is given, and the fields are ambiguous.
        """
        return split_batch(batch, self.input, self.target)

    def loss(self, model: Model, batch: Any) -> Loss:
        """Run the model on the inputs, several by position, and score its outputs."""
        inputs, targets = self.split_batch(batch)
        args = inputs if isinstance(self.input, list | tuple) else (inputs,)
        offered = None
        if self.takes_hidden and not torch.compiler.is_compiling():  # a graph of a whole step contains the loss
            offered = output_layer_of(model)
        if offered is None:
            return self.score(model(*args), targets)
        with scored_inside(offered.layer, lambda hidden: self.loss_from_hidden(hidden, offered, targets)):
            outputs = model(*args)
        return loss_in(outputs)

    @property
    def takes_hidden(self) -> bool:
        """Whether `loss_from_hidden` computes the same loss as `score`, which a derived class may have replaced."""
        return self._has_hidden_loss

    def loss_from_hidden(self, hidden: Tensor, output: OutputLayer, targets: Any) -> Loss:
        """Sum the loss of the scores of an output layer, given its inputs, without holding all scores.

        Called in training for a model with `output_layer`; the loss has no outputs. It must equal the loss of `score`
        up to rounding. Override this together with `score`; otherwise `score` is used.

        Args:
            hidden: (samples, ..., features), on the device of the layer.
            output: the layer.
            targets: as in `score`, possibly on another device.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss_from_hidden")

    def predict(self, model: Model, batch: Any) -> Any:
        """Run the model on the inputs of a batch, which may lack targets, and return its outputs."""
        if type(self).split_batch is not Supervised.split_batch:
            inputs = self.split_batch(batch)[0]
        else:
            inputs = input_of(batch, self.input)
        outputs = model(*inputs) if isinstance(self.input, list | tuple) else model(inputs)
        return scores_of(outputs, getattr(self, "output", None))

    def notes(self, model: nn.Module, sample: Any) -> list[str]:
        """Return whether the model would compute its own loss, from more fields of a sample than this objective
        uses.
        """
        why = reason_for_scores(model) if self.takes_hidden else None
        remarks = [] if why is None else [f"the loss is computed from all scores: {why}."]
        names, _ = parameters_of(model)
        if not isinstance(sample, Mapping) or "labels" not in names or "labels" not in sample:
            return remarks
        unused = [name for name in unused_fields(sample, self.input, self.target) if name in names]
        if not unused:
            return remarks
        ignored = f"this objective ignores {', '.join(unused)}: objective=own_loss passes every field."
        return [*remarks, f"{type(model).__name__} computes its own loss, and {ignored}"]

    @abstractmethod
    def score(self, outputs: Any, targets: Any) -> Loss:
        """Sum the loss of given outputs (the last stage of a pipeline calls this)."""


def add_terms(sums: dict[str, Tensor], objective: Objective, loss: Loss) -> None:
    """Add the terms of a shard's loss to sums by name, detached; nothing is read from the device."""
    terms = terms_of(objective, loss)
    for name in objective.term_names:
        term = terms[name].detach()
        sums[name] = sums[name] + term if name in sums else term


def terms_of(objective: Objective, loss: Loss) -> Mapping[str, Tensor]:
    """Return the terms of a shard's loss; empty if the objective names none.

    Raises:
        TrainingError: the terms are not those of `Objective.term_names`, or one is not a single number.
    """
    names, terms = objective.term_names, loss.terms or {}
    if terms.keys() != set(names):
        actual, declared = (", ".join(keys) or "none" for keys in (terms, names))
        raise TrainingError(
            f"{type(objective).__name__} gives the terms {actual}, and its term_names are {declared}: both must be the "
            "same in every shard."
        )
    for name, term in terms.items():
        if not isinstance(term, Tensor) or term.dim():
            kind = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else f"a {type(term).__name__}"
            rule = "must be a tensor of one number: its sum over the shard"
            raise TrainingError(f"{type(objective).__name__}: the term {name} is {kind}, and {rule}.")
    return terms


def parameters_of(model: nn.Module) -> tuple[tuple[str, ...], bool]:
    """Return the names of the arguments of a model's `forward`, and whether it takes further ones by keyword.

    Example:
        >>> parameters_of(nn.Linear(2, 2))
        (('input',), False)
    """
    args = inspect.signature(model.forward).parameters.values()
    by_name = tuple(arg.name for arg in args if arg.kind not in (arg.VAR_KEYWORD, arg.VAR_POSITIONAL))
    return by_name, any(arg.kind is arg.VAR_KEYWORD for arg in args)


def needs_of(objective: Objective) -> frozenset[Access]:
    """Return the access to the model that the loss of an objective needs, including `Access.calls`.

    Example:
        >>> from trainkit.objectives.classification import Classification
        >>> needs_of(Classification())
        frozenset()
    """
    alone = isinstance(objective, Supervised) and type(objective).loss is Supervised.loss
    return objective.needs | (frozenset() if alone else {Access.calls})


class RunningMean:
    """A sum and a count, kept on the device until they are needed.

    Example:
        >>> tally = RunningMean()
        >>> tally.add(torch.tensor(3.0), 4)
        >>> tally.add(torch.tensor(1.0), 4)
        >>> float(tally.total), tally.count
        (4.0, 8)
    """

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.count: Tensor | float = 0

    def add(self, total: Tensor, count: Tensor | float) -> None:
        """Add one batch: `total` is () of any dtype; sums are kept in float64."""
        self.total = self.total + total.detach().double()
        self.count = self.count + (count.detach().double() if isinstance(count, Tensor) else count)

    def mean(self, collective: Collective) -> float:
        """Return total over count, over all ranks; NaN if nothing was counted. Collective."""
        device = self.total.device if isinstance(self.total, Tensor) else torch.device("cpu")
        pair = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in (self.total, self.count)])
        total, count = collective.sum(pair).tolist()
        return float("nan") if count == 0 else total / count
