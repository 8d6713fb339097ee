"""What a task computes on a batch: the loss to train on, and the metrics to monitor.

An objective returns the loss as a *sum* together with its weight, never as a mean: means of unequal shards cannot be
combined, sums can. The trainer divides by the weight of the whole global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from trainkit.objectives.fields import Fields, split_batch

__all__ = ["Collective", "Loss", "Metric", "Model", "Objective", "RunningMean", "Supervised", "split_batch"]

Model = Callable[..., Any]
"""The model that an objective runs: an nn.Module, or a strategy's wrapper of it."""


@dataclass(slots=True)
class Loss:
    """The loss of one shard.

    Example:
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

    @abstractmethod
    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch. It calls no collective and does not synchronize with the device."""

    @abstractmethod
    def compute(self, collective: Collective) -> float:
        """Return the value over all ranks, the same on each. Collective; synchronizes with the device."""


class Objective(ABC):
    """The task: how a batch is scored, and which metrics are reported."""

    couples_samples: ClassVar[bool] = False
    """Whether the loss of a sample depends on the others of its shard (contrastive losses)."""
    log_scores: ClassVar[bool] = False
    """Whether outputs are scores whose softmax over the last dim gives probabilities, which an ensemble averages."""

    draws_nothing: ClassVar[bool] = False
    """Whether the code of this class itself draws no random number, so that it needs no key; a derived class must
    declare it again.
    """

    @abstractmethod
    def loss(self, model: Model, batch: Any) -> Loss:
        """Run the model on one collated shard and sum its loss.

        Random numbers drawn here are keyed by (seed, step, shard, `objective`), and again whenever the model returns.
        """

    def weight_per_sample(self, sample: Any) -> float | None:
        """Return the weight of a sample if it is the same for all and does not depend on its targets.

        Args:
            sample: any one sample of the dataset, not collated; None if `data.collate` makes the batches, so that only
                a weight that no sample decides is known.

        Returns:
            The weight; None if it must be counted batch by batch; the loss is then divided by a planned power of two.
        """
        del sample
        return 1.0

    def planned_weight_per_sample(self, sample: Any) -> float:
        """Return the approximate weight of a sample; where weights are counted, the divisor of the loss is planned from
        it.
        """
        known = self.weight_per_sample(sample)
        return 1.0 if known is None else known

    def metrics(self) -> dict[str, Metric]:
        """Return new metrics for one evaluation, by name. The trainer computes the loss itself."""
        return {}


class Supervised(Objective):
    """An objective that needs only the model's outputs and the targets, which may be on different devices.

    A class that has the attributes `input` and `target` names the fields of a batch by them (docs/data.md).
    """

    @property
    def field_names(self) -> tuple[Fields, Fields]:
        """The names of input and target, from the attributes `input` and `target`; None for the common names."""
        return getattr(self, "input", None), getattr(self, "target", None)

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the targets of a sample or batch; several inputs are a tuple.

        Raises:
            ConfigError: there is no field of a given name.
            DataError: no name is given, and the structure of the batch leaves open which fields are meant.
        """
        return split_batch(batch, *self.field_names)

    def loss(self, model: Model, batch: Any) -> Loss:
        """Run the model on the inputs, several by position, and score its outputs."""
        inputs, targets = self.split_batch(batch)
        outputs = model(*inputs) if isinstance(self.field_names[0], list | tuple) else model(inputs)
        return self.score(outputs, targets)

    @abstractmethod
    def score(self, outputs: Any, targets: Any) -> Loss:
        """Sum the loss of given outputs (the last stage of a pipeline calls this)."""


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
