"""The state of a model whose tensors lie in pieces on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.groups.gather_objects import all_gather_object

__all__ = ["ShardedState", "TensorShard", "coverage_error", "gather_full", "iter_gather_full", "nonfinite", "region"]


_Box = tuple[Sequence[int], Sequence[int]]
"""Offset and size of a part."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShard:
    """A rectangular part of a tensor, as one rank holds it.

    Example:
        >>> TensorShard(tensor=torch.ones(2, 3), offset=(2, 0), shape=(4, 3)).region
        (slice(2, 4, None), slice(0, 3, None))
    """

    tensor: Tensor
    """The part itself."""
    offset: tuple[int, ...]
    """Where it begins in the whole, dim by dim."""
    shape: tuple[int, ...]
    """The shape of the whole."""

    @classmethod
    def whole(cls, tensor: Tensor) -> Self:
        """A tensor that is not cut."""
        return cls(tensor=tensor, offset=(0,) * tensor.dim(), shape=tuple(tensor.shape))

    @property
    def region(self) -> tuple[slice, ...]:
        """The place of the part in the whole."""
        return region(self.offset, self.tensor.shape)


def region(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """The place of a rectangular part in its whole, as an index.

    Example:
        >>> region((2, 0), (2, 3))
        (slice(2, 4, None), slice(0, 3, None))
    """
    return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))


ShardedState = Mapping[str, Sequence[TensorShard]]
"""Names of a checkpoint -> what a rank holds of them: no pieces, one, or several that do not touch."""


def nonfinite(pieces: ShardedState) -> list[str]:
    """Return the names of the floating-point tensors of which a piece is not finite; waits for the device.

    Example:
        >>> whole = {"a": torch.ones(2), "b": torch.tensor([1.0, torch.inf])}
        >>> nonfinite({name: [TensorShard.whole(tensor)] for name, tensor in whole.items()})
        ['b']
    """
    floats = [(name, piece.tensor) for name, parts in pieces.items() for piece in parts]
    floats = [(name, tensor) for name, tensor in floats if tensor.is_floating_point() and tensor.numel()]
    found = set()
    for device in {tensor.device for _, tensor in floats}:
        here = [(name, tensor) for name, tensor in floats if tensor.device == device]
        norms = torch._foreach_norm([tensor for _, tensor in here], float("inf"))  # noqa: SLF001 - see update.py
        flags = torch.stack([norm.isfinite() for norm in norms]).tolist()
        found |= {name for (name, _), is_finite in zip(here, flags, strict=True) if not is_finite}
    return [name for name in pieces if name in found]


def gather_full(pieces: ShardedState, everyone: Collective) -> dict[str, Tensor]:
    """The whole tensors, on every rank; collective. All of it is in memory at once: for models that fit.

    Args:
        pieces: what this rank holds; each part of a tensor is with one rank alone.
        everyone: all processes of the run.
    """
    return dict(iter_gather_full(pieces, everyone))


def iter_gather_full(
    pieces: ShardedState, everyone: Collective, *, order: Callable[[str], Any] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Name after name with its whole tensor, on every rank; collective at each name. Memory: one whole tensor.

    Args:
        pieces: what this rank holds; each part of a tensor is with one rank alone.
        everyone: all processes of the run.
        order: what names are sorted by; None: the names themselves.

    Raises:
        ValueError: the pieces of a tensor do not make it up.
    """
    heard = all_gather_object({name: _pieces_to_json(parts) for name, parts in pieces.items() if parts}, everyone)
    for name in sorted({name for rank in heard for name in rank}, key=order):
        told = [(rank, said[name]) for rank, said in enumerate(heard) if name in said]
        cuts = [(cut["offset"], cut["size"]) for _, said in told for cut in said["cuts"]]
        if wrong := coverage_error(told[0][1]["shape"], cuts):
            raise ValueError(f"{name}: {wrong}")
        yield name, _gathered(told, pieces.get(name, ()), everyone)


def coverage_error(shape: Sequence[int], cuts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Why rectangular parts do not make up a whole; None where each of its numbers is in one of them.

    Args:
        shape: of the whole.
        cuts: offset and size of every part.

    Example:
        >>> coverage_error([4], [([0], [2]), ([2], [2])])
        >>> coverage_error([4], [([0], [2]), ([3], [1])])
        'its pieces hold 3 of 4 numbers'
    """
    held = sum(torch.Size(size).numel() for _, size in cuts)
    if held != torch.Size(shape).numel():
        return f"its pieces hold {held} of {torch.Size(shape).numel()} numbers"
    for offset, size in cuts:
        if len(offset) != len(shape) or len(size) != len(shape) or min([*offset, *size], default=0) < 0:
            return "a piece is of another shape"
        if any(start + length > whole for start, length, whole in zip(offset, size, shape, strict=True)):
            return "a piece reaches beyond it"
    full = [(offset, size) for offset, size in cuts if torch.Size(size).numel()]
    return "its pieces overlap" if any(_meet(*one, *other) for one, other in _neighbours(full)) else None


def _neighbours(parts: Sequence[_Box]) -> Iterator[tuple[_Box, _Box]]:
    """Yield the pairs of parts that share a stretch of the dimension in which most parts begin at places of their own.

    Thousands of ranks cut along one dimension: few of their pairs are left, and all pairs would take minutes.
    """
    begins = [{offset[axis] for offset, _ in parts} for axis in range(len(parts[0][0]))] if parts else []
    axis = max(range(len(begins)), key=lambda one: len(begins[one]), default=None)
    if axis is None:  # numbers without a dimension
        yield from combinations(parts, 2)
        return
    ordered = sorted(parts, key=lambda part: part[0][axis])
    for place, (offset, size) in enumerate(ordered):
        for other in islice(ordered, place + 1, None):
            if other[0][axis] >= offset[axis] + size[axis]:
                break
            yield (offset, size), other


def _meet(offset: Sequence[int], size: Sequence[int], other_offset: Sequence[int], other_size: Sequence[int]) -> bool:
    return all(
        start < other + other_length and other < start + length
        for start, length, other, other_length in zip(offset, size, other_offset, other_size, strict=True)
    )


def _pieces_to_json(parts: Sequence[TensorShard]) -> dict[str, Any]:
    cuts = [{"offset": part.offset, "size": list(part.tensor.shape)} for part in parts]
    dtype = str(parts[0].tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": parts[0].shape, "cuts": cuts}


def _gathered(
    told: Sequence[tuple[int, Mapping[str, Any]]], own: Sequence[TensorShard], everyone: Collective
) -> Tensor:
    """A whole tensor; on the host, but for the only rank's own, which may be the very tensor it holds."""
    first = told[0][1]
    if everyone.num_ranks == 1 and len(own) == 1:
        return own[0].tensor.detach()
    dtype: torch.dtype = getattr(torch, first["dtype"])
    whole = torch.empty(first["shape"], dtype=dtype)
    for rank, said in told:
        for place, cut in enumerate(said["cuts"]):
            mine = own[place].tensor.detach() if rank == everyone.rank else torch.empty(cut["size"], dtype=dtype)
            whole[region(cut["offset"], cut["size"])] = mine if everyone.num_ranks == 1 else _shared(mine, rank)
    return whole


def _shared(tensor: Tensor, source: int) -> Tensor:
    """The tensor of a rank of the default group, on every rank; collective. As bytes: not every backend knows bf16."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    content = tensor.to(device).contiguous()
    if content.numel():
        dist.broadcast(content.reshape(-1).view(torch.uint8), src=source)
    return content
