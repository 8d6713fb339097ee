"""The state of a model whose tensors lie in pieces on several ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from trainkit.objectives.base import Collective

__all__ = ["Piece", "Pieces", "assembled"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A rectangular part of a tensor, as one rank holds it.

    Example:
        >>> Piece(tensor=torch.ones(2, 3), offset=(2, 0), shape=(4, 3)).region
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
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.tensor.shape, strict=True))


Pieces = Mapping[str, Sequence[Piece]]
"""Names of a checkpoint -> what a rank holds of them: no pieces, one, or several that do not touch."""


def assembled(pieces: Pieces, everyone: Collective) -> dict[str, Tensor]:
    """The whole tensors, on every rank; collective. All of it is in memory at once: for models that fit.

    Args:
        pieces: what this rank holds; each part of a tensor is with one rank alone.
        everyone: all processes of the run.
    """
    if everyone.num_ranks == 1:
        return {name: _joined(parts) for name, parts in sorted(pieces.items())}
    told = [_told(pieces, name) for name in sorted(pieces)]
    heard = [json.loads(bytes(part.tolist())) for part in everyone.gather(_as_bytes(told))]
    found: dict[str, Tensor] = {}
    for name in sorted({name for rank in heard for name, *_ in rank}):
        own = [part.tensor.detach().reshape(-1) for part in pieces.get(name, ())]
        kind = next(getattr(torch, dtype) for rank in heard for other, dtype, *_ in rank if other == name)
        device = own[0].device if own else torch.device("cpu")
        rows = everyone.gather(torch.cat(own) if own else torch.empty(0, dtype=kind, device=device))
        shape = next(shape for rank in heard for other, _, shape, _ in rank if other == name)
        whole = torch.empty(shape, dtype=kind, device=device)
        for row, rank in zip(rows, heard, strict=True):
            start = 0
            for offset, size in next((cuts for other, _, _, cuts in rank if other == name), ()):
                count = torch.Size(size).numel()
                region = tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))
                whole[region] = row[start : start + count].reshape(size).to(device)
                start += count
        found[name] = whole
    return found


def _told(pieces: Pieces, name: str) -> list[object]:
    parts = pieces[name]
    dtype = str(parts[0].tensor.dtype).removeprefix("torch.")
    return [name, dtype, parts[0].shape, [[part.offset, list(part.tensor.shape)] for part in parts]]


def _as_bytes(content: object) -> Tensor:
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def _joined(parts: Sequence[Piece]) -> Tensor:
    if len(parts) == 1:
        return parts[0].tensor.detach()
    whole = parts[0].tensor.new_empty(parts[0].shape)
    for part in parts:
        whole[part.region] = part.tensor.detach()
    return whole
