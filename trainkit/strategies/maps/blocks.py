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
            continue
        inner = {} if isinstance(module, _CONTAINERS) else dict(_elements(full, child))
        yield whole_block(full, child, without=inner)
        yield from (whole_block(*element) for element in inner.items())


def whole_block(name: str, module: nn.Module, *, without: Iterable[str] = ()) -> Block:
    """Return a module with all modules below it as a block, except some modules that are blocks themselves.

    Activations enter it between those too: at the largest modules that hold none of them.
    """
    owners: list[tuple[str, nn.Module]] = []
    entries = [module]
    for full, owner in module.named_modules(prefix=name):
        if any(full == inner or full.startswith(f"{inner}.") for inner in without):
            continue
        owners.append((full, owner))
        outer = full.rpartition(".")[0]
        holds, outer_holds = (any(inner.startswith(f"{one}.") for inner in without) for one in (full, outer))
        if full != name and outer_holds and not holds:
            entries.append(owner)
    return Block(name=name, owners=tuple(owners), entries=tuple(entries))


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


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix and leaf else prefix or leaf
