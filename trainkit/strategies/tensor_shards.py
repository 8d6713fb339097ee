"""The state of a model whose tensors are sharded over several ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.adapters.average import AVERAGE
from trainkit.objectives.base import Collective
from trainkit.strategies.collectives import all_gather_object, broadcast_values

_Box = tuple[Sequence[int], Sequence[int]]
"""Offset and size of a part."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShard:
    """A rectangular part of a tensor on one rank.

    Example:
        >>> TensorShard.whole(torch.ones(2, 3)).offset
        (0, 0)
    """

    tensor: Tensor
    """The values of the part."""
    offset: tuple[int, ...]
    """Start of the part in the full tensor, dim by dim."""
    shape: tuple[int, ...]
    """The shape of the full tensor."""

    @classmethod
    def whole(cls, tensor: Tensor) -> Self:
        """Return the shard of a tensor that is not sharded."""
        return cls(tensor=tensor, offset=(0,) * tensor.dim(), shape=tuple(tensor.shape))


def region(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """Return the region of a rectangular part in the full tensor, as an index.

    Example:
        >>> region((2, 0), (2, 3))
        (slice(2, 4, None), slice(0, 3, None))
    """
    return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """The part of a tensor that one rank holds: a rectangle of the full tensor, possibly empty.

    Example:
        >>> ShardSlice(offset=(2, 0), size=(2, 3), shape=(4, 3), is_written=True).region
        (slice(2, 4, None), slice(0, 3, None))
    """

    offset: tuple[int, ...]
    """Start of the part in the full tensor, dim by dim."""
    size: tuple[int, ...]
    """Shape of the part."""
    shape: tuple[int, ...]
    """The shape of the full tensor."""
    is_written: bool
    """Whether this rank writes the part and counts it in sums; exactly one of the ranks with the same part does."""

    @property
    def region(self) -> tuple[slice, ...]:
        """Region of the part in the full tensor."""
        return region(self.offset, self.size)

    def piece(self, part: Tensor) -> TensorShard:
        """Return the part as a shard for a checkpoint."""
        return TensorShard(tensor=part.detach(), offset=self.offset, shape=self.shape)


ShardedState = Mapping[str, Sequence[TensorShard]]
"""Checkpoint names -> the shards of a rank: none, one, or several that do not overlap."""


def nonfinite(pieces: ShardedState) -> list[str]:
    """Return the names of the floating-point tensors with a shard that is not finite; synchronises with the device.

    Example:
        >>> whole = {"a": torch.ones(2), "b": torch.tensor([1.0, torch.inf])}
        >>> nonfinite({name: [TensorShard.whole(tensor)] for name, tensor in whole.items()})
        ['b']
    """
    floats = [(name, piece.tensor) for name, parts in pieces.items() for piece in parts]
    floats = [(name, tensor) for name, tensor in floats if tensor.is_floating_point() and tensor.numel()]
    bad_names = set()
    for device in {tensor.device for _, tensor in floats}:
        on_device = [(name, tensor) for name, tensor in floats if tensor.device == device]
        norms = torch._foreach_norm([tensor for _, tensor in on_device], float("inf"))  # noqa: SLF001 - see update.py
        flags = torch.stack([norm.isfinite() for norm in norms]).tolist()
        bad_names |= {name for (name, _), is_finite in zip(on_device, flags, strict=True) if not is_finite}
    return [name for name in pieces if name in bad_names]


def gather_full(pieces: ShardedState, all_ranks: Collective) -> dict[str, Tensor]:
    """Return the full tensors, on every rank; collective. All are in memory at once: for models that fit."""
    return dict(iter_gather_full(pieces, all_ranks))


def iter_gather_full(
    pieces: ShardedState, all_ranks: Collective, *, order: Callable[[str], Any] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield each name with its full tensor, on every rank; collective for each name. Memory: one full tensor.

    Raises:
        ValueError: the shards of a tensor do not cover it exactly.
    """
    gathered = all_gather_object({name: _pieces_to_json(parts) for name, parts in pieces.items() if parts}, all_ranks)
    for name in sorted({name for rank in gathered for name in rank}, key=order):
        holders = [(rank, names[name]) for rank, names in enumerate(gathered) if name in names]
        cuts = [(cut["offset"], cut["size"]) for _, entry in holders for cut in entry["cuts"]]
        if wrong := coverage_error(holders[0][1]["shape"], cuts):
            raise ValueError(f"{name}: {wrong}")
        yield name, _gathered(holders, pieces.get(name, ()), all_ranks)


def coverage_error(shape: Sequence[int], cuts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Return why rectangular parts do not cover a tensor exactly; None if each element is in exactly one of them.

    Example:
        >>> coverage_error([4], [([0], [2]), ([2], [2])])
        >>> coverage_error([4], [([0], [2]), ([3], [1])])
        'its pieces hold 3 of 4 numbers'
    """
    count = sum(torch.Size(size).numel() for _, size in cuts)
    if count != torch.Size(shape).numel():
        return f"its pieces hold {count} of {torch.Size(shape).numel()} numbers"
    for offset, size in cuts:
        if len(offset) != len(shape) or len(size) != len(shape) or min([*offset, *size], default=0) < 0:
            return "a piece is of another shape"
        if any(start + length > extent for start, length, extent in zip(offset, size, shape, strict=True)):
            return "a piece reaches beyond it"
    boxes = [(offset, size) for offset, size in cuts if torch.Size(size).numel()]
    return "its pieces overlap" if any(_overlap(*left, *right) for left, right in _neighbours(boxes)) else None


def _neighbours(parts: Sequence[_Box]) -> Iterator[tuple[_Box, _Box]]:
    """Yield the pairs of parts that overlap in the dimension with the most distinct offsets.

    Thousands of ranks shard along one dimension: few of their pairs are left, and testing all pairs would take minutes.
    """
    begins = [{offset[axis] for offset, _ in parts} for axis in range(len(parts[0][0]))] if parts else []
    axis = max(range(len(begins)), key=lambda dim: len(begins[dim]), default=None)
    if axis is None:  # scalars
        yield from combinations(parts, 2)
        return
    ordered = sorted(parts, key=lambda part: part[0][axis])
    for index, (offset, size) in enumerate(ordered):
        for other in islice(ordered, index + 1, None):
            if other[0][axis] >= offset[axis] + size[axis]:
                break
            yield (offset, size), other


def _overlap(
    offset: Sequence[int], size: Sequence[int], other_offset: Sequence[int], other_size: Sequence[int]
) -> bool:
    return all(
        start < other + other_length and other < start + length
        for start, length, other, other_length in zip(offset, size, other_offset, other_size, strict=True)
    )


def _pieces_to_json(parts: Sequence[TensorShard]) -> dict[str, Any]:
    cuts = [{"offset": part.offset, "size": list(part.tensor.shape)} for part in parts]
    dtype = str(parts[0].tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": parts[0].shape, "cuts": cuts}


def _gathered(
    holders: Sequence[tuple[int, Mapping[str, Any]]], local: Sequence[TensorShard], all_ranks: Collective
) -> Tensor:
    """Return a full tensor; on the host, except on a single rank, which may return its own tensor."""
    first = holders[0][1]
    if all_ranks.num_ranks == 1 and len(local) == 1:
        return local[0].tensor.detach()
    dtype: torch.dtype = getattr(torch, first["dtype"])
    full = torch.empty(first["shape"], dtype=dtype)
    on_gpu = all_ranks.num_ranks > 1 and dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for rank, entry in holders:
        for index, cut in enumerate(entry["cuts"]):
            part = local[index].tensor.detach() if rank == all_ranks.rank else torch.empty(cut["size"], dtype=dtype)
            if all_ranks.num_ranks > 1:
                broadcast_values(part, device=device, source=rank)
            full[region(cut["offset"], cut["size"])] = part
    return full


class LazyStateDict(Mapping[str, Tensor]):
    """Tensors by name on the host; each access may read a tensor again, so callers that need several parts should keep
    it.
    """

    @abstractmethod
    def meta_of(self, name: str) -> Tensor:
        """Return a tensor on the meta device, with shape and dtype of a tensor that is not read."""

    @abstractmethod
    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor; only the pieces that contain it are read."""


def name_in(key: str) -> str:
    """Return the canonical name of the parameter or buffer of a checkpoint key.

    Example:
        >>> name_in("param/head.weight"), name_in("optimizer/exp_avg/head.weight")
        ('head.weight', 'head.weight')
    """
    kind, _, rest = key.partition("/")
    return rest.partition("/")[2] if kind == "optimizer" else rest


def meta_of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor for its shape and dtype: without its values, unless the mapping has them at hand.

    Example:
        >>> meta_of({"param/w": torch.zeros(2, 3)}, "param/w").shape
        torch.Size([2, 3])
    """
    return tensors.meta_of(name) if isinstance(tensors, LazyStateDict) else tensors[name]


def read_slice(tensors: Mapping[str, Tensor], name: str, region: tuple[slice, ...]) -> Tensor:
    """Return a part of a tensor, without reading the rest if the mapping is lazy.

    Example:
        >>> read_slice({"param/w": torch.arange(6).reshape(3, 2)}, "param/w", (slice(1, 2), slice(0, 2)))
        tensor([[2, 3]])
    """
    return tensors.region_of(name, region) if isinstance(tensors, LazyStateDict) else tensors[name][region]


def select(tensors: Mapping[str, Tensor], chooses: Callable[[str], bool]) -> Mapping[str, Tensor]:
    """Return the tensors whose names are chosen, still read lazily.

    Example:
        >>> sorted(select({"param/w": torch.zeros(2), "optimizer/step/w": torch.ones(())}, lambda n: n[0] == "p"))
        ['param/w']
    """
    return _Renamed(tensors, {name: name for name in tensors if chooses(name)})


def model_weights(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint except those of the optimizer and of callbacks, still read lazily."""
    return select(tensors, lambda key: not key.startswith(("optimizer/", "callback/")))


def averaged_weights(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the parameters and buffers of a checkpoint, those with an average replaced by their average, still read
    lazily.

    Example:
        >>> weights = averaged_weights({"param/w": torch.zeros(1), "optimizer/average/w": torch.ones(1)})
        >>> dict(weights)
        {'param/w': tensor([1.])}
    """
    averages = {name: f"optimizer/{AVERAGE}/{name_in(name)}" for name in model_weights(tensors)}
    return _Renamed(tensors, {name: key if key in tensors else name for name, key in averages.items()})


class _Renamed(LazyStateDict):
    """Tensors of a mapping by other names."""

    def __init__(self, tensors: Mapping[str, Tensor], keys: Mapping[str, str]) -> None:
        self._tensors, self._keys = tensors, keys

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._keys[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def meta_of(self, name: str) -> Tensor:
        return meta_of(self._tensors, self._keys[name])

    def region_of(self, name: str, region: tuple[slice, ...]) -> Tensor:
        return read_slice(self._tensors, self._keys[name], region)
