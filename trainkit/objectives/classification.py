"""Classification with one class per sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor
from torch.nn import functional

from trainkit.errors import ConfigError, Problem
from trainkit.fields import below, cosmetic, unit
from trainkit.numerics.from_host import constant_on
from trainkit.objectives.base import Collective, Details, Loss, Metric, RunningMean, Supervised
from trainkit.objectives.details import class_details
from trainkit.objectives.fields import exact, scores_of
from trainkit.objectives.metrics import ScoredFields, fresh_metrics


class TopK(Metric):
    """The fraction of samples whose class is among the k highest scores; k = 1 is accuracy.

    Outputs are (samples, classes) scores, targets (samples,) class numbers.
    """

    def __init__(self, k: int = 1) -> None:
        self._k = k
        self._tally = RunningMean()

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        scores, labels = loss.outputs.detach(), loss.targets
        if self._k == 1:
            hits = scores.argmax(dim=1) == labels
        else:
            hits = (scores.topk(min(self._k, scores.shape[1]), dim=1).indices == labels.unsqueeze(1)).any(dim=1)
        self._tally.add(hits.sum(), labels.shape[0])

    def compute(self, collective: Collective) -> float:
        """Return the fraction over all ranks."""
        return self._tally.mean(collective)


@dataclass(frozen=True, kw_only=True)
class Classification(ScoredFields, Supervised):
    """Cross entropy over classes, summed over samples; metrics: accuracy and top-k.

    With class weights, the weight of a sample is that of its class, and the loss is the weighted mean, as in torch.

    Example:
        >>> import torch
        >>> objective = Classification(top_k=[3])
        >>> objective.score(torch.zeros(2, 4), torch.tensor([0, 1])).weight
        2.0
        >>> sorted(objective.metrics())
        ['accuracy', 'top3']
    """

    draws_nothing: ClassVar[bool] = True

    log_scores: ClassVar[bool] = True

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
        """Return 1 for every sample, unless classes have weights."""
        del sample
        return 1.0 if self.class_weights is None else None

    def score(self, outputs: Any, targets: Tensor) -> Loss:
        """Sum the cross entropy of (samples, classes) scores against (samples,) int64 classes."""
        outputs = scores_of(outputs, self.output)
        scores = exact(outputs)
        if targets.is_floating_point():
            targets = targets.to(scores.dtype)
        if self.class_weights is None:
            loss_sum = functional.cross_entropy(scores, targets, reduction="sum", label_smoothing=self.label_smoothing)
            return Loss(loss_sum, float(targets.shape[0]), None, outputs, targets)
        weights = constant_on(self.class_weights, scores.dtype, scores.device)
        loss_sum = functional.cross_entropy(
            scores, targets, weight=weights, reduction="sum", label_smoothing=self.label_smoothing
        )
        weight = targets * weights if targets.is_floating_point() else weights[targets]
        return Loss(loss_sum, weight.sum(), None, outputs, targets)

    def metrics(self) -> dict[str, Metric]:
        """Return accuracy, the requested top-k, and the metrics of the config."""
        own: dict[str, Metric] = {"accuracy": TopK(1), **{f"top{k}": TopK(k) for k in self.top_k}}
        return {**own, **fresh_metrics(self.extra_metrics)} if self.extra_metrics else own

    def details(self, dataset: Any, *, batch_size: int) -> Details:
        """Return a table of classes, the confusion matrix, the calibration and the worst samples."""
        return class_details(dataset, batch_size=batch_size)
