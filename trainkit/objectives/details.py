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
from torch.nn import functional

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
    metrics[WORST] = Worst(_of_sample, batch_size=batch_size)
    return Details(metrics=metrics, notes=notes)


def token_details(dataset: Any, *, batch_size: int, ignore_index: int) -> Details:
    """Return the details of a language model: bits per byte if the data has the bytes of each token, and the worst
    windows.
    """
    metrics: dict[str, Metric] = {}
    notes: tuple[str, ...] = ()
    sizes = getattr(dataset, "token_bytes", None)
    if callable(sizes):
        metrics["bits_per_byte"] = BitsPerByte(torch.as_tensor(sizes()), ignore_index=ignore_index)
    else:
        notes = (f"bits_per_byte is not measured: {type(dataset).__name__} has no token_bytes().",)
    metrics[WORST] = Worst(partial(_of_window, ignore_index=ignore_index), batch_size=batch_size)
    return Details(metrics=metrics, notes=notes)


def _named(metric: type[ConfusionMatrix], names: Sequence[str] | None, num_classes: int) -> Metric:
    return metric(num_classes, names if names is not None and len(names) == num_classes else None)


class OfClasses(Metric):
    """A metric whose number of classes is read from the first outputs.

    Outputs that are not (samples, classes) with one class number per sample are not counted.
    """

    gives_table = True

    def __init__(self, make: Callable[[int], Metric]) -> None:
        self._make = make
        self._metric: Metric | None = None
        self._size = 0

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        if not _one_class_each(loss):
            return
        if self._metric is None:
            self._size = loss.outputs.shape[-1]
            self._metric = self._make(self._size)
        self._metric.update(loss, batch)

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

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch, by the probabilities of its classes."""
        if _one_class_each(loss):
            super().update(replace(loss, outputs=exact(loss.outputs.detach()).softmax(dim=-1)), batch)


def _calibration_error(num_classes: int) -> Metric:
    from torchmetrics.classification import MulticlassCalibrationError  # noqa: PLC0415 - an extra, and slow

    return TorchMetric(MulticlassCalibrationError(num_classes, n_bins=15, norm="l1"))


class Worst(Metric):
    """The samples with the highest loss, highest first.

    Args:
        losses_of: returns the loss of each sample of a shard, its target, its guess and the probability of the guess,
            each (samples,); None if the shard has no such losses.
        batch_size: samples of a batch of the evaluation.
        count: samples to keep.
    """

    gives_table = True

    def __init__(
        self,
        losses_of: Callable[[Loss], tuple[Tensor, ...] | None],
        *,
        batch_size: int,
        count: int = NUM_WORST,
    ) -> None:
        self._losses_of, self._batch_size, self._count = losses_of, batch_size, count
        self._place = 0
        self._kept = torch.zeros(0, 6, dtype=torch.float64)  # loss, batch, offset, target, guess, probability

    def update(self, loss: Loss, batch: Any) -> None:
        """Keep the highest losses of this batch and of the previous ones."""
        del batch
        place, self._place = self._place, self._place + 1
        found = self._losses_of(loss)
        if found is None:
            return
        losses, *others = (one.detach().double() for one in found)
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
                if place < 0:
                    continue
                sample = (int(place) * collective.num_ranks + rank) * self._batch_size + int(offset)
                found.append((sample, loss, *others))
        found.sort(key=lambda row: (-row[1] if not math.isnan(row[1]) else -math.inf, row[0]))
        return Table(columns=("sample", "loss", "target", "guess", "probability"), rows=tuple(found[: self._count]))


class BitsPerByte(Metric):
    """The mean loss of a byte of the text, in bits: comparable between tokenizers.

    Args:
        num_bytes: (vocabulary,) bytes of each token.
        ignore_index: the target of a padded place.
    """

    def __init__(self, num_bytes: Tensor, *, ignore_index: int) -> None:
        self._num_bytes, self._ignored = num_bytes.double(), ignore_index
        self._tally = RunningMean()

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        self._num_bytes = self._num_bytes.to(loss.targets.device)
        counted = loss.targets != self._ignored
        sizes = self._num_bytes[torch.where(counted, loss.targets, 0)]
        self._tally.add(loss.loss_sum, torch.where(counted, sizes, 0.0).sum())

    def compute(self, collective: Collective) -> float:
        """Return the bits per byte over all ranks."""
        return self._tally.mean(collective) / math.log(2)


def _one_class_each(loss: Loss) -> bool:
    outputs, targets = loss.outputs, loss.targets
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return False
    return outputs.dim() == 2 and targets.dim() == 1


def _of_sample(loss: Loss) -> tuple[Tensor, ...] | None:
    if not _one_class_each(loss):
        return None
    logs = exact(loss.outputs.detach()).log_softmax(dim=-1)
    best = logs.max(dim=-1)
    return functional.nll_loss(logs, loss.targets, reduction="none"), loss.targets, best.indices, best.values.exp()


def _of_window(loss: Loss, *, ignore_index: int) -> tuple[Tensor, ...] | None:
    """Return the mean loss of each window, and the target, guess and probability at its worst place."""
    outputs, targets = loss.outputs, loss.targets
    if not isinstance(outputs, Tensor) or outputs.dim() != 3 or outputs.shape[:2] != targets.shape:
        return None
    found = [_of_windows(*part, ignore_index=ignore_index) for part in parts_of(outputs.detach(), targets)]
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _of_windows(outputs: Tensor, targets: Tensor, *, ignore_index: int) -> tuple[Tensor, ...]:
    logs = exact(outputs).log_softmax(dim=-1)
    each = functional.nll_loss(logs.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="none")
    each = each.view(targets.shape)
    counts = (targets != ignore_index).sum(dim=1)
    worst = each.argmax(dim=1, keepdim=True)
    best = logs.max(dim=-1)
    chosen = (targets.gather(1, worst), best.indices.gather(1, worst), best.values.exp().gather(1, worst))
    return each.sum(dim=1) / counts.clamp(min=1), *(one.squeeze(1) for one in chosen)
