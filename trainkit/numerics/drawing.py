"""Which parts of a model or an objective may draw random numbers, by the classes of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

from torch import nn

# Modules of torch whose forward pass draws random numbers in training; every other module of torch.nn draws none.
_RANDOM = (
    nn.modules.dropout._DropoutNd,  # noqa: SLF001 - the base class of all dropouts has no public name
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


class Draws(IntEnum):
    """Which generators some code may draw from."""

    nothing = 0
    torch = 1
    anything = 2
    """Torch's generator, `random` and NumPy: a user's own code."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Which parts of a model may draw random numbers; computed before a strategy changes the classes of its modules."""

    keyed: frozenset[str]
    """Blocks that are keyed on entry."""
    returned: frozenset[str]
    """Blocks after which the calling code is keyed again."""
    most: Draws
    """The generators that the model's code may draw from at most."""

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Inspect the classes of a model's modules.

        Example:
            >>> found = Drawing.of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
            >>> sorted(found.keyed), sorted(found.returned)
            (['', '1'], [])
        """
        blocks = dict(blocks_of(model))
        name_of = {id(block): name for name, block in blocks.items()}
        own: dict[str, Draws] = {}
        callers: dict[str, str] = {}
        seen: set[int] = set()

        def look(module: nn.Module, block: str) -> None:
            if id(module) in seen:
                return
            seen.add(id(module))
            name = name_of.get(id(module), block)
            if name and name != block:
                callers[name] = block
            own[name] = max(own.get(name, Draws.nothing), _own_draws(module))
            for child in module.children():
                look(child, name)

        look(model, "")
        return cls(
            keyed=frozenset(name for name, block in blocks.items() if not draws_nothing(block)),
            returned=frozenset(name for name, caller in callers.items() if own[caller] is not Draws.nothing),
            most=max(own.values()),
        )


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model itself as '', then its blocks by canonical name, each module once."""
    seen = {id(model)}
    yield "", model
    for name, module in _inner_blocks(model, "", top=True):
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def _inner_blocks(module: nn.Module, prefix: str, *, top: bool) -> Iterator[tuple[str, nn.Module]]:
    container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) and (container or top):
            yield full, child
        yield from _inner_blocks(child, f"{full}.", top=False)


def draws_nothing(block: nn.Module) -> bool:
    """Return whether a block surely draws no random number in training: all its modules are torch's, none random.

    A class of the user may call anything in its forward, so it counts as drawing unless it declares otherwise: a class
    attribute `draws_nothing = True` covers its own code, not the modules below it. Call this before a strategy changes
    the model: FSDP changes the classes of modules.
    """
    return all(_own_draws(module) is Draws.nothing for module in block.modules())


def _own_draws(module: nn.Module) -> Draws:
    """Return what the code of this module itself may draw from."""
    return Draws.torch if draws_at_random(module) else draws_of(type(module))


def draws_of(kind: type) -> Draws:
    """Return what the code of a class may draw from; a parent's `draws_nothing` does not cover overridden code."""
    found = _FOUND.get(kind)
    if found is None:
        found = _FOUND[kind] = _draws_of(kind)
    return found


def _draws_of(kind: type) -> Draws:
    if kind is type(None) or kind.__module__.startswith("torch.nn.") or kind.__dict__.get("draws_nothing", False):
        return Draws.nothing
    return Draws.torch if kind.__module__.startswith("trainkit.") else Draws.anything


_FOUND: Final[dict[type, Draws]] = {}
"""Cache by class, because every step needs it."""


def draws_at_random(module: nn.Module) -> bool:
    """Return whether this module of torch draws random numbers in training: a dropout with rate > 0, for example."""
    if not isinstance(module, _RANDOM):
        return False
    rate = getattr(module, "p", None)
    if rate is None:
        rate = getattr(module, "dropout", 1.0)
    return not (isinstance(rate, float | int) and rate == 0)
