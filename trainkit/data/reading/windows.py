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
        return self.sample_of(self.read(index))

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of many windows, each (windows, context) int64, by one indexed read."""
        return self.widened(self.read_many(indices))

    def read(self, index: int) -> tuple[Any, ...]:
        """Return a window as it is stored: (context + 1,) tokens, and with padding the number of targets, int32."""
        start = index * self.stride
        piece = self.tokens[start : start + self.context + 1].astype(self._dtype)
        if not self.padded:
            return (torch.from_numpy(piece),)
        targets = np.int32(len(piece) - 1)
        return torch.from_numpy(np.pad(piece, (0, self.context + 1 - len(piece)))), targets

    def read_many(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return many windows as they are stored, by one indexed read: as `read`, with an additional first dim."""
        starts = indices.numpy() * self.stride
        places, last = starts[:, None] + np.arange(self.context + 1), len(self.tokens) - 1
        read = self.tokens[np.minimum(places, last) if self.padded else places]
        tokens = torch.from_numpy(read.astype(self._dtype, copy=False))
        if not self.padded:
            return (tokens,)
        return tokens, torch.from_numpy(np.minimum(last - starts, self.context).astype(np.int32))

    def sample_of(self, stored: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a window as it is stored, each (context,) int64."""
        inputs, targets = self.widened(tuple(torch.as_tensor(part).unsqueeze(0) for part in stored))
        return inputs[0], targets[0]

    def widened(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of windows as they are stored, each (windows, context) int64, on their device."""
        inputs, targets = (
            part.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
            for part in (batch[0][:, :-1], batch[0][:, 1:])
        )
        if len(batch) == 1:
            return inputs, targets
        # The input of a position without target is padding too.
        past = torch.arange(self.context, device=inputs.device) >= batch[1].unsqueeze(1)
        return inputs.masked_fill_(past, 0), targets.masked_fill_(past, IGNORED)

    @property
    def _dtype(self) -> np.dtype[Any]:
        """The type of a token in the byte order of this machine, which torch requires."""
        return self.tokens.dtype.newbyteorder("=")


def tile(tokens: NDArray[Any], *, context: int) -> Windows:
    """Return adjacent windows over a whole sequence, the last one padded."""
    return Windows(tokens=tokens, context=context, stride=context, padded=True)


def split_tokens(tokens: NDArray[Any], *, split: str, val_share: float) -> NDArray[Any]:
    """Return the first part of a sequence to train on, int(n * (1 - val_share)) tokens, or the rest to validate on."""
    border = int(len(tokens) * (1 - val_share))
    return tokens[:border] if split == "train" else tokens[border:]
