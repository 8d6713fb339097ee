"""One search path, and the runs, points and arguments composed with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trainkit.config.compose.bounds import argument_problem
from trainkit.config.compose.builder import CompositionBuilder, repeated
from trainkit.config.compose.files import hydra_state
from trainkit.config.compose.hydra_adapter import ConfigLoaderImpl, ConfigSearchPathImpl
from trainkit.config.compose.space import Space, read_space
from trainkit.config.composition import Composition, Level, dotted
from trainkit.config.grammar import COMMAND_LINE, key_of, unreadable
from trainkit.config.paths import shipped_conf, shipped_recipes
from trainkit.config.schema import LIST_GROUPS
from trainkit.config.targets.allowed import refuse_packages
from trainkit.config.yaml_documents import read_document
from trainkit.errors import ConfigError, Problem
from trainkit.redaction import hide_from_process_list


class Composer:
    """Composes runs from one search path."""

    def __init__(self, config_dirs: Sequence[str | Path] = (), packages: Sequence[str] = ()) -> None:
        self.config_dirs = tuple(Path(folder).expanduser().absolute() for folder in config_dirs)
        self.packages = tuple(packages)
        refuse_packages(self.packages)
        for folder in self.config_dirs:
            if not folder.is_dir():
                raise ConfigError([Problem(key=f"--config-dir {folder}", rule="is not a folder.", origin=COMMAND_LINE)])
        with hydra_state():
            self.loader = ConfigLoaderImpl(self._search_path())
        self._parser: OverridesParser | None = None

    def _search_path(self) -> ConfigSearchPathImpl:
        path = ConfigSearchPathImpl()
        for folder in self.config_dirs:
            path.append("command-line", f"file://{folder}")
        path.append("hydra", "pkg://hydra.conf")
        path.append("main", f"file://{shipped_conf()}")
        path.append("trainkit", f"recipes://{shipped_recipes()}")
        path.append("schema", "structured://")
        return path

    def choices_of(self, group: str) -> list[str]:
        """Return the choices of a group."""
        return list(self.loader.repository.get_group_options(group))

    def groups(self) -> list[str]:
        """Return the names of all groups, including the user's own."""
        found = self.loader.repository.get_group_options("", results_filter=ObjectType.GROUP)
        return [name for name in found if name != "hydra"]

    def parse(self, overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
        """Parse arguments with Hydra's grammar; return a problem for each argument that it cannot read."""
        if self._parser is None:
            self._parser = OverridesParser.create(config_loader=self.loader)
        parsed, problems = [], []
        for argument in overrides:
            if problem := argument_problem(argument):
                problems.append(problem)
                continue
            try:
                override = self._parser.parse_override(argument)
                override.config_loader = self.loader  # glob(...) reads the choices from it
                parsed.append(override)
            except (HydraException, RecursionError, ValueError):
                problems.append(unreadable(argument))
        return parsed, problems

    def is_group(self, override: Override) -> bool:
        """Return whether an argument selects a choice of a group, not the value of a key."""
        if override.is_sweep_override():
            return bool(self.loader.repository.group_exists(override.key_or_group))
        return self.loader.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)

    def without_null(self, override: Override) -> Override:
        """Return `recipe=null` as Hydra's grammar expects it: `~recipe`, or an empty list for a group that takes a
        list.
        """
        if override.is_sweep_override() or override.is_delete() or not self.is_group(override):
            return override
        if override.value() is not None:
            return override
        group = override.get_key_element()
        line = f"{group}=[]" if override.key_or_group in LIST_GROUPS else f"~{group}"
        return self.parse([line])[0][0]

    def compose(self, overrides: Sequence[str] = (), *, for_others: bool = False) -> Composition:
        """Compose one run.

        With `for_others`, arguments may be meant for other choices that are composed too: keys of a group that this
        choice does not have, but another choice has, are then left out.
        """
        with hydra_state():
            composition = CompositionBuilder(self, overrides).run()
            if for_others and (foreign := foreign_keys(composition)):
                kept = [line for line in overrides if key_of(line) not in foreign]
                composition = CompositionBuilder(self, kept).run()
        hide_from_process_list(overrides)  # the secrets that the user's classes mark are known by now
        return composition

    def space(self, overrides: Sequence[str]) -> Space:
        """Return the arguments that all points of a sweep share, and the axes along which the points differ.

        Raises:
            ConfigError: an argument cannot be parsed, or a sweep cannot be searched.
        """
        with hydra_state():
            parsed, problems = self.parse(overrides)
            if problems:
                raise ConfigError(problems)
            if problems := repeated(parsed):
                raise ConfigError(problems)
            return read_space(parsed)

    def points(self, overrides: Sequence[str]) -> list[list[str]]:
        """Return the arguments of every point of a grid, in order; a single point where nothing is swept.

        Raises:
            ConfigError: an argument cannot be parsed, or the points of a sweep cannot be enumerated.
        """
        return self.space(overrides).grid()


def foreign_keys(composition: Composition) -> set[str]:
    """Return keys of the command line that the selected choices lack and other choices of their groups have."""
    found = set()
    for path, origin in composition.origins.items():
        file = next((item for item in composition.files if item.package == path[:1]), None)
        if origin.level is not Level.command_line or len(path) < 2 or file is None or path[1] in file.document.values:
            continue
        folders = (*composition.config_dirs, shipped_conf())
        others = [other for folder in folders for other in sorted((folder / path[0]).glob("*.yaml"))]
        if any(path[1] in read_document(other).values for other in others):
            found.add(dotted(path))
    return found


def compose(
    overrides: Sequence[str] = (), *, config_dirs: Sequence[str | Path] = (), packages: Sequence[str] = ()
) -> Composition:
    """Compose a run from the shipped configuration, the user's own folders and arguments.

    Hydra's global state is left as it was found.

    Args:
        overrides: arguments as on the command line, `["model=mlp", "optimizer.lr=0.1"]`.
        config_dirs: folders of the user's own YAMLs; they come first on the search path.
        packages: packages that `_target_` may name besides the allowed ones.

    Returns:
        The composition; its `problems` lists the errors.
    """
    return Composer(config_dirs, packages).compose(overrides)
