"""The region of a rank's shard in the full tensor, and which rank writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.strategies.tensors.sharded import TensorShard, region

__all__ = ["ShardSlice", "local_part"]


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """The part of a tensor that one rank holds: a rectangle of the full tensor, possibly empty.

    Example:
        >>> ShardSlice(offset=(2, 0), size=(2, 3), shape=(4, 3), is_written=True).region
        (slice(2, 4, None), slice(0, 3, None))
    """

    offset: tuple[int, ...]
    """Its start in the full tensor, dim by dim."""
    size: tuple[int, ...]
    """Its own shape."""
    shape: tuple[int, ...]
    """The shape of the full tensor."""
    is_written: bool
    """Whether this rank writes it, and counts it in sums over ranks: exactly one of the ranks with the same
    part does.
    """

    @classmethod
    def of(cls, tensor: Tensor, *, is_first: bool) -> Self:
        """Return the part of a tensor on this rank.

        Args:
            tensor: a DTensor, sharded or replicated over its mesh; or a plain one, full on every rank.
            is_first: whether this is the first of the ranks that hold copies outside of the tensor's mesh; for a plain
                tensor, of all ranks.
        """
        if not isinstance(tensor, DTensor):
            whole = tuple(tensor.shape)
            return cls(offset=(0,) * len(whole), size=whole, shape=whole, is_written=is_first)
        coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        offset, size, firsts = [0] * tensor.dim(), list(tensor.shape), [is_first]
        for place in _order(tensor.placements):
            placement, ranks, here = tensor.placements[place], tensor.device_mesh.size(place), coordinate[place]
            dim = getattr(placement, "dim", None)
            if dim is None:
                firsts.append(here == 0)
                continue
            length = -(-size[dim] // ranks)  # as in torch.chunk: the last parts are short, or empty
            start = min(length * here, size[dim])
            offset[dim], size[dim] = offset[dim] + start, min(length, size[dim] - start)
        return cls(offset=tuple(offset), size=tuple(size), shape=tuple(tensor.shape), is_written=all(firsts))

    @property
    def region(self) -> tuple[slice, ...]:
        """Its region in the full tensor."""
        return region(self.offset, self.size)

    @property
    def is_empty(self) -> bool:
        """Whether the part is empty."""
        return 0 in self.size

    def piece(self, part: Tensor) -> TensorShard:
        """Return the part as a shard for a checkpoint."""
        return TensorShard(tensor=part.detach(), offset=self.offset, shape=self.shape)

    def take(self, whole: Tensor) -> Tensor:
        """Return a copy of the part of a full tensor; a tensor of another shape is not sharded, and returned
        unchanged.
        """
        return whole[self.region].clone() if tuple(whole.shape) == self.shape else whole


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, as a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _order(placements: tuple[Any, ...]) -> list[int]:
    """Return the mesh axes in the order in which they shard: one that shards the parts of another (strided)
    comes last.
    """
    return sorted(range(len(placements)), key=lambda place: hasattr(placements[place], "split_factor"))
