"""Provide `recipe=NAME` for Hydra: read `recipes/NAME/recipe.yaml`, lazily, one recipe at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

__all__ = ["RecipeSource", "TrainkitSearchPath"]


class RecipeSource(ConfigSource):
    """A folder of recipes as the config group `recipe`, for search path entries `recipes:///folder`."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of its search path entries."""
        return "recipes"

    def file_of(self, config_path: str) -> Path | None:
        """Return the file of `recipe/NAME`; None if it does not exist."""
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        if group != "recipe" or not name:
            return None
        file = Path(self.path) / name / "recipe.yaml"
        return file if file.is_file() else None

    def load_config(self, config_path: str) -> ConfigResult:
        """Read one recipe; its content is merged at the root of the config."""
        file = self.file_of(config_path)
        if file is None:
            raise ConfigLoadError(f"Config not found : {config_path}")
        return ConfigResult(
            config=OmegaConf.load(file),
            path=self.full_path(),
            provider=self.provider,
            header={"package": "_global_"},
        )

    def available(self) -> bool:
        """Return whether the folder exists."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """Return whether this is the group `recipe`."""
        return config_path.strip("/") == "recipe" and self.available()

    def is_config(self, config_path: str) -> bool:
        """Return whether there is such a recipe."""
        return self.file_of(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> Any:
        """Return the names below a path."""
        if not self.available() or config_path.strip("/") not in ("", "recipe"):
            return []
        if config_path.strip("/") == "":
            return [] if results_filter is ObjectType.CONFIG else ["recipe"]
        if results_filter is ObjectType.GROUP:
            return []
        return sorted(folder.name for folder in Path(self.path).iterdir() if self.is_config(f"recipe/{folder.name}"))


class TrainkitSearchPath(SearchPathPlugin):
    """Adds trainkit's recipes to any Hydra program that composes trainkit's config."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folder of recipes next to a main config folder of trainkit."""
        for element in search_path.get_path():
            folder = Path((element.path or "").removeprefix("file://"))
            recipes = folder.parent / "recipes"
            if folder.name == "conf" and recipes.is_dir():
                search_path.append(provider="trainkit", path=f"recipes://{recipes}")
                return
