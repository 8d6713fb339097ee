"""The metric that selects the best checkpoint and drives early stopping and leaderboards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainkit.config.sections import EvalConfig

__all__ = ["MonitoredMetric"]

_LESS_IS_BETTER = frozenset({"loss", "perplexity", "error", "mse", "mae"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitoredMetric:
    """The metric that selects the best checkpoint and drives early stopping and leaderboards."""

    metric: str
    """Its name, such as `val/accuracy`."""
    mode: Literal["min", "max"]
    """Whether lower or higher values are better."""

    @classmethod
    def of(cls, settings: EvalConfig) -> MonitoredMetric:
        """Return the metric of the settings; the default is the validation loss.

        Example:
            >>> MonitoredMetric.of(EvalConfig()), MonitoredMetric.of(EvalConfig(metric="val/accuracy"))
            (MonitoredMetric(metric='val/loss', mode='min'), MonitoredMetric(metric='val/accuracy', mode='max'))
        """
        metric = settings.metric or "val/loss"
        return cls(metric=metric, mode=settings.mode or _better_end(metric))

    def __str__(self) -> str:
        return f"{self.metric} ({self.mode})"

    @property
    def sign(self) -> float:
        """The factor that makes lower values better."""
        return -1.0 if self.mode == "max" else 1.0


def _better_end(metric: str) -> Literal["min", "max"]:
    return "min" if metric.rpartition("/")[2] in _LESS_IS_BETTER else "max"
