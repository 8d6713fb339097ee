"""Estimate the bytes that each block saves for backward, from a forward pass without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    kept = _SavedTensors(sizes=[0] * len(units), known={_storage(tensor) for tensor in state.values()})

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
        return functional_call(model, state, args, kwargs)

    try:
        with kept.tracking(units), torch.enable_grad(), saved_tensors_hooks(kept.note, lambda tensor: tensor):
            kept.alive.append(forward(run))
    except Exception:  # noqa: BLE001 - a forward pass that reads data may fail in any way
        return None
    return kept.sizes


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


@dataclass(kw_only=True)
class _SavedTensors:
    """Counts the tensors that are saved while a block runs."""

    sizes: list[int]
    known: set[int]
    """Storages that were counted, or belong to the model."""
    alive: list[Any] = field(default_factory=list)
    """Storages kept alive, so that no new storage reuses a known address."""
    at: int = 0

    def note(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self.known and self.sizes:
            self.known.add(storage)
            self.alive.append(tensor)
            self.sizes[self.at] += tensor.untyped_storage().nbytes()
        return tensor

    @contextmanager
    def tracking(self, units: Sequence[Block]) -> Iterator[None]:
        """Track the running block."""

        def enter(place: int) -> Callable[..., None]:
            return lambda *_: setattr(self, "at", place)

        handles = [
            module.register_forward_pre_hook(enter(place))
            for place, unit in enumerate(units)
            for module in unit.entries
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - meta tensors have no address


def _without_numbers(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    empty = torch.empty_like(tensor, device=_META, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
    return empty.requires_grad_(tensor.requires_grad)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
