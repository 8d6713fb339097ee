"""Composition of a run's config, before Hydra runs.

Hydra supplies its grammar of overrides, its search path and its defaults list. The values are then merged here, file by
file, so that every key records the file and line, or the argument, that set it. The check reports all unknown keys
together; Hydra would end the program at the first one.

    space   the arguments of a sweep as axes, and every point of a grid
    jobs    composed runs as Hydra jobs: Hydra's config loader, a job in its folder, a sweep, completion
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from hydra import version as hydra_version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.compose.space import Space, read_space
from trainkit.config.composition import (
    DEFAULT,
    Composition,
    ConfigFile,
    KeyPath,
    Level,
    Origin,
    TrackedTree,
    dotted,
    is_path_key,
    lookup,
    path_of,
    shown,
    variable_in,
)
from trainkit.config.grammar import COMMAND_LINE, key_of, unreadable
from trainkit.config.interface import advice, own_folder
from trainkit.config.schema import GROUPS, LIST_GROUPS, RunConfig, hints_of
from trainkit.config.secrets import dereferenced, import_marks, reference_paths, remember_secrets, texts_in
from trainkit.config.targets.allowed import TARGET, allow_packages, refuse_packages
from trainkit.config.targets.build import resolve_target, signature_of
from trainkit.config.targets.choices import read_choice
from trainkit.config.values import closest, expanded, leaves, plain
from trainkit.config.yaml_files import Document, is_choice_path, shipped_conf, shipped_recipes
from trainkit.errors import ConfigError, Problem, first_line, refuse
from trainkit.redaction import REDACTED, redacted_argument, remember

_CORE_PLUGINS: Final = "hydra._internal.core_plugins"
"""The package of Hydra's own sweepers and launchers."""
CONFIG: Final = "config"
"""The primary config, conf/config.yaml."""
_NO_SOURCES: Final = ConfigRepository(ConfigSearchPathImpl())
_NO_CONTENT: Final = OmegaConf.create({})
_SOME_CONTENT: Final = OmegaConf.create({"content": True})
"""Placeholder for the content of a file: Hydra only checks whether there is any."""


@contextlib.contextmanager
def hydra_state() -> Iterator[None]:
    """Set Hydra's resolvers and version base as Hydra needs them, and restore them afterwards."""
    resolvers = dict(BaseContainer._resolvers)  # noqa: SLF001 - OmegaConf offers no way to restore them
    base = Singleton._instances.get(hydra_version.VersionBase)  # noqa: SLF001
    previous = base.getbase() if base is not None else None  # type: ignore[attr-defined]
    try:
        setup_globals()
        version = hydra_version._get_version("1.3")  # noqa: SLF001 - the public `setbase` warns in Hydra 1.4
        hydra_version.VersionBase.instance().setbase(version)
        Plugins.instance()
        yield
    finally:
        BaseContainer._resolvers = resolvers  # noqa: SLF001
        if base is None:
            Singleton._instances.pop(hydra_version.VersionBase, None)  # noqa: SLF001
        else:
            base.version_base = previous  # type: ignore[attr-defined]


class Repository(CachingConfigRepository):
    """Hydra's config repository, which records line numbers and drops what a file sets about Hydra itself."""

    def __init__(self, delegate: ConfigRepository) -> None:
        # Not the base class's deep copy: only the list of sources could be replaced in it, not a source.
        self.delegate, self.cache = copy.copy(delegate), {}
        self.documents: dict[str, Document] = {}
        """The files that were read, in order."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return the defaults list and header of a file for Hydra; the content is kept in `documents`."""
        if config_path not in self.cache:
            document = self._document(config_path)
            self.cache[config_path] = None if document is None else self._result(config_path, document)
        return self.cache[config_path]

    def config_exists(self, config_path: str) -> bool:
        """Return whether the file exists below a folder of the config, or was already reported as absent."""
        return is_choice_path(config_path) and (config_path in self.documents or super().config_exists(config_path))

    def mark_absent(self, config_path: str) -> None:
        """Treat a file that was reported as absent as empty from now on, so that the other choices are checked too."""
        empty = Document(file=Path(config_path), values={}, lines={})
        self.cache[config_path] = self._result(config_path, empty)

    def _document(self, config_path: str) -> Document | None:
        if (file := self.file_of(config_path)) is not None:
            return read_choice(file)
        if (result := self.delegate.load_config(config_path)) is None:
            return None
        values: Any = OmegaConf.to_container(result.config, resolve=False)
        header = result.header.get("package")
        return Document(file=Path(config_path), values=values or {}, lines={}, package=header)

    def file_of(self, config_path: str) -> Path | None:
        """Return the YAML file of a config path; None where another kind of source holds it."""
        source = self.delegate._find_object_source(config_path, ObjectType.CONFIG)  # type: ignore[attr-defined]  # noqa: SLF001
        if source is None:
            return None
        if source.scheme() == "file":
            return Path(source.path) / f"{config_path.removesuffix('.yaml')}.yaml"
        return Path(source.file_of(config_path)) if hasattr(source, "file_of") else None

    def _result(self, config_path: str, document: Document) -> ConfigResult:
        self.documents[config_path] = document
        result = ConfigResult(
            provider="trainkit",
            path=str(document.file),
            config=_SOME_CONTENT if document.values else _NO_CONTENT,
            header={"package": _package(config_path, document)},
        )
        result.defaults_list = _defaults_list(config_path, document)
        return result


