"""Assemble a page: one HTML file with style, scripts and data inside, which loads nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

MARK: Final = b"<!doctype html><!-- trainkit report -->"
"""The first bytes of every page: a file that lacks them was not written by trainkit."""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Policy that makes the browser load nothing, whatever the page contains."""
_LONGEST_TITLE: Final = 200


def make_page(title: str, content: str, *, scripts: Sequence[str], refresh_s: int | None = None) -> str:
    """Return a page.

    Args:
        title: the title of the window.
        content: the data for the scripts, from `to_json`; any text in it is shown as text.
        scripts: the names of the scripts, in the order of their execution; `uPlot.iife.min.js` comes before them.
        refresh_s: seconds after which a browser loads the page again; None: never.
    """
    shown = html.escape(printable(title, _LONGEST_TITLE))
    code = "\n".join(_static(name) for name in ("uPlot.iife.min.js", *scripts))
    return (
        f'{MARK.decode()}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{'' if refresh_s is None else f'<meta http-equiv=refresh content={refresh_s}>'}"
        f"<title>{shown}</title><style>{_static('uPlot.min.css')}\n{_static('page.css')}</style></head>\n"
        f'<body><main id="page"><noscript>This page shows its figures by JavaScript.</noscript></main>\n'
        f'<script type="application/json" id="data">{content}</script>\n'
        f"<script>{code}</script></body></html>\n"
    )


@lru_cache(maxsize=16)
def _static(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")


def to_json(data: Any) -> str:
    r"""Return JSON that an HTML parser cannot interpret as markup: `<` is escaped, and so are the line separators of
    JavaScript.

    Example:
        >>> to_json({"name": "</script>"})
        '{"name":"\\u003c/script>"}'
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def printable(text: str, most: int = 400) -> str:
    r"""Return text without control characters, shortened to `most` characters, with its original length.

    Example:
        >>> printable("a" * 9, 4), printable("a\x1b[31m")
        ('aaaa... (9 characters)', 'a?[31m')
    """
    kept = text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
    if kept.isprintable():
        return kept
    return "".join(one if one.isprintable() or one == "\n" or _is_bidi(one) else "?" for one in kept)


def _is_bidi(character: str) -> bool:
    """Return whether a character changes the direction of text."""
    return "\u200e" <= character <= "\u200f" or "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
