"""Classification: a class for each sample, or for each pixel, position or point of it.

Scores are (samples, classes, ...). Targets are the class of each place, (samples, ...) whole numbers, or its
probabilities of all classes, in the shape of the scores: both as `torch.nn.functional.cross_entropy` has it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.errors import ConfigError, DataError, Problem, TrainingError
from trainkit.fields import below, cosmetic, maths, unit
from trainkit.numerics.copies import constant_on
from trainkit.objectives.base import Details, Loss, Metric, Supervised
from trainkit.objectives.fields import IGNORED, counted_in, exact, scores_of, split_batch
from trainkit.objectives.metrics import (
    WORST,
    CalibrationError,
    ConfusionMatrix,
    PerClass,
    ScoredFields,
    Worst,
    fresh_metrics,
    top_k,
)

_NO_CLASS: Final = -(2**62)
"""A class that no target has: torch's functions have no other way to ignore none."""


def class_loss(
    outputs: Tensor,
    targets: Tensor,
    *,
    ignore_index: int | None = IGNORED,
    class_weights: list[float] | None = None,
    label_smoothing: float = 0.0,
) -> Loss:
    """Sum the cross entropy of a shard, and its weight, so that sums over shards give the mean of torch.

    The weight is the number of targets that count, or the sum of the weights of their classes.

    Args:
        outputs: (samples, classes, ...) scores of any float dtype.
        targets: (samples, ...) whole numbers, or probabilities of the shape of the scores.
        ignore_index: the class that does not count; None: every target counts.
        class_weights: a weight for each class. A place with probabilities weighs 1 nevertheless, as in torch.
        label_smoothing: the share of each target that is spread evenly over the classes.

    Raises:
        DataError: the targets have another dtype, or are probabilities of which some would be ignored.
        TrainingError: the targets have another shape than the scores.

    Example:
        >>> found = class_loss(torch.zeros(3, 4), torch.tensor([0, 1, -100]))
        >>> round(float(found.loss_sum), 4), found.weight
        (2.7726, tensor(2))
    """
    scores = exact(outputs)
    targets = _fitting(scores, targets)
    is_soft = targets.is_floating_point()
    if is_soft and ignore_index is not None and ignore_index >= 0:
        raise DataError(
            f"the targets are probabilities, of which none is ignored, and objective.ignore_index={ignore_index}. Use "
            "whole numbers as targets, or objective.ignore_index=null."
        )
    weights = None if class_weights is None else constant_on(class_weights, scores.dtype, scores.device)
    rows, of_rows = scores, targets
    if scores.dim() > 2 and torch.are_deterministic_algorithms_enabled():  # torch has no such kernel of masks for CUDA
        rows = scores.movedim(1, -1).flatten(0, -2)
        of_rows = targets.movedim(1, -1).flatten(0, -2) if is_soft else targets.flatten()
    loss_sum = functional.cross_entropy(
        rows,
        of_rows,
        weight=weights,
        reduction="sum",
        ignore_index=_NO_CLASS if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
    )
    counted = counted_in(targets, ignore_index)
    weight: Tensor | float
    if is_soft:
        weight = float(targets.numel() // scores.shape[1])
    elif weights is None:
        weight = float(targets.numel()) if counted is None else counted.sum()
    elif counted is None:
        weight = weights[targets].sum()
    else:
        weight = torch.where(counted, weights[targets.where(counted, 0)], 0.0).sum()
    return Loss(loss_sum, weight, outputs=outputs, targets=targets, counted=counted, class_dim=1)


def _fitting(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the targets of some scores: int64, or in the dtype of the scores.

    Raises:
        DataError: their dtype is not that of classes.
        TrainingError: their shape is not that of the scores.
    """
    dtype, has_classes = targets.dtype, scores.dim() > 1
    shape = (*scores.shape[:1], *scores.shape[2:])
    if dtype.is_floating_point and has_classes and targets.shape == scores.shape:
        return targets.to(scores.dtype)
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise DataError(
            f"the targets are {str(dtype).removeprefix('torch.')}, and classes are whole numbers (int64), or "
            f"probabilities of the shape of the scores: these are {tuple(scores.shape)}, and the targets "
            f"{tuple(targets.shape)}. Convert them in the dataset, int(y), or use objective=regression."
        )
    if not has_classes or targets.shape != shape:
        expected = f"the classes of {tuple(scores.shape)} are {shape}" if has_classes else "there is no dim of classes"
        raise TrainingError(
            f"the model gives scores {tuple(scores.shape)} for targets {tuple(targets.shape)}: scores are (samples, "
            f"classes, ...) and classes (samples, ...), and {expected}."
        )
    return targets.long()


@dataclass(frozen=True, kw_only=True)
class ScoredClasses(ScoredFields):
    """The keys of an objective whose targets are classes."""

    log_scores: ClassVar[bool] = True
    class_dim: ClassVar[int] = 1

    ignore_index: Annotated[int | None, maths(neutral=IGNORED)] = IGNORED
    """The target that does not count, in the loss, its weight and the metrics; null: every target counts, so that the
    weight of a step is known and need not be counted.
    """

    def weight_per_sample(self, sample: Any) -> float | None:
        """Return None: targets that do not count are known only in the batch. With `ignore_index` null, return the
        number of classes that a sample has: 1, or that of its mask.
        """
        counts = self.ignore_index is not None or sample is None
        return None if counts else self.planned_weight_per_sample(sample)

    def planned_weight_per_sample(self, sample: Any) -> float:
        """Return the number of classes that a sample has; 1 if it cannot be read."""
        with suppress(Exception):  # what cannot be read is refused when the sample is scored
            targets = torch.as_tensor(split_batch(sample, self.input, self.target)[1])
            return float(max(1, targets[0].numel() if targets.is_floating_point() else targets.numel()))
        return 1.0

    @property
    def plans_exactly(self) -> bool:
        """Whether the planned weight is exact unless a target is ignored."""
        return True


@dataclass(frozen=True, kw_only=True)
class Classification(ScoredClasses, Supervised):
    """Cross entropy over classes, summed over targets; metrics: accuracy and top-k.

    Scores are (samples, classes, ...), targets (samples, ...): one class for a sample, or one for each pixel of a mask.
    Targets may be probabilities of the shape of the scores. Over the whole batch of a step the loss is that of
    `torch.nn.functional.cross_entropy` with the same arguments, with class weights a weighted mean.

    Example:
        >>> import torch
        >>> objective = Classification(top_k=[3])
        >>> objective.score(torch.zeros(3, 4), torch.tensor([0, 1, -100])).weight
        tensor(2)
        >>> sorted(objective.metrics())
        ['accuracy', 'top3']
    """

    draws_nothing: ClassVar[bool] = True

    label_smoothing: Annotated[float, below(0, 1), unit("a share, 0 to 1")] = 0.0
    """Share of each target spread evenly over all classes, in [0, 1)."""
    class_weights: list[float] | None = None
    """One weight per class; null weighs all classes equally."""
    top_k: Annotated[list[int], cosmetic, unit("classes")] = field(default_factory=list)
    """Also report whether the class is among the k highest scores, for each of these k (metric `top5`)."""

    def __post_init__(self) -> None:
        problems = []
        if any(k < 2 for k in self.top_k):
            rule = "every k must be 2 or more (accuracy is k = 1 and always there)."
            problems.append(Problem(key="objective.top_k", value=self.top_k, rule=rule))
        if self.class_weights is not None and (not self.class_weights or min(self.class_weights) < 0):
            rule = "needs one weight per class, none negative."
            problems.append(Problem(key="objective.class_weights", value=self.class_weights, rule=rule))
        if problems:
            raise ConfigError(problems)

    def weight_per_sample(self, sample: Any) -> float | None:
        """Return the number of classes of a sample if all count and weigh the same; else None."""
        return super().weight_per_sample(sample) if self.class_weights is None else None

    @property
    def plans_exactly(self) -> bool:
        """Whether the planned weight is exact unless a target is ignored: not with class weights."""
        return self.class_weights is None

    def score(self, outputs: Any, targets: Any) -> Loss:
        """Sum the cross entropy of (samples, classes, ...) scores against (samples, ...) classes or probabilities."""
        return class_loss(
            scores_of(outputs, self.output),
            targets,
            ignore_index=self.ignore_index,
            class_weights=self.class_weights,
            label_smoothing=self.label_smoothing,
        )

    def metrics(self) -> dict[str, Metric]:
        """Return accuracy, the requested top-k, and the metrics of the config."""
        standard = {"accuracy": top_k(), **{f"top{k}": top_k(k) for k in self.top_k}}
        return {**standard, **fresh_metrics(self.extra_metrics)}

    def details(self, dataset: Any, *, batch_size: int) -> Details:
        """Return a table of classes, the confusion matrix, the calibration and the worst samples."""
        names = getattr(dataset, "classes", None)
        labels = list(map(str, names)) if isinstance(names, list | tuple) else None
        return Details(
            metrics={
                "classes": PerClass(names=labels),
                "confusion": ConfusionMatrix(names=labels),
                "calibration_error": CalibrationError(),
                WORST: Worst(batch_size=batch_size),
            }
        )
