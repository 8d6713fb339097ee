"""`auto`: partition the blocks of a model into consecutive ranges of about equal size, one for each place."""

from __future__ import annotations

import math
from collections.abc import Sequence


def balanced(
    sizes: Sequence[int], capacities: Sequence[float], *, leaders: Sequence[int], fill: bool = False
) -> list[int] | None:
    """Partition blocks into consecutive ranges so that the largest place is as small as possible.

    Args:
        sizes: bytes of each block.
        capacities: byte limit of each place, `math.inf` if there is none; a place may stay empty.
        leaders: for each block, the one whose place it must share; itself for most.
        fill: whether every place must hold some bytes.

    Returns:
        The place of each block; None if they do not fit.

    Example:
        >>> balanced([4, 1, 1, 4], [math.inf, math.inf], leaders=[0, 1, 2, 3])
        [0, 0, 1, 1]
        >>> balanced([4, 1, 1, 4], [3, 20], leaders=[0, 1, 2, 3])
        [1, 1, 1, 1]
        >>> balanced([9, 1, 0, 1], [math.inf] * 3, leaders=[0, 1, 2, 3], fill=True)
        [0, 1, 1, 2]
    """
    free = [at for at, leader in enumerate(leaders) if leader == at]
    position = {at: number for number, at in enumerate(free)}
    weights = [0] * len(free)
    for size, leader in zip(sizes, leaders, strict=True):
        weights[position[leader]] += size
    cuts = _cuts(weights, capacities, least=1 if fill else 0)
    if cuts is None:
        return None
    place_of = [place for place, (start, end) in enumerate(cuts) for _ in range(start, end)]
    return [place_of[position[leader]] for leader in leaders]


def _cuts(weights: Sequence[int], capacities: Sequence[float], *, least: int) -> list[tuple[int, int]] | None:
    """Return (start, end) of each place's range: the partition with the least maximum, by dynamic programming."""
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    count = len(weights)
    # best[end]: the least maximum of the places so far, if they hold the first `end` blocks
    best = [0.0] + [math.inf] * count
    starts: list[list[int]] = []
    for capacity in capacities:
        reached, chosen = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(count + 1):
            for start in range(end, -1, -1):
                held = total[end] - total[start]
                if held > capacity or held >= reached[end]:
                    break
                if held < least:
                    continue
                worst = max(best[start], held)
                if worst < reached[end]:
                    reached[end], chosen[end] = worst, start
        best = reached
        starts.append(chosen)
    if math.isinf(best[count]):
        return None
    cuts, end = [], count
    for chosen in reversed(starts):
        cuts.append((chosen[end], end))
        end = chosen[end]
    return cuts[::-1]
