"""Access Hydra's files, plugins and state: one search path, its files read with line numbers, launchers and sweepers,
and its global state saved and restored.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from hydra import version as hydra_version
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from trainkit.config.compose.bounds import argument_problem
from trainkit.config.compose.hydra_adapter import (
    CORE_PLUGINS,
    CachingConfigRepository,
    ConfigLoaderImpl,
    ConfigRepository,
    ConfigSearchPathImpl,
    defaults_list,
)
from trainkit.config.composition import Composition, ConfigFile
from trainkit.config.door import advice, own_folder
from trainkit.config.grammar import COMMAND_LINE, unreadable
from trainkit.config.schema import LIST_GROUPS
from trainkit.config.targets.allowed import refuse_packages
from trainkit.config.yaml_files import Document, is_choice_path, read_document, shipped_conf, shipped_recipes
from trainkit.errors import ConfigError, Problem

CONFIG: Final = "config"
"""The primary config, conf/config.yaml."""
_MAX_FILES: Final = 200
"""Largest number of file loads in one composition; repeated loads count again."""
_NO_SOURCES: Final = ConfigRepository(ConfigSearchPathImpl())
_NO_CONTENT: Final = OmegaConf.create({})
_SOME_CONTENT: Final = OmegaConf.create({"content": True})
"""Placeholder for the content of a file: Hydra only checks whether there is any."""
_MAP: Final = "_create_interpolation_map"
"""Hydra's function that builds, for each file, a mapping of all choices for the interpolations in its defaults list."""


@contextlib.contextmanager
def hydra_state() -> Iterator[None]:
    """Set Hydra's resolvers and version base as Hydra needs them, and restore them afterwards."""
    resolvers = dict(BaseContainer._resolvers)  # noqa: SLF001 - OmegaConf offers no way to restore them
    base = Singleton._instances.get(hydra_version.VersionBase)  # noqa: SLF001
    previous = base.getbase() if base is not None else None  # type: ignore[attr-defined]
    try:
        setup_globals()
        hydra_version.setbase("1.3")
        Plugins.instance()
        with _lean_defaults_lists():
            yield
    finally:
        BaseContainer._resolvers = resolvers  # noqa: SLF001
        if base is None:
            Singleton._instances.pop(hydra_version.VersionBase, None)  # noqa: SLF001
        else:
            base.version_base = previous  # type: ignore[attr-defined]


@contextlib.contextmanager
def _lean_defaults_lists() -> Iterator[None]:
    """Let Hydra build no mapping of choices for files without an interpolation while the block runs.

    Building these mappings takes a third of the time of a composition.
    """
    built = getattr(defaults_list, _MAP)

    def needed(overrides: Any, items: Sequence[Any], self_added: bool) -> Any:
        refers = any(not item.is_self() and item.is_interpolation() for item in items)
        return built(overrides, items, self_added) if refers else None

    setattr(defaults_list, _MAP, needed)
    try:
        yield
    finally:
        setattr(defaults_list, _MAP, built)


