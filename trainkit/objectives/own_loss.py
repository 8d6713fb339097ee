"""Models that compute their own loss, such as those of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from trainkit.errors import DataError, Problem, TrainingError
from trainkit.fields import cosmetic, speed
from trainkit.objectives.base import Loss, Metric, Model, Objective, loss_in, parameters_of
from trainkit.objectives.fields import IGNORED, counted_in, named_fields, scores_of
from trainkit.objectives.linear_cross_entropy import has_plain_loss, output_layer_of, reason_for_scores, scored_inside
from trainkit.objectives.metrics import fresh_metrics

_OF_THE_LOSS: Final = frozenset({"num_items_in_batch", "shift_labels", "ignore_index", "weight"})
"""Fields that transformers passes on to its loss function."""


@dataclass(frozen=True, kw_only=True)
class ModelComputesLoss(Objective):
    """The model receives the whole batch and returns a mean loss, which counts as the mean times its number of targets.

    A dict batch is passed by keyword, a tuple by position. The loss is the output's `loss`, its first element, or the
    output itself. Predictions for metrics are its `logits`, or its second element.

    Example:
        >>> model = lambda inputs, labels: {"loss": inputs.mean(), "logits": inputs}
        >>> batch = {"inputs": torch.tensor([1.0, 3.0, 5.0]), "labels": torch.tensor([0, 1, -100])}
        >>> float(ModelComputesLoss().loss(model, batch).loss_sum)
        6.0
    """

    draws_nothing: ClassVar[bool] = True

    labels: str = "labels"
    """The key of the targets in a batch; in a tuple they are its last element."""
    ignore_index: int = IGNORED
    """Targets that the model ignores in its mean."""
    shifted: bool = False
    """Whether the model shifts the labels itself, so that the first of a row is not a target (causal models)."""
    cross_entropy: Annotated[Literal["auto", "chunked", "plain"], speed] = "auto"
    """Computation of the loss of a causal model of transformers in training, with `shifted`: `chunked`, in its output
    layer, without all scores; or `plain`, by the model's own code. `auto`: `plain` in a compiled graph of model and
    loss, else `chunked`.
    """
    extra_metrics: Annotated[dict[str, Any], cosmetic] = field(default_factory=dict)
    """Metrics by name: any torchmetrics class by its `_target_`, or a trainkit Metric."""

    def weight_per_sample(self, sample: Any) -> float | None:
        """Return None: labels may contain padding, so they are counted."""
        del sample
        return None

    def planned_weight_per_sample(self, sample: Any) -> float:
        """Return the number of labels of a sample."""
        labels = torch.as_tensor(self._labels(sample))
        return float(max(1, labels.numel() - (1 if self.shifted and labels.dim() else 0)))

    def loss(self, model: Model, batch: Any) -> Loss:
        """Run the model on the batch and convert its mean loss into a sum."""
        offered = output_layer_of(model) if self._is_plain(model, batch) else None
        if offered is not None:
            following = self._labels(batch)[:, 1:]

            def scored(hidden: Tensor) -> Loss:
                only_eager, counted = self.cross_entropy == "auto", following != IGNORED
                total = offered.loss_sum(hidden[:, :-1], following, ignore_index=IGNORED, only_eager=only_eager)
                return Loss(total, counted.sum(), None, None, following, counted=counted)

            with scored_inside(offered.layer, scored):
                return loss_in(self._run(model, batch))
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        labels, logits = self._labels(batch), _part(output, "logits", 1)
        if self.shifted:
            labels, logits = labels[:, 1:], logits[:, :-1] if isinstance(logits, Tensor) else logits
        counted = counted_in(labels, self.ignore_index)
        mean = _part(output, "loss", 0)
        if not isinstance(mean, Tensor) or mean.numel() != 1:
            raise TrainingError(
                "the model reports no loss: objective=own_loss needs `loss`, one number, in its output."
            )
        weight = float(labels.numel()) if counted is None else counted.sum()
        loss_sum = mean.reshape(()) * weight
        if isinstance(weight, Tensor):  # the mean over no targets is NaN, which would make the step NaN
            loss_sum = torch.where(weight > 0, loss_sum, 0.0)
        return Loss(loss_sum, weight, None, logits, labels, counted=counted)

    def _is_plain(self, model: Model, batch: Any) -> bool:
        """Return whether the loss of the model is the plain cross entropy of each next label."""
        if torch.compiler.is_compiling() or self.cross_entropy == "plain":
            return False
        if not self.shifted or self.ignore_index != IGNORED or self.labels != "labels":
            return False
        return isinstance(batch, Mapping) and not _OF_THE_LOSS & batch.keys() and has_plain_loss(model)

    def predict(self, model: Model, batch: Any) -> Any:
        """Run the model on a batch without its labels, and return the scores."""
        return scores_of(self._run(model, batch))

    def _run(self, model: Model, batch: Any) -> Any:
        """Return the outputs for a batch without its labels."""
        if isinstance(batch, Mapping):
            return model(**{name: value for name, value in batch.items() if name != self.labels})
        return model(*batch[:-1]) if isinstance(batch, tuple) and len(batch) > 1 else model(batch)

    def validate_model(self, model: nn.Module, sample: Any) -> list[Problem]:
        """Return the fields of a sample that the model does not take."""
        if not isinstance(sample, Mapping):
            return []
        taken, takes_more = parameters_of(model)
        unknown = [str(name) for name in sample if name not in taken]
        if takes_more or not unknown:
            return []
        rule = (
            f"passes a sample's fields to the model by name, and {type(model).__name__} takes no {', '.join(unknown)}. "
            f"It takes {', '.join(taken)}. Leave them out of the samples."
        )
        return [Problem(key="objective", value=type(self).__name__, rule=rule)]

    def notes(self, model: nn.Module, sample: Any) -> list[str]:
        """Return whether the model shifts its labels by itself."""
        del sample
        why = reason_for_scores(model) if self.shifted and self.cross_entropy != "plain" else None
        if why is not None:
            return [f"the loss is computed from all scores: {why}."]
        if self.shifted or getattr(model, "loss_type", None) != "ForCausalLM":
            return []
        why = f"{type(model).__name__} predicts each next label, and the first label of a row is not a target"
        return [f"{why}: with padding, only objective.shifted=true counts the targets exactly."]

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics of the config."""
        return fresh_metrics(self.extra_metrics)

    def _labels(self, batch: Any) -> Any:
        if isinstance(batch, tuple | list):
            return batch[-1]
        batch = named_fields(batch)
        if self.labels not in batch:
            names = ", ".join(map(str, batch))
            raise DataError(f"a batch holds {names}, and no {self.labels}. Name its targets by objective.labels.")
        return batch[self.labels]


def _part(output: Any, name: str, position: int) -> Any:
    if isinstance(output, Tensor):
        return output if position == 0 else None
    if isinstance(output, Mapping):
        return output.get(name)
    if hasattr(output, name):
        return getattr(output, name)
    return output[position] if isinstance(output, tuple) and len(output) > position else None
