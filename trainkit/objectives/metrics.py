"""Trainkit's metrics, and the adapter for torchmetrics classes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import torch
from torch import Tensor

from trainkit.fields import cosmetic, maths
from trainkit.objectives.base import Collective, Loss, Metric, RunningMean
from trainkit.objectives.fields import Field
from trainkit.objectives.tables import Result

MAX_DIMS: Final = 8
"""Most dims a gathered state of a torchmetrics class may have."""


class MeanOf(Metric):
    """The mean of a quantity: a function of (outputs, targets) returns its sum and its count."""

    def __init__(self, sum_and_count: Any) -> None:
        self._sum_and_count = sum_and_count
        self._tally = RunningMean()

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        self._tally.add(*self._sum_and_count(loss.outputs.detach(), loss.targets))

    def compute(self, collective: Collective) -> float:
        """Return the mean over all ranks."""
        return self._tally.mean(collective)


class TorchMetric(Metric):
    """Any torchmetrics metric, reduced over trainkit's ranks instead of a process group of torch.

    The metric is copied, so that the configured one stays empty; its floating states are float64.
    """

    def __init__(self, prototype: Any) -> None:
        self._metric = copy.deepcopy(prototype)
        self._metric.reset()
        self._metric.set_dtype(torch.float64)

    def update(self, loss: Loss, batch: Any) -> None:
        """Update the metric with the predictions and the targets of one batch, without those that do not count.

        A metric that ignores the same targets by its own `ignore_index` gets all of them, in their shape.
        """
        del batch
        outputs, targets, counted = loss.outputs.detach(), loss.targets, loss.counted
        self._metric.to(outputs.device)
        own = getattr(self._metric, "ignore_index", None)
        if counted is not None and not counted.all() and (own is None or not (targets[~counted] == own).all()):
            if not counted.any():
                return
            outputs, targets = outputs.movedim(loss.class_dim, -1)[counted], targets[counted]
            if counted.dim() > 1:  # one sample with all of them
                outputs, targets = outputs.unsqueeze(0).movedim(-1, loss.class_dim), targets.unsqueeze(0)
        self._metric.update(outputs, targets)

    def compute(self, collective: Collective) -> Result:
        """Combine the states of all ranks by the metric's own rules, then compute."""
        self._metric.distributed_available_fn = lambda: collective.num_ranks > 1
        self._metric.dist_sync_fn = lambda state, **_group: gather_ragged(state, collective)
        with warnings.catch_warnings():
            # A rank without samples computes the metric too, from the states of the other ranks.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
            value: Any = self._metric.compute()
        if isinstance(value, Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, tuple | list):  # the axes of a curve, by number
            return {str(place): axis for place, axis in enumerate(value)}
        found: Result = value
        return found


def gather_ragged(tensor: Tensor, collective: Collective) -> list[Tensor]:
    """Gather tensors of different sizes: first the shapes, then the tensors padded to the largest.

    A rank without samples has an empty tensor of any shape and dtype; it adopts those of the others.
    """
    header = torch.zeros(MAX_DIMS + 2, dtype=torch.int64, device=tensor.device)
    header[:2] = torch.tensor([tensor.dim(), _DTYPES.index(tensor.dtype)])
    header[2 : tensor.dim() + 2] = torch.tensor(tensor.shape, dtype=torch.int64)
    headers = [(_DTYPES[h[1]], h[2 : 2 + h[0]]) for h in (row.tolist() for row in collective.gather(header))]
    dtype, shape = next(((d, s) for d, s in headers if 0 not in s), headers[0])
    shapes = [s if 0 not in s else [0, *shape[1:]] for _, s in headers]
    padded = torch.zeros([max(sizes) for sizes in zip(*shapes, strict=True)], dtype=dtype, device=tensor.device)
    if tensor.numel():
        padded[tuple(slice(0, size) for size in tensor.shape)] = tensor
    gathered = collective.gather(padded)
    return [full[tuple(slice(0, size) for size in sizes)] for full, sizes in zip(gathered, shapes, strict=True)]


_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES: Final = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True, kw_only=True)
class ScoredFields:
    """The keys of an objective that scores one output of the model."""

    input: Annotated[Field | list[Field] | None, maths(neutral=None)] = None
    """The field or fields of a sample that the model receives, by position; null: the first, or input, x, image, ..."""
    target: Annotated[Field | None, maths(neutral=None)] = None
    """The field of a sample with the targets; null: the second, or target, y, label, labels."""
    output: Annotated[Field | None, maths(neutral=None)] = None
    """The output of the model that is scored, by key or index; null: the only one, or `logits`."""
    extra_metrics: Annotated[dict[str, Any], cosmetic] = field(default_factory=dict)
    """More metrics by name: any torchmetrics class by its `_target_`, or a trainkit Metric."""


def fresh_metrics(configured: Mapping[str, Any]) -> dict[str, Metric]:
    """Return empty copies of the metrics in a config: those of trainkit directly, others through `TorchMetric`."""
    return {
        name: copy.deepcopy(metric) if isinstance(metric, Metric) else TorchMetric(metric)
        for name, metric in configured.items()
    }
