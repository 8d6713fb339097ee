"""Regression: predict numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.errors import ConfigError, DataError, Problem
from trainkit.fields import above
from trainkit.objectives.base import Loss, Metric, Supervised
from trainkit.objectives.fields import exact, scores_of
from trainkit.objectives.metrics import MeanOf, ScoredFields, fresh_metrics


@dataclass(frozen=True, kw_only=True)
class Regression(ScoredFields, Supervised):
    """Squared, absolute or Huber error, summed over every predicted number.

    Example:
        >>> loss = Regression(error="l1").score(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 4.0]))
        >>> float(loss.loss_sum), loss.weight
        (3.0, 2.0)
    """

    draws_nothing: ClassVar[bool] = True

    error: Literal["mse", "l1", "huber"] = "mse"
    """Error to sum: squared, absolute, or absolute beyond `delta` and squared within."""
    delta: Annotated[float, above(0)] = 1.0
    """Threshold at which Huber's error changes from squared to absolute; only used by `huber`."""

    def __post_init__(self) -> None:
        if self.error != "huber" and self.delta != 1:
            rule = f"has no effect with objective.error={self.error}. Use objective.error=huber, or leave it out."
            raise ConfigError([Problem(key="objective.delta", value=self.delta, rule=rule)])

    def weight_per_sample(self, sample: Any) -> float | None:
        """Return the number of values in a sample's target; None without a sample."""
        return None if sample is None else float(torch.as_tensor(self.split_batch(sample)[1]).numel())

    def score(self, outputs: Any, targets: Tensor) -> Loss:
        """Sum the error of predictions of the targets' shape (a further dim of size 1 is removed)."""
        outputs = scores_of(outputs, self.output)
        if outputs.shape[:-1] == targets.shape and outputs.shape[-1] == 1:
            outputs = outputs.squeeze(-1)
        if outputs.shape != targets.shape:
            raise DataError(
                f"the model predicts {tuple(outputs.shape)} for targets of {tuple(targets.shape)}: "
                "the shapes must agree."
            )
        predicted = exact(outputs)
        expected = targets.to(predicted.dtype)
        error: Callable[..., Tensor] = getattr(functional, f"{self.error}_loss")
        more = {"delta": self.delta} if self.error == "huber" else {}
        loss_sum = error(predicted, expected, reduction="sum", **more)
        return Loss(loss_sum, float(targets.numel()), None, outputs, targets)

    def metrics(self) -> dict[str, Metric]:
        """Return the mean absolute error, and the metrics of the config."""

        def absolute_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
            return (outputs.double() - targets.double()).abs().sum(), targets.numel()

        return {"mae": MeanOf(absolute_error), **fresh_metrics(self.extra_metrics)}
