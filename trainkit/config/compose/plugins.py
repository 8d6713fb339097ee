"""Launchers, which start the jobs of a sweep, and sweepers, which propose them: the choices of Hydra's groups.

Their classes say themselves what they do with the keys of a sweep; those of other packages do not know them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore

from trainkit.config.compose.hydra_adapter import CORE_PLUGINS

_GROUPS: Final = ("hydra/launcher", "hydra/sweeper")


def usual_choices() -> dict[str, str]:
    """Return the choices of these groups where no file and no argument makes one: those of Hydra itself."""
    items = [item for item in HydraConf().defaults if isinstance(item, Mapping)]
    choices = {f"hydra/{name}": choice for item in items for name, choice in item.items()}
    return {group: str(choices[group]) for group in _GROUPS}


def _classes(group: str) -> Iterator[tuple[str, type]]:
    """Yield the choices of a group that packages have registered, each with its class."""
    store = ConfigStore.instance()
    for file in store.list(group):
        module, _, name = str(store.load(f"{group}/{file}").node.get("_target_")).rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type):
            yield file.removesuffix(".yaml"), kind


def unused_sweep_keys(group: str, choice: str, sweep: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of `sweep` that have no effect with a choice of a group, and why.

    Its class says so (`unused_keys`); of a class that knows nothing of these keys, the other classes of the group do.

    Example:
        >>> dict(unused_sweep_keys("hydra/sweeper", "random", {}))["rungs"]
        'has no effect with hydra/sweeper=random: it is for halving.'
    """
    found = dict(_classes(group))
    known = [found[choice]] if hasattr(found.get(choice), "unused_keys") else dict.fromkeys(found.values())
    for kind in known:
        if (declared := getattr(kind, "unused_keys", None)) is not None:
            yield from declared(choice, sweep)


def submits_single_runs(launcher: str) -> bool:
    """Return whether a launcher is given single runs, too; one of another package is, but Hydra's own is not."""
    kind = dict(_classes("hydra/launcher")).get(launcher)
    own_of_hydra = kind is not None and kind.__module__.startswith(CORE_PLUGINS)
    return bool(getattr(kind, "submits_single_runs", not own_of_hydra))
