"""The interface of a call, the command line or Python: advice names what can be given there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

_INTERFACES: Final[list[str]] = []


@contextmanager
def called_from(interface: Literal["command line", "python"]) -> Iterator[None]:
    """Let advice fit an interface while the block or the decorated function runs; calls inside of a call keep it."""
    _INTERFACES.append(interface)
    try:
        yield
    finally:
        _INTERFACES.pop()


def advice(command_line: str, python: str) -> str:
    """Return the advice that fits the interface of the call.

    Example:
        >>> with called_from("python"):
        ...     advice("--config-dir DIR", 'config_dirs=["DIR"]')
        'config_dirs=["DIR"]'
    """
    return python if _INTERFACES[:1] == ["python"] else command_line


def trusting(package: str) -> str:
    """Return what trusts a package, so that targets may come from it."""
    return advice(f"--allow-package {package}", f'packages=["{package}"]')


def own_folder() -> str:
    """Return what names a folder of YAMLs."""
    return advice("--config-dir DIR", 'config_dirs=["DIR"]')
