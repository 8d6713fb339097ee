"""Text for language models: a file by characters, and the source of Python's own library by bytes."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainkit.data.declaration import Declared, window
from trainkit.data.reading.files import digest_of, download, existing, text_of
from trainkit.data.reading.windows import Windows, split_tokens, tile
from trainkit.data.stored import Samples, Stored
from trainkit.errors import ConfigError, DataError, Problem
from trainkit.fields import a_file, above, at_least, below, maths, placement
from trainkit.files import cache_folder

SHAKESPEARE_URL: Final = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256: Final = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """The common part of these datasets: windows over one split of a sequence of tokens."""

    splits: ClassVar[tuple[str, ...]] = ("train", "val")
    _token_bytes: ClassVar[int] = 2
    """Bytes of a stored token; a text of more than 65,536 different characters has 4."""

    split: Literal["train", "val"]
    """Part of the text to use."""
    context: Annotated[int, at_least(1)] = 64
    """Number of tokens of a sample."""
    stride: Annotated[int | None, at_least(1)] = None
    """Tokens from one training sample to the next; null: `context`, so that each token is used once per epoch."""
    _windows: Windows = field(init=False, repr=False, compare=False)

    @classmethod
    def declare(cls, keys: Mapping[str, Any], split: str) -> Declared:
        """Return the samples; the length is that of the files."""
        del split
        vocab_size = keys.get("vocab_size", getattr(cls, "vocab_size", None))
        size, context = vocab_size if isinstance(vocab_size, int) else None, keys.get("context", 64)
        return Declared(draw=lambda g: window(g, context, size), stored_bytes=(context + 1) * cls._token_bytes)

    def _keep(self, tokens: NDArray[Any], *, val_share: float) -> None:
        part = split_tokens(tokens, split=self.split, val_share=val_share)
        if len(part) <= self.context:
            raise DataError(
                f"the {self.split} part has {len(part)} tokens, fewer than a sample needs "
                f"(data.context={self.context} and one more)."
            )
        if self.split == "val":
            windows = tile(part, context=self.context)
        else:
            windows = Windows(tokens=part, context=self.context, stride=self.stride or self.context)
        object.__setattr__(self, "_windows", windows)

    def __len__(self) -> int:
        """Return the number of windows in this split."""
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a window, each (context,) int64."""
        return self._windows[index]

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of many windows, each (windows, context) int64."""
        return self._windows.gather(indices)

    def as_stored(self) -> Stored:
        """Return the windows in bytes, uint16 or uint32."""
        windows = self._windows
        samples = Samples(len(self), windows.read, gather=windows.read_many)
        return Stored(samples=samples, widened=windows.widened)


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
    vocab_size: Annotated[int | None, at_least(1)] = None
    """Size of the model's vocabulary; a text with more characters is refused. null: not checked."""
    val_share: Annotated[float, above(0), below(0, 1)] = 0.1
    """Share of the characters, at the end, to validate on."""
    characters: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = text_of(self._found(), self.encoding)
        code_points, tokens = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype="<u4"), return_inverse=True)
        if self.vocab_size is not None and len(code_points) > self.vocab_size:
            raise DataError(
                f"the text has {len(code_points)} different characters, more than data.vocab_size={self.vocab_size}. "
                f"Use {len(code_points)} for it and for model.vocab_size."
            )
        object.__setattr__(self, "characters", "".join(map(chr, code_points)))
        self._keep(tokens.astype(np.uint16 if len(code_points) <= 1 << 16 else np.uint32), val_share=self.val_share)

    def _found(self) -> Path:
        if self.path is not None:
            return existing(self.path)
        cached = cache_folder() / "text" / f"{self.sha256}.txt"
        if not self.download and not cached.exists():
            rule = f"is not set. Give a text file, or data.download=true to fetch {self.url}."
            raise ConfigError([Problem(key="data.path", rule=rule)])
        if self.sha256 is None:
            rule = "is not set: a download is only accepted against its SHA-256."
            raise ConfigError([Problem(key="data.sha256", rule=rule)])
        if not self.download and digest_of(cached) == self.sha256:
            return cached
        return download(self.url, cached, sha256=self.sha256)

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
    _token_bytes: ClassVar[int] = 1

    max_bytes: Annotated[int | None, at_least(1)] = None
    """Stop after this many bytes; null reads everything, 10 to 30 MB."""
    val_share: Annotated[float, above(0), below(0, 1)] = 0.1
    """Share of the bytes, at the end, to validate on."""

    def __post_init__(self) -> None:
        self._keep(_library_bytes(self.max_bytes), val_share=self.val_share)

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
