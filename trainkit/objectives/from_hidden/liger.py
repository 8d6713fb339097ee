"""The fused linear cross entropy of Liger Kernel, an extra: Triton kernels, for GPUs."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Final

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigError, Problem
from trainkit.extras import install_command
from trainkit.objectives.from_hidden.output_layer import keeps_scores, offered_by

_MODULE: Final = "liger_kernel.transformers.functional"
_KEY: Final = "objective.cross_entropy"


def liger_problems(model: nn.Module) -> list[Problem]:
    """Return why Liger's kernel cannot compute the loss of a model on this host."""
    if not isinstance(offered_by(model), nn.Module):
        rule = f"needs the output layer of the model, and {type(model).__name__} has no output_layer(). Leave it out."
        return [Problem(key=_KEY, value="liger", rule=rule)]
    if importlib.util.find_spec(_MODULE.partition(".")[0]) is None:
        rule = f"needs Liger Kernel: {install_command('liger', 'liger-kernel')}. Or leave it out."
        return [Problem(key=_KEY, value="liger", rule=rule)]
    if not torch.cuda.is_available():
        rule = "runs on GPUs, and there is none here. Leave it out: the default computes in chunks everywhere."
        return [Problem(key=_KEY, value="liger", rule=rule)]
    return []


def refuse_scores() -> None:
    """Refuse to compute the loss of a training step from scores.

    Raises:
        ConfigError: gradients are on, and the model is not being inspected.
    """
    if torch.is_grad_enabled() and not keeps_scores():
        rule = (
            "is not used where the loss is computed from scores: under precision=fp16_mixed, strategy=pipeline, or "
            "where activation_checkpointing computes the output layer again. Leave it out."
        )
        raise ConfigError([Problem(key=_KEY, value="liger", rule=rule)])


def liger_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None, ignore_index: int, is_cut: bool
) -> Tensor:
    """Return () float32: the sum of the cross entropies of `hidden @ weight.T + bias`.

    Args:
        hidden: (rows, features).
        weight: (vocabulary, features).
        targets: (rows,) int64.
        bias: (vocabulary,).
        ignore_index: rows with this target do not count.
        is_cut: whether `weight` holds a part of the vocabulary.

    Raises:
        ConfigError: the vocabulary is cut over ranks, which the kernel does not support.
    """
    if is_cut:
        rule = "does not support a vocabulary that is cut over ranks. Leave it out with strategy=tensor_parallel."
        raise ConfigError([Problem(key=_KEY, value="liger", rule=rule)])
    function = importlib.import_module(_MODULE).liger_fused_linear_cross_entropy
    total: Tensor = function(
        hidden,
        weight,
        targets.to(hidden.device),
        bias,
        ignore_index=ignore_index,
        reduction="sum",
        accum_dtype=torch.float32,
    )
    return total
