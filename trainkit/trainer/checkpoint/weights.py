"""A hash of all weights: equal hashes mean equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.tensors.sharded import ShardedState, iter_gather_full
from trainkit.trainer.checkpoint.dtypes import bytes_of


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over parameters and buffers: little-endian bytes, sorted by canonical names.

    Args:
        tensors: by their names in a checkpoint; only `param/` and `buffer/` count, sorted by the rest of the name.

    Example:
        >>> import torch
        >>> weights_sha256({"param/w": torch.zeros(2), "optimizer/momentum/w": torch.ones(2)})[:8]
        'af5570f5'
    """
    digest = hashlib.sha256()
    for name in sorted(filter(_counts, tensors), key=_canonical):
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()


def sha256_of_pieces(pieces: ShardedState, all_ranks: Collective) -> str:
    """Return the hash of a sharded state; collective. Memory: one full tensor on each rank."""
    weights = {name: parts for name, parts in pieces.items() if _counts(name)}
    digest = hashlib.sha256()
    for _, tensor in iter_gather_full(weights, all_ranks, order=_canonical):
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _counts(name: str) -> bool:
    return name.startswith(("param/", "buffer/"))


def _canonical(name: str) -> tuple[str, str]:
    """Return the sort key of a name: the part after the kind, then the kind."""
    kind, _, rest = name.partition("/")
    return rest, kind
