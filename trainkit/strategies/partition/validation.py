"""Validate a layout: parameters without a place, split tied weights, unnecessary changes of device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from trainkit.errors import Problem
from trainkit.strategies.partition.blocks import Block
from trainkit.strategies.partition.syntax import REST, Assigned, Place, collapsed


def validate_layout(
    units: Sequence[Block],
    assigned: Assigned,
    given: Mapping[str, Place],
    *,
    key: str,
    noun: str,
    same: Callable[[Place], Place | None] = lambda place: place,
) -> list[Problem]:
    """Validate a map whose keys are valid.

    Args:
        units: from `blocks_of`.
        assigned: the place of each block.
        given: the user's map, for the messages.
        key: its key in the config.
        noun: the name of a place in messages, `device` or `stage`.
        same: normalises a place: `0` and `/gpu:0` are one device.
    """
    normalised = tuple(None if place is None else same(place) for place in assigned.places)
    assigned = replace(assigned, places=normalised)
    problems = uncovered(units, assigned, key=key, noun=noun) or _split(units, assigned, given, key, noun)
    return problems or _crossings(units, assigned, given, key, noun)


def leaders_of(units: Sequence[Block]) -> list[int]:
    """Return for each block the position of the first one that it shares a tensor with; its own if it shares none."""
    first: dict[int, int] = {}
    leaders = list(range(len(units)))
    for at, unit in enumerate(units):
        for _, tensor in unit.tensors():
            leaders[at] = min(leaders[at], leaders[first.setdefault(id(tensor), at)])
    return leaders


def uncovered(units: Sequence[Block], assigned: Assigned, *, key: str, noun: str) -> list[Problem]:
    """Return a problem if a tensor has no place."""
    without = [unit for unit, place in zip(units, assigned.places, strict=True) if place is None]
    names = [name for unit in without for name, _ in unit.tensors()]
    if not names:
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    least = next(unit.name for unit in without if any(True for _ in unit.tensors()))
    rule = f"no {noun} for {shown}. Add {least}: {noun.upper()}, or {REST}: {noun.upper()}."
    return [Problem(key=key, rule=rule)]


def _split(
    units: Sequence[Block], assigned: Assigned, given: Mapping[str, Place], key: str, noun: str
) -> list[Problem]:
    problems, seen = [], dict[int, tuple[str, int]]()
    for at, unit in enumerate(units):
        for name, tensor in unit.tensors():
            other, leader = seen.setdefault(id(tensor), (name, at))
            word, home = assigned.keys[at], assigned.keys[leader]
            if assigned.places[at] != assigned.places[leader] and word is not None and home is not None:
                rule = (
                    f"{name} is the same tensor as {other}, which is on {given[home]}. Tied weights stay on one "
                    f"{noun}: put {unit.name} on {given[home]} too."
                )
                problems.append(Problem(key=f"{key}.{word}", value=given[word], rule=rule))
    return problems


def _crossings(
    units: Sequence[Block], assigned: Assigned, given: Mapping[str, Place], key: str, noun: str
) -> list[Problem]:
    named = [at for at, place in enumerate(assigned.places) if place is not None]
    places = [assigned.places[at] for at in named]
    leaders = leaders_of(units)
    better = dict(zip(named, _straightened(named, places, leaders), strict=True))
    count, least = _changes(places), _changes(list(better.values()))
    if count <= least:
        return []
    spelled = {assigned.places[at]: given[word] for at in named if (word := assigned.keys[at]) is not None}
    runs: list[tuple[Place | None, list[str]]] = []
    for at, place in better.items():
        if not runs or runs[-1][0] != place:
            runs.append((place, []))
        runs[-1][1].append(units[at].name)
    words = ",".join(f"{name}:{spelled[place]}" for place, names in runs for name in collapsed(names))
    rule = (
        f"activations change their {noun} {count} times on the way through the model, where {least} would do. "
        f"Use {{{words}}}."
    )
    return [Problem(key=key, rule=rule)]


def _straightened(named: Sequence[int], places: Sequence[Place | None], leaders: Sequence[int]) -> list[Place | None]:
    """Return as many blocks on each place as before, in one range each; tied ones stay with the first of them."""
    free = [place for at, place in zip(named, places, strict=True) if leaders[at] == at]
    order = list(dict.fromkeys(places))
    in_runs = iter(sorted(free, key=order.index))
    normalised: dict[int, Place | None] = {}
    for at in named:
        normalised[at] = next(in_runs) if leaders[at] == at else normalised.get(leaders[at])
    return [normalised[at] for at in named]


def _changes(places: Sequence[Place | None]) -> int:
    return sum(one != other for one, other in pairwise(places))
