"""The transfers of all ranks, from the collectives that were observed on the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainkit.strategies.traffic.dry_run import CollectiveCall
from trainkit.strategies.traffic.flows import Flows, all_gather, all_reduce, joined, reduce_scatter, times
from trainkit.strategies.traffic.transfers import Transfer


def observed_transfers(
    collectives: Sequence[CollectiveCall],
    *,
    num_ranks: int,
    device_type: str,
    purpose: Callable[[CollectiveCall], tuple[str, bool]],
    share: Callable[[int], float] = lambda _rank: 1.0,
) -> tuple[Transfer, ...]:
    """Return the transfers of a step in which each group of ranks does what that of the first rank does.

    Args:
        collectives: those of the first rank, with its first two shards and its last one.
        num_ranks: number of ranks.
        device_type: cpu or cuda.
        purpose: function that returns what a collective serves, and whether ranks compute meanwhile.
        share: function that returns the share of the first rank's shards that a rank computes.
    """
    found: dict[tuple[str, bool, str], tuple[Flows, int]] = {}
    sizes: dict[tuple[str, bool, str, tuple[int, ...]], tuple[int, int]] = {}
    for one in collectives:
        key = *purpose(one), one.kind, one.ranks
        size, messages = sizes.get(key, (0, 0))
        sizes[key] = size + one.times * one.num_bytes, messages + one.times
    for (what, overlaps, kind, ranks), (size, messages) in sizes.items():
        groups = [
            (times(_flows(kind, group, size, device_type), share(group[0]))) for group in _alike(ranks, num_ranks)
        ]
        twice = kind == "all-reduce" or (kind == "reduce-scatter" and device_type == "cpu")
        flows, before = found.get((what, overlaps, kind), ({}, 0))
        more = messages * (len(ranks) - 1) * (2 if twice else 1)
        found[what, overlaps, kind] = joined(flows, *groups), before + more
    return tuple(
        Transfer(what=what, how=kind, flows=flows, messages=messages, overlaps=overlaps)
        for (what, overlaps, kind), (flows, messages) in found.items()
        if flows
    )


def _flows(kind: str, ranks: Sequence[int], size: int, device_type: str) -> Flows:
    if kind == "reduce-scatter":
        return reduce_scatter(ranks, size, device_type=device_type)
    if kind == "all-to-all":
        return {(one, other): size / len(ranks) for one in ranks for other in ranks if one != other}
    return all_reduce(ranks, size) if kind == "all-reduce" else all_gather(ranks, size)


def _alike(ranks: Sequence[int], num_ranks: int) -> list[range]:
    """Return all groups of ranks at the distances of a group with the first rank.

    Example:
        >>> [list(group) for group in _alike((0, 2), 4)]
        [[0, 2], [1, 3]]
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    length = step * len(ranks)
    return [range(at, at + length, step) for at in range(num_ranks) if at % length < step]
