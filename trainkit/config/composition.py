"""The result of a composition: the values of a run, the origin of each and its precedence, and notes for the user."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from trainkit.config.grammar import key_of
from trainkit.config.schema import LIST_GROUPS, RunConfig
from trainkit.config.secrets import remember_secrets, secret_keys
from trainkit.config.yaml_files import Document
from trainkit.errors import MISSING, ConfigError, Problem, refuse
from trainkit.redaction import REDACTED, redacted_argument

_VARIABLE: Final = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,[^{}]*)?\}")


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A file that contributed to a composition."""

    group: str
    """The group, `model`; empty for config.yaml."""
    name: str
    """The choice, `mlp`."""
    package: KeyPath
    """The path in the config at which its content is merged."""
    level: Level
    document: Document
    shipped: bool
    """Whether the file is shipped with trainkit."""

    def origin(self, path: KeyPath, rank: int) -> Origin:
        """Return where the file sets a key: its line, or the class of the choice; `rank`: its place in precedence."""
        inner, document = path[len(self.package) :], self.document
        where, line = shown(document.file), document.lines.get(inner)
        if inner[:1] and inner[0] in document.of_class:
            where = f"default of {document.values['_target_']}"
        elif line:
            where = f"{where}:{line}"
        return Origin(level=self.level, where=where, file_rank=rank, shipped=self.shipped)


