"""Token files of any size, read from disk when needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainkit.data.declaration import Declared, window
from trainkit.data.reading.files import existing
from trainkit.data.reading.windows import Windows, tile
from trainkit.data.stored import Samples, Stored
from trainkit.errors import DataError
from trainkit.fields import a_folder, at_least


@dataclass(frozen=True, kw_only=True)
class TokenMemmap:
    """A folder with `train.bin` and `val.bin`, sequences of raw little-endian token numbers, in the format of nanoGPT.

    Samples are windows `stride` apart; validation uses adjacent windows, the last one padded.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")

    split: Literal["train", "val"]
    """File to read."""
    path: Annotated[Path, a_folder]
    """The folder."""
    context: Annotated[int, at_least(1)] = 1024
    """Number of tokens of a sample."""
    stride: Annotated[int | None, at_least(1)] = None
    """Tokens from one training sample to the next; null: `context`."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Storage type of a token."""
    vocab_size: Annotated[int | None, at_least(1)] = None
    """Size of the model's vocabulary; a sample with a larger token is refused. null: not checked."""
    _windows: Windows = field(init=False, repr=False, compare=False)

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return the samples; the length is that of the files."""
        del split
        context, width = keys.get("context", 1024), np.dtype(keys.get("dtype", "uint16")).itemsize
        return Declared(draw=lambda g: window(g, context, keys.get("vocab_size")), stored_bytes=(context + 1) * width)

    def __post_init__(self) -> None:
        file = existing(existing(self.path, a_folder) / f"{self.split}.bin")
        if file.stat().st_size % np.dtype(self.dtype).itemsize or not file.stat().st_size:
            raise DataError(f"{file}: its {file.stat().st_size} bytes are not a whole number of {self.dtype} tokens.")
        tokens: Any = np.memmap(file, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")
        _refuse_other_format(file, tokens, self.dtype)
        if len(tokens) <= self.context:
            raise DataError(f"{file} has {len(tokens)} tokens, fewer than a sample of {self.context} and one more.")
        if self.split == "val":
            windows = tile(tokens, context=self.context)
        else:
            windows = Windows(tokens=tokens, context=self.context, stride=self.stride or self.context)
        object.__setattr__(self, "_windows", windows)

    def __len__(self) -> int:
        """Return the number of windows in this file."""
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a window, each (context,) int64."""
        return self._windows.sample_of(self._read(index))

    def as_stored(self) -> Stored:
        """Return the windows in uint16 or uint32."""
        return Stored(samples=Samples(len(self), self._read), widened=self._windows.widened)

    def _read(self, index: int) -> tuple[Any, ...]:
        found = self._windows.read(index)
        if self.vocab_size is not None and (largest := int(found[0].numpy().max())) >= self.vocab_size:
            raise DataError(f"sample {index} holds token {largest}, but data.vocab_size={self.vocab_size}.")
        return found


_LLM_C: Final = (20240520, 20240801)
"""First number of the token files of llm.c and its relatives."""
_LOOKED_AT: Final = 1 << 16
"""Tokens whose halves are compared."""
_FEW: Final = 32


def _refuse_other_format(file: Path, tokens: NDArray[Any], dtype: str) -> None:
    """Refuse a file that begins with a header, or holds wider tokens: their upper halves look like small tokens.

    Raises:
        DataError: it is such a file; names the remedy.
    """
    head = tokens[: 8 // tokens.itemsize].tobytes()
    if head.startswith(b"\x93NUMPY"):
        raise DataError(f"{file} was written by numpy.save, with a header. Write its array by array.tofile(FILE).")
    if int.from_bytes(head[:4], "little") in _LLM_C:
        raise DataError(f"{file} begins with the 1,024 bytes of the header of llm.c. Write it without them.")
    halves = np.asarray(tokens[: min(len(tokens), _LOOKED_AT) // 2 * 2]).reshape(-1, 2)
    low, high = (int(column.max()) for column in halves.T) if len(halves) >= _FEW else (0, 0)
    # the upper halves are 0 below 65,536 tokens, and at most 3 in any vocabulary of today
    if high == 0 < low or (high <= 3 and low > 255):
        remedy = "data.dtype=uint32" if dtype == "uint16" else "uint32 for the tokens"
        raise DataError(
            f"{file}: every second {dtype} is at most {high}, as of tokens of twice the bytes. Use {remedy}."
        )
