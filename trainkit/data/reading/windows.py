"""Windows over a long sequence of tokens, the samples of a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED: Final = -100
"""The target of a padded position; `ignore_index` of the language-model objective."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Windows of `context` tokens, `stride` apart; the target of each token is the next one.

    With `tile`, the windows are adjacent and the last is padded, so that every token but the very first is predicted
    exactly once. Otherwise, only whole windows count.

    Example:
        >>> windows = Windows(tokens=np.arange(6, dtype=np.uint8), context=2, stride=1)
        >>> len(windows), windows[3]
        (4, (tensor([3, 4]), tensor([4, 5])))
        >>> tile(np.arange(6, dtype=np.uint8), context=3)[1]
        (tensor([3, 4, 0]), tensor([   4,    5, -100]))
    """

    tokens: NDArray[Any]
    """The sequence, of any unsigned integer type; may be a memory map."""
    context: int
    """Tokens of a window."""
    stride: int
    """Tokens from the start of a window to the start of the next."""
    padded: bool = False
    """Whether the last window may extend past the end."""

    def __len__(self) -> int:
        """Return the number of windows."""
        reach = len(self.tokens) - 1 + (self.stride - 1 if self.padded else -self.context)
        return max(0, reach // self.stride + (0 if self.padded else 1))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a window, each (context,) int64."""
        start = index * self.stride
        piece = self.tokens[start : start + self.context + 1].astype(np.int64)
        if len(piece) == self.context + 1:
            whole = torch.from_numpy(piece)
            return whole[:-1], whole[1:]
        inputs = torch.zeros(self.context, dtype=torch.int64)
        targets = torch.full((self.context,), IGNORED, dtype=torch.int64)
        inputs[: len(piece) - 1] = torch.from_numpy(piece[:-1])
        targets[: len(piece) - 1] = torch.from_numpy(piece[1:])
        return inputs, targets

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of many windows, each (windows, context) int64, by one indexed read."""
        starts = indices.numpy() * self.stride
        places = starts[:, None] + np.arange(self.context + 1)
        last = len(self.tokens) - 1
        if not self.padded or int(places.max(initial=0)) <= last:
            read = torch.from_numpy(self.tokens[places].astype(np.int64))
            return read[:, :-1], read[:, 1:]
        read = torch.from_numpy(self.tokens[np.minimum(places, last)].astype(np.int64))
        past = torch.from_numpy(places[:, 1:] > last)
        # the input of a position without target is padding too
        return read[:, :-1].masked_fill(past, 0), read[:, 1:].masked_fill(past, IGNORED)


def tile(tokens: NDArray[Any], *, context: int) -> Windows:
    """Return adjacent windows over a whole sequence, the last one padded."""
    return Windows(tokens=tokens, context=context, stride=context, padded=True)


def split_tokens(tokens: NDArray[Any], *, split: str, val_share: float) -> NDArray[Any]:
    """Return the first part of a sequence to train on, int(n * (1 - val_share)) tokens, or the rest to validate on."""
    border = int(len(tokens) * (1 - val_share))
    return tokens[:border] if split == "train" else tokens[border:]
