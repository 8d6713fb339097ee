"""What a map places: the blocks of a model, in its own order, each with the tensors that are its own.

A block is what numerics.randomness keys: an element of a ModuleList or Sequential, or else a top-level child. Blocks
within an element are not cut apart. A top-level child with a ModuleList deeper inside (a `transformer` with its `h`)
is a block of what is left of it, and each element one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

__all__ = ["Block", "blocks_of"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """What is placed as a whole."""

    name: str
    """Its canonical name; that of a tensor where the model itself owns it."""
    owners: tuple[tuple[str, nn.Module], ...]
    """Canonical name and module of each that owns its tensors directly."""
    entries: tuple[nn.Module, ...]
    """The modules at whose entry activations must be where the unit is."""
    tensor: str | None = None
    """The one tensor of its owner that it is; None: all of them."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers by canonical name; a tied one comes under each of its names."""
        for prefix, owner in self.owners:
            for leaf, tensor in chain(owner._parameters.items(), owner._buffers.items()):  # noqa: SLF001 - own ones only
                if tensor is not None and self.tensor in (None, leaf):
                    yield f"{prefix}.{leaf}" if prefix else leaf, tensor


def blocks_of(model: nn.Module) -> tuple[Block, ...]:
    """The units of a model, in the order in which it names them.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> [unit.name for unit in blocks_of(model)]
        ['0', '1.0', '1.1']
    """
    return tuple(_below("", model))


def _below(name: str, module: nn.Module) -> Iterator[Block]:
    """The units of the model itself, or of a container at its top."""
    for leaf, tensor in chain(module._parameters.items(), module._buffers.items()):  # noqa: SLF001 - own ones only
        if tensor is not None:
            yield Block(name=_join(name, leaf), owners=((name, module),), entries=(), tensor=leaf)
    for leaf, child in module.named_children():
        full = _join(name, leaf)
        if isinstance(child, _CONTAINERS):
            yield from _below(full, child)
        elif isinstance(module, _CONTAINERS):
            yield _whole(full, child)
        else:
            yield from _top_level(full, child)


def _top_level(name: str, child: nn.Module) -> Iterator[Block]:
    inner = dict(_elements(name, child))
    if not inner:
        yield _whole(name, child)
        return
    yield Block(name=name, owners=tuple(_left(name, child, inner)), entries=(child, *_free(name, child, inner)))
    yield from (_whole(full, element) for full, element in inner.items())


def _whole(name: str, module: nn.Module) -> Block:
    owners = tuple((_join(name, inner), owner) for inner, owner in module.named_modules())
    return Block(name=name, owners=owners, entries=(module,))


def _elements(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost elements of the lists below. Not of a Sequential: within a block that is most often a branch."""
    for leaf, child in module.named_children():
        full = _join(name, leaf)
        if isinstance(module, nn.ModuleList):
            yield full, child
        else:
            yield from _elements(full, child)


def _left(name: str, module: nn.Module, inner: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that no inner element holds."""
    yield name, module
    for leaf, child in module.named_children():
        full = _join(name, leaf)
        if full not in inner:
            yield from _left(full, child, inner)


def _free(name: str, module: nn.Module, inner: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """The largest modules below without an inner element: what runs between those comes in here."""
    for leaf, child in module.named_children():
        full = _join(name, leaf)
        if not any(element == full or element.startswith(f"{full}.") for element in inner):
            yield child
        elif full not in inner:
            yield from _free(full, child, inner)


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix and leaf else prefix or leaf
