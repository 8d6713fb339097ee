"""Copy models whose hooks or passes keep computed tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def copied(model: nn.Module, held: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a model, in which computed tensors have no graph: torch refuses to copy one that has.

    Args:
        model: the model, which does not change.
        held: objects of the copy by the id of the original, as the memo of `copy.deepcopy`.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.kept = layer.weight * 2
        >>> copied(layer).kept.requires_grad
        False
    """
    held = {} if held is None else held
    for value in computed_tensors(model):
        held.setdefault(id(value), value.detach().clone())
    return copy.deepcopy(model, held)


def computed_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors with a graph that the modules of a model keep as attributes.

    Hooks of torch (`torch.nn.utils.prune`, `torch.nn.utils.weight_norm`) keep such tensors, and so does a forward pass
    that stores its activations.
    """
    for module in model.modules():
        for value in tree_leaves(vars(module)):
            if isinstance(value, Tensor) and not value.is_leaf:
                yield value
