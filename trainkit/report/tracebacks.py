"""Shorten long error texts to one screen: in the middle, so that the message and the user's own lines stay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Final

from trainkit.errors import is_library

_FRAME: Final = re.compile(r'\s+File "(.+)", line \d+.*')
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
    starts = [number for number, line in enumerate(lines) if _FRAME.match(line)]
    if len(lines) <= limit:
        return text
    if not starts:
        return "\n".join(_middle_cut(lines, limit))
    end = next(
        (number for number in range(starts[-1] + 1, len(lines)) if not lines[number].startswith(" ")), len(lines)
    )
    message = _middle_cut(lines[end:], limit // 2)
    frames, room = [lines[start:stop] for start, stop in pairwise([*starts, end])], limit - len(message)
    of_libraries = [is_library(_FRAME.sub(r"\1", frame[0])) for frame in frames]
    # Frames of libraries go first, from the outermost on, then the others; the innermost never.
    for index in sorted(range(len(frames) - _LAST_FRAMES), key=lambda index: not of_libraries[index]):
        if starts[0] + sum(map(len, frames)) + 1 <= room:
            break
        frames[index] = []
    result = lines[: starts[0]]
    for is_kept, group in groupby(frames, key=bool):
        shown = [*group]
        cut = [f"  ... {len(shown)} frame{'' if len(shown) == 1 else 's'} ..."]
        result += [line for frame in shown for line in frame] if is_kept else cut
    return "\n".join([*(result if all(frames) else _middle_cut(result, room)), *message])


def _middle_cut(lines: Sequence[str], limit: int) -> list[str]:
    if len(lines) <= limit:
        return list(lines)
    first = (limit - 1) // 2
    last = limit - 1 - first
    return [*lines[:first], f"  ... {len(lines) - first - last} more lines ...", *lines[len(lines) - last :]]
