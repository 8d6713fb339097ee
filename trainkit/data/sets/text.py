"""Text and tokens for language models: windows over a file or over Python's own library, and lines to predict on."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.data.declaration import Declared, window, with_defaults
from trainkit.data.reading.files import check, existing, fetch, text_of
from trainkit.data.stored import Samples, Stored
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.fields import a_file, a_folder, above, at_least, below, maths, placement, unit
from trainkit.files import cache_folder
from trainkit.objectives.fields import IGNORED

SHAKESPEARE_URL: Final = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256: Final = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclass(frozen=True, kw_only=True)
class _Windowed:
    """The common part of these datasets: windows of `context` tokens over one split of a sequence of tokens.

    The target of each token is the next one. Windows to train on are whole ones, `stride` apart. Those to validate on
    are adjacent and the last one is padded, so that every token but the very first is predicted exactly once.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "val")
    _stored: ClassVar[str] = "uint16"
    """Type of a stored token, if no key `dtype` gives it; a text of more than 65,536 characters has uint32."""

    split: Literal["train", "val"]
    """Part of the tokens to use."""
    context: Annotated[int, at_least(1), unit("tokens")] = 64
    """Number of tokens of a sample."""
    stride: Annotated[int | None, at_least(1), unit("tokens")] = None
    """Tokens from one training sample to the next; null: `context`, so that each token is used once per epoch."""
    _tokens: NDArray[Any] = field(init=False, repr=False, compare=False)
    """The sequence, of any unsigned integer type; may be a memory map."""

    @classmethod
    def declare(cls, keys: Mapping[str, Any], _split: str) -> Declared:
        """Return the samples; the length is that of the files."""
        settings = with_defaults(cls, keys)
        context, size = settings["context"], settings.get("vocab_size", getattr(cls, "vocab_size", None))
        width = np.dtype(settings.get("dtype", cls._stored)).itemsize
        return Declared(draw=lambda g: window(g, context, size), stored_bytes=(context + 1) * width)

    def _keep(self, tokens: NDArray[Any], where: str) -> None:
        """Keep the windows over the tokens of the split; `where` names them in messages."""
        if len(tokens) <= self.context:
            raise DataError(
                f"{where} has {len(tokens)} tokens, fewer than a sample needs "
                f"(data.context={self.context} and one more)."
            )
        vars(self)["_tokens"] = tokens

    @property
    def _padded(self) -> bool:
        """Whether the last window may extend past the end."""
        return self.split == "val"

    @property
    def _distance(self) -> int:
        """Tokens from the start of a window to the start of the next."""
        return self.context if self._padded or self.stride is None else self.stride

    def __len__(self) -> int:
        """Return the number of windows in this split."""
        reach = len(self._tokens) - 1 + (self.context - 1 if self._padded else self._distance - self.context)
        return max(0, reach // self._distance)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a window, each (context,) int64."""
        inputs, targets = self._widened(tuple(torch.as_tensor(part).unsqueeze(0) for part in self._read(index)))
        return inputs[0], targets[0]

    def as_stored(self) -> Stored:
        """Return the windows in bytes, uint16 or uint32."""
        return Stored(samples=Samples(len(self), self._read), widened=self._widened)

    def _read(self, index: int) -> tuple[Any, ...]:
        """Return a window as it is stored: (context + 1,) tokens, and with padding the number of targets, int32."""
        start = index * self._distance
        piece = self._tokens[start : start + self.context + 1].astype(self._dtype)
        if not self._padded:
            return (torch.from_numpy(piece),)
        targets = np.int32(len(piece) - 1)
        return torch.from_numpy(np.pad(piece, (0, self.context + 1 - len(piece)))), targets

    def _read_many(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return many windows as they are stored, by one indexed read: as `_read`, with an additional first dim."""
        starts = indices.numpy() * self._distance
        positions, last = starts[:, None] + np.arange(self.context + 1), len(self._tokens) - 1
        read = self._tokens[np.minimum(positions, last) if self._padded else positions]
        tokens = torch.from_numpy(read.astype(self._dtype, copy=False))
        if not self._padded:
            return (tokens,)
        return tokens, torch.from_numpy(np.minimum(last - starts, self.context).astype(np.int32))

    def _widened(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
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
        return self._tokens.dtype.newbyteorder("=")


@dataclass(frozen=True, kw_only=True)
class _Tokens(_Windowed):
    """The common part of texts in memory, of which the end is held out to validate."""

    val_share: Annotated[float, above(0), below(0, 1), unit("a share, 0 to 1")] = 0.1
    """Share of the tokens, at the end, to validate on."""

    def _split(self, tokens: NDArray[Any]) -> None:
        border = int(len(tokens) * (1 - self.val_share))
        self._keep(tokens[:border] if self.split == "train" else tokens[border:], f"the {self.split} part")

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of many windows, each (windows, context) int64."""
        return self._widened(self._read_many(indices))

    def as_stored(self) -> Stored:
        """Return the windows in bytes, uint16 or uint32."""
        return Stored(samples=Samples(len(self), self._read, gather=self._read_many), widened=self._widened)


@dataclass(frozen=True, kw_only=True)
class TextFile(_Tokens):
    """A text, character by character; its vocabulary is its own sorted characters.

    The first nine tenths are the training split. Validation uses the rest in adjacent windows, the last one padded:
    every character is predicted once.
    """

    path: Annotated[Path | None, a_file] = None
    """The file; null: the downloaded one."""
    encoding: Annotated[str, maths(neutral="utf-8")] = "utf-8"
    """Encoding of the file, as Python names it; a byte order mark at its beginning is no character of the text."""
    download: Annotated[bool, placement] = False
    """Download the text of `url` into the cache folder if it is missing; otherwise nothing is downloaded."""
    url: Annotated[str, placement] = SHAKESPEARE_URL
    """The address of the download; by default Shakespeare, as in char-rnn and nanoGPT."""
    sha256: str | None = SHAKESPEARE_SHA256
    """SHA-256 of the downloaded file; checked at each download, and before use if no `path` is given."""
    vocab_size: Annotated[int | None, at_least(1), unit("tokens")] = None
    """Size of the model's vocabulary; a text with more characters is refused. null: not checked."""
    characters: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = text_of(self._file(), self.encoding)
        code_points, tokens = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True)
        if self.vocab_size is not None and len(code_points) > self.vocab_size:
            raise DataError(
                f"the text has {len(code_points)} different characters, more than data.vocab_size={self.vocab_size}. "
                f"Use {len(code_points)} for it and for model.vocab_size."
            )
        vars(self)["characters"] = "".join(map(chr, code_points))
        self._split(tokens.astype(np.uint16 if len(code_points) <= 1 << 16 else np.uint32))

    def _file(self) -> Path:
        if self.path is not None:
            return existing(self.path)
        cached = cache_folder() / "text" / f"{self.sha256}.txt"
        if not self.download and not cached.exists():
            rule = f"is not set. Give a text file, or data.download=true to fetch {self.url}."
            raise ConfigError([Problem(key="data.path", rule=rule)])
        if self.sha256 is None:
            rule = "is not set: a download is only accepted against its SHA-256."
            raise ConfigError([Problem(key="data.sha256", rule=rule)])
        if cached.exists():
            check(cached, self.sha256, origin=cached)
        else:
            fetch(self.url, cached, accept=partial(check, sha256=self.sha256, origin=self.url))
        return cached

    def encode(self, text: str) -> list[int]:
        """Return the token numbers of a text; characters outside the vocabulary are dropped."""
        number = {character: index for index, character in enumerate(self.characters)}
        return [number[character] for character in text if character in number]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token numbers."""
        return "".join(self.characters[token] for token in tokens)

    def token_bytes(self) -> list[int]:
        """Return the bytes of each token in UTF-8."""
        return [len(character.encode()) for character in self.characters]


@dataclass(frozen=True, kw_only=True)
class PythonSource(_Tokens):
    """The standard library of the running Python as bytes: a text that every machine with Python has.

    It holds the `.py` files in sorted order, without installed packages; 256 tokens. Another Python version is another
    text.

    Example:
        >>> sample, targets = PythonSource(split="val", context=16, max_bytes=100_000)[0]
        >>> sample.shape, bool((sample[1:] == targets[:-1]).all())
        (torch.Size([16]), True)
    """

    vocab_size: ClassVar[int] = 256
    _stored: ClassVar[str] = "uint8"

    max_bytes: Annotated[int | None, at_least(1), unit("bytes")] = None
    """Stop after this many bytes; null reads everything, 10 to 30 MB."""

    def __post_init__(self) -> None:
        self._split(_library_bytes(self.max_bytes))

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """Return the text of bytes, with replacement characters where they are not UTF-8."""
        return bytes(tokens).decode(errors="replace")

    def token_bytes(self) -> list[int]:
        """Return 1 for each token."""
        return [1] * self.vocab_size


def _library_bytes(max_bytes: int | None) -> NDArray[np.uint8]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, inner, names in os.walk(root):
        # Skip them before entering: installed packages are often larger than the library.
        inner[:] = [name for name in inner if name not in {"site-packages", "dist-packages", "__pycache__"}]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"there are no .py files in {root}: this Python has its library in another form.")
    pieces, total = [], 0
    # Sort by the name relative to the root, which is the same on every machine.
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        pieces.append(file.read_bytes())
        total += len(pieces[-1])
        if max_bytes is not None and total >= max_bytes:
            break
    return np.frombuffer(b"".join(pieces)[:max_bytes], dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class TokenMemmap(_Windowed):
    """A folder with `train.bin` and `val.bin`, sequences of raw little-endian token numbers, in the format of nanoGPT.

    Samples are windows `stride` apart; validation uses adjacent windows, the last one padded.
    """

    path: Annotated[Path, a_folder]
    """The folder."""
    context: Annotated[int, at_least(1), unit("tokens")] = 1024
    """Number of tokens of a sample."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Storage type of a token."""
    vocab_size: Annotated[int | None, at_least(1), unit("tokens")] = None
    """Size of the model's vocabulary; a sample with a larger token is refused. null: not checked."""

    def __post_init__(self) -> None:
        file = existing(existing(self.path, a_folder) / f"{self.split}.bin")
        if file.stat().st_size % np.dtype(self.dtype).itemsize or not file.stat().st_size:
            raise DataError(f"{file}: its {file.stat().st_size} bytes are not a whole number of {self.dtype} tokens.")
        tokens: Any = np.memmap(file, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")
        _refuse_other_format(file, tokens, self.dtype)
        self._keep(tokens, str(file))

    def _read(self, index: int) -> tuple[Any, ...]:
        sample = super()._read(index)
        if self.vocab_size is not None and (largest := int(sample[0].numpy().max())) >= self.vocab_size:
            raise DataError(f"sample {index} holds token {largest}, but data.vocab_size={self.vocab_size}.")
        return sample


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


@dataclass(frozen=True, kw_only=True)
class TextLines:
    """The lines of a text as tokens, padded at the end with 0 to one length; the id of a line is its number, from 1."""

    splits: ClassVar[tuple[str, ...]] = ("all",)

    path: Annotated[Path, placement, a_file]
    """The file; a line ends with a line feed, or with a carriage return and a line feed."""
    context: Annotated[int, at_least(1), unit("tokens")] = 64
    """Tokens of a sample; a longer line is refused."""
    encoding: Annotated[str, maths(neutral="utf-8")] = "utf-8"
    """Encoding of the files, as Python names it."""
    reference: Annotated[Path | None, placement, a_file] = None
    """The text that a model of `text_file` was trained on: its characters are the tokens. null: its bytes are."""
    ids: range = field(init=False, repr=False, compare=False)
    _rows: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = text_of(self.path, self.encoding).removesuffix("\n")
        lines = [line.removesuffix("\r") for line in text.split("\n")] if text else []
        numbers: dict[str, int] | None = None
        if self.reference is not None:
            characters = sorted(set(text_of(self.reference, self.encoding, key="data.reference")))
            numbers = {character: number for number, character in enumerate(characters)}
        rows = np.zeros((len(lines), self.context), dtype=np.uint8 if numbers is None else np.int32)
        for index, line in enumerate(lines):
            try:
                tokens = list(line.encode()) if numbers is None else [numbers[character] for character in line]
            except KeyError as error:
                rule = f"has the character {error}, which {self.reference} does not have."
                raise DataError(f"line {index + 1} of {self.path} {rule}") from None
            if len(tokens) > self.context:
                excess = f"{len(tokens)} tokens, more than data.context={self.context}"
                raise DataError(f"line {index + 1} of {self.path} has {excess}. Cut it, or use a larger one.")
            rows[index, : len(tokens)] = tokens
        vars(self).update(_rows=torch.from_numpy(rows), ids=range(1, len(lines) + 1))

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        """Return the tokens of a line, (context,) int64."""
        return self._rows[index].to(torch.int64)

    def gather(self, indices: Tensor) -> Tensor:
        """Return the tokens of many lines, (lines, context) int64."""
        return self._rows[indices].to(torch.int64)

    def as_stored(self) -> Stored:
        """Return the tokens in bytes, or in int32 for characters."""
        rows = self._rows
        samples = Samples(len(rows), rows.__getitem__, gather=rows.__getitem__)
        return Stored(samples=samples, widened=lambda batch: batch.to(torch.int64))
