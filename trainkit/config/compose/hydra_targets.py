"""Which classes and functions Hydra's own node may name: its plugins and callbacks, and handlers of Python's `logging`.

Hydra and `logging.config` call anything that a text in this node names, so the rule for every `_target_`
(`trainkit.config.targets.allowed`) is applied to it before either of them reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from trainkit.config.compose.hydra_adapter import CORE_PLUGINS
from trainkit.config.provenance import dotted
from trainkit.config.targets.allowed import TARGET, root_of
from trainkit.config.targets.build import imported
from trainkit.errors import ConfigError, Problem

__all__ = ["refuse_hydra_targets"]

_PLUGINS: Final = ("hydra_plugins", CORE_PLUGINS)
_CALLBACKS: Final = ("hydra_plugins", "hydra.experimental.callbacks")
_MAKES_NODES: Final = ("${oc.decode", "${oc.create", "${oc.dict")
_STREAMS: Final = ("ext://sys.stdout", "ext://sys.stderr")
_LOGGING: Final = (logging.Handler, logging.Formatter, logging.Filter)
_CALLED: Final = ("()", "class", "queue", "listener")
"""Keys whose value `logging.config.dictConfig` imports and calls."""
_OWN: Final = "To trust it: --allow-package {}."


def refuse_hydra_targets(node: DictConfig, packages: Sequence[str]) -> None:
    """Refuse a Hydra node that names something that neither Hydra nor Python's `logging` defines.

    Args:
        node: `hydra`, with its interpolations.
        packages: packages that the user allowed.

    Raises:
        ConfigError: every such name.
    """
    values = OmegaConf.to_container(node, resolve=False)
    problems = [
        Problem(key=dotted(("hydra", *path)), value=value, rule=rule)
        for path, value in _texts(values, ())
        if (rule := _rule(path, value, packages)) is not None
    ]
    if problems:
        raise ConfigError(problems)


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, (*path, str(name)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, str(index)))
    elif isinstance(value, str):
        yield path, value


def _rule(path: tuple[str, ...], text: str, packages: Sequence[str]) -> str | None:
    """Return what is wrong with one text of the node; None if nothing is."""
    is_called = path[-1] == TARGET or (path[0].endswith("_logging") and path[-1] in _CALLED)
    names_code = is_called or text.startswith("ext://")
    if any(resolver in text for resolver in _MAKES_NODES) or (names_code and "${" in text):
        return "must be written out: what it stands for is only known once it would be called."
    if path[0].endswith("_logging") and text.startswith("${") and text.endswith("}"):
        return "must be written out: it may stand for a handler, which would be called."
    if path[0] == "callbacks" and len(path) < 3 and "${" in text:
        return f"must be a mapping with {TARGET}."
    if text.startswith("ext://") and text not in _STREAMS:
        return _of_package(text.removeprefix("ext://"), packages)
    return _rule_of_called(path, text, packages) if is_called else None


def _rule_of_called(path: tuple[str, ...], text: str, packages: Sequence[str]) -> str | None:
    """Return what is wrong with a text that names something that will be called; None if nothing is."""
    if path in (("launcher", TARGET), ("sweeper", TARGET)) and text.startswith(_below(_PLUGINS)):
        return None  # Hydra itself refuses anything that is not a plugin of these two kinds
    if path[0] == "callbacks" and len(path) == 3 and text.startswith(_below(_CALLBACKS)):
        return _unless(text, (Callback,), "is not a callback of Hydra.")
    if path[-1] != TARGET and root_of(text) == "logging":
        return _unless(text, _LOGGING, "is not a handler, formatter or filter of Python's logging.")
    return _of_package(text, packages)


def _below(homes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{home}." for home in homes)


def _of_package(text: str, packages: Sequence[str]) -> str | None:
    package = root_of(text)
    if package not in packages:
        return f"{package} is not among the packages that Hydra's node may name. {_OWN.format(package)}"
    home = str(getattr(imported(text), "__module__", ""))
    return None if root_of(home) == package else f"is defined in {home}, not in {package}. Name it where it is defined."


def _unless(text: str, kinds: tuple[type, ...], rule: str) -> str | None:
    found = imported(text)
    return None if isinstance(found, type) and issubclass(found, kinds) else rule
