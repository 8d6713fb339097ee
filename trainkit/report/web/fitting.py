"""Fit a page into a number of bytes: reduce the points of curves, then leave out parts, which the page names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainkit.report.web.page import make_page, to_json


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """Resolution of each curve."""

    points: int
    """Largest number of points of a curve."""
    is_packed: bool = True
    """Whether the numbers are packed (`trainkit.report.web.packing`)."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A page without its curves."""

    data: Mapping[str, Any]
    """Content of the page; any text in it is shown as text."""
    curves: Callable[[Resolution], Iterable[str]]
    """Returns the curves as pieces of a JSON list, without its brackets."""


PLAIN: Final = Resolution(points=2_000, is_packed=False)
"""The first resolution: every point of a curve, as readable numbers."""


def fit(
    drafts: Sequence[Callable[[], Draft]], *, scripts: Sequence[str], limit: int, points: Sequence[int], few: int
) -> str:
    """Return the first page that fits into a number of bytes; if none fits, the smallest.

    Args:
        drafts: each makes a draft that leaves out more than the draft before it.
        scripts: as in `make_page`.
        limit: largest number of bytes.
        points: numbers of points a curve that are tried with each draft, largest first.
        few: with fewer points only the last draft is tried: parts are left out before curves become coarse.
    """
    resolutions = [PLAIN, *(Resolution(points=most) for most in points)]
    fine = [resolution for resolution in resolutions if resolution.points >= few]
    for number, make in enumerate(drafts, start=1):
        draft = make()
        room = limit - len(_page(draft, "", PLAIN, scripts).encode())
        for resolution in fine if number < len(drafts) else resolutions:
            curves = _within(room, draft.curves(resolution))
            if curves is not None:
                return _page(draft, curves, resolution, scripts)
    return _page(draft, "".join(draft.curves(resolutions[-1])), resolutions[-1], scripts)


def _within(room: int, pieces: Iterable[str]) -> str | None:
    """Return the pieces as one text; None, without making the rest, if they exceed a number of bytes."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece.encode())
        if size > room:
            return None
        kept.append(piece)
    return "".join(kept) if room >= 0 else None


def _page(draft: Draft, curves: str, resolution: Resolution, scripts: Sequence[str]) -> str:
    content = to_json({**draft.data, "points": resolution.points})
    return make_page(draft.data["title"], f'{content[:-1]},"curves":[{curves}]}}', scripts=scripts)
