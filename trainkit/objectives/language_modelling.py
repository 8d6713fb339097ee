"""Language modelling: predict the next token at every position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.errors import Problem, TrainingError
from trainkit.fields import speed
from trainkit.objectives.base import Collective, Details, Loss, Metric, RunningMean, Supervised
from trainkit.objectives.details import token_details
from trainkit.objectives.fields import exact, parts_of, scores_of
from trainkit.objectives.from_hidden.cross_entropy import linear_cross_entropy
from trainkit.objectives.from_hidden.liger import liger_cross_entropy, liger_problems, refuse_scores
from trainkit.objectives.from_hidden.output_layer import OutputLayer
from trainkit.objectives.metrics import ScoredFields, fresh_metrics
from trainkit.objectives.targets import IGNORED, counted_in


@dataclass(frozen=True, kw_only=True)
class LanguageModelling(ScoredFields, Supervised):
    """Cross entropy summed over tokens; positions whose target is `ignore_index` are padding and do not count.

    Example:
        >>> scores, targets = torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]])
        >>> LanguageModelling().score(scores, targets).weight
        tensor(2)
    """

    draws_nothing: ClassVar[bool] = True

    log_scores: ClassVar[bool] = True

    padding: bool = True
    """Whether training samples may hold padding; false skips counting and divides the loss before backward."""
    ignore_index: int = IGNORED
    """The target of a padded place."""
    cross_entropy: Annotated[Literal["auto", "chunked", "plain", "liger"], speed] = "auto"
    """Computation of the loss in training: in the output layer of a model that declares one, `chunked` or by `liger`, a
    kernel for GPUs; or `plain`, from all scores, as for other models. `auto`: `plain` in a compiled graph of model and
    loss, else `chunked`.
    """

    def weight_per_sample(self, sample: Any) -> float | None:
        """Return the sample's length if no sample is padded; otherwise None, and tokens are counted batch by batch."""
        if sample is None:
            return None
        targets = torch.as_tensor(self.split_batch(sample)[1])
        counted = counted_in(targets, self.ignore_index)
        return None if self.padding or counted is None or not bool(counted.all()) else float(targets.numel())

    def planned_weight_per_sample(self, sample: Any) -> float:
        """Return the length of a sample, including padding."""
        return float(torch.as_tensor(self.split_batch(sample)[1]).numel())

    def score(self, outputs: Any, targets: Tensor) -> Loss:
        """Sum the cross entropy of (samples, length, vocabulary) scores against (samples, length) int64 tokens."""
        outputs = scores_of(outputs, self.output)
        if self.cross_entropy == "liger":
            refuse_scores()
        _refuse_shape(outputs, targets)
        loss_sum = self._loss_sum(outputs.flatten(0, -2), targets.flatten())
        return self._loss(loss_sum, outputs, targets)

    def _loss(self, loss_sum: Tensor, outputs: Tensor | None, targets: Tensor) -> Loss:
        counted = counted_in(targets, self.ignore_index)
        assert counted is not None
        return Loss(loss_sum, counted.sum(), None, outputs, targets, counted=counted)

    def _loss_sum(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross entropy of (rows, vocabulary) scores; in an evaluation in parts, since each takes two copies in
        float32.
        """
        parts: list[tuple[Tensor, ...]] = [(rows, targets)] if torch.is_grad_enabled() else parts_of(rows, targets)
        first, *others = (
            functional.cross_entropy(exact(scores), wanted, reduction="sum", ignore_index=self.ignore_index)
            for scores, wanted in parts
        )
        return torch.stack([first, *others]).sum() if others else first

    @property
    def takes_hidden(self) -> bool:
        """Whether `loss_from_hidden` is used, if the model declares its output layer."""
        # not by super(), which torch 2.11 cannot trace
        return self.cross_entropy != "plain" and self.output is None and self._has_hidden_loss

    def loss_from_hidden(self, hidden: Tensor, output: OutputLayer, targets: Tensor) -> Loss:
        """Sum the cross entropy of (samples, length, features) hidden states against (samples, length) tokens."""
        _refuse_shape(hidden, targets)
        only_eager = self.cross_entropy == "auto"
        compute = partial(linear_cross_entropy, score=output.score, part=output.part, only_eager=only_eager)
        if self.cross_entropy == "liger":
            compute = partial(liger_cross_entropy, is_cut=output.part is not None)
        loss_sum = compute(
            hidden.flatten(0, -2),
            output.layer.weight,
            targets.flatten(),
            bias=output.layer.bias,
            ignore_index=self.ignore_index,
        )
        return self._loss(loss_sum, None, targets)

    def validate_model(self, model: nn.Module, sample: Any) -> list[Problem]:
        """Return why the kernel of Liger cannot compute the loss of this model."""
        found = super().validate_model(model, sample)
        return [*found, *(liger_problems(model) if self.cross_entropy == "liger" else [])]

    def metrics(self) -> dict[str, Metric]:
        """Return perplexity, and the metrics of the config."""
        return {"perplexity": Perplexity(), **fresh_metrics(self.extra_metrics)}

    def details(self, dataset: Any, *, batch_size: int) -> Details:
        """Return the bits per byte, if the data has the bytes of each token, and the worst windows."""
        return token_details(dataset, batch_size=batch_size)


def _refuse_shape(rows: Tensor, targets: Tensor) -> None:
    if rows.shape[:-1] != targets.shape:
        raise TrainingError(
            f"the model gives {tuple(rows.shape)}, (samples, length, ...), and the targets are {tuple(targets.shape)}: "
            f"one token for each place, {tuple(rows.shape[:-1])}."
        )


class Perplexity(Metric):
    """exp(mean loss of a token): the number of equally likely tokens with the same loss."""

    def __init__(self) -> None:
        self._tally = RunningMean()

    def update(self, loss: Loss, batch: Any) -> None:
        """Count one batch."""
        del batch
        self._tally.add(loss.loss_sum, loss.weight)

    def compute(self, collective: Collective) -> float:
        """Return the perplexity over all ranks' tokens; infinity if the mean loss is too large."""
        mean = self._tally.mean(collective)
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf
