"""The states of callbacks in a checkpoint: JSON, and tensors stored like those of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from trainkit.errors import TrainingError
from trainkit.names import name_of
from trainkit.objectives.base import Collective
from trainkit.strategies import ALL_DEVICES
from trainkit.strategies.collectives import all_gather_object
from trainkit.strategies.core.replica_check import bits_hash
from trainkit.trainer.events import Callback

PREFIX: Final = "callback/"
"""Prefix of the names of these tensors in a checkpoint."""
_MARK: Final = "tensor of the checkpoint"
"""The key that stands for a tensor in the JSON."""


def by_kind(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return callbacks by class, the second of a class with a number: a resumed run may have another order of
    callbacks.
    """
    found: dict[str, Callback] = {}
    for callback in callbacks:
        kind = name_of(type(callback))
        count = sum(name.partition("#")[0] == kind for name in found)
        found[f"{kind}#{count}" if count else kind] = callback
    return found


def separated(states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return states for JSON, and their tensors by name.

    Example:
        >>> import torch
        >>> plain, tensors = separated({"mine.Ema": {"decay": 0.9, "means": [torch.ones(2)]}})
        >>> plain["mine.Ema"]["means"], list(tensors)
        ([{'tensor of the checkpoint': 'callback/mine.Ema/means/0'}], ['callback/mine.Ema/means/0'])
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
            return {_MARK: name}
        if isinstance(value, Mapping):
            return {key: plain(one, f"{name}/{key}") for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one, f"{name}/{place}") for place, one in enumerate(value)]
        return value

    return {kind: plain(state, f"{PREFIX}{kind}") for kind, state in states.items()}, tensors


def refuse_unlike(tensors: Mapping[str, Tensor], ranks: Collective) -> None:
    """Refuse tensors that are not the same on every rank: a checkpoint keeps those of rank 0. Collective.

    Raises:
        TrainingError: names the callback and the rank.
    """
    own = {name: [list(tensor.shape), int(bits_hash(tensor))] for name, tensor in tensors.items()}
    first, *others = all_gather_object(own, ranks)
    for rank, found in enumerate(others, start=1):
        unlike = next((name for name in {**first, **found} if first.get(name) != found.get(name)), None)
        if unlike is not None:
            named = unlike.split("/")[1]
            raise TrainingError(
                f"the state of the callback {named} holds other tensors on rank {rank} than on rank 0, whose state is "
                f"saved. Keep only state that is the same on every rank, or use {ALL_DEVICES}."
            )


def joined(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a state of JSON with its tensors, on the CPU.

    Raises:
        KeyError: there is no such tensor.
    """
    if isinstance(state, Mapping):
        if state.keys() == {_MARK}:
            return tensors[state[_MARK]].clone()
        return {key: joined(one, tensors) for key, one in state.items()}
    return [joined(one, tensors) for one in state] if isinstance(state, list) else state


def copied(state: Any) -> Any:
    """Return a state with copies of the tensors of the callback."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: copied(one) for key, one in state.items()}
    return [copied(one) for one in state] if isinstance(state, list | tuple) else state
