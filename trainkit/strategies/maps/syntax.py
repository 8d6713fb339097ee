"""The syntax of a map: module names, prefixes, ranges (`blocks.0-5`) and `rest`, each with a place; its validation."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, pairwise
from typing import Final

from torch import Tensor, nn

from trainkit.config.values import closest
from trainkit.errors import Problem, listed

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


def distinct_tensors(units: Iterable[Block], counted: set[int] | None = None) -> list[Tensor]:
    """Return the tensors of blocks, each once; without those whose ids are in `counted`, to which the ids are added."""
    ids: set[int] = set() if counted is None else counted
    tensors = {id(tensor): tensor for unit in units for _, tensor in unit.tensors() if id(tensor) not in ids}
    ids.update(tensors)
    return list(tensors.values())


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
        holds, outer_holds = (any(inner.startswith(f"{prefix}.") for inner in without) for prefix in (full, outer))
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


_KEY: Final = "strategy.map"
REST: Final = "rest"
"""The key for all blocks that no other key names."""
_RANGE: Final = re.compile(r"(?P<head>(?:.+\.)?)(?P<first>\d+)-(?P<last>\d+)")

Place = str | int
"""A device, or the number of a stage."""


@dataclass(frozen=True, kw_only=True)
class Assigned:
    """The place of each block according to a map."""

    places: tuple[Place | None, ...]
    """The place of each block; None if no key names it."""
    keys: tuple[str | None, ...]
    """The key that names each block."""
    problems: list[Problem] = field(default_factory=list)
    """The problems of the keys."""


def assign(model: nn.Module, units: Sequence[Block], block_map: Mapping[str, Place]) -> Assigned:
    """Find the blocks that each key of a map names.

    Args:
        model: its module names are used for suggestions.
        units: the result of `blocks_of`, or parts of it.
        block_map: module name, prefix, range or `rest` -> place.

    Returns:
        Places by block, and problems: unknown names, cuts within a block, and blocks that two keys name.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> assign(model, blocks_of(model), {"0-1": 0, "rest": 1}).places
        (0, 0, 1)
    """
    keys: list[str | None] = [None] * len(units)
    blocks = {unit.name for unit in blocks_of(model)}
    problems = []
    for word, place in block_map.items():
        if word == REST:
            continue
        indices, rule = _named(word, units, model)
        taken = [i for i in indices if not _yields_to(word, keys[i], units[i], blocks)]
        clash = next(
            (i for i in taken if keys[i] is not None and not _yields_to(keys[i], word, units[i], blocks)), None
        )
        if clash is not None:
            rule = f"{units[clash].name} is in {keys[clash]} already. Name each block once."
        if rule is not None:
            problems.append(Problem(key=f"{_KEY}.{word}", value=place, rule=rule))
            continue
        for index in taken:
            keys[index] = word
    if REST in block_map:
        if None in keys:
            keys = [REST if key is None else key for key in keys]
        else:
            rule = "names nothing: the other keys name every block. Leave it out."
            problems.append(Problem(key=f"{_KEY}.{REST}", value=block_map[REST], rule=rule))
    places = tuple(None if key is None else block_map[key] for key in keys)
    return Assigned(places=places, keys=tuple(keys), problems=problems)


def _yields_to(word: str | None, other: str | None, unit: Block, blocks: Collection[str]) -> bool:
    """Return whether a key of a whole block yields a part of it to another key (`transformer.h.3`)."""
    return word is not None and other is not None and word != unit.name and word in blocks


def _named(word: str, units: Sequence[Block], model: nn.Module) -> tuple[list[int], str | None]:
    """Return the indices of the blocks that a key names, or its problem."""
    if indices := _within(word, units):
        return indices, None
    if match := _RANGE.fullmatch(word):
        return _in_range(match["head"], int(match["first"]), int(match["last"]), units)
    names = {name for name, _ in model.named_modules()} | {unit.name for unit in units}
    outer = next((unit for unit in units if word.startswith(f"{unit.name}.")), None)
    if outer is not None and (word in names or word in dict(outer.tensors())):
        return [], f"lies inside the block {outer.name}, and maps split a model between blocks only. Use {outer.name}."
    near = closest(word, [*names - {""}, REST])
    choices = ", ".join(collapsed([unit.name for unit in units]))
    return [], f"no such module. {f'Did you mean {near}?' if near else f'There are: {choices}.'}"


def _in_range(head: str, first: int, last: int, units: Sequence[Block]) -> tuple[list[int], str | None]:
    if first > last:
        return [], f"runs backwards. Write {head}{last}-{first}."
    matches = [_within(f"{head}{number}", units) for number in range(first, last + 1)]
    if all(matches):
        return sorted(index for indices in matches for index in indices), None
    leaves = [unit.name.removeprefix(head).partition(".")[0] for unit in units if unit.name.startswith(head)]
    if numbers := [int(leaf) for leaf in leaves if leaf.isdigit()]:
        return [], f"no such modules: there are {head}{min(numbers)}-{max(numbers)}."
    outer = {unit.name[: dot.start()] for unit in units for dot in re.finditer(r"\.", unit.name)}
    near = closest(head.rstrip("."), outer)
    return [], f"no such modules.{f' Did you mean {near}.{first}-{last}?' if near else ''}"


def _within(word: str, units: Sequence[Block]) -> list[int]:
    return [index for index, unit in enumerate(units) if unit.name == word or unit.name.startswith(f"{word}.")]


def collapsed(names: Sequence[str]) -> list[str]:
    """Return names in which consecutive numbers are collapsed into ranges.

    Example:
        >>> collapsed(["embed", "blocks.0", "blocks.1", "blocks.2", "head"])
        ['embed', 'blocks.0-2', 'head']
    """
    ranges: list[str] = []
    run: tuple[str, int] | None = None  # the last name without its number, and the first number of its run
    for before, name in pairwise(["", *names]):
        head, number = _numbered(name)
        if run is not None and number is not None and (head, number - 1) == _numbered(before):
            ranges[-1] = f"{head}{run[1]}-{number}"
            continue
        ranges.append(name)
        run = None if number is None else (head, number)
    return ranges


def _numbered(name: str) -> tuple[str, int | None]:
    """Return a name up to its last number, and that number."""
    head, dot, leaf = name.rpartition(".")
    return (head + dot, int(leaf)) if leaf.isdigit() else (name, None)


def validate_layout(
    units: Sequence[Block], assigned: Assigned, block_map: Mapping[str, Place], *, same: Callable[[Place], Place | None]
) -> list[Problem]:
    """Validate a map to devices whose keys are valid.

    Args:
        units: the result of `blocks_of`.
        assigned: the place of each block.
        block_map: the user's map, for the messages.
        same: normalises a place: `0` and `/gpu:0` are one device.
    """
    normalised = tuple(None if place is None else same(place) for place in assigned.places)
    assigned = replace(assigned, places=normalised)
    problems = uncovered(units, assigned, noun="device") or _split(units, assigned, block_map)
    return problems or _crossings(units, assigned, block_map)


def leaders_of(units: Sequence[Block]) -> list[int]:
    """Return for each block the position of the first one that it shares a tensor with; its own if it shares none."""
    first: dict[int, int] = {}
    leaders = list(range(len(units)))
    for index, unit in enumerate(units):
        for _, tensor in unit.tensors():
            leaders[index] = min(leaders[index], leaders[first.setdefault(id(tensor), index)])
    return leaders


def uncovered(units: Sequence[Block], assigned: Assigned, *, noun: str) -> list[Problem]:
    """Return a problem if a tensor has no place."""
    without = [unit for unit, place in zip(units, assigned.places, strict=True) if place is None]
    names = [name for unit in without for name, _ in unit.tensors()]
    if not names:
        return []
    least = next(unit.name for unit in without if any(True for _ in unit.tensors()))
    rule = f"no {noun} for {listed(names)}. Add {least}: {noun.upper()}, or {REST}: {noun.upper()}."
    return [Problem(key=_KEY, rule=rule)]


def _split(units: Sequence[Block], assigned: Assigned, block_map: Mapping[str, Place]) -> list[Problem]:
    problems, first_use = [], dict[int, tuple[str, int]]()
    for index, unit in enumerate(units):
        for name, tensor in unit.tensors():
            other, leader = first_use.setdefault(id(tensor), (name, index))
            word, home = assigned.keys[index], assigned.keys[leader]
            if assigned.places[index] != assigned.places[leader] and word is not None and home is not None:
                rule = (
                    f"{name} is the same tensor as {other}, which is on {block_map[home]}. Tied weights stay on one "
                    f"device: put {unit.name} on {block_map[home]} too."
                )
                problems.append(Problem(key=f"{_KEY}.{word}", value=block_map[word], rule=rule))
    return problems


def _crossings(units: Sequence[Block], assigned: Assigned, block_map: Mapping[str, Place]) -> list[Problem]:
    """Return a problem if places with as many blocks each, in one range each, would need fewer moves.

    Tied blocks stay with the first of them.
    """
    places = {index: place for index, place in enumerate(assigned.places) if place is not None}
    leaders, order = leaders_of(units), list(dict.fromkeys(places.values()))
    in_runs = iter(sorted((place for index, place in places.items() if leaders[index] == index), key=order.index))
    better: dict[int, Place] = {}
    for index in places:
        better[index] = next(in_runs) if leaders[index] == index else better[leaders[index]]
    count, least = (sum(before != after for before, after in pairwise(moves.values())) for moves in (places, better))
    if count <= least:
        return []
    spelled = {assigned.places[index]: block_map[word] for index, word in enumerate(assigned.keys) if word is not None}
    words = ",".join(
        f"{name}:{spelled[place]}"
        for place, run in groupby(better, key=better.__getitem__)
        for name in collapsed([units[index].name for index in run])
    )
    rule = (
        f"activations change their device {count} times on the way through the model, and {least} would suffice. "
        f"Use {{{words}}}."
    )
    return [Problem(key=_KEY, rule=rule)]
