"""Language modelling: predict the next token at every position."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.extras import install_command
from trainkit.fields import speed
from trainkit.objectives.base import Details, Loss, Metric, Supervised
from trainkit.objectives.fields import IGNORED, counted_in, exact, parts_of, scores_of
from trainkit.objectives.linear_cross_entropy import OutputLayer, keeps_scores, offered_by
from trainkit.objectives.metrics import WORST, ScoredFields, Worst, bits_per_byte, fresh_metrics, perplexity

_LIGER: Final = "liger_kernel.transformers.functional"


@dataclass(frozen=True, kw_only=True)
class LanguageModelling(ScoredFields, Supervised):
    """Cross entropy summed over tokens; positions whose target is `ignore_index` are padding and do not count.

    Example:
        >>> scores, targets = torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]])
        >>> LanguageModelling().score(scores, targets).weight
        tensor(2)
    """

    draws_nothing: ClassVar[bool] = True
    by_position: ClassVar[bool] = True

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
        if self.cross_entropy == "liger" and torch.is_grad_enabled() and not keeps_scores():
            rule = (
                "is not used where the loss is computed from scores: under precision=fp16_mixed, strategy=pipeline, or "
                "where activation_checkpointing computes the output layer again. Leave it out."
            )
            raise ConfigError([_without_liger(rule)])
        _refuse_shape(outputs, targets)
        parts: list[tuple[Tensor, ...]] = [(outputs.flatten(0, -2), targets.flatten())]
        if not torch.is_grad_enabled():  # an evaluation: each part takes two copies in float32
            parts = parts_of(*parts[0])
        first, *others = (
            functional.cross_entropy(exact(rows), tokens, reduction="sum", ignore_index=self.ignore_index)
            for rows, tokens in parts
        )
        return self._loss(torch.stack([first, *others]).sum() if others else first, outputs, targets)

    def _loss(self, loss_sum: Tensor, outputs: Tensor | None, targets: Tensor) -> Loss:
        counted = targets != self.ignore_index
        return Loss(loss_sum, counted.sum(), None, outputs, targets, counted=counted)

    @property
    def takes_hidden(self) -> bool:
        """Whether `loss_from_hidden` is used, if the model declares its output layer."""
        # not by super(), which torch 2.11 cannot trace
        return self.cross_entropy != "plain" and self.output is None and self._has_hidden_loss

    def loss_from_hidden(self, hidden: Tensor, output: OutputLayer, targets: Tensor) -> Loss:
        """Sum the cross entropy of (samples, length, features) hidden states against (samples, length) tokens."""
        _refuse_shape(hidden, targets)
        if self.cross_entropy != "liger":
            only_eager = self.cross_entropy == "auto"
            loss_sum = output.loss_sum(hidden, targets, ignore_index=self.ignore_index, only_eager=only_eager)
            return self._loss(loss_sum, None, targets)
        if output.part is not None:
            rule = "does not support a vocabulary that is cut over ranks. Leave it out with strategy=tensor_parallel."
            raise ConfigError([_without_liger(rule)])
        loss_sum = importlib.import_module(_LIGER).liger_fused_linear_cross_entropy(
            hidden.flatten(0, -2),
            output.layer.weight,
            targets.flatten().to(hidden.device),
            output.layer.bias,
            ignore_index=self.ignore_index,
            reduction="sum",
            accum_dtype=torch.float32,
        )
        return self._loss(loss_sum, None, targets)

    def validate_model(self, model: nn.Module, sample: Any) -> list[Problem]:
        """Return why the kernel of Liger cannot compute the loss of this model on this host."""
        problems = super().validate_model(model, sample)
        if self.cross_entropy != "liger":
            return problems
        if not isinstance(offered_by(model), nn.Module):
            kind = type(model).__name__
            rule = f"needs the output layer of the model, and {kind} has no output_layer(). Leave it out."
        elif importlib.util.find_spec(_LIGER.partition(".")[0]) is None:
            rule = f"needs Liger Kernel: {install_command('liger', 'liger-kernel')}. Or leave it out."
        elif not torch.cuda.is_available():
            rule = "runs on GPUs, and there is none here. Leave it out: the default computes in chunks everywhere."
        else:
            return problems
        return [*problems, _without_liger(rule)]

    def metrics(self) -> dict[str, Metric]:
        """Return perplexity, and the metrics of the config."""
        return {"perplexity": perplexity(), **fresh_metrics(self.extra_metrics)}

    def details(self, dataset: Any, *, batch_size: int) -> Details:
        """Return the bits per byte, if the data has the bytes of each token, and the worst windows."""
        worst: dict[str, Metric] = {WORST: Worst(batch_size=batch_size)}
        sizes = getattr(dataset, "token_bytes", None)
        if callable(sizes):
            return Details(metrics={"bits_per_byte": bits_per_byte(torch.as_tensor(sizes())), **worst})
        note = f"bits_per_byte is not measured: {type(dataset).__name__} has no token_bytes()."
        return Details(metrics=worst, notes=(note,))


def _without_liger(rule: str) -> Problem:
    return Problem(key="objective.cross_entropy", value="liger", rule=rule)


def _refuse_shape(rows: Tensor, targets: Tensor) -> None:
    if rows.shape[:-1] != targets.shape:
        raise TrainingError(
            f"the model gives {tuple(rows.shape)}, (samples, length, ...), and the targets are {tuple(targets.shape)}: "
            f"one token for each place, {tuple(rows.shape[:-1])}."
        )
