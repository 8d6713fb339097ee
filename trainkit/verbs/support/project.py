"""The user's project: `[tool.trainkit]` of a pyproject.toml names its config folders and packages once.

    [tool.trainkit]
    config_dirs = ["conf"]
    packages = ["mine"]

The file is looked for from the current folder up. The packages lie below its folder and belong to this user, so that no
project of another person is trusted because a command was started inside of it.
"""

from __future__ import annotations

import importlib.util
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainkit.config.values import nearest
from trainkit.errors import ConfigError, Problem, UnreadableError, refuse
from trainkit.files import read_text

_KEYS: Final = ("config_dirs", "packages")
_TABLE: Final = "tool.trainkit"


@dataclass(frozen=True, kw_only=True)
class Project:
    """What a project allows."""

    file: Path
    config_dirs: tuple[Path, ...] = ()
    packages: tuple[str, ...] = ()
    code: tuple[Path, ...] = ()
    """The folders that hold the packages, where Python does not look for modules yet."""

    def __str__(self) -> str:
        folders = ", ".join(os.path.relpath(folder) for folder in self.config_dirs) or "none"
        return f"{self.file}: config folders {folders}; packages {', '.join(self.packages) or 'none'}"


def find_project(start: Path) -> Project | None:
    """Return the project of a folder: of the nearest pyproject.toml, there or above, that has the table.

    Raises:
        ConfigError: the file cannot be read, or belongs to another user; unknown keys of the table, folders that do not
            exist, and packages that are not below the folder of the file or belong to another user.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if not os.path.isfile(file):  # noqa: PTH113 - pathlib may raise
            continue
        try:
            text = read_text(file, follow=True)
            table = tomllib.loads(text).get("tool", {}).get("trainkit") if "trainkit" in text else None
        except (UnreadableError, tomllib.TOMLDecodeError, AttributeError) as error:
            rule = f"cannot be read: {error}. Correct it, or give --no-project."
            raise ConfigError([Problem(key=str(file), rule=rule)]) from error
        if table is not None:
            return _checked(file, table)
    return None


def _checked(file: Path, table: Any) -> Project:
    if not isinstance(table, Mapping):
        raise ConfigError([_problem(file, _TABLE, table, "must be a table.")])
    problems = [
        _problem(file, f"{_TABLE}.{key}", value, f"no such key. {nearest(key, _KEYS)}")
        for key, value in table.items()
        if key not in _KEYS
    ]
    names = dict[str, list[str]]()
    for key in _KEYS:
        value = table.get(key, [])
        names[key] = [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
        if names[key] != value:
            problems.append(_problem(file, f"{_TABLE}.{key}", value, 'must be a list of texts, ["NAME"].'))
    if not _is_mine(file):
        problems.append(Problem(key=str(file), rule="belongs to another user. To start without it: --no-project."))
    folders = [file.parent / name for name in names["config_dirs"]]
    for name, folder in zip(names["config_dirs"], folders, strict=True):
        if not folder.is_dir():
            problems.append(_problem(file, f"{_TABLE}.config_dirs", name, f"there is no folder {folder}."))
    code = dict[Path, None]()
    for name in names["packages"]:
        path = _path_of(name, file.parent)
        if (rule := _package_rule(name, path, file.parent)) is not None:
            problems.append(_problem(file, f"{_TABLE}.packages", name, rule))
        elif path is not None and importlib.util.find_spec(name) is None:
            code[path.parent] = None
    refuse(problems)
    return Project(file=file, config_dirs=tuple(folders), packages=tuple(names["packages"]), code=tuple(code))


def _path_of(package: str, folder: Path) -> Path | None:
    """Return the folder or file of a package or module of a project, beside its pyproject.toml or in `src`."""
    if not package.isidentifier():
        return None
    paths = (home / name for home in (folder, folder / "src") for name in (package, f"{package}.py"))
    return next((path for path in paths if path.exists()), None)


def _package_rule(name: str, path: Path | None, folder: Path) -> str | None:
    """Return why a package cannot be named in the table; None if it can."""
    instead = f"Only packages below this folder can be named here; for others: --allow-package {name}."
    if path is None:
        return f"there is no {name} in {folder} or {folder / 'src'}. {instead}"
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"{path} is a link to {path.resolve()}. {instead}"
    foreign = next((item for item in (path, *path.rglob("*.py")) if not _is_mine(item)), None)
    if foreign is not None:
        return f"{foreign} belongs to another user. {instead}"
    spec = importlib.util.find_spec(name)
    homes = [] if spec is None else [Path(home) for home in spec.submodule_search_locations or [spec.origin or ""]]
    other = next((home for home in homes if home.resolve() != path.resolve()), None)
    return None if other is None else f"Python imports {name} from {other}. Rename one of the two, or uninstall that."


def _is_mine(path: Path) -> bool:
    return path.stat().st_uid == os.getuid()


def _problem(file: Path, key: str, value: object, rule: str) -> Problem:
    return Problem(key=key, value=value, rule=rule, origin=str(file))
