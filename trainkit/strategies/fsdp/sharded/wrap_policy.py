"""The wrap policy: modules that are gathered separately, while they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from trainkit.strategies.partition.blocks import blocks_of

__all__ = ["blocks_of_model", "modules_above", "modules_of_classes", "without_shared"]

_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def blocks_of_model(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a map places, by canonical name: elements of lists and sequences, else top-level children.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> list(blocks_of_model(model))
        ['0', '2']
    """
    wholes = {unit.name: unit.entries[0] for unit in blocks_of(model) if len(unit.entries) == 1 and unit.tensor is None}
    return {name: module for name, module in wholes.items() if any(True for _ in module.parameters())}


def modules_of_classes(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules below the model whose class has one of these names, including nested ones."""
    wanted = set(names)
    return {name: module for name, module in model.named_modules() if name and type(module).__name__ in wanted}


def modules_above(model: nn.Module, num_bytes: float) -> dict[str, nn.Module]:
    """Return the smallest modules with at least `num_bytes` of parameters outside of modules that are already
    chosen.
    """
    return dict(_above("", model, num_bytes, set()))


def without_shared(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that share no parameter with the rest of the model: tied ones are gathered with the model
    itself.
    """
    owners = Counter(
        id(param)
        for module in model.modules()
        for param in module._parameters.values()  # noqa: SLF001 - own ones only
        if param is not None
    )
    shared = {place for place, count in owners.items() if count > 1}
    return {name: module for name, module in units.items() if not _reaches_out(module, shared, owners)}


def _reaches_out(module: nn.Module, shared: set[int], owners: Counter[int]) -> bool:
    inside = Counter(
        id(param)
        for inner in module.modules()
        for param in inner._parameters.values()  # noqa: SLF001
        if id(param) in shared
    )
    return any(count < owners[place] for place, count in inside.items())


def _above(name: str, module: nn.Module, num_bytes: float, taken: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for leaf, child in module.named_children():
        yield from _above(f"{name}.{leaf}" if name else leaf, child, num_bytes, taken)
    left = {id(p): p.numel() * p.element_size() for p in module.parameters() if id(p) not in taken}
    if name and sum(left.values()) >= num_bytes and not isinstance(module, _UNCALLED):
        taken.update(left)
        yield name, module
