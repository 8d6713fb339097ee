"""Limits on what Hydra and OmegaConf parse, resolve and call.

Both parse recursively, so an argument of nested brackets exhausts the stack. And Hydra and `logging.config` import and
call every dotted name in Hydra's config node.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse

from trainkit.config.compose.hydra_adapter import CORE_PLUGINS
from trainkit.config.composition import KeyPath, dotted, leaves
from trainkit.config.door import own_folder, trusting
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.secrets import texts_in
from trainkit.config.targets.allowed import TARGET, root_of
from trainkit.config.targets.build import imported
from trainkit.errors import ConfigError, Problem
from trainkit.files import MAX_YAML_DEPTH

MAX_ARGUMENT: Final = 10_000
"""Largest number of characters of one argument, and of one text that contains references."""
_MAX_DIGITS: Final = 500
_SHOWN: Final = 200
"""Characters of a key that a message shows."""
_DIGITS: Final = re.compile(rf"\d{{{_MAX_DIGITS + 1}}}")
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def argument_problem(argument: str) -> Problem | None:
    """Return the problem of an argument that must not be passed to Hydra's grammar; None if there is none.

    Example:
        >>> print(argument_problem("model.hidden=" + "[" * 60))
        model.hidden: nests brackets 60 deep; 50 is the limit. (command line)
    """
    key, _, value = argument.partition("=")
    rule = None
    if not key.lstrip("+~"):
        return Problem(key=argument[:_SHOWN], rule="names no key. Write key=value.", origin=COMMAND_LINE)
    if found := _CONTROL.search(argument):
        rule = f"holds the character {ascii(found[0])[1:-1]}, which no argument may hold. Remove it."
    elif len(argument) > MAX_ARGUMENT:
        rule = f"has {len(argument):,} characters; {MAX_ARGUMENT:,} is the limit. "
        rule += f"Put it into a YAML file of your own: {own_folder()}."
    elif (depth := _nesting(argument)) > MAX_YAML_DEPTH:
        rule = f"nests brackets {depth} deep; {MAX_YAML_DEPTH} is the limit."
    elif _DIGITS.search(value):
        rule = f"holds a number of more than {_MAX_DIGITS} digits."
    return None if rule is None else Problem(key=key[:_SHOWN], rule=rule, origin=COMMAND_LINE)


def _nesting(text: str) -> int:
    """Return how deep brackets are nested, inside quotes or not."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def reference_problem(value: Any) -> str | None:
    r"""Return what is wrong with the references in a value of a file, before any is resolved; None if nothing is.

    Example:
        >>> reference_problem("${a}"), reference_problem("${a")
        (None, 'holds a reference that cannot be read. Write ${KEY}, ${oc.env:VARIABLE} or, for text, \\${.')
    """
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return next((rule for item in items if (rule := reference_problem(item))), None)
    return _rule_of_text(value) if isinstance(value, str) and "${" in value else None


@lru_cache(maxsize=512)
def _rule_of_text(value: str) -> str | None:
    if len(value) > MAX_ARGUMENT:
        return f"holds references in {len(value):,} characters; {MAX_ARGUMENT:,} is the limit."
    if (depth := _nesting(value)) > MAX_YAML_DEPTH:
        return f"nests brackets {depth} deep next to a reference; {MAX_YAML_DEPTH} is the limit."
    try:
        parse(value)
    except GrammarParseError:
        return "holds a reference that cannot be read. Write ${KEY}, ${oc.env:VARIABLE} or, for text, \\${."
    return None


def refuse_endless(config: DictConfig) -> None:
    """Refuse references in Hydra's own node that are circular or cannot be read.

    References that only a job can resolve, such as the job's number, are accepted.

    Raises:
        ConfigError: every such reference.
    """
    problems = []
    values: Any = OmegaConf.to_container(config.hydra, resolve=False, throw_on_missing=False)
    for path, value in leaves(values, ("hydra",)):
        rule = reference_problem(value) or (_rule_of_resolving(config, path) if "${" in str(value) else None)
        if rule is not None:
            problems.append(Problem(key=dotted(path), value=value, rule=rule))
    if problems:
        raise ConfigError(problems)


def _rule_of_resolving(config: DictConfig, path: KeyPath) -> str | None:
    try:
        found = OmegaConf.select(config, dotted(path))
        if OmegaConf.is_config(found):
            OmegaConf.to_container(found, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        if isinstance(error, RecursionError) or "Recursive" in str(error) or "RecursionError" in str(error):
            return "refers to itself. Write the value itself."
    return None


_PLUGINS: Final = ("hydra_plugins", CORE_PLUGINS)
_CALLBACKS: Final = ("hydra_plugins", "hydra.experimental.callbacks")
_MAKES_NODES: Final = ("${oc.decode", "${oc.create", "${oc.dict")
_STREAMS: Final = ("ext://sys.stdout", "ext://sys.stderr")
_LOGGING: Final = (logging.Handler, logging.Formatter, logging.Filter)
_CALLED: Final = ("()", "class", "queue", "listener")
"""Keys whose value `logging.config.dictConfig` imports and calls."""


def refuse_hydra_targets(node: DictConfig, packages: Sequence[str]) -> None:
    """Refuse a Hydra node that names something that neither Hydra nor Python's `logging` defines.

    Hydra and `logging.config` call anything that a text in this node names, so the rule for every `_target_`
    (`trainkit.config.targets.allowed`) is applied to it before either of them reads it.

    Raises:
        ConfigError: every such name.
    """
    values = OmegaConf.to_container(node, resolve=False)
    problems = [
        Problem(key=dotted(("hydra", *path)), value=value, rule=rule)
        for path, value in texts_in(values)
        if (rule := _rule(path, value, packages)) is not None
    ]
    if problems:
        raise ConfigError(problems)


def _rule(path: tuple[str, ...], text: str, packages: Sequence[str]) -> str | None:
    """Return what is wrong with one text of the node; None if nothing is."""
    is_called = path[-1] == TARGET or (path[0].endswith("_logging") and path[-1] in _CALLED)
    names_code = is_called or text.startswith("ext://")
    if any(resolver in text for resolver in _MAKES_NODES) or (names_code and "${" in text):
        return "must be written out: a reference is resolved only when Hydra calls it."
    if path[0].endswith("_logging") and text.startswith("${") and text.endswith("}"):
        return "must be written out: it may resolve to a handler, which would be called."
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
        return f"{package} is not among the packages that Hydra's node may name. To trust it: {trusting(package)}."
    home = str(getattr(imported(text), "__module__", ""))
    return None if root_of(home) == package else f"is defined in {home}, not in {package}. Name it where it is defined."


def _unless(text: str, kinds: tuple[type, ...], rule: str) -> str | None:
    found = imported(text)
    return None if isinstance(found, type) and issubclass(found, kinds) else rule
