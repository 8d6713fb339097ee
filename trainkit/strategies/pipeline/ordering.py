"""The order in which a forward pass calls its blocks, and which blocks must be on one stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from trainkit.strategies.partition.blocks import Block
from trainkit.strategies.pipeline.tracing.program import ParamRef, Program

__all__ = ["in_forward_order", "leaders_among"]


def in_forward_order(units: Sequence[Block], programs: Sequence[Program]) -> tuple[Block, ...]:
    """Return blocks in the order in which a model calls them first.

    A block that is not called follows the block before it.

    Args:
        units: the blocks, in the order in which the model names them.
        programs: the recorded passes of the model; the first one gives the order. Empty: the order is unchanged.
    """
    if not programs:
        return tuple(units)
    first: dict[str, int] = {}
    for name in programs[0].blocks():
        first.setdefault(name, len(first))
    keys, last = [], -1
    for unit in units:
        last = first.get(unit.name, last)
        keys.append(last)
    return tuple(unit for _, unit in sorted(zip(keys, units, strict=True), key=lambda pair: pair[0]))


def leaders_among(units: Sequence[Block], programs: Sequence[Program]) -> list[int]:
    """Return for each block the position of the first block whose stage it must share; its own if it is free.

    Blocks must be on one stage from one call of a block to its next one, from a block to code that uses its tensors,
    and from where a tensor is created to where its memory is used after an in-place write.
    """
    leaders = list(range(len(units)))
    for program in programs:
        for first, last in _together(units, program):
            for at in range(first + 1, last + 1):
                leaders[at] = min(leaders[at], leaders[first])
    for at in range(len(leaders) - 2, -1, -1):  # overlapping ranges are merged
        later = min(leaders[at + 1 :])
        leaders[at] = min(leaders[at], later) if later <= at else leaders[at]
    return leaders


def _together(units: Sequence[Block], program: Program) -> Iterator[tuple[int, int]]:
    position = {unit.name: at for at, unit in enumerate(units)}
    places = program.stages_of_calls(position)
    yield from ((after, before) for before, after in pairwise(places) if after < before)
    homes: dict[str, set[int]] = {}
    for at, unit in enumerate(units):
        for name, _ in unit.tensors():
            homes.setdefault(name, set()).add(at)
    for call, place in zip(program.calls, places, strict=True):
        for one in call.reads() if call.block is None else ():
            if isinstance(one, ParamRef) and one.name in homes and place not in homes[one.name]:
                nearest = min(homes[one.name], key=lambda at: abs(at - place))
                yield min(nearest, place), max(nearest, place)
    for calls in program.shared_memory():
        used = [places[call] for call in calls]
        yield min(used), max(used)
