"""Several optimizers of a run: the meaning of an entry of `optimizers`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from trainkit.config.targets.allowed import TARGET

OWN_KEYS: Final = ("match", "ratio", "schedule")
"""Keys of an entry that do not belong to the class of its optimizer."""
RATIO_RULE: Final = "must be the passes in a step, 1 or more, or 1/N for one in every N steps."
_MOST_PASSES: Final = 10_000


def optimizer_node(base: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the complete node of an entry's optimizer.

    Args:
        base: the node `optimizer`, whose keys the entry takes over unless it has a class of its own.
        entry: an entry of `optimizers`.

    Example:
        >>> optimizer_node({"_target_": "torch.optim.Adam", "lr": 0.1}, {"match": ["head.*"], "lr": 0.2})
        {'_target_': 'torch.optim.Adam', 'lr': 0.2}
    """
    node = {key: value for key, value in entry.items() if key not in OWN_KEYS}
    return node if TARGET in node else {**base, **node}


def passes_of(ratio: object) -> tuple[int, int] | None:
    """Return (passes in a step in which the phase runs, n: it runs in every n-th step); None: invalid ratio.

    Example:
        >>> passes_of(5), passes_of("1/5"), passes_of("2/5")
        ((5, 1), (1, 5), None)
    """
    match = re.fullmatch(r"(?:1/)?([1-9][0-9]{0,4})", str(ratio)) if isinstance(ratio, int | str) else None
    if isinstance(ratio, bool) or match is None or int(match[1]) > _MOST_PASSES:
        return None
    count = int(match[1])
    return (1, count) if "/" in str(ratio) else (count, 1)