class Repository(CachingConfigRepository):
    """Hydra's config repository, which records line numbers and drops what a file sets about Hydra itself."""

    def __init__(self, delegate: ConfigRepository) -> None:
        # Not the base class's deep copy: only the list of sources could be replaced in it, not a source.
        self.delegate = copy.copy(delegate)
        self.cache = {}
        self.documents: dict[str, Document] = {}
        self.absent: set[str] = set()
        """Choices that do not exist. Once reported, they are read as empty, so that the remaining choices are checked
        too.
        """
        self._asked: Counter[str] = Counter()

    def begin_list(self) -> None:
        """Reset the count of loaded files at the start of a defaults list."""
        self._asked.clear()

    def cycle_problem(self) -> Problem:
        """Return the problem of defaults lists that are circular."""
        times = self._asked.most_common(1)[0][1]
        names = [name for name, count in self._asked.items() if times > 1 and count > times // 2 and name != CONFIG]
        many = f"{', '.join(names[:3])}, {times} times" if names else f"{len(self._asked)} of them"
        rule = f"more than {_MAX_FILES} files include one another ({many}). Remove the entry that closes the cycle."
        document = self.documents.get(names[0]) if names else None
        where = f"{document.file}:{document.defaults_lines[0]}" if document and document.defaults_lines else ""
        return Problem(key="defaults", rule=rule, origin=where)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return the defaults list and header of a file for Hydra; the content is kept in `documents`.

        Raises:
            ConfigError: the defaults lists lead to too many files.
        """
        self._asked[config_path] += 1
        if self._asked.total() > _MAX_FILES:
            raise ConfigError([self.cycle_problem()])
        if config_path in self.cache:
            return self.cache[config_path]
        self.cache[config_path] = result = self._load(config_path)
        return result

    def config_exists(self, config_path: str) -> bool:
        """Return whether the file exists below a folder of the config, or was already reported as absent."""
        if not is_choice_path(config_path):
            return False
        return config_path in self.absent or super().config_exists(config_path)

    def mark_absent(self, config_path: str) -> None:
        """Treat an absent file as empty from now on."""
        self.absent.add(config_path)
        self.cache.pop(config_path, None)

    def _load(self, config_path: str) -> ConfigResult | None:
        if config_path in self.absent:
            return self._result(config_path, Document(file=Path(config_path), values={}, lines={}))
        file = self.file_of(config_path)
        if file is not None:
            document = read_document(file)
        elif (found := self.delegate.load_config(config_path)) is not None:
            values: Any = OmegaConf.to_container(found.config, resolve=False)
            header = found.header.get("package")
            document = Document(file=Path(config_path), values=values or {}, lines={}, package=header)
        else:
            return None
        return self._result(config_path, document)

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


class HydraFiles(Repository):
    """Presents the Hydra settings of a composition as the primary config, in addition to Hydra's own files."""

    def __init__(self, delegate: ConfigRepository, composition: Composition) -> None:
        super().__init__(delegate)
        choices = [{f"override /{group}": name} for group, name in composition.hydra_choices.items()]
        self._primary = Document(
            file=Path("config.yaml"), values={"hydra": composition.hydra}, lines={}, defaults=["_self_", *choices]
        )

    def _load(self, config_path: str) -> ConfigResult | None:
        if config_path != CONFIG:
            return self.delegate.load_config(config_path)
        result = ConfigResult(
            provider="trainkit",
            path="config.yaml",
            config=OmegaConf.create(self._primary.values),
            header={"package": None},
        )
        items = OmegaConf.create(self._primary.defaults)
        result.defaults_list = self.delegate._create_defaults_list(config_path, items)  # type: ignore[attr-defined]  # noqa: SLF001
        return result


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
    loader = ConfigLoaderImpl(path)
    for source in loader.repository.sources:
        if source.scheme() == "pkg":  # Hydra's own files: they stay as they are installed
            for method in (source.is_config, source.is_group):
                setattr(source, method.__name__, cache(method))
            source.load_config = _copying(cache(source.load_config))  # type: ignore[method-assign, assignment]
    return loader


def _copying(load: Callable[[str], ConfigResult]) -> Callable[[str], ConfigResult]:
    return lambda config_path: copy.deepcopy(load(config_path))


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


@lru_cache(maxsize=1024)  # the jobs of a sweep share most of their arguments
def _parsed(argument: str) -> Override:
    """Return an argument parsed by Hydra's grammar, which takes about a millisecond; to be copied."""
    return _parser().parse_override(argument)


class SearchPath:
    """Finds YAML files by group and choice, and parses arguments for the groups that exist."""

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
        found = self.loader.repository.get_group_options("", results_filter=ObjectType.GROUP)
        return [name for name in found if name != "hydra"]

    def parse(self, overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
        """Parse arguments with Hydra's grammar; return a problem for each argument that it cannot read."""
        parsed, problems = [], []
        for argument in overrides:
            if problem := argument_problem(argument):
                problems.append(problem)
                continue
            try:
                override = copy.copy(_parsed(argument))
                override.config_loader = self.loader  # glob(...) reads the choices from it
                parsed.append(override)
            except (HydraException, RecursionError, ValueError):
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
    own = [item for item in HydraConf().defaults if isinstance(item, dict)]
    usual = {f"hydra/{name}": choice for item in own for name, choice in item.items()}
    items = [item for file in files for item in file.document.defaults if is_about_hydra(item)]
    chosen = {group_in(str(key)): value for item in items for key, value in item.items()}
    return {group: str(usual[group]) for group in _PLUGINS} | chosen


def _plugins(group: str) -> Iterator[tuple[str, type]]:
    """Yield the choices of a group that packages have registered, each with its class."""
    store = ConfigStore.instance()
    for file in store.list(group):
        module, _, name = str(store.load(f"{group}/{file}").node.get("_target_")).rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type):
            yield file.removesuffix(".yaml"), kind


def unused_sweep_keys(group: str, choice: str, sweep: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of `sweep` that have no effect with a choice of a group, and the reasons.

    Its class says so (`unused_keys`); of a class that knows nothing of these keys, the other classes of the group do.

    Example:
        >>> dict(unused_sweep_keys("hydra/sweeper", "random", {}))["pruner"]
        'has no effect with hydra/sweeper=random: it is for optuna.'
    """
    found = dict(_plugins(group))
    known = [found[choice]] if hasattr(found.get(choice), "unused_keys") else dict.fromkeys(found.values())
    for kind in known:
        if (declared := getattr(kind, "unused_keys", None)) is not None:
            yield from declared(choice, sweep)


def submits_single_runs(launcher: str) -> bool:
    """Return whether a launcher also starts single runs: that of another package does, Hydra's own does not."""
    kind = dict(_plugins("hydra/launcher")).get(launcher)
    own_of_hydra = kind is not None and kind.__module__.startswith(CORE_PLUGINS)
    return bool(getattr(kind, "submits_single_runs", not own_of_hydra))
