"""A trained model to export: the weights of one checkpoint, and functions that build the model."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainkit.config.schema import RunConfig
from trainkit.errors import CheckpointError, ConfigError, Problem
from trainkit.files import bytes_needed, refuse_full
from trainkit.objectives.base import Objective
from trainkit.trainer.checkpoint.tensors import Loaded
from trainkit.trainer.manifest import FileRecord


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a run with the weights of one of its checkpoints."""

    cfg: RunConfig
    """The config of the run; a secret in it may be redacted."""
    weights: Loaded
    """The verified checkpoint; its tensors are read on access."""
    which: str
    """`last` or `best`, the checkpoint of the run; `average`, the averaged weights in the last one."""
    skeleton: Callable[[], nn.Module]
    """Function that builds the model on the meta device, if its constructor allows that."""
    build: Callable[[Mapping[str, Tensor]], nn.Module]
    """Function that builds the model with the tensors of a checkpoint: on the CPU, in evaluation mode, in the dtype
    that was trained.
    """
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the run for the description: `run`, `command`, `fingerprint`, `metrics`; values of JSON."""
    working: Callable[[], None] = lambda: None
    """Callback that the export calls repeatedly, to show that the process does not hang."""

    def model(self) -> nn.Module:
        """Return the whole model with these weights."""
        return self.build(self.weights.tensors)

    @property
    def step(self) -> int:
        """Updates after which these weights were saved."""
        return self.weights.checkpoint.step


@dataclass(frozen=True, kw_only=True)
class Written:
    """The files that a format has written, and notes about them for the user."""

    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """Size and SHA-256 of those files whose bytes were hashed as they were written; the others are read again."""
    notes: tuple[str, ...] = ()
    """Sentences for the screen and the model card: how the files were checked, which sizes they take."""


class NotExportableError(CheckpointError):
    """The model has something that a format cannot hold; the weights themselves are intact."""

    anchor = "a-model-that-a-format-cannot-hold"


def refuse_lack_of_room(model: nn.Module, file: Path) -> None:
    """Refuse a file that holds all tensors of a model, before a library writes it whose errors name no file.

    Raises:
        StorageError: there is too little space, or a file may not become that large.
    """
    refuse_full(file, bytes_needed({id(one): one for one in model.state_dict().values()}.values()))


def checkpoint_keys(model: nn.Module) -> dict[str, str] | None:
    """Return name in the model's `state_dict` -> key in a checkpoint; tied names have the same key.

    Returns:
        None if the `state_dict` holds something else than the model's unchanged parameters and buffers, for example
        because a hook of the model renames or converts them.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> keys = checkpoint_keys(model)
        >>> keys["0.weight"], keys["1.weight"], keys["1.bias"]
        ('param/0.weight', 'param/0.weight', 'param/1.bias')
    """
    keys = {id(tensor): f"buffer/{name}" for name, tensor in model.named_buffers()}
    keys |= {id(tensor): f"param/{name}" for name, tensor in model.named_parameters()}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if any(not isinstance(tensor, Tensor) or id(tensor) not in keys for tensor in state.values()):
        return None
    return {name: keys[id(tensor)] for name, tensor in state.items()}


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
