"""Shorten long error texts to one screen: in the middle, so that the message and the user's own lines stay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from trainkit.errors import is_library

_FRAME: Final = re.compile(r'\s+File "(.+)", line \d+')
_LAST_FRAMES: Final = 3
"""Number of innermost frames that always stay."""


def one_screen(text: str, limit: int) -> str:
    r"""Shorten a text to `limit` lines: a traceback loses the frames of libraries first, any other text its middle.

    Args:
        text: the message of an error; it may hold a traceback.
        limit: lines to keep, 10 or more.

    Example:
        >>> print(one_screen("\n".join(f"line {number}" for number in range(20)), 10).replace("line ", ""))
        0
        1
        2
        3
          ... 11 more lines ...
        15
        16
        17
        18
        19
    """
    lines = text.splitlines()
    if len(lines) <= limit:
        return text
    frames = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return "\n".join(_middle_cut(lines, limit))
    end = next(
        (number for number in range(frames[-1] + 1, len(lines)) if not lines[number].startswith(" ")), len(lines)
    )
    message = _middle_cut(lines[end:], limit // 2)
    return "\n".join([*_fewer_frames(lines[:end], frames, limit - len(message)), *message])


def _fewer_frames(lines: Sequence[str], frames: Sequence[int], limit: int) -> list[str]:
    """Keep the text before the first frame, the innermost frames, and those of the user."""
    ends = [*frames[1:], len(lines)]
    head = list(lines[: frames[0]])
    kept = set(range(len(frames)))
    size = len(lines)
    for place in _in_order_of_cutting(lines, frames):
        if size + 1 <= limit:
            break
        kept.discard(place)
        size -= ends[place] - frames[place]
    if len(kept) == len(frames):
        return list(lines)
    found, skipped = head, 0
    for place, (start, stop) in enumerate(zip(frames, ends, strict=True)):
        if place in kept:
            found += _skipped(skipped)
            found += lines[start:stop]
        skipped = 0 if place in kept else skipped + 1
    return _middle_cut(found, limit)


def _in_order_of_cutting(lines: Sequence[str], frames: Sequence[int]) -> Iterable[int]:
    """Return the indices of removable frames: those of libraries from the outermost on, then the others; never the
    innermost.
    """
    inner = range(len(frames) - _LAST_FRAMES)
    files = [match[1] for line in lines if (match := _FRAME.match(line))]
    of_libraries = [place for place in inner if is_library(files[place])]
    return [*of_libraries, *(place for place in inner if place not in of_libraries)]


def _skipped(count: int) -> list[str]:
    return [f"  ... {count} frame{'' if count == 1 else 's'} ..."] if count else []


def _middle_cut(lines: Sequence[str], limit: int) -> list[str]:
    if len(lines) <= limit:
        return list(lines)
    first = (limit - 1) // 2
    last = limit - 1 - first
    return [*lines[:first], f"  ... {len(lines) - first - last} more lines ...", *lines[len(lines) - last :]]
