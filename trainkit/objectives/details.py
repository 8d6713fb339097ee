"""Metrics of `trainkit evaluate` alone: tables of classes, calibration, the samples with the highest loss."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from trainkit.extras import install_command
from trainkit.objectives.base import Collective, Details, Loss, Metric, RunningMean
from trainkit.objectives.confusion import ConfusionMatrix, PerClass
from trainkit.objectives.fields import exact, parts_of
from trainkit.objectives.metrics import TorchMetric
from trainkit.objectives.tables import Result, Table

NUM_WORST: Final = 16
"""Samples in the table of the highest losses."""
WORST: Final = "worst"
"""Name of that table."""


def class_details(dataset: Any, *, batch_size: int) -> Details:
    """Return the details of a classification: a table of classes, the confusion matrix, calibration, worst samples."""
    names = getattr(dataset, "classes", None)
    known = list(map(str, names)) if isinstance(names, list | tuple) else None
    metrics: dict[str, Metric] = {
        "classes": OfClasses(partial(_named, PerClass, known)),
        "confusion": OfClasses(partial(_named, ConfusionMatrix, known)),
    }
    notes: tuple[str, ...] = ()
    if importlib.util.find_spec("torchmetrics") is None:
        line = install_command("metrics", "torchmetrics")
        notes = (f"calibration is not measured: it needs the package torchmetrics. Install it: {line}",)
    else:
        metrics["calibration_error"] = Calibration()
    metrics[WORST] = Worst(batch_size=batch_size)
    return Details(metrics=metrics, notes=notes)


def token_details(dataset: Any, *, batch_size: int) -> Details:
    """Return the details of a language model: bits per byte if the data has the bytes of each token, and the worst
    windows.
    """
    metrics: dict[str, Metric] = {}
    notes: tuple[str, ...] = ()
    sizes = getattr(dataset, "token_bytes", None)
    if callable(sizes):
        metrics["bits_per_byte"] = BitsPerByte(torch.as_tensor(sizes()))
    else:
        notes = (f"bits_per_byte is not measured: {type(dataset).__name__} has no token_bytes().",)
    metrics[WORST] = Worst(batch_size=batch_size)
    return Details(metrics=metrics, notes=notes)


def _named(metric: type[ConfusionMatrix], names: Sequence[str] | None, num_classes: int) -> Metric:
    return metric(num_classes, names if names is not None and len(names) == num_classes else None)


class OfClasses(Metric):
    """A metric whose number of classes is read from the first outputs.

    It gets one row for each target. Outputs that are not scores of the classes of their targets are not counted.
    """

    gives_table = True

    def __init__(self, make: Callable[[int], Metric]) -> None:
        self._make = make
        self._metric: Metric | None = None
        self._size = 0

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        if not _has_classes(loss):
            return
        dim, counted = loss.class_dim, loss.counted
        if self._metric is None:
            self._size = loss.outputs.shape[dim]
            self._metric = self._make(self._size)
        rows = self._scores(loss.outputs.detach(), dim).movedim(dim, -1).flatten(0, -2)
        counted = None if counted is None else counted.flatten()
        self._metric.update(
            replace(loss, outputs=rows, targets=loss.classes.flatten(), counted=counted, class_dim=-1), batch
        )

    def _scores(self, outputs: Tensor, dim: int) -> Tensor:
        """Return what the metric gets instead of the outputs, whose classes are in a dim."""
        del dim
        return outputs

    def compute(self, collective: Collective) -> Result:
        """Return the result over all ranks; nothing if no batch counted."""
        size = max(int(one.item()) for one in collective.gather(torch.tensor([self._size])))
        if not size:
            return {}
        metric = self._make(size) if self._metric is None else self._metric
        found: Result = metric.compute(collective)
        return found


class Calibration(OfClasses):
    """Expected calibration error, 15 bins: the mean difference between the confidence of predictions and their
    accuracy.

    Source: Guo et al. 2017, arXiv:1706.04599, section 2.
    """

    gives_table = False

    def __init__(self) -> None:
        super().__init__(_calibration_error)

    def _scores(self, outputs: Tensor, dim: int) -> Tensor:
        return exact(outputs).softmax(dim)


def _calibration_error(num_classes: int) -> Metric:
    from torchmetrics.classification import MulticlassCalibrationError  # noqa: PLC0415 - an extra, and slow

    return TorchMetric(MulticlassCalibrationError(num_classes, n_bins=15, norm="l1"))


class Worst(Metric):
    """The samples with the highest loss, highest first.

    The loss of a sample is the mean over its targets that count; target, guess and the probability of the guess are
    those of its worst place. Samples without a target that counts are left out, and so are outputs that are not scores
    of the classes of their targets.

    Args:
        batch_size: samples of a batch of the evaluation.
        count: samples to keep.
    """

    gives_table = True

    def __init__(self, *, batch_size: int, count: int = NUM_WORST) -> None:
        self._batch_size, self._count = batch_size, count
        self._place = 0
        self._kept = torch.zeros(0, 6, dtype=torch.float64)  # loss, batch, offset, target, guess, probability

    def update(self, loss: Loss, batch: Any) -> None:
        """Keep the highest losses of this batch and of the previous ones."""
        del batch
        place, self._place = self._place, self._place + 1
        if not _has_classes(loss):
            return
        outputs, targets = loss.outputs.detach(), loss.targets
        counted = torch.ones_like(loss.classes, dtype=torch.bool) if loss.counted is None else loss.counted
        found = [_of_samples(*part, dim=loss.class_dim) for part in parts_of(outputs, targets, counted)]
        losses, *others = (torch.cat(part).double() for part in zip(*found, strict=True))
        offsets = torch.arange(len(losses), dtype=torch.float64, device=losses.device)
        places = torch.full_like(offsets, place)
        rows = torch.stack([losses, places, offsets, *others], dim=1)
        rows = torch.cat([self._kept.to(losses.device), rows])
        order = rows[:, 0].nan_to_num(nan=math.inf).topk(min(self._count, len(rows))).indices
        self._kept = rows[order]

    def compute(self, collective: Collective) -> Table:
        """Return one row per sample: its index in the split, loss, target, guess and the probability of the guess."""
        rows = torch.full((self._count, 6), -math.inf, dtype=torch.float64)
        rows[: len(self._kept)] = self._kept.cpu()
        found = []
        for rank, part in enumerate(collective.gather(rows)):
            for loss, place, offset, *others in part.tolist():
                if loss == -math.inf:  # a sample without a target, or no sample
                    continue
                sample = (int(place) * collective.num_ranks + rank) * self._batch_size + int(offset)
                found.append((sample, loss, *others))
        found.sort(key=lambda row: (-row[1] if not math.isnan(row[1]) else -math.inf, row[0]))
        return Table(columns=("sample", "loss", "target", "guess", "probability"), rows=tuple(found[: self._count]))


class BitsPerByte(Metric):
    """The mean loss of a byte of the text, in bits: comparable between tokenizers.

    Args:
        num_bytes: (vocabulary,) bytes of each token.
    """

    def __init__(self, num_bytes: Tensor) -> None:
        self._num_bytes = num_bytes.double()
        self._tally = RunningMean()

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        self._num_bytes = self._num_bytes.to(loss.targets.device)
        if loss.counted is None:
            sizes = self._num_bytes[loss.targets]
        else:
            sizes = torch.where(loss.counted, self._num_bytes[torch.where(loss.counted, loss.targets, 0)], 0.0)
        self._tally.add(loss.loss_sum, sizes.sum())

    def compute(self, collective: Collective) -> float:
        """Return the bits per byte over all ranks."""
        return self._tally.mean(collective) / math.log(2)


def _has_classes(loss: Loss) -> bool:
    """Return whether outputs are scores of the classes of the targets."""
    outputs, targets, dim = loss.outputs, loss.targets, loss.class_dim
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.dim() < 2:
        return False
    shape = list(outputs.shape)
    del shape[dim]
    return list(targets.shape) == (list(outputs.shape) if targets.is_floating_point() else shape)


def _of_samples(outputs: Tensor, targets: Tensor, counted: Tensor, *, dim: int) -> tuple[Tensor, ...]:
    """Return the mean loss of each sample, and the target, guess and probability at its worst place; (samples,) each.

    A sample without a target that counts has the loss minus infinity.
    """
    samples, size = outputs.shape[0], outputs.shape[dim]
    logs = exact(outputs).log_softmax(dim).movedim(dim, -1).reshape(samples, -1, size)
    counted = counted.reshape(samples, -1)
    if targets.is_floating_point():
        shares = targets.movedim(dim, -1).reshape(samples, -1, size)
        each, classes = -(shares * logs).sum(-1), shares.argmax(-1)
    else:
        classes = targets.reshape(samples, -1).where(counted, 0)
        each = -logs.gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    worst = each.where(counted, -math.inf).argmax(dim=1, keepdim=True)
    best = logs.max(dim=-1)
    chosen = (classes.gather(1, worst), best.indices.gather(1, worst), best.values.exp().gather(1, worst))
    total, count = each.where(counted, 0.0).sum(dim=1), counted.sum(dim=1)
    return torch.where(count > 0, total / count, -math.inf), *(one.squeeze(1) for one in chosen)
