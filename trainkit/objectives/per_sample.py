"""A loss written as one function of outputs and targets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from trainkit.config.targets.allowed import ALLOWED_PACKAGES, allowed_packages, name_problem
from trainkit.config.targets.build import imported
from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.objectives.base import Loss, Metric, Supervised
from trainkit.objectives.fields import scores_of
from trainkit.objectives.metrics import ScoredFields, fresh_metrics


@dataclass(frozen=True, kw_only=True)
class LossPerSample(ScoredFields, Supervised):
    """The function receives the outputs and the targets of a batch, and returns the loss of each sample.

    A mean over the batch is refused: means of unequal shards cannot be combined. Losses of several values per sample
    are averaged within the sample.
    """

    runs_user_code: ClassVar[bool] = True

    function: str
    """Its dotted name, `mine.loss`, in a package of one's own."""

    def __post_init__(self) -> None:
        """Import the function.

        Raises:
            ConfigError: there is none, or no package of one's own is named.
        """
        packages = [name for name in allowed_packages() if name not in ALLOWED_PACKAGES]
        if rule := name_problem(self.function, packages):
            raise ConfigError([Problem(key="objective.function", value=self.function, rule=rule)])
        _ = self._call

    @cached_property
    def _call(self) -> Any:
        return imported(self.function)

    def score(self, outputs: Any, targets: Any) -> Loss:
        """Sum the losses of the samples."""
        outputs = scores_of(outputs, self.output)
        losses = self._call(outputs, targets)
        if not isinstance(losses, Tensor) or not losses.dim() or len(losses) != len(targets):
            actual = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise TrainingError(
                f"{self.function} gives {actual}, and {len(targets)} samples need a loss each: leave out the mean over "
                'the batch, reduction="none".'
            )
        total = losses.reshape(len(losses), -1).mean(1).sum()
        return Loss(loss_sum=total, weight=float(len(losses)), outputs=outputs, targets=targets)

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics of the config."""
        return fresh_metrics(self.extra_metrics)