@lru_cache(maxsize=512)
def _defaults_list(config_path: str, document: Document) -> list[InputDefault]:
    """Return the defaults list of a file in Hydra's form; Hydra changes only copies of it."""
    items = [item for item in document.defaults if not is_about_hydra(item)]
    return _NO_SOURCES._create_defaults_list(config_path, OmegaConf.create(items)) if items else []  # noqa: SLF001


def is_about_hydra(item: Any) -> bool:
    """Return whether an item of a defaults list selects a choice of one of Hydra's own groups."""
    return isinstance(item, Mapping) and any(group_in(str(key)).startswith("hydra/") for key in item)


def group_in(key: str) -> str:
    """Return the group that an item of a defaults list names: `override /model@x` is model."""
    return key.rsplit(" ", maxsplit=1)[-1].lstrip("/").split("@")[0]


def _package(config_path: str, document: Document) -> str | None:
    """Return where a file's content is merged: a recipe or experiment at the root, a callback or logger by its name."""
    group, _, name = config_path.rpartition("/")
    if document.package is not None:
        return document.package
    if group.split("/")[0] in ("recipe", "experiment"):
        return "_global_"
    if group in LIST_GROUPS and "_target_" in document.values:
        return f"{group}.{name}"
    return None


@lru_cache(maxsize=16)
def _loader(config_dirs: tuple[Path, ...]) -> ConfigLoaderImpl:
    """Return Hydra's loader of files below these folders; it searches for a file at every request."""
    path = ConfigSearchPathImpl()
    for folder in config_dirs:
        path.append("command-line", f"file://{folder}")
    path.append("hydra", "pkg://hydra.conf")
    path.append("main", f"file://{shipped_conf()}")
    path.append("trainkit", f"recipes://{shipped_recipes()}")
    path.append("schema", "structured://")
    return ConfigLoaderImpl(path)


@lru_cache(maxsize=1024)  # the jobs of a sweep share most of their arguments
def _parsed(argument: str) -> Override:
    """Return an argument parsed by Hydra's grammar, which takes about a millisecond; to be copied."""
    return OverridesParser.create().parse_override(argument)


