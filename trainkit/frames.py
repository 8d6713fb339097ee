"""Show the lines of the user's own code in the traceback of an error, without those of libraries."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LIBRARIES: Final = re.compile(
    r"/(?:site|dist)-packages/(?:hydra|numpy|omegaconf|timm|torch|torchmetrics|torchvision|trainkit|transformers)/"
)
_OWN: Final = str(Path(__file__).parent) + os.sep
_STANDARD: Final = str(Path(os.__file__).parent) + os.sep
_MOST: Final = 3
_LONGEST: Final = 300


def with_frames(text: str, error: BaseException) -> str:
    r"""Append the innermost frames of the user's code to a text, one per line.

    Example:
        >>> def mine():
        ...     raise ValueError("no")
        >>> try:
        ...     mine()
        ... except ValueError as error:
        ...     print(with_frames("it fails.", error).splitlines()[0])
        it fails.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    lines = [f"    {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-_MOST:]]
    return "\n".join([text, *lines])


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause or the error it was raised after, and so on.

    Example:
        >>> error = ValueError("no")
        >>> error.__context__ = KeyError("x")
        >>> [type(one).__name__ for one in chain_of(error)]
        ['ValueError', 'KeyError']
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message that is not blank; without one, the name of its class.

    Example:
        >>> first_line(ValueError(" two\nlines")), first_line(MemoryError())
        ('two', 'MemoryError')
    """
    return next((line.strip() for line in text_of(error).splitlines() if line.strip()), type(error).__name__)


def text_of(error: BaseException) -> str:
    """Return the message of an error; an empty text for a user's exception whose `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - `__str__` may raise anything
        return ""


def named_first_line(error: BaseException) -> str:
    """Return the class and the first line of an error, truncated to 300 characters.

    Example:
        >>> named_first_line(KeyError("label")), named_first_line(MemoryError())
        ("KeyError: 'label'", 'MemoryError')
    """
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line[:_LONGEST]}"


def is_library(file: str) -> bool:
    """Return whether a source file belongs to trainkit, to Python, or to a known library; others are the user's own.

    Example:
        >>> is_library("/env/lib/python3.11/site-packages/torch/nn/linear.py"), is_library("/home/ada/shop/net.py")
        (True, False)
    """
    if file.startswith((_OWN, "<frozen")) or _LIBRARIES.search(file):
        return True
    return file.startswith(_STANDARD) and "-packages/" not in file
