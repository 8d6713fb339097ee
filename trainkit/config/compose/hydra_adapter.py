"""The only import of Hydra's internal modules: composition needs classes that Hydra does not make public."""

from __future__ import annotations

from typing import Final

from hydra._internal import defaults_list
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import DefaultsList, create_defaults_list

__all__ = [
    "CORE_PLUGINS",
    "CachingConfigRepository",
    "Callbacks",
    "ConfigLoaderImpl",
    "ConfigRepository",
    "ConfigSearchPathImpl",
    "DefaultsList",
    "completions",
    "create_defaults_list",
    "defaults_list",
    "get_overrides_dirname",
]

CORE_PLUGINS: Final = "hydra._internal.core_plugins"
"""The package of Hydra's own sweepers and launchers."""


def completions(loader: ConfigLoaderImpl, *, config_name: str, line: str) -> list[str]:
    """Return the completions of the last word of a line of overrides, by Hydra's plugin for bash."""
    from hydra._internal.core_plugins.bash_completion import BashCompletion  # noqa: PLC0415 - for a shell only

    found: list[str] = BashCompletion(loader)._query(config_name=config_name, line=line)  # noqa: SLF001
    return found
