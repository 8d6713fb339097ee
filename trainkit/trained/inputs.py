"""The inputs of a trained model: batches of a split, and what its objective passes to it."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.config.schema import RunConfig
from trainkit.data.hooks import DataHooks, Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.errors import ConfigError, Problem
from trainkit.objectives.base import Objective

Inputs = Mapping[str, Tensor]
"""Argument of the model's `forward` -> its value for a batch."""
CPU = torch.device("cpu")


def batches_of(cfg: RunConfig, dataset: Any, size: int, device: torch.device = CPU) -> EvalBatches:
    """Return the batches of a dataset, in its order, read as in the training."""
    reading = Reading(device=device, settings=cfg.loader, hooks=DataHooks.of(cfg.data))
    return EvalBatches(dataset, reading, batch_size=size, rank=0, num_ranks=1)


class _CalledError(Exception):
    """The model was called."""


def model_inputs(objective: Objective, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return argument of the model's `forward` -> tensor of a batch, in the order of the arguments.

    The objective gets a function instead of the model, which records its arguments.

    Raises:
        ConfigError: the objective never calls the model, or passes something else than tensors.

    Example:
        >>> from trainkit.objectives.classification import Classification
        >>> batch = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
        >>> {name: value.shape for name, value in model_inputs(Classification(), nn.Linear(2, 2), batch).items()}
        {'input': torch.Size([3, 2])}
    """
    found: dict[str, Any] = {}
    signature = inspect.signature(model.forward)

    def record(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            found.update(value if is_rest else {name: value})
        raise _CalledError

    cause: Exception | None = None
    try:
        objective.predict(record, batch)
    except _CalledError:
        if found and all(isinstance(value, Tensor) for value in found.values()):
            return found
    except Exception as error:  # noqa: BLE001 - an objective may fail in any way where it gets no outputs
        cause = error
    rule = (
        "does not call the model with tensors only, so the inputs of the model are unknown. Formats that need no "
        "inputs: export --to safetensors; quantize --to int8_weight, int8_dynamic or int4_weight."
    )
    raise ConfigError([Problem(key="objective", value=type(objective).__name__, rule=rule)]) from cause


@contextmanager
def quiet() -> Iterator[None]:
    """Hide log lines up to warnings, and Python's warnings, for the duration of the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
