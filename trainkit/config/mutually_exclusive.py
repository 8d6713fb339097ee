"""Keys that set the same thing in several ways: the key of the higher level counts, the other is displaced.

The sets are {epochs, steps}; {warmup.epochs, warmup.steps}; and any two of {batch.global_size, batch.micro_size,
batch.accumulation}. Of these three, `global_size` is displaced last.
"""

from __future__ import annotations

from typing import Final

from trainkit.config.provenance import KeyPath, Origin, TrackedTree, dotted, lookup
from trainkit.errors import Problem

__all__ = ["resolve"]

_PAIRS: Final[tuple[tuple[KeyPath, KeyPath], ...]] = (
    (("epochs",), ("steps",)),
    (("warmup", "epochs"), ("warmup", "steps")),
)
_GLOBAL: Final = ("batch", "global_size")
_MICRO: Final = ("batch", "micro_size")
_ACCUMULATION: Final = ("batch", "accumulation")


def resolve(tree: TrackedTree) -> tuple[list[str], list[Problem]]:
    """Displace keys that a key of a higher level contradicts, in the tree itself.

    Returns:
        Notes on displaced values that the user had set, and problems of two keys at the same level.
    """
    notes: list[str] = []
    problems: list[Problem] = []
    for pair in _PAIRS:
        _resolve_pair(tree, pair, notes, problems)
    _resolve_batch(tree, notes, problems)
    return notes, problems


def _resolve_pair(tree: TrackedTree, pair: tuple[KeyPath, KeyPath], notes: list[str], problems: list[Problem]) -> None:
    given = [path for path in pair if lookup(tree.values, path) is not None]
    if len(given) < 2:
        return
    low, high = sorted(given, key=lambda path: tree.origin_of(path).rank)
    if tree.origin_of(low).rank < tree.origin_of(high).rank:
        _displace(tree, low, high, notes)
        return
    if lookup(tree.values, low) == 0 == lookup(tree.values, high):
        _displace(tree, low, high, notes)
        return
    rule = f"sets the same as {dotted(pair[0])}, set at the same place. Give one of the two."
    problems.append(_problem(tree, pair[1], rule))


def _resolve_batch(tree: TrackedTree, notes: list[str], problems: list[Problem]) -> None:
    if any(lookup(tree.values, path) is None for path in (_GLOBAL, _MICRO, _ACCUMULATION)):
        return
    whole, micro, accumulation = (tree.origin_of(path).rank for path in (_GLOBAL, _MICRO, _ACCUMULATION))
    if micro < accumulation:
        _displace(tree, _MICRO, _ACCUMULATION, notes)
    elif accumulation < micro:
        _displace(tree, _ACCUMULATION, _MICRO, notes)
    elif whole < micro:
        _displace(tree, _GLOBAL, _MICRO, notes)
    elif whole > micro:
        _displace(tree, _ACCUMULATION, _GLOBAL, notes)
    else:
        rule = "global_size, micro_size and accumulation are set at the same place. Give any two of the three."
        problems.append(_problem(tree, _ACCUMULATION, rule))


def _problem(tree: TrackedTree, path: KeyPath, rule: str) -> Problem:
    return Problem(key=dotted(path), value=lookup(tree.values, path), rule=rule, origin=tree.origin_of(path).where)


def _displace(tree: TrackedTree, loser: KeyPath, winner: KeyPath, notes: list[str]) -> None:
    origin: Origin = tree.origin_of(loser)
    lost = lookup(tree.values, loser)
    won = tree.origin_of(winner)
    if not (origin.shipped and origin.level == 0):
        shown = f"{dotted(winner)}={lookup(tree.values, winner)} ({won.where})"
        notes.append(f"{shown} replaces {dotted(loser)}={lost} ({origin.where})")
    tree.put(loser, None, won)