class Composer:
    """Composes runs from one search path: finds YAML files by group and choice, and parses arguments."""

    def __init__(self, config_dirs: Sequence[str | Path] = (), packages: Sequence[str] = ()) -> None:
        self.config_dirs = tuple(Path(folder).expanduser().absolute() for folder in config_dirs)
        self.packages = tuple(packages)
        refuse_packages(self.packages)
        for folder in self.config_dirs:
            if not folder.is_dir():
                key, origin = own_folder().replace("DIR", str(folder)), advice(COMMAND_LINE, "")
                raise ConfigError([Problem(key=key, rule="is not a folder.", origin=origin)])
        with hydra_state():
            self.loader = _loader(self.config_dirs)
        self._is_group = cache(self.loader.repository.group_exists)

    def choices_of(self, group: str) -> list[str]:
        """Return the choices of a group."""
        return list(self.loader.repository.get_group_options(group))

    def groups(self) -> list[str]:
        """Return the names of all groups, including the user's own."""
        names = self.loader.repository.get_group_options("", results_filter=ObjectType.GROUP)
        return [name for name in names if name != "hydra"]

    def parse(self, overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
        """Parse arguments with Hydra's grammar; return a problem for each argument that it cannot read."""
        parsed, problems = [], []
        for argument in overrides:
            try:
                if not key_of(argument):
                    raise ValueError(argument)
                override = copy.copy(_parsed(argument))
                override.config_loader = self.loader  # glob(...) reads the choices from it
                parsed.append(override)
            except (HydraException, RecursionError, ValueError, UnicodeError):
                problems.append(unreadable(argument))
        return parsed, problems

    def is_group(self, override: Override) -> bool:
        """Return whether an argument selects a choice of a group, not the value of a key."""
        if override.is_sweep_override():
            return self._is_group(override.key_or_group)
        return self._is_group(override.key_or_group) and not isinstance(override.value(), dict)

    def without_null(self, override: Override) -> Override:
        """Return `recipe=null` as Hydra's grammar expects it: `~recipe`, or an empty list for a group that takes a
        list.
        """
        if override.is_sweep_override() or not self.is_group(override):
            return override
        deletes = override.is_delete() and override.key_or_group in LIST_GROUPS  # Hydra deletes one choice, not a list
        if not deletes and (override.is_delete() or override.value() is not None):
            return override
        group = override.key_or_group if deletes else override.get_key_element()
        line = f"{group}=[]" if override.key_or_group in LIST_GROUPS else f"~{group}"
        return self.parse([line])[0][0]

    def compose(self, overrides: Sequence[str] = (), *, for_others: bool = False) -> Composition:
        """Compose one run.

        With `for_others`, arguments may be meant for other choices that are composed too: keys of a group that this
        choice does not have, but another choice has, are then left out, with a note.
        """
        with hydra_state():
            composition = CompositionBuilder(self, overrides).run()
            if for_others and (foreign := foreign_keys(composition)):
                lines = [line for line in overrides if key_of(line) not in foreign]
                composition = CompositionBuilder(self, lines).run()
                texts = (
                    f"{key}: left out, {composition.choices[key.partition('.')[0]]} has no such key" for key in foreign
                )
                composition = composition.with_notes(sorted(texts))
        return composition

    def space(self, overrides: Sequence[str]) -> Space:
        """Return the arguments that all points of a sweep share, and the axes along which the points differ.

        Raises:
            ConfigError: an argument cannot be parsed, or a sweep cannot be searched.
        """
        with hydra_state():
            parsed, problems = self.parse(overrides)
            refuse(problems or repeated(parsed))
            return read_space(parsed)

    def points(self, overrides: Sequence[str]) -> list[list[str]]:
        """Return the arguments of every point of a grid, in order; a single point where nothing is swept.

        Raises:
            ConfigError: an argument cannot be parsed, or the points of a sweep cannot be enumerated.
        """
        return self.space(overrides).grid()


_PLUGINS: Final = ("hydra/launcher", "hydra/sweeper")
"""Groups whose choices are classes that start the jobs of a sweep, or propose them."""


def is_key_of_hydra(key: str) -> bool:
    """Return whether Hydra has a key; mappings of names and the nodes of plugins take any.

    Example:
        >>> [is_key_of_hydra(f"hydra.{key}") for key in ("run.dir", "job.nosuch", "job.env_set.X", "launcher.n_jobs")]
        [True, False, True, True]
    """
    node: Any = OmegaConf.structured(HydraConf)
    for name in key.split(".")[1:]:
        if not OmegaConf.is_dict(node) or OmegaConf.get_type(node) is dict:
            return True
        if name not in node.keys():  # noqa: SIM118 - `in` resolves the value
            return False
        node = node._get_node(name)  # noqa: SLF001 - an interpolation stays as it is
    return True


def hydra_choices_of(files: Sequence[ConfigFile]) -> dict[str, str]:
    """Return the choices of Hydra's own groups; the file of highest precedence decides, or else Hydra."""
    defaults = [item for item in HydraConf().defaults if isinstance(item, dict)]
    usual = {f"hydra/{name}": choice for item in defaults for name, choice in item.items()}
    items = [item for file in files for item in file.document.defaults if is_about_hydra(item)]
    chosen = {group_in(str(key)): value for item in items for key, value in item.items()}
    return {group: str(usual[group]) for group in _PLUGINS} | chosen


def _plugins(group: str) -> Iterator[tuple[str, type]]:
    """Yield the choices of a group that packages have registered, each with its class."""
    Plugins.instance()  # registers them
    store = ConfigStore.instance()
    for file in store.list(group):
        module, _, name = str(store.load(f"{group}/{file}").node.get("_target_")).rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type):
            yield file.removesuffix(".yaml"), kind


