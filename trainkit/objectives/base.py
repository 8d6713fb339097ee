"""What a task is scored by: the loss that is trained on, and the metrics that are watched.

A loss leaves an objective as a *sum* with its weight beside it, never as a mean: means of unequal shards cannot be
combined, sums can. The engine divides by the weight of the whole global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from trainkit.errors import DataError

__all__ = ["Collective", "Loss", "Metric", "Model", "Objective", "RunningMean", "Supervised", "split_batch"]

Model = Callable[..., Any]
"""What an objective runs: an nn.Module, or whatever a strategy made of it."""


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
    """What the sum is over: samples, tokens or class weights. A float costs no device work; a tensor is ()."""
    extra: Tensor | None = None
    """() auxiliary loss, already a mean over the shard; the engine scales it by the shard's share of the weight."""
    outputs: Any = None
    """What the model predicted, for metrics only: the graph is not theirs to use."""
    targets: Any = None
    """What it should have predicted, aligned with `outputs`."""


class Collective(Protocol):
    """The few exchanges a metric needs, over the data ranks. Both calls are collective and keep the dtype."""

    @property
    def rank(self) -> int:
        """The data rank that calls."""

    @property
    def num_ranks(self) -> int:
        """How many data ranks there are."""

    def sum(self, tensor: Tensor, /) -> Tensor:
        """The elementwise sum over ranks; the shape is the same on each. A tensor of any device may be given."""

    def gather(self, tensor: Tensor, /) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks; the shape is the same on each."""


class Metric(ABC):
    """One figure of an evaluation, counted batch by batch, combined over ranks once at its end."""

    @abstractmethod
    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch. No collective, and no synchronisation with the device."""

    @abstractmethod
    def compute(self, collective: Collective) -> float:
        """The figure over all ranks, the same on each. Collective; synchronises with the device."""


class Objective(ABC):
    """The task: how a batch is scored, and which metrics tell a person how it goes."""

    couples_samples: ClassVar[bool] = False
    """Whether the loss of a sample depends on the others of its shard (contrastive losses)."""
    log_scores: ClassVar[bool] = False
    """Whether outputs are scores whose softmax over the last dim are probabilities: an ensemble averages those."""

    draws_nothing: ClassVar[bool] = False
    """Whether the code of this very class draws no random number, so that nothing needs to be keyed for it; a class
    derived from it says so for itself."""

    @abstractmethod
    def loss(self, model: Model, batch: Any) -> Loss:
        """Run the model on one collated shard and sum its loss.

        What is drawn here is keyed by (seed, step, shard, `objective`), and anew whenever the model returns.
        """

    def weight_per_sample(self, sample: Any) -> float | None:
        """The weight of a sample where it is known without looking at its targets, the same for all.

        Args:
            sample: any one sample of the dataset, not collated.

        Returns:
            The weight; None where it must be counted batch by batch, and a planned power of two divides the loss.
        """
        del sample
        return 1.0

    def planned_weight_per_sample(self, sample: Any) -> float:
        """About how much a sample weighs; the divisor of the loss is planned from it where the weight is counted."""
        known = self.weight_per_sample(sample)
        return 1.0 if known is None else known

    def metrics(self) -> dict[str, Metric]:
        """Fresh metrics of one evaluation, by name. The loss itself is the engine's."""
        return {}


class Supervised(Objective):
    """An objective that needs the model's outputs and the targets only, so that they may be on different devices."""

    def loss(self, model: Model, batch: Any) -> Loss:
        """Run the model on the inputs and score its outputs."""
        inputs, targets = split_batch(batch)
        return self.score(model(inputs), targets)

    @abstractmethod
    def score(self, outputs: Any, targets: Any) -> Loss:
        """Sum the loss of outputs that are already there (the last stage of a pipeline calls this)."""


class RunningMean:
    """A numerator and a count, kept on the device until they are needed.

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
        """Total over count, over all ranks; NaN where nothing was counted. Collective."""
        device = self.total.device if isinstance(self.total, Tensor) else torch.device("cpu")
        pair = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in (self.total, self.count)])
        total, count = collective.sum(pair).tolist()
        return float("nan") if count == 0 else total / count


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of a batch: a pair, or a dict with `input` and `target`.

    Raises:
        DataError: the batch is neither.

    Example:
        >>> split_batch({"input": 1, "target": 2})
        (1, 2)
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping) and "input" in batch and "target" in batch:
        return batch["input"], batch["target"]
    got = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else _described(batch)
    raise DataError(
        f"the dataset gives {got}; this objective needs (input, target), or a dict with the keys input and target."
    )


def _described(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"{len(batch)} things a sample"
    return f"a {type(batch).__name__} a sample"
