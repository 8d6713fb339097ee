"""Hydra's files and state: its config repository read with line numbers, and its global state saved and restored."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hydra import version as hydra_version
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import setup_globals
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from trainkit.config.compose.hydra_adapter import CachingConfigRepository, ConfigRepository
from trainkit.config.composition import Composition
from trainkit.config.schema import LIST_GROUPS
from trainkit.config.yaml_documents import Document, is_choice_path, read_document
from trainkit.errors import ConfigError, Problem

CONFIG: Final = "config"
"""The primary config, conf/config.yaml."""
_MAX_FILES: Final = 200
"""Largest number of file loads in one composition; repeated loads count again."""


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
        super().__init__(delegate)
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
        rule = f"more than {_MAX_FILES} files follow from one another ({many}). Remove the entry that leads back."
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
        items = [item for item in document.defaults if not is_about_hydra(item)]
        has_content = {"content": True} if document.values else {}
        result = ConfigResult(
            provider="trainkit",
            path=str(document.file),
            config=OmegaConf.create(has_content),
            header={"package": _package(config_path, document)},
        )
        result.defaults_list = self.delegate._create_defaults_list(  # type: ignore[attr-defined]  # noqa: SLF001
            config_path, OmegaConf.create(items)
        )
        return result


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
    """Presents what a composition sets about Hydra as the primary config, beside Hydra's own files."""

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
