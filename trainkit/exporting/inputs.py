"""The tensors that an objective passes to a model, by the names of the model's own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trainkit.errors import ConfigError, Problem
from trainkit.objectives.base import Objective

Inputs = Mapping[str, Tensor]
"""Argument of the model's `forward` -> its value for a batch."""


class _CalledError(Exception):
    """The model was called."""


def model_inputs(objective: Objective, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return argument of the model's `forward` -> tensor of a batch, in the order of the arguments.

    The objective gets a function instead of the model, which records its arguments.

    Raises:
        ConfigError: the objective never calls the model, or passes something else than tensors.

    Example:
        >>> import torch
        >>> from trainkit.objectives.classification import Classification
        >>> batch = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
        >>> {name: value.shape for name, value in model_inputs(Classification(), nn.Linear(2, 2), batch).items()}
        {'input': torch.Size([3, 2])}
    """
    recorded: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        recorded.append((args, kwargs))
        raise _CalledError

    try:
        objective.predict(record, batch)
    except _CalledError:
        args, kwargs = recorded[0]
        found = _bound(model, args, kwargs)
        if found and all(isinstance(value, Tensor) for value in found.values()):
            return found
    except Exception as error:
        raise _refusal(objective) from error
    raise _refusal(objective)


def _bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    more = next(
        (name for name, one in inspect.signature(model.forward).parameters.items() if one.kind is one.VAR_KEYWORD), ""
    )
    named = {name: value for name, value in bound.items() if name != more}
    return {**named, **bound.get(more, {})}


def _refusal(objective: Objective) -> ConfigError:
    rule = (
        "does not call the model with tensors only, so the inputs of the model are unknown. Formats that need no "
        "inputs: export --to safetensors; quantize --to int8_weight, int8_dynamic or int4_weight."
    )
    return ConfigError([Problem(key="objective", value=type(objective).__name__, rule=rule)])
