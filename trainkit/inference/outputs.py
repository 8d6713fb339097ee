"""The outputs that a prediction stores: scores, probabilities, classes, or the outputs of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigError, DataError, Problem
from trainkit.objectives.base import Objective

KINDS: Final = ("logits", "probabilities", "classes", "embedding")
"""The names before a colon in `predict.outputs`."""
_RULE: Final = "must be logits, probabilities, classes, or embedding:LAYER with the name of a module of the model."


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The content of each row of a prediction.

    Example:
        >>> Outputs.parse("embedding:blocks.2")
        Outputs(kind='embedding', layer='blocks.2')
    """

    kind: str
    layer: str = ""
    """The module whose outputs an embedding holds, by its name in the model."""

    @classmethod
    def parse(cls, text: str) -> Outputs:
        """Read the key `predict.outputs`.

        Raises:
            ConfigError: it is none of the kinds, or an embedding without a layer.
        """
        kind, _, layer = text.partition(":")
        if kind not in KINDS or (kind == "embedding") != bool(layer):
            raise ConfigError([Problem(key="predict.outputs", value=text, rule=_RULE)])
        return cls(kind=kind, layer=layer)

    def problems(self, objective: Objective, model: nn.Module) -> list[Problem]:
        """Return the problems of this choice for an objective and a model, which may be on the meta device."""
        text = f"{self.kind}:{self.layer}" if self.layer else self.kind
        if self.kind in ("probabilities", "classes") and not objective.log_scores:
            rule = f"the outputs of {type(objective).__name__} are not scores of classes. Use logits."
            return [Problem(key="predict.outputs", value=text, rule=rule)]
        modules = dict(model.named_modules())
        if self.layer and self.layer not in modules:
            known = ", ".join(name for name in list(modules)[:12] if name)
            rule = f"the model has no module of this name. It has {known}{' ...' if len(modules) > 13 else ''}."
            return [Problem(key="predict.outputs", value=text, rule=rule)]
        return []

    @contextmanager
    def of(self, model: nn.Module, objective: Objective) -> Iterator[OutputFunction]:
        """Yield a function that runs the model on a batch, for the duration of the block."""
        function = OutputFunction(self, model, objective)
        if not self.layer:
            yield function
            return
        handle = model.get_submodule(self.layer).register_forward_hook(function.keep)
        try:
            yield function
        finally:
            handle.remove()


class OutputFunction:
    """Runs a model on a batch and returns the rows of a prediction."""

    def __init__(self, outputs: Outputs, model: nn.Module, objective: Objective) -> None:
        self._outputs, self._model, self._objective = outputs, model, objective
        self._kept: Any = None

    def keep(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Keep the outputs of a layer; a forward hook."""
        del module, inputs
        self._kept = outputs

    def __call__(self, batch: Any, *, num_rows: int) -> Tensor:
        """Return (num_rows, ...) on the device: float32 or float64, int64 for classes.

        Raises:
            DataError: the model gives no tensor with one row per sample.
        """
        scores = self._objective.predict(self._model, batch)
        if self._outputs.layer:
            outputs, self._kept = self._kept, None
            scores = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        if not isinstance(scores, Tensor) or not scores.dim() or scores.shape[0] != num_rows:
            found = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise DataError(f"the model gives {found} for {num_rows} samples: a prediction needs one row per sample.")
        scores, dim = scores.detach(), self._objective.class_dim
        if self._outputs.kind == "classes":
            return scores.argmax(dim)
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        return scores.softmax(dim) if self._outputs.kind == "probabilities" else scores
