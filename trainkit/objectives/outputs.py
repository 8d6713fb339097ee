"""Select the scores among the outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainkit.errors import TrainingError

__all__ = ["scores_of"]


def scores_of(outputs: Any) -> Tensor:
    """Return the scores among a model's outputs: a tensor itself, or the `logits` of an output like Hugging Face's.

    Raises:
        TrainingError: the outputs are neither.

    Example:
        >>> import torch
        >>> scores_of({"logits": torch.zeros(2, 3), "past_key_values": None}).shape
        torch.Size([2, 3])
    """
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise TrainingError(
        f"the model returns a {type(outputs).__name__}, and this objective scores a tensor, or an output with `logits`."
    )
