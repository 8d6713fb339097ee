"""Arguments of a test that change what its constants say."""

from __future__ import annotations

from trainkit.config.grammar import replacing

__all__ = ["latest"]


def latest(*arguments: str) -> list[str]:
    """Return arguments of which the last of each key is left: a command that gives a key twice is refused."""
    last: tuple[str, ...] = ()
    for argument in arguments:
        last = replacing(last, argument)
    return list(last)
