"""The blocks of a model that a map places, in the model's order, each with its own tensors.

A block is also the unit of random keys in numerics.randomness: an element of a ModuleList or Sequential, or else a
top-level child. Blocks within an element are not separated. A top-level child with a nested ModuleList (a `transformer`
with its `h`) gives one block for each element, and one for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """A part of a model that is placed as a whole."""

    name: str
    """Canonical name of the block, or of a tensor that the model itself owns."""
    owners: tuple[tuple[str, nn.Module], ...]
    """Canonical name and module of each module that directly owns tensors of the block."""
    entries: tuple[nn.Module, ...]
    """The modules at whose entry activations must be on the block's device."""
    tensor: str | None = None
    """Name of the tensor, if the block is one tensor of its owner; None: all tensors."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers by canonical name; a tied one appears under each of its names."""
        for prefix, owner in self.owners:
            for leaf, tensor in chain(owner._parameters.items(), owner._buffers.items()):  # noqa: SLF001 - own ones only
                if tensor is not None and self.tensor in (None, leaf):
                    yield f"{prefix}.{leaf}" if prefix else leaf, tensor


def names_of(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return the canonical names of modules of a model, in its order."""
    chosen = {id(module) for module in modules}
    return tuple(name for name, module in model.named_modules() if id(module) in chosen)


def blocks_of(model: nn.Module) -> tuple[Block, ...]:
    """Return the blocks of a model, in the order of the model's names.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> [unit.name for unit in blocks_of(model)]
        ['0', '1.0', '1.1']
    """
    return tuple(_below("", model))


def distinct_tensors(units: Iterable[Block], seen: set[int] | None = None) -> list[Tensor]:
    """Return the tensors of blocks, each once; without tensors whose ids are in `seen`, to which the ids are added."""
    known: set[int] = set() if seen is None else seen
    found = {id(tensor): tensor for unit in units for _, tensor in unit.tensors() if id(tensor) not in known}
    known.update(found)
    return list(found.values())


def _below(name: str, module: nn.Module) -> Iterator[Block]:
    """Yield the blocks of the model itself, or of a top-level container."""
    for leaf, tensor in chain(module._parameters.items(), module._buffers.items()):  # noqa: SLF001 - own ones only
        if tensor is not None:
            yield Block(name=_join(name, leaf), owners=((name, module),), entries=(), tensor=leaf)
    for leaf, child in module.named_children():
        full = _join(name, leaf)
        if isinstance(child, _CONTAINERS):
            yield from _below(full, child)
        elif isinstance(module, _CONTAINERS):
            yield whole_block(full, child)
        else:
            yield from _top_level(full, child)


def _top_level(name: str, child: nn.Module) -> Iterator[Block]:
    inner = dict(_elements(name, child))
    if not inner:
        yield whole_block(name, child)
        return
    yield Block(name=name, owners=tuple(_left(name, child, inner)), entries=(child, *_free(name, child, inner)))
    yield from (whole_block(full, element) for full, element in inner.items())


def whole_block(name: str, module: nn.Module) -> Block:
    """Return a module with all modules below it as a block."""
    owners = tuple((_join(name, inner), owner) for inner, owner in module.named_modules())
    return Block(name=name, owners=owners, entries=(module,))


def _elements(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost elements of nested lists. A Sequential within a block is not split: it is usually a
    branch.
    """
    for leaf, child in module.named_children():
        full = _join(name, leaf)
        if isinstance(module, nn.ModuleList):
            yield full, child
        else:
            yield from _elements(full, child)


def _left(name: str, module: nn.Module, inner: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside of the inner elements."""
    yield name, module
    for leaf, child in module.named_children():
        full = _join(name, leaf)
        if full not in inner:
            yield from _left(full, child, inner)


def _free(name: str, module: nn.Module, inner: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest modules without an inner element: activations enter them between those elements."""
    for leaf, child in module.named_children():
        full = _join(name, leaf)
        if not any(element == full or element.startswith(f"{full}.") for element in inner):
            yield child
        elif full not in inner:
            yield from _free(full, child, inner)


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix and leaf else prefix or leaf
