"""Metrics of the objectives: means, tables of classes, and the adapter for torchmetrics classes."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

import torch
from torch import Tensor

from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.fields import cosmetic, maths, unit
from trainkit.objectives.base import Collective, Loss, Metric, RunningMean
from trainkit.objectives.fields import Field, exact, parts_of
from trainkit.objectives.tables import Result, Table

MAX_DIMS: Final = 8
"""Most dims a gathered state of a torchmetrics class may have."""
NUM_WORST: Final = 16
"""Samples in the table of the highest losses."""
WORST: Final = "worst"
"""Name of that table."""


class Mean(Metric):
    """A sum over a count.

    Args:
        of: returns the sum and the count of one batch.
        then: converts the mean over all ranks.
    """

    def __init__(
        self, of: Callable[[Loss], tuple[Tensor, Tensor | float]], then: Callable[[float], float] = float
    ) -> None:
        self._of, self._then, self._tally = of, then, RunningMean()

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        self._tally.add(*self._of(loss))

    def compute(self, collective: Collective) -> float:
        """Return the mean over all ranks, converted."""
        return self._then(self._tally.mean(collective))


class MeanOf(Mean):
    """The mean of a quantity: a function of (outputs, targets) returns its sum and its count."""

    def __init__(self, of_batch: Any) -> None:
        super().__init__(lambda loss: of_batch(loss.outputs.detach(), loss.targets))


def top_k(k: int = 1) -> Mean:
    """Return the fraction of targets whose class is among the k highest scores; k = 1 is accuracy.

    Targets that are ignored do not count; the class of probabilities is the most likely one.
    """

    def hits_of(loss: Loss) -> tuple[Tensor, Tensor | float]:
        scores, labels, dim = loss.outputs.detach(), loss.classes, loss.class_dim
        if k == 1:
            hits = scores.argmax(dim) == labels
        else:
            hits = (scores.topk(min(k, scores.shape[dim]), dim).indices == labels.unsqueeze(dim)).any(dim)
        if loss.counted is None:
            return hits.sum(), labels.numel()
        return (hits & loss.counted).sum(), loss.counted.sum()

    return Mean(hits_of)


def perplexity() -> Mean:
    """Return exp(mean loss of a token), the number of equally likely tokens with the same loss; infinity if the mean is
    too large.
    """
    most = math.log(sys.float_info.max)
    return Mean(lambda loss: (loss.loss_sum, loss.weight), lambda mean: math.inf if mean > most else math.exp(mean))


def bits_per_byte(num_bytes: Tensor) -> Mean:
    """Return the mean loss of a byte of the text, in bits: comparable between tokenizers.

    Args:
        num_bytes: (vocabulary,) bytes of each token.
    """

    def of(loss: Loss) -> tuple[Tensor, Tensor | float]:
        sizes = num_bytes.to(loss.targets.device).double()
        if loss.counted is None:
            return loss.loss_sum, sizes[loss.targets].sum()
        counted = sizes[torch.where(loss.counted, loss.targets, 0)]
        return loss.loss_sum, torch.where(loss.counted, counted, 0.0).sum()

    return Mean(of, lambda mean: mean / math.log(2))


class ConfusionMatrix(Metric):
    """One row per true class: the number of its samples predicted as each class. Counts are exact on any number of
    ranks.

    Outputs are scores with the classes in the dim `Loss.class_dim`, by default the last, targets class numbers of the
    other dims, or probabilities, of which the most likely class counts.

    Args:
        num_classes: number of classes; None: that of the first scores. Outputs that are not scores of the classes of
            their targets are then not counted.
        names: names of the classes; their numbers by default, and if `num_classes` is None and names do not fit it.
        ignore_index: the target of a padded place, which does not count.
    """

    gives_table: ClassVar[bool] = True

    def __init__(
        self,
        num_classes: Annotated[int | None, unit("classes")] = None,
        names: Sequence[str] | None = None,
        ignore_index: int = -100,
    ) -> None:
        if num_classes is not None and num_classes < 2:
            raise ConfigError([Problem(key="num_classes", value=num_classes, rule="must be 2 or more.")])
        if num_classes is not None and names is not None and len(names) != num_classes:
            raise ConfigError([Problem(key="names", value=list(names), rule=f"must be {num_classes}, one per class.")])
        self._is_sized, self._size, self._ignored = num_classes is not None, num_classes or 0, ignore_index
        self._names = names
        self._counts = torch.zeros(self._size**2 + 1, dtype=torch.float64)

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        if not self._is_sized and not _has_classes(loss):
            return
        scores, labels, size = loss.outputs.detach(), loss.classes.flatten(), loss.outputs.shape[loss.class_dim]
        if not self._size:
            self._size, self._counts = size, torch.zeros(size**2 + 1, dtype=torch.float64)
        if size != self._size:
            raise TrainingError(f"a confusion matrix of {self._size} classes got scores of {size}.")
        guesses = scores.argmax(dim=loss.class_dim).flatten()
        counted = labels != self._ignored
        if loss.counted is not None:
            counted &= loss.counted.flatten()
        # Ignored targets are added to the last place.
        cells = torch.where(counted, labels * size + guesses, size**2)
        self._counts = self._counts.to(scores.device)
        self._counts.index_add_(0, cells, torch.ones_like(cells, dtype=torch.float64))

    def compute(self, collective: Collective) -> Result:
        """Return the table over all ranks; nothing if the number of classes is not known on any."""
        size = max(int(size.item()) for size in collective.gather(torch.tensor([self._size])))
        if not size:
            return {}
        counts = self._counts if self._size else self._counts.new_zeros(size**2 + 1)
        fits = self._names is not None and len(self._names) == size
        names = [*map(str, (self._names if fits else None) or range(size))]
        return self._table(collective.sum(counts)[:-1].reshape(size, size).cpu(), names)

    def _table(self, matrix: Tensor, names: Sequence[str]) -> Table:
        """Return the table of (true class, guessed class) float64 counts."""
        return Table.of(matrix, names)


class PerClass(ConfusionMatrix):
    """Precision, recall, F1 and number of samples of each class; NaN where a share is 0 / 0."""

    def _table(self, matrix: Tensor, names: Sequence[str]) -> Table:
        hits, true, guessed = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
        columns = (hits / guessed, hits / true, 2 * hits / (true + guessed), true)
        rows = zip(names, *(column.tolist() for column in columns), strict=True)
        return Table(columns=("class", "precision", "recall", "f1", "samples"), rows=tuple(rows))


class CalibrationError(Metric):
    """Expected calibration error, 15 bins: the mean difference between the confidence of predictions and their
    accuracy. Outputs that are not scores of the classes of their targets are not counted.

    Source: Guo et al. 2017, arXiv:1706.04599, section 2.
    """

    def __init__(self) -> None:
        self._bins = torch.zeros(15, 3, dtype=torch.float64)  # targets, sum of confidences, hits

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        if not _has_classes(loss):
            return
        sure, guesses = exact(loss.outputs.detach()).softmax(loss.class_dim).max(loss.class_dim)
        counted = torch.ones_like(sure) if loss.counted is None else loss.counted
        rows = torch.stack([torch.ones_like(sure), sure, guesses == loss.classes], dim=-1).double()
        index = (15 * sure).ceil().long().sub(1).clamp(0, 14)
        self._bins = self._bins.to(sure.device)
        self._bins.index_add_(0, index.flatten(), (rows * counted.unsqueeze(-1)).flatten(0, -2))

    def compute(self, collective: Collective) -> Result:
        """Return the error over all ranks; nothing if no target counts."""
        targets, sure, hits = collective.sum(self._bins).unbind(1)
        return float((sure - hits).abs().sum() / targets.sum()) if targets.any() else {}


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
        self._batch_index = 0
        self._worst = torch.zeros(0, 6, dtype=torch.float64)  # loss, batch, offset, target, guess, probability

    def update(self, loss: Loss, batch: Any) -> None:
        """Keep the highest losses of this batch and of the previous ones."""
        del batch
        index, self._batch_index = self._batch_index, self._batch_index + 1
        if not _has_classes(loss):
            return
        outputs, targets = loss.outputs.detach(), loss.targets
        counted = torch.ones_like(loss.classes, dtype=torch.bool) if loss.counted is None else loss.counted
        parts = [_of_samples(*part, dim=loss.class_dim) for part in parts_of(outputs, targets, counted)]
        losses, *others = (torch.cat(part).double() for part in zip(*parts, strict=True))
        offsets = torch.arange(len(losses), dtype=torch.float64, device=losses.device)
        batches = torch.full_like(offsets, index)
        rows = torch.stack([losses, batches, offsets, *others], dim=1)
        rows = torch.cat([self._worst.to(losses.device), rows])
        order = rows[:, 0].nan_to_num(nan=math.inf).topk(min(self._count, len(rows))).indices
        self._worst = rows[order]

    def compute(self, collective: Collective) -> Table:
        """Return one row per sample: its index in the split, loss, target, guess and the probability of the guess."""
        rows = torch.full((self._count, 6), -math.inf, dtype=torch.float64)
        rows[: len(self._worst)] = self._worst.cpu()
        samples = []
        for rank, part in enumerate(collective.gather(rows)):
            for loss, index, offset, *others in part.tolist():
                if loss == -math.inf:  # a sample without a target, or no sample
                    continue
                sample = (int(index) * collective.num_ranks + rank) * self._batch_size + int(offset)
                samples.append((sample, loss, *others))
        samples.sort(key=lambda row: (-row[1] if not math.isnan(row[1]) else -math.inf, row[0]))
        return Table(columns=("sample", "loss", "target", "guess", "probability"), rows=tuple(samples[: self._count]))


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
    return torch.where(count > 0, total / count, -math.inf), *(column.squeeze(1) for column in chosen)


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
        ignored = getattr(self._metric, "ignore_index", None)
        if counted is not None and not counted.all() and (ignored is None or not (targets[~counted] == ignored).all()):
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
            return {str(index): axis for index, axis in enumerate(value)}
        result: Result = value
        return result


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
