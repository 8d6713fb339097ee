"""Verdicts of trainkit without what differs from one machine and start to the next."""

from __future__ import annotations

import re

_PROCESS = re.compile(r"(rank \d+) \(pid \d+ on [^)\s]+(, state \w)?\)")
_HINT = " The system may have run out of memory."


def plain(text: object) -> str:
    """Return a text without pids and hosts, and without the hint of hosts where the kernel counts no kills."""
    return _PROCESS.sub(r"\1", str(text)).replace(_HINT, "")
