"""Cut gradients into buckets, so that the exchange of the first one starts while backward still computes others."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["Bucket", "cut_into_buckets"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A range of the packing's tensors that is exchanged at once."""

    first: int
    """The index of its first tensor."""
    last: int
    """The index after its last tensor."""
    is_tail: bool = False
    """Whether it contains no gradients, but buffers and the counted weight."""


def cut_into_buckets(packing: FlatBuffer, *, bucket_bytes: int, part_tail: bool) -> tuple[Bucket, ...]:
    """Return the buckets of a packing, in the order in which they are exchanged.

    Gradients become final in about the reverse order of the parameters, and buckets follow that order. All but the last
    have at least `bucket_bytes`.

    Args:
        packing: gradients first, then buffers and the counted weight.
        bucket_bytes: size from which a bucket is full; 0: one bucket.
        part_tail: whether buffers and weight must form a separate bucket; else they join the gradients if those are one
            bucket, which saves an exchange.

    Example:
        >>> import torch
        >>> packing = FlatBuffer([torch.Size([2])] * 4, torch.float32, torch.device("cpu"), num_grads=3)
        >>> buckets = cut_into_buckets(packing, bucket_bytes=16, part_tail=False)
        >>> [(one.first, one.last, one.is_tail) for one in buckets]
        [(1, 3, False), (0, 1, False), (3, 4, True)]
    """
    count, num_grads = len(packing.shapes), packing.num_grads
    end = num_grads
    buckets: list[Bucket] = []
    for place in reversed(range(num_grads)):
        size = (packing.offsets[end] - packing.offsets[place]) * packing.dtype.itemsize
        if place == 0 or (bucket_bytes and size >= bucket_bytes):
            buckets.append(Bucket(first=place, last=end))
            end = place
    if count == num_grads:
        return tuple(buckets)
    if len(buckets) == 1 and not part_tail:
        return (Bucket(first=0, last=count),)
    return (*buckets, Bucket(first=num_grads, last=count, is_tail=True))
