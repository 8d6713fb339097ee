"""The objective: the loss of a batch, and the metrics of an evaluation."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from own_package.metric import Correct
from trainkit import Loss, Metric, Supervised


@dataclass(frozen=True, kw_only=True)
class Logistic(Supervised):
    """The logistic loss of one score for each sample, which should exceed a margin."""

    draws_nothing: ClassVar[bool] = True  # no random number is drawn here

    margin: float = 0.0
    """Margin that a score should exceed on its own side of zero."""

    def score(self, outputs: Tensor, targets: Tensor) -> Loss:
        """Sum the loss of (n,) scores against (n,) classes 0 and 1. A sum, not a mean: trainkit divides once."""
        sides = 2 * targets - 1
        losses = functional.softplus(self.margin - sides * outputs)
        return Loss(loss_sum=losses.sum(), weight=float(len(targets)), outputs=outputs, targets=targets)

    def metrics(self) -> dict[str, Metric]:
        """Return new metrics for one evaluation; `correct` becomes `val/correct`."""
        return {"correct": Correct()}
