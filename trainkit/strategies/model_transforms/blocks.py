"""The blocks of a model that are recomputed or compiled, each as a unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["RepeatedBlock", "repeated_blocks_of"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class RepeatedBlock:
    """A module made of modules, which a forward pass calls as a whole."""

    name: str
    """Its canonical name."""
    module: nn.Module
    repeated: bool
    """Whether it is an element of a container, like the repeated blocks of a deep model."""


def repeated_blocks_of(model: nn.Module) -> tuple[RepeatedBlock, ...]:
    """Return the blocks of a model, in its order: elements of its containers, and other top-level children.

    Containers of containers are searched recursively; a module without children is too small to be a block.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> [(unit.name, unit.repeated) for unit in repeated_blocks_of(model)]
        [('1', True)]
    """
    return tuple(_units(model, "", repeated=isinstance(model, _CONTAINERS)))


def _units(parent: nn.Module, prefix: str, *, repeated: bool) -> Iterator[RepeatedBlock]:
    for name, child in parent.named_children():
        if _is_row(child):
            yield from _units(child, f"{prefix}{name}.", repeated=True)
        elif next(child.children(), None) is not None:
            yield RepeatedBlock(f"{prefix}{name}", child, repeated)


def _is_row(module: nn.Module) -> bool:
    """Return whether a module is a container of modules that have children themselves."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    return isinstance(module, nn.Sequential) and any(next(child.children(), None) is not None for child in module)
