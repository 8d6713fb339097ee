"""The losses that a user's own loop gives to its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainkit.errors import TrainingError
from trainkit.objectives.base import Loss, Model, Objective
from trainkit.strategies.base import StepContext

LossFunction = Callable[[nn.Module, Any], object]
"""Function that runs the model on the batch of a shard. It returns a tensor of one number, the mean over the samples of
the shard; a mapping from names to such tensors, which are added up; or a `Loss`, a sum with its weight.
"""

_EXPECTED: Final = (
    "a tensor of one number (the mean over the batch), a mapping from names to such tensors, or a trainkit Loss"
)


class FunctionLoss(Objective):
    """The mean over samples that a function computes; every sample has the weight 1.

    Args:
        function: a `LossFunction`.
        terms: the keys of the mapping that it returns.

    Example:
        >>> objective = FunctionLoss(lambda model, batch: model(batch).square().mean())
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> objective.loss(model, torch.zeros(4, 1)).weight
        4.0
    """

    runs_user_code: ClassVar[bool] = True

    def __init__(self, function: LossFunction, terms: Sequence[str] = ()) -> None:
        self.function = function
        self.term_names = tuple(terms)  # type: ignore[misc]  # of this function

    def loss(self, model: Model, batch: Any) -> Loss:
        """Return the loss of a batch; the number of samples is taken from its first tensor."""
        first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
        if first is None:
            raise TrainingError(
                "loss_fn returned a mean, but no tensor of the batch gives the number of samples. "
                "Return a Loss with its weight."
            )
        return loss_of(self.function, model, batch, weight=float(len(first)), terms=self.term_names)


def loss_of(function: LossFunction, model: Model, batch: Any, *, weight: float, terms: Sequence[str]) -> Loss:
    """Call a loss function, and return its result as a sum with its weight.

    Args:
        function: a `LossFunction`.
        model: the model.
        batch: the batch of a shard.
        weight: the weight of the shard, if the function returns a mean.
        terms: the keys of the mapping that it returns.

    Raises:
        TrainingError: the function returns something else.
    """
    result = function(
        cast("nn.Module", model), batch
    )  # only strategies that pass the plain module accept a loss function; the others refuse it earlier
    if isinstance(result, Loss):
        return result
    if not isinstance(result, Mapping):
        return _differentiable(Loss(_mean(result) * weight, weight))
    if not terms or result.keys() != {*terms}:
        names = [*map(str, result)]
        returned, declared = ", ".join(names) or "none", ", ".join(terms) or "none"
        raise TrainingError(
            f"loss_fn gives the terms {returned}, and the session knows {declared}: name them when it is made, "
            f"trainkit.session(..., terms={names})."
        )
    return _differentiable(Loss.of_terms({name: _mean(result[name], name) * weight for name in terms}, weight))


def _differentiable(loss: Loss) -> Loss:
    if torch.is_grad_enabled() and not loss.loss_sum.requires_grad:
        raise TrainingError(
            "loss_fn gives a loss that depends on no parameter that is trained. Is it computed with model(...), and "
            "without detach(), item() and torch.no_grad()?"
        )
    return loss


def _mean(value: object, name: str | None = None) -> Tensor:
    """Return a mean in float32 or float64.

    Raises:
        TrainingError: the value is something else.
    """
    subject = "loss_fn gives" if name is None else f"loss_fn gives as the term {name}"
    if not isinstance(value, Tensor):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise TrainingError(f"{subject} {kind}, not {_EXPECTED}.")
    if value.dim():
        raise TrainingError(f"{subject} a tensor of shape {tuple(value.shape)}, not {_EXPECTED}. Is a .mean() missing?")
    if not value.is_floating_point():
        raise TrainingError(f"{subject} a tensor of {value.dtype}, which has no gradient.")
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


class LoopLoss(Objective):
    """The objective of the steps of a user's own loop: the configured one, unless a step gets its own loss."""

    runs_user_code: ClassVar[bool] = True

    def __init__(self, terms: Sequence[str] = ()) -> None:
        self.function: LossFunction | None = None
        """The loss of the current step; None: that of the configured objective."""
        self.configured: Objective = self
        self._terms = tuple(terms)

    def take(self, function: LossFunction | None) -> None:
        """Set the loss of the next step; None: that of the configured objective."""
        self.function = function

    def context_of(self, training: StepContext) -> StepContext:
        """Return the settings of the steps of a run, with this loss."""
        self.configured = training.objective
        self.term_names = self._terms or self.configured.term_names  # type: ignore[misc]  # of this loop
        settings = {field.name: getattr(training, field.name) for field in fields(training)}
        return _LoopContext(**settings | {"objective": self}, loop_loss=self)

    def loss(self, model: Model, batch: Any) -> Loss:
        """Return the loss of the configured objective."""
        return self.configured.loss(model, batch)

    def phase_loss(self, phase: str, model: Model, batch: Any) -> Loss:
        """Return the loss of a phase of the configured objective."""
        return self.configured.phase_loss(phase, model, batch)


@dataclass(frozen=True, kw_only=True)
class _LoopContext(StepContext):
    """The settings of the steps of a user's own loop."""

    loop_loss: LoopLoss

    def loss(self, model: Model, batch: Any, step: int, shard: int) -> Loss:
        """Return the loss that the loop gives to this step, or that of the configured objective."""
        function, configured = self.loop_loss.function, self.loop_loss.configured
        if function is None and isinstance(configured, FunctionLoss):
            function = configured.function
        if function is None or function == configured.loss:
            return super().loss(model, batch, step, shard)
        samples, per_sample = self.plan.shard_size(step, shard), self.weighing.per_sample
        weight = float(samples if per_sample is None else samples * per_sample)
        loss = loss_of(function, model, batch, weight=weight, terms=self.loop_loss.term_names)
        actual = loss.weight
        if per_sample is None:  # the weight of the shard is not known before
            return loss
        if isinstance(actual, Tensor) or abs(actual - weight) > 1e-6 * weight:
            name = type(self.loop_loss.configured).__name__
            shown = "a tensor" if isinstance(actual, Tensor) else f"{actual:g}"
            raise TrainingError(
                f"loss_fn gives a Loss whose weight is {shown}, and {name} divides this shard by {weight:g}. Return "
                "the mean over the batch as a tensor, or choose an objective whose weight is counted."
            )
        return loss
