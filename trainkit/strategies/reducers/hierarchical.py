"""Sum within a host, then between hosts, then broadcast: slow links carry one vector per host instead of one
per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from trainkit.strategies.reducers.vectors import InPlaceVector

__all__ = ["HierarchicalTransport"]


class HierarchicalTransport(InPlaceVector):
    """Reduces to the first rank of each host, all-reduces among those ranks, and broadcasts on each host.

    Args:
        hosts: the host of every rank, by any number; construction is collective.
        rank: this rank.
        timeout_s: seconds to wait for another rank in an exchange.

    Source: tf.distribute.HierarchicalCopyAllReduce.
    """

    def __init__(self, hosts: Sequence[int], *, rank: int, timeout_s: float) -> None:
        members = {host: [other for other, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)}
        timeout = timedelta(seconds=timeout_s)
        # Every rank creates every group in the same order, as torch requires.
        groups = {host: dist.new_group(ranks, timeout=timeout) for host, ranks in members.items()}
        self._leaders = dist.new_group([ranks[0] for ranks in members.values()], timeout=timeout)
        self._leads = members[hosts[rank]][0] == rank
        self._leader = members[hosts[rank]][0]
        self._host = groups[hosts[rank]]

    def sum(self, flat: Tensor) -> Tensor:
        """Sum over all ranks, in place; collective."""
        dist.reduce(flat, dst=self._leader, op=dist.ReduceOp.SUM, group=self._host)
        if self._leads:
            dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=self._leaders)
        dist.broadcast(flat, src=self._leader, group=self._host)
        return flat
