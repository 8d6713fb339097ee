"""Estimate the bytes that each block saves for backward, from a forward pass without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_map

from trainkit.numerics.precision import Precision
from trainkit.strategies.base import PlanContext
from trainkit.strategies.maps.blocks import Block

_META = torch.device("meta")


def activation_bytes(
    model: nn.Module, units: Sequence[Block], forward: Callable[[Callable[..., Any]], Any], precision: Precision
) -> list[int] | None:
    """Return the bytes that autograd saves for the backward pass of one shard, by the block that computes them.

    The pass runs on torch's `meta` device: it takes no memory, and no arithmetic. A tensor that several blocks save
    counts in the first; tensors computed between blocks count in the previous block.

    Args:
        model: the model, with or without data; unchanged.
        units: the blocks of the model.
        forward: runs the given model function on a shard that has shapes and no data, and computes the loss.
        precision: defines the dtype of the model; an autocast to a narrower one is not simulated.

    Returns:
        None if the model cannot run without data.
    """
    dtype = precision.model_dtype
    state = {
        name: _without_numbers(tensor, dtype)
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    }
    sizes, known = [0] * len(units), {_storage(tensor) for tensor in state.values()}
    alive: list[Any] = []  # so that no new storage reuses a known address
    running = 0

    def note(tensor: Tensor) -> Tensor:
        if (storage := _storage(tensor)) not in known and sizes:
            known.add(storage)
            alive.append(tensor)
            sizes[running] += tensor.untyped_storage().nbytes()
        return tensor

    def enter(place: int, *_: object) -> None:
        nonlocal running
        running = place

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
        return functional_call(model, state, args, kwargs)

    handles = [
        module.register_forward_pre_hook(partial(enter, place))
        for place, unit in enumerate(units)
        for module in unit.entries
    ]
    try:
        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            alive.append(forward(run))
    except Exception:  # noqa: BLE001 - a forward pass that reads data may fail in any way
        return None
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def activations_of(
    model: nn.Module, units: Sequence[Block], context: PlanContext | None, precision: Precision
) -> list[int] | None:
    """Return `activation_bytes` for a shard of a config; None if no sample or objective is known.

    The last result for a model is cached, because planning needs it several times.
    """
    if context is None or context.objective is None or context.sample is None:
        return None
    objective, key = context.objective, (context.micro_size, precision.value, *(unit.name for unit in units))
    sample, known_objective, known_key, sizes = _KNOWN.get(model, (None, None, None, None))
    if sample is not context.sample or known_objective is not objective or known_key != key:
        batch = tree_map(lambda value: _of_size(value, context.micro_size), context.collate([context.sample], [0]))
        sizes = activation_bytes(model, units, lambda run: objective.loss(run, batch), precision)
        _KNOWN[model] = context.sample, objective, key, sizes
    return sizes


_KNOWN: WeakKeyDictionary[nn.Module, tuple[object, object, object, list[int] | None]] = WeakKeyDictionary()
"""Model -> a sample, the objective, (size of the shard, precision, names of the blocks), and the estimate for these."""


def _of_size(value: Any, count: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty((count, *value.shape[1:]), dtype=value.dtype, device=_META)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - meta tensors have no address


def _without_numbers(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    empty = torch.empty_like(tensor, device=_META, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
    return empty.requires_grad_(tensor.requires_grad)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
