"""Assemble a page: one HTML file with style, scripts and data inside, which loads nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from trainkit.redaction import mask

MARK: Final = b"<!doctype html><!-- trainkit report -->"
"""The first bytes of every page: a file that lacks them was not written by trainkit."""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Policy that makes the browser load nothing, whatever the page contains."""
_LONGEST: Final = 2_000
"""Largest number of characters of a text."""
_PICTURE: Final = "data:image/png;base64,"


def make_page(data: Mapping[str, Any], *, scripts: Sequence[str], refresh_s: int | None = None) -> str:
    """Return a page.

    Args:
        data: the data for the scripts, as `cleaned` returns it; `title` is that of the window.
        scripts: the names of the scripts, in the order of their execution; `uPlot.iife.min.js` comes before them.
        refresh_s: seconds after which a browser loads the page again; None: never.
    """
    code = "\n".join(_static(name) for name in ("uPlot.iife.min.js", *scripts))
    return (
        f'{MARK.decode()}\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"{'' if refresh_s is None else f'<meta http-equiv=refresh content={refresh_s}>'}"
        f"<title>{html.escape(data['title'])}</title>"
        f"<style>{_static('uPlot.min.css')}\n{_static('page.css')}</style></head>\n"
        f'<body><main id="page"><noscript>This page shows its figures by JavaScript.</noscript></main>\n'
        f'<script type="application/json" id="data">{to_json(data)}</script>\n'
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


def cleaned(data: Any, most: int = _LONGEST) -> Any:
    r"""Return data with all texts as a page shows them: without secrets and control characters, and shortened to `most`
    characters, with the original length.

    Example:
        >>> cleaned({"a\x1b[31m": ["a" * 9, 1.5]}, 4)
        {'a?[3... (6 characters)': ['aaaa... (9 characters)', 1.5]}
    """
    if isinstance(data, Mapping):
        return {cleaned(key, most): cleaned(value, most) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [cleaned(item, most) for item in data]
    if not isinstance(data, str) or data.startswith(_PICTURE):
        return data
    text = mask(data)
    shortened = text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
    return shortened if shortened.isprintable() else "".join(map(_printable, shortened))


def _printable(char: str) -> str:
    """Return a character, or a question mark; one that changes the direction of text stays."""
    is_bidi = "\u200e" <= char <= "\u200f" or "\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069"
    return char if char.isprintable() or char == "\n" or is_bidi else "?"
