"""Folders of YAMLs: trainkit's own, inside the package once installed and beside it in a checkout, and the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final


def shipped_conf() -> Path:
    """Return the folder of trainkit's own YAMLs."""
    return _shipped("conf")


def shipped_recipes() -> Path:
    """Return the folder of trainkit's recipes."""
    return _shipped("recipes")


def shipped_template() -> Path:
    """Return the folder that `trainkit init` copies."""
    return _shipped("template")


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parent.parent
    return next((folder for folder in (package / name, package.parent / name) if folder.is_dir()), package / name)


_GIVEN: Final[list[tuple[Path, ...]]] = [()]
"""The folders of the calls that run, innermost last."""
_VARIABLE: Final = "TRAINKIT_CONFIG_DIRS"
"""The environment variable that passes the folders to a worker, separated as in PATH; only printed commands use it."""


@contextmanager
def with_config_dirs(folders: Sequence[Path]) -> Iterator[None]:
    """Let commands that are printed while the block runs name these absolute folders."""
    _GIVEN.append(tuple(folders))
    try:
        yield
    finally:
        _GIVEN.pop()


def config_dir_arguments(folders: Sequence[Path] | None = None) -> list[str]:
    """Return the arguments that name config folders in a command printed by trainkit.

    Args:
        folders: absolute paths; None for those of the running call. Folders below the current one become relative.

    Example:
        >>> config_dir_arguments([Path("/srv/conf")]), config_dir_arguments([])
        (['--config-dir', '/srv/conf'], [])
    """
    here = Path.cwd()
    arguments = []
    for folder in _GIVEN[-1] if folders is None else folders:
        shown = os.path.relpath(folder, here) if folder.is_relative_to(here) else str(folder)
        arguments += ["--config-dir", shown]
    return arguments


def config_dir_environ() -> dict[str, str]:
    """Return the variable that passes the folders of this process to a worker."""
    return {_VARIABLE: os.pathsep.join(map(str, _GIVEN[-1]))} if _GIVEN[-1] else {}


def config_dirs_from(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders that the parent process was started with.

    Example:
        >>> [str(folder) for folder in config_dirs_from({"TRAINKIT_CONFIG_DIRS": "/srv/conf"})], config_dirs_from({})
        (['/srv/conf'], ())
    """
    return tuple(Path(name) for name in environ.get(_VARIABLE, "").split(os.pathsep) if name)
