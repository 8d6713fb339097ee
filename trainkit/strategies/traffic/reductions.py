"""The transfers of summing gradients over ranks, for each reducer and each compression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from trainkit.numerics.batch import owned_nodes
from trainkit.strategies.traffic.flows import all_gather, all_reduce, broadcast, joined, reduce_to_first
from trainkit.strategies.traffic.transfers import Transfer


@dataclass(frozen=True, kw_only=True)
class Vector:
    """The vector that the ranks sum in a step."""

    num_bytes: float
    element_bytes: int
    """Bytes of a sent element."""
    bucket_mb: float = 25.0
    """MiB that the backend exchanges at once; 0: all."""

    @classmethod
    def of(cls, num_elements: int, width: int) -> Vector:
        """Return a vector of elements of `width` bytes, in the backend's own buckets."""
        return cls(num_bytes=num_elements * width, element_bytes=width)

    @property
    def num_buckets(self) -> int:
        """Number of exchanges into which the backend cuts the vector."""
        return max(1, math.ceil(self.num_bytes / (self.bucket_mb * 2**20))) if self.bucket_mb else 1


def reduction(reduce: str, ranks: Sequence[int], vector: Vector, *, ranks_a_host: int) -> tuple[Transfer, ...]:
    """Return the transfers of a reducer, by its name."""
    size, count, buckets = vector.num_bytes, len(ranks), vector.num_buckets
    if count == 1:
        return ()
    if reduce == "shared_memory":
        flows = all_reduce(ranks, size)
        return (Transfer(what="gradients", how="shared memory", flows=flows, messages=2, by="memory"),)
    if reduce == "to_one_device":
        flows = joined(reduce_to_first(ranks, size), broadcast(ranks, size))
        return (Transfer(what="gradients", how="reduce and broadcast", flows=flows, messages=2 * (count - 1)),)
    if reduce == "hierarchical":
        return _hierarchical(ranks, size, ranks_a_host)
    return (
        Transfer(
            what="gradients",
            how="ring" if reduce == "ring" else "all-reduce",
            flows=all_reduce(ranks, size),
            messages=2 * (count - 1) * (1 if reduce == "ring" else buckets),
            overlaps=reduce != "ring" and buckets > 1,
        ),
    )


def _hierarchical(ranks: Sequence[int], size: float, ranks_a_host: int) -> tuple[Transfer, ...]:
    hosts = [ranks[first : first + ranks_a_host] for first in range(0, len(ranks), ranks_a_host)]
    flows = joined(
        *(joined(reduce_to_first(host, size), broadcast(host, size)) for host in hosts if len(host) > 1),
        all_reduce([host[0] for host in hosts], size),
    )
    messages = 2 * (ranks_a_host - 1) + 2 * (len(hosts) - 1)
    return (Transfer(what="gradients", how="reduce, all-reduce and broadcast", flows=flows, messages=messages),)


def powersgd(
    ranks: Sequence[int], vector: Vector, model: nn.Module, *, rank: int, after: int, sparse: Sequence[Tensor] = ()
) -> tuple[Transfer, ...]:
    """Return the transfers of PowerSGD: whole gradients in the first steps, then two thin matrices for each matrix.

    Args:
        ranks: the replicas.
        vector: the vector of the first steps.
        model: the model; unchanged.
        rank: columns of the matrices.
        after: number of first steps.
        sparse: the parameters whose gradients are not in the vector.

    Source: Vogels et al. 2019, arXiv:1905.13727; torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, whose
    `min_compression_rate` is 2.
    """
    if len(ranks) == 1:
        return ()
    left_out = set(map(id, sparse))
    grads = [param for param in model.parameters() if param.requires_grad and id(param) not in left_out]
    beside = (
        vector.num_bytes - sum(param.numel() for param in grads) * vector.element_bytes
    )  # buffers are not compressed
    thin = sum(_thin_elements(tuple(param.shape), rank) for param in grads) * vector.element_bytes + beside
    rounds = 2 * (len(ranks) - 1)
    whole = all_reduce(ranks, vector.num_bytes)
    return (
        Transfer(what="gradients", how="all-reduce", flows=whole, messages=rounds, end_step=after),
        Transfer(
            what="gradients",
            how=f"PowerSGD of rank {rank}",
            flows=all_reduce(ranks, thin),
            messages=3 * rounds,
            first_step=after,
        ),
    )


def _thin_elements(shape: tuple[int, ...], rank: int) -> int:
    """Return the elements that PowerSGD sends of a gradient.

    Example:
        >>> _thin_elements((100, 50), 1), _thin_elements((3, 3), 1), _thin_elements((7,), 1)
        (150, 9, 7)
    """
    numel = math.prod(shape)
    rows = shape[0] if shape else 1
    columns = numel // max(rows, 1)
    thin = (rows + columns) * min(rows, columns, rank)
    return thin if thin * 2 < numel else numel


def in_lanes(ranks: Sequence[int], vector: Vector, *, lanes: int, num_shards: int) -> tuple[Transfer, ...]:
    """Return the transfers of a sum in the order of the lanes: an exchange of slices of partial sums, then a gather."""
    count = len(ranks)
    if count == 1:
        return ()
    part = vector.num_bytes / count
    sent = {
        (sender, receiver): part * len(owned_nodes(rank=place, num_ranks=count, num_lanes=lanes, num_shards=num_shards))
        for place, sender in enumerate(ranks)
        for receiver in ranks
        if sender != receiver
    }
    flows = joined(sent, all_gather(ranks, vector.num_bytes))
    return (Transfer(what="gradients", how="lanes", flows=flows, messages=2 * (count - 1)),)
