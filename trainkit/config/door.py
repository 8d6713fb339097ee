"""The door of a call, the command line or Python: advice names what the person who reads it can give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

_DOORS: Final[list[str]] = []


@contextmanager
def called_from(door: Literal["command line", "python"]) -> Iterator[None]:
    """Let advice fit a door while the block or the decorated function runs; a call within a call keeps its door."""
    _DOORS.append(door)
    try:
        yield
    finally:
        _DOORS.pop()


def advice(command_line: str, python: str) -> str:
    """Return the advice that fits the door.

    Example:
        >>> with called_from("python"):
        ...     advice("--config-dir DIR", 'config_dirs=["DIR"]')
        'config_dirs=["DIR"]'
    """
    return python if _DOORS[:1] == ["python"] else command_line


def trusting(package: str) -> str:
    """Return what trusts a package, so that targets may come from it."""
    return advice(f"--allow-package {package}", f'packages=["{package}"]')


def own_folder() -> str:
    """Return what names a folder of YAMLs."""
    return advice("--config-dir DIR", 'config_dirs=["DIR"]')