def unused_sweep_keys(group: str, choice: str, sweep: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of `sweep` that have no effect with a choice of a group, and the reasons.

    Its class declares them (`unused_keys`); for a class that declares none, the other classes of the group do.

    Example:
        >>> dict(unused_sweep_keys("hydra/sweeper", "random", {}))["pruner"]
        'has no effect with hydra/sweeper=random: it is for optuna.'
    """
    plugins = dict(_plugins(group))
    kinds = [plugins[choice]] if hasattr(plugins.get(choice), "unused_keys") else dict.fromkeys(plugins.values())
    for kind in kinds:
        if (declared := getattr(kind, "unused_keys", None)) is not None:
            yield from declared(choice, sweep)


def submits_single_runs(launcher: str) -> bool:
    """Return whether a launcher also starts single runs: that of another package does, Hydra's own does not."""
    kind = dict(_plugins("hydra/launcher")).get(launcher)
    own_of_hydra = kind is not None and kind.__module__.startswith(_CORE_PLUGINS)
    return bool(getattr(kind, "submits_single_runs", not own_of_hydra))


def _unresolved(error: Exception) -> str:
    text = first_line(error)
    if match := re.search(r"Interpolation key '([^']+)' not found", text):
        return f"refers to {match[1]}, and there is no such key."
    return f"cannot be resolved: {text.rstrip('.')}."


_PAIRS: Final[tuple[tuple[KeyPath, KeyPath], ...]] = (
    (("epochs",), ("steps",)),
    (("warmup", "epochs"), ("warmup", "steps")),
)
_WHOLE, _MICRO, _SHARDS = _BATCH = tuple(("batch", key) for key in ("global_size", "micro_size", "accumulation"))


def resolve_exclusive(tree: TrackedTree) -> tuple[list[str], list[Problem]]:
    """Displace keys that a key of a higher level contradicts, in the tree itself.

    The sets of exclusive keys are {epochs, steps}; {warmup.epochs, warmup.steps}; and any two of {batch.global_size,
    batch.micro_size, batch.accumulation}. Of these three, `global_size` is displaced last. `stop_after` displaces
    epochs and steps of a lower level, and bounds those of its own.

    Returns:
        Notes on displaced values that the user had set, and problems of two keys at the same level.
    """
    notes: list[str] = []
    problems: list[Problem] = []

    def value(path: KeyPath) -> Any:
        return lookup(tree.values, path)

    def rank(path: KeyPath) -> tuple[int, int]:
        return tree.origin_of(path).rank

    def displace(loser: KeyPath, winner: KeyPath) -> None:
        lost, won = tree.origin_of(loser), tree.origin_of(winner)
        if not (lost.shipped and lost.level == 0):
            shown = f"{dotted(winner)}={value(winner)} ({won.where})"
            notes.append(f"{shown} replaces {dotted(loser)}={value(loser)} ({lost.where})")
        tree.put(loser, None, won)

    def report(path: KeyPath, rule: str) -> None:
        problems.append(Problem(key=dotted(path), value=value(path), rule=rule, origin=tree.origin_of(path).where))

    for pair in _PAIRS:
        low, high = sorted(pair, key=rank)
        if value(low) is None or value(high) is None:
            continue
        if rank(low) < rank(high) or value(low) == value(high) == 0:
            displace(low, high)
        else:
            report(pair[1], f"sets the same as {dotted(pair[0])}, set at the same place. Give one of the two.")
    time = ("stop_after",)
    for path in _PAIRS[0]:
        if value(time) is not None and value(path) is not None and rank(path) < rank(time):
            displace(path, time)
    if all(value(path) is not None for path in _BATCH):
        if rank(_MICRO) != rank(_SHARDS):
            displace(*sorted((_MICRO, _SHARDS), key=rank))
        elif rank(_WHOLE) == rank(_MICRO):
            rule = "global_size, micro_size and accumulation are set at the same place. Give any two of the three."
            report(_SHARDS, rule)
        else:
            displace(*((_WHOLE, _MICRO) if rank(_WHOLE) < rank(_MICRO) else (_SHARDS, _WHOLE)))
    return notes, problems


_UNSUPPORTED: Final = {
    "hydra.job.chdir": "is not supported: relative paths are found in the folder where the training was started, and "
    "its files are in its run folder. Leave it out.",
    "hydra.searchpath": "is not read. Give the folder of your own YAMLs: {folder}.",
}
"""Key of Hydra -> why it has no effect."""
_ARGUMENT: Final = Origin(level=Level.command_line, where=COMMAND_LINE)


def foreign_keys(composition: Composition) -> set[str]:
    """Return keys of the command line that the selected choices lack and other choices of their groups have."""
    keys = set()
    for path, origin in composition.origins.items():
        file = next((item for item in composition.files if item.package == path[:1]), None)
        if origin.level is not Level.command_line or len(path) < 2 or file is None or path[1] in file.document.values:
            continue
        folders = (*composition.config_dirs, shipped_conf())
        others = [other for folder in folders for other in sorted((folder / path[0]).glob("*.yaml"))]
        if any(path[1] in read_choice(other).values for other in others) and not _takes(composition, file, path[1]):
            keys.add(dotted(path))
    return keys


def _takes(composition: Composition, file: ConfigFile, key: str) -> bool:
    """Return whether the class of a group takes a key that the file of its choice leaves out."""
    target = lookup(composition.values, (*file.package, TARGET))
    if not isinstance(target, str) or (file.shipped and target == file.document.values.get(TARGET)):
        return False  # a shipped choice has every key of its class
    try:
        with allow_packages(composition.packages):
            signature = signature_of(resolve_target(target))
    except Exception:  # noqa: BLE001 - the check reports it, whatever a module of the user raises
        return True
    return signature.takes_more or key in signature.keys


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


class CompositionBuilder:
    """Collects the state of one composition while it is built."""

    def __init__(self, composer: Composer, overrides: Sequence[str]) -> None:
        self.composer = composer
        self.repository = Repository(composer.loader.repository)
        self.overrides = tuple(overrides)
        self.parsed, self.problems = composer.parse(overrides)
        self.problems += repeated(self.parsed)
        self.tree = TrackedTree()
        self.hydra = TrackedTree()
        """Values that the files and arguments set for Hydra itself."""
        self.notes: list[str] = []
        self.variables: dict[KeyPath, Any] = {}
        """Keys whose values come from environment variables, as they were written."""

    def run(self) -> Composition:
        """Compose: defaults list, layers, arguments, exclusive keys, interpolations."""
        arguments = [item for item in self.parsed if not item.is_hydra_override()]
        about_hydra = [item for item in self.parsed if item.is_hydra_override() and not self._refused_of_hydra(item)]
        task = [item for item in arguments if not self._refused(item)]
        defaults = self._defaults([*task, *self._no_default_recipe(task)])
        files = self._files(defaults)
        self.problems += self._surplus_choices()
        lists = {group: [*dict.fromkeys(file.name for file in files if file.group == group)] for group in LIST_GROUPS}
        choices: dict[str, Any] = dict(sorted({**defaults.overrides.known_choices, **lists}.items()))
        swapped = self._swapped(task, files, choices)
        for name, value in RunConfig().to_dict().items():
            if name not in (*GROUPS, "recipe"):
                self.tree.put((name,), value, DEFAULT)
        for rank, file in enumerate(files):
            self._merge_file(file, rank, swapped.get(file.level, {}))
        hydra = copy.deepcopy(self.hydra.values.get("hydra", {}))
        for override in defaults.config_overrides:
            self._apply(override, self.tree)
        for override in about_hydra:
            if "." in override.key_or_group:
                self._apply(override, self.hydra)
        for key, template in _UNSUPPORTED.items():  # what Hydra would do around a task and trainkit does not do
            if setting := lookup(self.hydra.values, path := path_of(key)):
                rule, where = template.format(folder=own_folder()), self.hydra.origin_of(path).where
                self.problems.append(Problem(key=key, value=setting, rule=rule, origin=where))
        for argument in self.overrides:  # also one that cannot be parsed: no message quotes its secret
            if redacted_argument(argument).endswith(f"={REDACTED}"):
                remember(argument.partition("=")[2].strip("'\""))
        import_marks(self.tree.values, self.composer.packages)
        self._complete(choices)
        notes, problems = resolve_exclusive(self.tree)
        self.notes += notes
        self.problems += problems
        self._resolve()
        self._note_shadowed(files)
        values = self.tree.values
        remember_secrets(values)
        run_dir = self._folder(lookup(self.hydra.values, ("hydra", "run", "dir")), values)
        return Composition(
            values=values,
            origins=dict(self.tree.origins),
            choices=choices,
            files=tuple(files),
            overrides=tuple(item.input_line or "" for item in arguments),
            given_keys=tuple(item.key_or_group for item in arguments),
            hydra_overrides=tuple(item.input_line or "" for item in about_hydra),
            hydra=hydra,
            hydra_choices=(hydra_choices := hydra_choices_of(files)),
            launcher_takes_single_runs=submits_single_runs(hydra_choices["hydra/launcher"]),
            config_dirs=self.composer.config_dirs,
            packages=self.composer.packages,
            notes=tuple(self.notes),
            variables=self.variables,
            problems=tuple(self.problems),
            run_dir=run_dir,
            run_dir_given=self.hydra.origin_of(("hydra", "run", "dir")).level > Level.defaults,
        )

    def _merge_file(self, file: ConfigFile, rank: int, swapped: Mapping[str, str]) -> None:
        """Merge one file's values over the values below it, each key with its own line.

        Args:
            file: the file.
            rank: its place in ascending precedence.
            swapped: groups whose choice in files of its level was replaced from above -> the text of the note.
        """
        chosen = {group: set(lookup(self.tree.values, (group,)) or ()) for group in LIST_GROUPS}

        def origin(path: KeyPath) -> Origin:
            return file.origin(path, rank)

        for name, value in file.document.values.items():
            path = (*file.package, str(name))
            tree = self.hydra if path[0] == "hydra" else self.tree
            if path[0] not in swapped:
                tree.put(path, value, origin)
                continue
            names = value if isinstance(value, Mapping) else {}
            gone = [key for key in names if key not in chosen.get(path[0], ())]
            for key in [key for key in names if key not in gone]:
                tree.put((*path, str(key)), names[key], origin)
            if gone:
                keys = ", ".join(dotted((*path, str(key))) for key in gone)
                text = f"the keys that the {file.level.name} set in {path[0]} are dropped with it ({keys})"
                self.notes.append(f"{swapped[path[0]]}: {text}")
        if not file.document.values and file.package and file.level == Level.choice:
            self.tree.put(file.package, {}, origin)

    def _complete(self, choices: Mapping[str, Any]) -> None:
        """Add the name, the recipe and a node for every group; expand `~` in paths."""
        for group in GROUPS:
            if group not in self.tree.values and (group in LIST_GROUPS or choices.get(group) is not None):
                self.tree.put((group,), {}, Origin(level=Level.defaults, where=""))
        recipe, experiment = choices.get("recipe"), choices.get("experiment")
        if "recipe" not in self.tree.values:
            self.tree.put(("recipe",), recipe, Origin(level=Level.defaults, where=""))
        if self.tree.values.get("name") is None:
            name = re.sub(r"[^A-Za-z0-9._-]", "_", str(experiment or recipe or "run"))
            self.tree.put(("name",), name, self.tree.origin_of(("name",)))
        for path, value in list(leaves(self.tree.values)):
            if isinstance(value, str) and value.startswith("~") and is_path_key(path[-1]):
                self.tree.put(path, expanded(value), self.tree.origin_of(path))

    def _resolve(self) -> None:
        """Replace `${...}` by its value; secrets that refer to environment variables stay references."""
        values, config = self.tree.values, None
        remember_secrets(values)
        references = reference_paths(values)
        for path in references:
            try:
                dereferenced(lookup(values, path), key=dotted(path))
            except ConfigError as error:
                where = self.tree.origin_of(path).where
                self.problems += [replace(problem, origin=where) for problem in error.problems]
        refers = [(path, value) for path, value in leaves(values) if any("${" in text for _, text in texts_in([value]))]
        readable = []
        for path, value in refers:
            try:
                OmegaConf.create([value])
            except (OmegaConfBaseException, RecursionError):
                rule = "holds a reference that cannot be read. Write ${KEY}, ${oc.env:VARIABLE} or, for text, \\${."
                self._set(path, value, None, rule)
            else:
                readable += [(path, value)] if path not in references else []
        for path, value in readable:
            config = config or OmegaConf.create(values)
            try:
                node = OmegaConf.select(config, dotted(path), throw_on_missing=True)
                node = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
                self._set(path, value, node)
            except (OmegaConfBaseException, RecursionError) as error:
                self._set(path, value, None, _unresolved(error))

    def _set(self, path: KeyPath, raw: Any, value: Any, rule: str | None = None) -> None:
        """Set the value of a reference; report it if it has a rule."""
        lookup(self.tree.values, path[:-1])[path[-1]] = value
        if rule is not None:
            where = self.tree.origin_of(path).where
            self.problems.append(Problem(key=dotted(path), value=raw, rule=rule, origin=where))
        elif value is not None and any(map(variable_in, raw if isinstance(raw, list) else [raw])):
            self.variables[path] = raw

    def _note_shadowed(self, files: Sequence[ConfigFile]) -> None:
        """Note the shipped files that the user's own folders hide."""
        for file in files:
            path = Path(file.group) / file.name
            recipe = shipped_recipes() / file.name / "recipe.yaml"
            if not file.shipped and (recipe if file.group == "recipe" else shipped_conf() / f"{path}.yaml").is_file():
                self.notes.append(f"{shown(file.document.file)} shadows the shipped {path.as_posix()}.yaml")

    def _folder(self, pattern: Any, values: Mapping[str, Any]) -> Path | None:
        """Return `hydra.run.dir` with its interpolations resolved; None if only a job can resolve them."""
        if not isinstance(pattern, str):
            return None
        try:
            used = {key: value for key, value in values.items() if str(key) in pattern}
            return Path(expanded(OmegaConf.create({**used, "_folder_": pattern})["_folder_"]))
        except (OmegaConfBaseException, RecursionError, TypeError) as error:
            rule = _unresolved(error)
        origin = self.hydra.origin_of(("hydra", "run", "dir"))
        if origin.level > Level.defaults:  # silently, the run would be written elsewhere
            self.problems.append(Problem(key="hydra.run.dir", value=pattern, rule=rule, origin=origin.where))
        return None

    # -- the arguments ------------------------------------------------------------------------------------------

    def _refused(self, override: Override) -> bool:
        """Report an argument that no defaults list can take; return True if there was a problem."""
        key, text = override.key_or_group, (override.input_line or "").partition("=")[2]
        value = None if override.is_sweep_override() else override.value()
        of_ours = key not in LIST_GROUPS and key in (*GROUPS, "recipe", "experiment")
        if key == "hydra":
            rule = "is the node of Hydra itself. Give its keys: hydra.run.dir=DIR."
        elif override.is_sweep_override():
            hint = advice("which trainkit -m trains one after the other", "and one call trains one of them")
            rule = f"is a list of choices, {hint}. As one text: {key}='...'."
        elif not self.composer.is_group(override):
            return False
        elif override.package is not None:
            rule = f"takes no @package: the choice of a group stands at its own key. Write {key}={text}."
        elif override.is_delete() and key in LIST_GROUPS and text:
            rule = f"removes all {key}, without a value. One of them: ~{key}.NAME."
        elif isinstance(value, list) and key not in LIST_GROUPS:
            rule = f"takes one choice, not a list. To run them all: -m {key}={','.join(map(str, value))}."
        elif override.is_force_add() or (override.is_add() and of_ours):
            rule = f"is a group: write {key}={text}."
        elif not isinstance(value, str | list | None) and not override.is_delete():
            rule = f"needs the name of a choice. {self._choices_text(key)}"
        else:
            names = [] if override.is_delete() else value if isinstance(value, list) else [value]
            absent = [name for name in names if not self._exists(key, name)]
            for name in absent:
                self._report(override, self._no_choice(key, str(name)))
            return bool(absent)
        self._report(override, rule)
        return True

    def _refused_of_hydra(self, override: Override) -> bool:
        """Report an argument that Hydra would ignore or could not read; return True if there was a problem."""
        key = override.key_or_group
        if override.is_delete():
            self._report(override, f"belongs to Hydra and cannot be deleted. Give a value: {key}=VALUE.")
        elif override.is_sweep_override():
            self._report(override, f"is a list of choices. As one text: {key}='...'.")
        elif "/" not in key and not is_key_of_hydra(key):
            self._report(override, "is no key of Hydra. trainkit --cfg hydra shows them.")
        else:
            return False
        return True

    def _report(self, override: Override, rule: str) -> None:
        line = override.input_line or ""
        name, separator, value = line.lstrip("+").partition("=")
        extra = {"value": value} if separator else {}
        self.problems.append(Problem(key=name, rule=rule, origin=COMMAND_LINE, **extra))

    def _exists(self, group: str, name: Any) -> bool:
        return name is None or (isinstance(name, str) and self.repository.config_exists(f"{group}/{name}"))

    def _no_choice(self, group: str, name: str) -> str:
        near = closest(name, self.composer.choices_of(group))
        hint = f"Did you mean {near}? " if near else ""
        return f"no such choice. {hint}{self._choices_text(group)}"

    def _choices_text(self, group: str) -> str:
        if not self.composer.choices_of(group):
            return f"There is no group {group}; there are: {', '.join(self.composer.groups())}."
        return f"There are: {', '.join(self.composer.choices_of(group))}."

    # -- the files ----------------------------------------------------------------------------------------------

    def _defaults(self, task: Sequence[Override]) -> DefaultsList:
        """Return Hydra's defaults list; report every choice that a file names and that does not exist."""
        remaining = [self.composer.without_null(item) for item in task]
        while True:
            try:
                return create_defaults_list(self.repository, CONFIG, list(remaining), False, False)
            except RecursionError:
                document = [*self.repository.documents.values()][-1]
                where = f"{document.file}:{document.defaults_lines[0]}" if document.defaults_lines else ""
                rule = "files include one another without an end. Remove the item that closes the circle."
                raise ConfigError([*self.problems, Problem(key="defaults", rule=rule, origin=where)]) from None
            except MissingConfigException as error:
                missing = error.missing_cfg_file or ""
                if missing in self.repository.documents or missing == CONFIG:
                    raise ConfigError([*self.problems, Problem(key=missing, rule=first_line(error))]) from error
                self.problems.append(self._missing(missing))
                self.repository.mark_absent(missing)
            except (HydraException, ValueError, OmegaConfBaseException) as error:
                matches = [item for item in remaining if item.get_key_element() in str(error)]
                matches += [item for item in remaining if item.key_or_group in str(error)]
                culprit, rule = next(iter(matches), None), first_line(error)
                if culprit is not None and culprit.is_delete():
                    rule = "is not the choice of this group, so it cannot be deleted."
                elif culprit is not None and self.composer.is_group(culprit) and not culprit.is_add():
                    rule = f"is not in the defaults list. To add it: +{culprit.input_line}."
                if culprit is None:
                    raise ConfigError([*self.problems, Problem(key="defaults list", rule=rule)]) from error
                self._report(culprit, rule)
                remaining.remove(culprit)

    def _missing(self, config_path: str) -> Problem:
        """Return the problem of a missing choice, with the line that names it."""
        group, _, name = config_path.rpartition("/")
        for document in self.repository.documents.values():
            for item, line in zip(document.defaults, document.defaults_lines, strict=False):
                pairs = item.items() if isinstance(item, Mapping) else ()
                if any(group_in(str(key)) == group and name in _names(value) for key, value in pairs):
                    where = f"{shown(document.file)}:{line}"
                    return Problem(key=group, value=name, rule=self._no_choice(group, name), origin=where)
        return Problem(key=group or config_path, value=name, rule=self._no_choice(group, name))

    def _surplus_choices(self) -> Iterator[Problem]:
        """Yield problems of lists of choices that files give to a group of one choice; Hydra would merge them."""
        for document in self.repository.documents.values():
            for item, line in zip(document.defaults, document.defaults_lines, strict=False):
                for key, value in item.items() if isinstance(item, Mapping) else ():
                    group = group_in(str(key))
                    if isinstance(value, list) and group in GROUPS and group not in LIST_GROUPS:
                        where = f"{shown(document.file)}:{line}"
                        yield Problem(key=group, value=value, rule="takes one choice, not a list.", origin=where)

    def _files(self, defaults: DefaultsList) -> list[ConfigFile]:
        """Return the files in ascending precedence: config.yaml, choices, recipes, experiments."""
        files = []
        roots = (shipped_conf(), shipped_recipes())
        for default in defaults.defaults:
            path = default.config_path or ""
            group, _, name = path.rpartition("/")
            level = Level.choice
            if path == CONFIG:
                level = Level.defaults
            elif path.startswith(("recipe/", "experiment/")):
                level = Level.recipe if path.startswith("recipe/") else Level.experiment
            document = self.repository.documents[path]
            package = tuple(part for part in (default.package or "").split(".") if part and part != "_global_")
            shipped = any(document.file.is_relative_to(folder) for folder in roots)
            files.append(
                ConfigFile(group=group, name=name, package=package, level=level, document=document, shipped=shipped)
            )
        return sorted(files, key=lambda file: file.level)

    def _swapped(
        self, task: Sequence[Override], files: Sequence[ConfigFile], choices: Mapping[str, Any]
    ) -> dict[Level, dict[str, str]]:
        """Return level -> group -> note, for groups whose choice in a recipe or experiment was replaced from above."""
        arguments = {item.key_or_group: str(item.input_line) for item in task if self.composer.is_group(item)}
        primary, recipes, experiments = (
            [file.document for file in reversed(files) if file.level == level]
            for level in (Level.defaults, Level.recipe, Level.experiment)
        )
        of_experiment = {group: "the experiment" for group in GROUPS if [*_chosen_in(experiments, group)]}
        sources = {
            Level.recipe: ([*recipes, *primary], {**of_experiment, **arguments}),
            Level.experiment: ([*experiments, *recipes, *primary], arguments),
        }
        swapped: dict[Level, dict[str, str]] = {level: {} for level in sources}
        for level, (documents, labels) in sources.items():
            for group in labels.keys() - {"recipe", "experiment"}:
                before = next(_named_in(documents, group), None)
                if _names(before) != _names(choices.get(group)):
                    swapped[level][group] = f"{labels[group]} replaces {'+'.join(_names(before)) or 'nothing'}"
        return swapped

    def _no_default_recipe(self, task: Sequence[Override]) -> list[Override]:
        """Return the argument that leaves the default recipe out: an experiment is composed over the defaults alone,
        unless it or the command line names a recipe.
        """
        names = [str(item.value()) for item in task if item.key_or_group == "experiment" and not item.is_delete()]
        if not names or any(item.key_or_group == "recipe" for item in task):
            return []
        self.repository.load_config(f"experiment/{names[0]}")
        document = self.repository.documents.get(f"experiment/{names[0]}")
        if document is None or [*_chosen_in([document], "recipe")]:
            return []
        return self.composer.parse(["recipe=null"])[0]

    def _apply(self, override: Override, tree: TrackedTree) -> None:
        """Merge one argument over the values of the files."""
        path = tuple(override.key_or_group.split("."))
        if override.package is not None:
            self._report(override, f"{override.key_or_group} is not a group, so it takes no @package.")
        elif override.is_delete():
            if _is_of_schema(path) and path in tree.origins:
                name = f"{dotted(path)}.KEY" if isinstance(lookup(tree.values, path), Mapping) else dotted(path)
                self._report(override, f"belongs to every run and cannot be deleted. Give a value: {name}=VALUE.")
            elif "=" in (override.input_line or "") and override.value() != lookup(tree.values, path):
                rule = f"is not deleted: its value is {lookup(tree.values, path)}. Without a value: ~{dotted(path)}."
                self._report(override, rule)
            elif not tree.remove(path):
                self._report(override, "there is no such key to delete.")
        else:
            value = override.value()
            is_section = len(path) == 1 and is_dataclass(plain(hints_of(RunConfig).get(path[0])))
            if value == {} and is_section and isinstance(lookup(tree.values, path), Mapping):
                rule = f"belongs to every run and cannot be cleared. Give values: {dotted(path)}.KEY=VALUE."
                self._report(override, rule)
                return
            if value == {}:
                tree.remove(path)  # merging an empty mapping would change nothing, but it means to clear the node
            tree.put(path, value, _ARGUMENT)


def _is_of_schema(path: KeyPath) -> bool:
    """Return whether every run has a key; below `optimizers` the names are the user's."""
    hint = hints_of(RunConfig).get(path[0])
    return hint is not None and path[0] not in GROUPS and (len(path) == 1 or is_dataclass(plain(hint)))


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _chosen_in(documents: Sequence[Document], group: str) -> Iterator[Any]:
    """Yield the choices that the defaults lists of documents make for a group, first document first."""
    for item in itertools.chain.from_iterable(document.defaults for document in documents):
        if isinstance(item, Mapping):
            yield from (value for key, value in item.items() if group_in(str(key)) == group)


def _named_in(documents: Sequence[Document], group: str) -> Iterator[Any]:
    """Yield what documents choose for a group, first document first: a class named by `_target_`, or choices."""
    for document in documents:
        node = document.values.get(group)
        if group not in LIST_GROUPS and isinstance(node, Mapping) and "_target_" in node:
            yield node["_target_"]
        yield from _chosen_in([document], group)


def repeated(arguments: Sequence[Override]) -> list[Problem]:
    """Return a problem for each key or group that several arguments give: their order would decide which one counts.

    `optimizer=adamw optimizer.lr=1` names a group and one of its keys, each once. A mapping names every key in it.
    """
    givers: dict[str, list[str]] = {}
    for argument in arguments:
        name = argument.key_or_group if argument.package is None else f"{argument.key_or_group}@{argument.package}"
        value = None if argument.is_sweep_override() or argument.is_delete() else argument.value()
        for path, _ in leaves({name: value}):
            givers.setdefault(dotted(path), []).append(redacted_argument(argument.input_line or ""))
    return [
        Problem(key=key, rule=f"is given {_times(len(lines))}: {_listed(lines)}. Give it once.", origin=COMMAND_LINE)
        for key, lines in givers.items()
        if len(lines) > 1
    ]


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def _listed(lines: Sequence[str]) -> str:
    shown = [line if len(line) <= 60 else f"{line[:57]}..." for line in lines[:4]]
    return ", ".join(shown[:-1]) + f" and {shown[-1]}" if len(lines) <= 4 else ", ".join(shown) + " and others"
