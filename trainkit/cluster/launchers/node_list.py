"""Parse lists as SLURM writes them: `n[01-03,7],login` and `2(x3),1`."""

from __future__ import annotations

import itertools
import math
import re
from typing import Final

__all__ = ["node_names", "tasks_per_node"]

_NAME: Final = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_COUNT: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MOST: Final = 100_000
"""Largest number of nodes of a step."""
_LONGEST: Final = 40
"""Largest number of characters of one range, `00001-99999`, or of one count, `4(x16)`."""
_SHOWN: Final = 200


def node_names(text: str) -> list[str]:
    """Return the names in a list of nodes, in order; numbers keep their leading zeros.

    Raises:
        ValueError: brackets or ranges are invalid.

    Example:
        >>> node_names("n[01-03,7],r[1-2]n[5,6],login")
        ['n01', 'n02', 'n03', 'n7', 'r1n5', 'r1n6', 'r2n5', 'r2n6', 'login']
    """
    names: list[str] = []
    place = 0
    while place < len(text):
        found = _NAME.match(text, place)
        if found is None or text[found.end() : found.end() + 1] not in ("", ","):
            raise ValueError(f"is not a list of nodes: {text[:_SHOWN]}")
        parts = re.split(r"(\[[^\]]*\])", found[0])
        variants = [_variants(part) for part in parts]
        if len(names) + math.prod(map(len, variants)) > _MOST:
            raise ValueError(f"lists more than {_MOST:,} nodes")
        names += map("".join, itertools.product(*variants))
        place = found.end() + 1
    return names


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, in the order of the nodes.

    Raises:
        ValueError: the text is not such a list.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if found is None or len(part) > _LONGEST:
            raise ValueError(f"is not a list of tasks per node: {text[:_SHOWN]}")
        if len(counts) + int(found[2] or 1) > _MOST:
            raise ValueError(f"lists more than {_MOST:,} nodes")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _variants(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    found: list[str] = []
    for item in part[1:-1].split(","):
        ends = _RANGE.fullmatch(item)
        if ends is None:
            if not item.isdigit():
                raise ValueError(f"is not a list of nodes: {part[:_SHOWN]}")
            found.append(item)
            continue
        low, high = (int(ends[1]), int(ends[2])) if len(item) <= _LONGEST else (0, _MOST)
        if high - low >= _MOST:
            raise ValueError(f"is not a list of nodes: {part[:_SHOWN]}")
        found += [f"{number:0{len(ends[1])}d}" for number in range(low, high + 1)]
    return found
