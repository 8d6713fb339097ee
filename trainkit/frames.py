"""Show the lines of the user's own code that an error came through, without those of libraries."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Final

_LIBRARIES: Final = tuple(
    f"/site-packages/{name}/"
    for name in ("hydra", "numpy", "omegaconf", "timm", "torch", "torchmetrics", "torchvision", "transformers")
)
_OWN: Final = str(Path(__file__).parent)
_STANDARD: Final = sysconfig.get_paths()["stdlib"]
_MOST: Final = 3


def with_frames(text: str, error: BaseException) -> str:
    r"""Append the innermost frames of the user's code to a text, one a line.

    Example:
        >>> def mine():
        ...     raise ValueError("no")
        >>> try:
        ...     mine()
        ... except ValueError as error:
        ...     print(with_frames("it fails.", error).splitlines()[0])
        it fails.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    lines = [f"    {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-_MOST:]]
    return "\n".join([text, *lines])


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an error, at most 300 characters.

    Example:
        >>> first_line(KeyError("label"))
        "KeyError: 'label'"
    """
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line[:300]}" if line else type(error).__name__


def _is_own(file: str) -> bool:
    if file.startswith((_OWN, "<frozen")) or any(name in file for name in _LIBRARIES):
        return False
    return not file.startswith(_STANDARD) or "/site-packages/" in file
