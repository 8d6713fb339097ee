"""One number for all weights: equal numbers, equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.tensors.sharded import ShardedState, iter_gather_full
from trainkit.trainer.checkpoint.dtypes import bytes_of

__all__ = ["sha256_of_pieces", "weights_sha256"]


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 over parameters and buffers: little-endian bytes, in the order of their sorted canonical names.

    Args:
        tensors: by the names of a checkpoint; `param/` and `buffer/` count, and are sorted by what follows; the rest
            (optimizer state) does not.

    Example:
        >>> import torch
        >>> weights_sha256({"param/w": torch.zeros(2), "optimizer/momentum/w": torch.ones(2)})[:8]
        'af5570f5'
    """
    digest = hashlib.sha256()
    for name in sorted(filter(_counts, tensors), key=_canonical):
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()


def sha256_of_pieces(pieces: ShardedState, everyone: Collective) -> str:
    """The same of tensors that lie in pieces on several ranks; collective. Memory: one whole tensor on each rank.

    Args:
        pieces: what this rank holds, by the names of a checkpoint.
        everyone: all processes of the run.
    """
    weights = {name: parts for name, parts in pieces.items() if _counts(name)}
    digest = hashlib.sha256()
    for _, tensor in iter_gather_full(weights, everyone, order=_canonical):
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _counts(name: str) -> bool:
    return name.startswith(("param/", "buffer/"))


def _canonical(name: str) -> tuple[str, str]:
    """Sorted by what follows the kind, then by the kind."""
    kind, _, rest = name.partition("/")
    return rest, kind
