"""Values with the origin of each, and the precedence of origins."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

KeyPath = tuple[str, ...]


class Level(IntEnum):
    """The four levels at which a value can be set; a higher one wins."""

    defaults = 0
    """conf/config.yaml."""
    choice = 1
    """The YAML of a group's choice."""
    recipe = 2
    """A recipe."""
    command_line = 3
    """An argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a value was set."""

    level: Level
    where: str
    """`command line`, or `file.yaml:12`."""
    file_rank: int = 0
    """Order among the files of one level; a later file outranks an earlier one."""
    shipped: bool = False
    """Whether the file is shipped with trainkit."""

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key by which the higher of two origins wins."""
        return (int(self.level), self.file_rank)


NOWHERE = Origin(level=Level.defaults, where="")


class TrackedTree:
    """A tree of plain values that records the origin of every key while layers are merged.

    Example:
        >>> tree = TrackedTree()
        >>> tree.put(("batch", "micro_size"), 8, Origin(level=Level.command_line, where="command line"))
        >>> tree.values, tree.origin_of(("batch", "micro_size")).where
        ({'batch': {'micro_size': 8}}, 'command line')
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[KeyPath, Origin] = {}

    def put(self, path: KeyPath, value: Any, origin: Origin) -> None:
        """Set a key; a mapping is merged into an existing mapping, any other value replaces it."""
        here = self.values
        for depth, name in enumerate(path[:-1], start=1):
            if not isinstance(here.get(name), dict):
                self._forget(path[:depth])
                here[name] = {}
                self.origins[path[:depth]] = origin
            here = here[name]
        name = path[-1]
        if isinstance(value, Mapping) and isinstance(here.get(name), dict):
            for key, item in value.items():
                self.put((*path, str(key)), item, origin)
            return
        if name in here:
            self._forget(path)
        here[name] = {} if isinstance(value, Mapping) else copy.deepcopy(value)
        self.origins[path] = origin
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.put((*path, str(key)), item, origin)

    def remove(self, path: KeyPath) -> bool:
        """Remove a key; return False if there is none."""
        parent = lookup(self.values, path[:-1])
        if not isinstance(parent, dict) or path[-1] not in parent:
            return False
        del parent[path[-1]]
        self._forget(path)
        return True

    def origin_of(self, path: KeyPath) -> Origin:
        """Return the origin of a key, or of the nearest key above it that has one."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return NOWHERE

    def _forget(self, path: KeyPath) -> None:
        size = len(path)
        for known in [key for key in self.origins if key[:size] == path]:
            del self.origins[known]


def lookup(values: Any, path: KeyPath) -> Any:
    """Return the value at a path, or None."""
    for name in path:
        if not isinstance(values, Mapping):
            return None
        values = values.get(name)
    return values


def leaves(values: Mapping[Any, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every key that holds no further keys, in order; an empty mapping is a leaf.

    Example:
        >>> list(leaves({"a": {"b": 1}, "c": {}}))
        [(('a', 'b'), 1), (('c',), {})]
    """
    for name, value in values.items():
        inner = (*path, str(name))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, inner)
        else:
            yield inner, value


_PATH_KEY: Final = re.compile(r"(.*_)?(path|folder|root|dir|file)|resume|init_from")


def is_path_key(name: str) -> bool:
    """Return whether a key names a file or folder.

    Example:
        >>> is_path_key("data_dir"), is_path_key("direction")
        (True, False)
    """
    return _PATH_KEY.fullmatch(name) is not None


def dotted(path: KeyPath) -> str:
    """Return the key as the user writes it."""
    return ".".join(path)