def shown(file: Path) -> str:
    """Return the shortest form of a file's path: relative if it is below the current folder."""
    with contextlib.suppress(ValueError):
        return str(file.relative_to(Path.cwd()))
    return str(file)


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A config before anything is built from it.

    `problems` holds the problems found while composing; `trainkit.config.check` finds the others.
    """

    values: dict[str, Any]
    """Plain values of a `RunConfig`, interpolations resolved."""
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)
    """Origin of each key: the place where it was set."""
    choices: Mapping[str, str | list[str] | None] = field(default_factory=dict)
    """Group -> choice; a list for callbacks and logger."""
    files: tuple[ConfigFile, ...] = ()
    """The composed files, in ascending precedence."""
    overrides: tuple[str, ...] = ()
    """The composed arguments, without Hydra's own."""
    given_keys: tuple[str, ...] = ()
    """The key or group that each of these arguments gives, without an @package."""
    hydra_overrides: tuple[str, ...] = ()
    """The arguments for Hydra."""
    hydra: Mapping[str, Any] = field(default_factory=dict)
    """Values that the files set below `hydra`."""
    hydra_choices: Mapping[str, str] = field(default_factory=dict)
    """The choices of Hydra's own groups, such as `hydra/launcher`, without those of the arguments."""
    launcher_takes_single_runs: bool = False
    """Whether their launcher also starts single runs."""
    config_dirs: tuple[Path, ...] = ()
    """The user's config folders."""
    packages: tuple[str, ...] = ()
    """Packages the user allows as targets."""
    notes: tuple[str, ...] = ()
    """Notes for the summary: values displaced or dropped, files shadowed."""
    problems: tuple[Problem, ...] = ()
    """Problems found while composing."""
    variables: Mapping[KeyPath, Any] = field(default_factory=dict)
    """Keys whose values come from environment variables, as they were written: `${oc.env:X}`."""
    reads_files: bool = True
    """Whether this process reads the files that keys name; a plan and an emitted script do not."""
    run_dir: Path | None = None
    """`hydra.run.dir` with its date filled in."""
    run_dir_given: bool = False
    """Whether the user named `run_dir`: then the run must use exactly this folder."""

    def with_notes(self, notes: Iterable[str]) -> Composition:
        """Return a copy with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def with_origins(self, error: ConfigError) -> ConfigError:
        """Return a later error with the origin of each key, where the error does not name one."""
        problems = [
            item if item.origin else replace(item, origin=self.origin(item.key).where) for item in error.problems
        ]
        return ConfigError(self.without_secrets(problems))

    def without_secrets(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return problems with secret values redacted, including keys that only an imported class marks as secret."""
        remember_secrets(self.values)  # also what a class marks that was imported meanwhile
        secrets = secret_keys(self.values)

        def hidden(item: Problem) -> bool:
            path = path_of(item.key)
            return item.value is not MISSING and any(path[:length] in secrets for length in range(1, len(path) + 1))

        return [replace(item, value=REDACTED) if hidden(item) else item for item in problems]

    @property
    def cfg(self) -> RunConfig:
        """Return the run as a typed value.

        Raises:
            ConfigError: composing met problems, or values do not fit the schema.
        """
        refuse(self.problems)
        return RunConfig.from_dict(self.values)

    @property
    def sweeper(self) -> str:
        """The choice of hydra/sweeper, which decides the points of a sweep."""
        return self._hydra_setting("hydra/sweeper") or self.hydra_choices.get("hydra/sweeper", "")

    @property
    def launcher(self) -> str:
        """The choice of hydra/launcher, which starts the jobs of a sweep."""
        return self._hydra_setting("hydra/launcher") or self.hydra_choices.get("hydra/launcher", "")

    def _hydra_setting(self, key: str) -> str:
        """Return the last value that the arguments give to a key of Hydra, or an empty text."""
        settings = dict(line.lstrip("+~").partition("=")[::2] for line in self.hydra_overrides)
        return settings.get(key, "").strip("'\"")

    @property
    def asks_for_folds(self) -> bool:
        """Whether the command requests a whole cross-validation: one run per fold."""
        cv = self.values.get("cv") or {}
        return cv.get("folds") is not None and cv.get("fold") is None

    @property
    def submits_single_runs(self) -> bool:
        """Whether the cluster's launcher also submits single runs; the job itself has hydra.mode=RUN."""
        if mode := self._hydra_setting("hydra.mode"):
            return mode == "MULTIRUN"
        return self.launcher_takes_single_runs

    @property
    def is_sweep(self) -> bool:
        """Whether it runs as a sweep even without -m."""
        return self.asks_for_folds or self.submits_single_runs

    def origin(self, key: str | KeyPath) -> Origin:
        """Return where a key was set, or else the nearest key above it."""
        return _nearest(self.origins, path_of(key))

    def is_given(self, key: str) -> bool:
        """Return whether the user set a key or chose a node; False for a recipe, a default, a resumed run, and a config
        made by hand, which does not record who set a key.
        """
        origin, (group, *below) = self.origin(key), path_of(key)
        if origin == NOWHERE:
            return False
        is_node = len(below) == (group in LIST_GROUPS)
        chosen = is_node and group in self.given_keys
        return origin.level is not Level.recipe and (chosen or not origin.shipped)

    def given_below(self, path: KeyPath) -> Iterator[KeyPath]:
        """Yield a key and the keys below it that an argument or a file of the user's set."""
        for key, origin in self.origins.items():
            if key[: len(path)] == path and origin.where and not origin.shipped:
                yield key

    def set_below_recipe(self, path: KeyPath) -> Iterator[tuple[int, ConfigFile, Any]]:
        """Yield the files below the recipe that set a key, from the highest, each with its rank and the value."""
        for rank, file in reversed(list(enumerate(self.files))):
            inner = path[len(file.package) :]
            node = lookup(file.document.values, inner[:-1])
            applies = inner and path[: len(file.package)] == file.package and file.level < Level.recipe
            if applies and isinstance(node, Mapping) and inner[-1] in node:
                yield rank, file, node[inner[-1]]

    def problem(self, key: str | KeyPath, rule: str, *, value: Any = None, show_value: bool = True) -> Problem:
        """Return a problem of a key, with the place that set it."""
        name = key if isinstance(key, str) else dotted(key)
        return Problem(key=name, value=value if show_value else MISSING, rule=rule, origin=self.origin(key).where)


