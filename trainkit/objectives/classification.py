"""Classification: a class for each sample, or for each pixel, position or point of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from trainkit.errors import ConfigError, Problem
from trainkit.fields import below, cosmetic, unit
from trainkit.objectives.base import Collective, Details, Loss, Metric, RunningMean, Supervised
from trainkit.objectives.details import class_details
from trainkit.objectives.fields import exact, scores_of
from trainkit.objectives.metrics import fresh_metrics
from trainkit.objectives.targets import ScoredClasses, class_loss


class TopK(Metric):
    """The fraction of targets whose class is among the k highest scores; k = 1 is accuracy.

    Targets that are ignored do not count; the class of probabilities is the most likely one.
    """

    def __init__(self, k: int = 1) -> None:
        self._k = k
        self._tally = RunningMean()

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        scores, labels, dim = loss.outputs.detach(), loss.classes, loss.class_dim
        if self._k == 1:
            hits = scores.argmax(dim) == labels
        else:
            hits = (scores.topk(min(self._k, scores.shape[dim]), dim).indices == labels.unsqueeze(dim)).any(dim)
        if loss.counted is None:
            self._tally.add(hits.sum(), labels.numel())
        else:
            self._tally.add((hits & loss.counted).sum(), loss.counted.sum())

    def compute(self, collective: Collective) -> float:
        """Return the fraction over all ranks."""
        return self._tally.mean(collective)


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

    label_smoothing: Annotated[float, below(0, 1)] = 0.0
    """Share of each target spread evenly over all classes, in [0, 1)."""
    class_weights: list[float] | None = None
    """One weight per class; null weighs all classes equally."""
    top_k: Annotated[list[int], cosmetic, unit("classes")] = field(default_factory=list)
    """Also report whether the class is among the k highest scores, for each of these k (metric `top5`)."""

    def __post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise ConfigError(problems)

    def _problems(self) -> list[Problem]:
        found = []
        if any(k < 2 for k in self.top_k):
            rule = "every k must be 2 or more (accuracy is k = 1 and always there)."
            found.append(Problem(key="objective.top_k", value=self.top_k, rule=rule))
        if self.class_weights is not None and (not self.class_weights or min(self.class_weights) < 0):
            rule = "needs one weight per class, none negative."
            found.append(Problem(key="objective.class_weights", value=self.class_weights, rule=rule))
        return found

    def weight_per_sample(self, sample: Any) -> float | None:
        """Return the number of classes of a sample if all count and weigh the same; else None."""
        return super().weight_per_sample(sample) if self.class_weights is None else None

    @property
    def plans_exactly(self) -> bool:
        """Whether the planned weight is exact unless a target is ignored: not with class weights."""
        return self.class_weights is None

    def score(self, outputs: Any, targets: Any) -> Loss:
        """Sum the cross entropy of (samples, classes, ...) scores against (samples, ...) classes or probabilities."""
        outputs = scores_of(outputs, self.output)
        found = class_loss(
            exact(outputs),
            targets,
            ignore_index=self.ignore_index,
            class_weights=self.class_weights,
            label_smoothing=self.label_smoothing,
        )
        return Loss(
            found.loss_sum,
            found.weight,
            outputs=outputs,
            targets=found.targets,
            counted=found.counted,
            class_dim=self.class_dim,
        )

    def metrics(self) -> dict[str, Metric]:
        """Return accuracy, the requested top-k, and the metrics of the config."""
        own: dict[str, Metric] = {"accuracy": TopK(1), **{f"top{k}": TopK(k) for k in self.top_k}}
        return {**own, **fresh_metrics(self.extra_metrics)} if self.extra_metrics else own

    def details(self, dataset: Any, *, batch_size: int) -> Details:
        """Return a table of classes, the confusion matrix, the calibration and the worst samples."""
        return class_details(dataset, batch_size=batch_size)
