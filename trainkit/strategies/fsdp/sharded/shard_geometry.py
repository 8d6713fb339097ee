"""Where a rank's part of a tensor lies in the whole, and which rank writes it."""

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
    """The part of a tensor that one rank holds: a rectangle of the whole, perhaps an empty one.

    Example:
        >>> ShardSlice(offset=(2, 0), size=(2, 3), shape=(4, 3), is_written=True).region
        (slice(2, 4, None), slice(0, 3, None))
    """

    offset: tuple[int, ...]
    """Where it begins in the whole, dim by dim."""
    size: tuple[int, ...]
    """Its own shape."""
    shape: tuple[int, ...]
    """The shape of the whole."""
    is_written: bool
    """Whether this rank writes it, and counts it in sums over ranks: of several that hold the same part, one does."""

    @classmethod
    def of(cls, tensor: Tensor, *, is_first: bool) -> Self:
        """The part of a tensor that is here.

        Args:
            tensor: a DTensor, cut or replicated over its mesh; or a plain one, whole on every rank.
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
            length = -(-size[dim] // ranks)  # as torch.chunk cuts: the last parts are short, or empty
            start = min(length * here, size[dim])
            offset[dim], size[dim] = offset[dim] + start, min(length, size[dim] - start)
        return cls(offset=tuple(offset), size=tuple(size), shape=tuple(tensor.shape), is_written=all(firsts))

    @property
    def region(self) -> tuple[slice, ...]:
        """Its place in the whole."""
        return region(self.offset, self.size)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing of the tensor here."""
        return 0 in self.size

    def piece(self, part: Tensor) -> TensorShard:
        """The part as a checkpoint takes it."""
        return TensorShard(tensor=part.detach(), offset=self.offset, shape=self.shape)

    def take(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor, in memory of its own; a tensor of another shape is no cut one: all of it."""
        return whole[self.region].clone() if tuple(whole.shape) == self.shape else whole


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor is on this rank, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _order(placements: tuple[Any, ...]) -> list[int]:
    """The axes of the mesh in the order in which they cut: one that cuts the parts of another (strided) comes last."""
    return sorted(range(len(placements)), key=lambda place: hasattr(placements[place], "split_factor"))
