"""One number for all weights: equal numbers, equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from trainkit.engine.checkpoint.dtypes import bytes_of

__all__ = ["weights_sha256"]


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
    split = (name.partition("/") for name in tensors)
    named = sorted((name, kind) for kind, _, name in split if kind in ("param", "buffer"))
    digest = hashlib.sha256()
    for name, kind in named:
        digest.update(bytes_of(tensors[f"{kind}/{name}"]))
    return digest.hexdigest()