def problems_of_points(points: Sequence[Composition], problems: Sequence[Iterable[Problem]]) -> list[Problem]:
    """Return each problem of the points of a sweep once; a problem of only some points names those points.

    Args:
        points: all points.
        problems: the problems of each point.
    """
    by_text: dict[str, Problem] = {}
    having: dict[str, list[set[str]]] = {}
    arguments = [set(point.overrides) for point in points]
    for lines, of_point in zip(arguments, problems, strict=True):
        for text, problem in {str(problem): problem for problem in of_point}.items():
            by_text.setdefault(text, problem)
            having.setdefault(text, []).append(lines)
    shared = set.intersection(*arguments) if arguments else set()
    labelled = []
    for text, first in by_text.items():
        problem = first
        typical = set.intersection(*having[text]) - shared or having[text][0] - shared
        if len(having[text]) < len(points) and {key_of(line) for line in typical} - {problem.key}:
            where = "point" if len(having[text]) == 1 else f"{len(having[text])} points with"
            label = " ".join(map(redacted_argument, sorted(typical)))
            problem = replace(problem, rule=f"{problem.rule} In the {where} {label[:300]}.")
        labelled.append(problem)
    return labelled


def variable_in(raw: Any) -> str | None:
    """Return the environment variable whose text alone is a value as it was written; None if it is something else.

    Example:
        >>> variable_in("${oc.env:EPOCHS}"), variable_in("${oc.env:EPOCHS,3}"), variable_in("run_${oc.env:USER}")
        ('EPOCHS', 'EPOCHS', None)
    """
    match = _VARIABLE.fullmatch(raw) if isinstance(raw, str) else None
    return match[1] if match else None


def path_of(key: str | KeyPath) -> KeyPath:
    """Return a key as a path.

    Example:
        >>> path_of("batch.micro_size")
        ('batch', 'micro_size')
    """
    return tuple(key.split(".")) if isinstance(key, str) else key


KeyPath = tuple[str, ...]


class Level(IntEnum):
    """The five levels at which a value can be set; a higher one wins."""

    defaults = 0
    """The schema and conf/config.yaml."""
    choice = 1
    """The YAML of a group's choice."""
    recipe = 2
    """A recipe."""
    experiment = 3
    """An experiment of the user's, `experiment=NAME`."""
    command_line = 4
    """An argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The place where a value was set."""

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
DEFAULT: Final = Origin(level=Level.defaults, where="default", shipped=True)
"""The origin of a default of the schema."""


def _nearest(origins: Mapping[KeyPath, Origin], path: KeyPath) -> Origin:
    return next((origins[path[:size]] for size in range(len(path), 0, -1) if path[:size] in origins), NOWHERE)


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

    def put(self, path: KeyPath, value: Any, origin: Origin | Callable[[KeyPath], Origin]) -> None:
        """Set a key; a mapping is merged into an existing mapping, any other value replaces it."""
        node, name, source = self.values, path[-1], origin if isinstance(origin, Origin) else origin(path)
        for depth, parent in enumerate(path[:-1], start=1):
            if not isinstance(node.get(parent), dict):
                self.origins.pop(path[:depth], None)
                node[parent] = {}
                self.origins[path[:depth]] = source
            node = node[parent]
        is_mapping = isinstance(node.get(name), dict)
        if not (is_mapping and isinstance(value, Mapping)):
            if is_mapping:
                self._forget(path)
            self.origins.pop(path, None)  # to stand last, as every key that was set last
            node[name] = {} if isinstance(value, Mapping) else copy.deepcopy(value)
            self.origins[path] = source
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
        return _nearest(self.origins, path)

    def _forget(self, path: KeyPath) -> None:
        size = len(path)
        for key in [key for key in self.origins if key[:size] == path]:
            del self.origins[key]


def lookup(values: Any, path: KeyPath) -> Any:
    """Return the value at a path, or None."""
    for name in path:
        if not isinstance(values, Mapping):
            return None
        values = values.get(name)
    return values


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
