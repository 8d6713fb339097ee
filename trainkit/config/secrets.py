"""Remove the secrets of a config from everything that is written, and restore them in the processes that need them.

A secret given literally reaches the workers of its run through their environment. A secret given as a reference,
`${oc.env:X}`, stays a reference in the config and in every file; the process that builds the object reads the variable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from trainkit.bounded import MAX_BYTES, parse_yaml
from trainkit.config.schema import RunConfig
from trainkit.config.values import plain
from trainkit.errors import ConfigError, Problem, UnreadableError
from trainkit.fields import secret_fields, signature_hints
from trainkit.files import read_text
from trainkit.names import path_of
from trainkit.redaction import (
    REDACTED,
    is_secret_name,
    mask,
    redacted_argument,
    remember,
    remember_passwords,
    secrets_in,
    variable_of,
    without_secrets,
)

VARIABLE: Final = "TRAINKIT_SECRETS"
"""The environment variable that holds key -> value, as JSON, for processes that read the config from a run folder."""
ARGUMENTS: Final = "TRAINKIT_SECRET_ARGUMENTS"
"""The environment variable that holds position -> argument, as JSON, for a job whose command line lacks them."""


def redacted(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy without secrets, and the secrets by their full key.

    In a text that contains a password in a URL, or the value of another secret, only that part is redacted.

    Example:
        >>> redacted({"logger": {"w": {"api_key": "k7", "project": "digits"}}})
        ({'logger': {'w': {'api_key': '(redacted)', 'project': 'digits'}}}, {'logger.w.api_key': 'k7'})
    """
    found = remember_secrets(values)
    shown = without_secrets(values, found)
    kept = {path: text for path, text in texts_in(values) if path not in found and not is_below(path, found)}
    masked = {path: text for path, text in kept.items() if mask(text) != text}
    return shown, {".".join(path): value for path, value in {**found, **masked}.items()}


def remember_secrets(values: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Let messages hide the secrets of a config from now on; return the secrets that have a key of their own."""
    found = secret_keys(values)
    remember(list(found.values()))
    for _, text in texts_in(values):
        remember_passwords(text)
    return found


def restored(values: Mapping[str, Any], secrets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with their secrets back in place.

    Raises:
        ConfigError: a needed secret was not given.
    """
    stored = dict(texts_in(values))
    for key, value in secrets.items():
        if stored.get(tuple(key.split(".")), REDACTED) == REDACTED:
            remember(value)
        else:  # only part of the text is secret, such as the password of a URL
            remember_passwords(str(value))
    whole: dict[str, Any] = _replaced(values, (), secrets)
    if problems := missing_secrets(whole):
        raise ConfigError(problems)
    return whole


def in_environment(environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Take the secrets of a run out of an environment, so that later child processes do not inherit them.

    Raises:
        ConfigError: the variable does not hold a JSON object of keys and values.
    """
    return _read(environ.pop(VARIABLE, ""))


def from_environment() -> dict[str, Any]:
    """Return the secrets that the user set in the environment for commands that take no `key=value`.

    Raises:
        ConfigError: the variable does not hold a JSON object of keys and values.
    """
    return _read(os.environ.get(VARIABLE, ""))


def to_environment(secrets: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variable that `in_environment` reads in another process; none without secrets."""
    return {VARIABLE: json.dumps(dict(secrets))} if secrets else {}


def _read(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        rule = (
            f"must be a JSON object of full keys and their secrets: {VARIABLE}='{json.dumps({'data.token': '...'})}'."
        )
        raise ConfigError([Problem(key=VARIABLE, rule=rule)]) from None
    return found


def with_own_secrets(cfg: RunConfig, groups: Sequence[str]) -> RunConfig:
    """Return the config of a run with the secrets of some groups restored from the environment.

    Raises:
        ConfigError: a secret is missing.
    """
    values = cfg.to_dict()
    given = from_environment()
    problems = [
        Problem(key=key, value=REDACTED, rule=f"a secret is not kept in the run folder. {_by_variable(key)}")
        for key in _lacking({group: values[group] for group in groups})
        if key not in given
    ]
    if problems:
        raise ConfigError(problems)
    whole = _replaced(values, (), given)
    return replace(cfg, **{group: whole[group] for group in groups})


def _by_variable(key: str) -> str:
    return f"Give it in the environment: {VARIABLE}='{json.dumps({key: '...'})}'."


def missing_secrets(values: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each secret that the run folder does not store and that was not given again."""
    return [
        Problem(
            key=key,
            value=REDACTED,
            rule=f"a secret is not kept in the run folder. Give it again: {key}=... on the command line, or "
            f"{reference(key)}.",
        )
        for key in _lacking(values)
    ]


def keys_to_add(resolved: Path) -> list[str]:
    """Return the arguments that a command about this run needs, one for each secret that its folder does not store."""
    try:
        text = read_text(resolved, limit=MAX_BYTES)
        values = parse_yaml(text) if REDACTED in text else {}
    except (UnreadableError, ValueError):
        return []
    return [reference(key) for key in _lacking(values)] if isinstance(values, Mapping) else []


def refuse_to_carry(secrets: Sequence[str], carrier: str, *, key: str) -> None:
    """Refuse secrets that would have to be written to a disk to reach the processes that need them.

    Raises:
        ConfigError: there is such a secret.
    """
    names = [text.partition("=")[0] for text in secrets]
    rule = f"{carrier} would write it to a disk. Set a variable where the processes run, and refer to it: "
    problems = [Problem(key=name, value=REDACTED, rule=f"{rule}{reference(name)}. ({key})") for name in names]
    if problems:
        raise ConfigError(problems)


def hidden_arguments(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a command line without secrets, and the environment variable that passes them to its process.

    Example:
        >>> hidden_arguments(["seed=1", "logger.w.api_key=k7"])
        (('seed=1', 'logger.w.api_key=(redacted)'), {'TRAINKIT_SECRET_ARGUMENTS': '{"1": "logger.w.api_key=k7"}'})
    """
    shown = tuple(map(redacted_argument, arguments))
    hidden = {str(place): text for place, text in enumerate(arguments) if text != shown[place]}
    return shown, {ARGUMENTS: json.dumps(hidden)} if hidden else {}


def given_arguments(arguments: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """Return a command line with the arguments that `hidden_arguments` removed."""
    hidden = json.loads(environ.pop(ARGUMENTS, "{}"))
    return [hidden.get(str(place), text) for place, text in enumerate(arguments)]


def _lacking(values: Any) -> list[str]:
    return [".".join(path) for path, text in texts_in(values) if REDACTED in text]


def _replaced(values: Any, path: tuple[str, ...], by_key: Mapping[str, Any]) -> Any:
    key = ".".join(path)
    if key in by_key:
        return by_key[key]
    if isinstance(values, Mapping):
        return {name: _replaced(value, (*path, str(name)), by_key) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_replaced(value, (*path, str(index)), by_key) for index, value in enumerate(values)]
    return values


_TARGET: Final = "_target_"


def secret_keys(values: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the secrets of a config that have a key of their own, by their path.

    `trainkit.redaction` decides which names are secret; imported classes add the fields that they mark.
    """
    return dict(secrets_in(values, marks=_marks))


def import_marks(values: Mapping[str, Any], packages: Sequence[str]) -> None:
    """Import the classes of the user's own packages, so that the secrets they mark are known before anything is shown.

    Import errors are ignored here; the check reports them.
    """
    for path, text in texts_in(values) if packages else ():
        if path[-1] == _TARGET and text.partition(".")[0] in packages:
            with contextlib.suppress(Exception):
                import_module(text.rpartition(".")[0])


def marked_in(target: Any, path: tuple[str, ...] = ()) -> frozenset[tuple[str, ...]]:
    """Return the paths that a class marks as secret, including those inside of its dataclass fields."""
    found = {(*path, name) for name in secret_fields(target)}
    for name, hint in signature_hints(target).items():
        kind = plain(hint)
        if isinstance(kind, type) and is_dataclass(kind) and kind is not target:
            found |= marked_in(kind, (*path, name))
    return frozenset(found)


def _marks(node: Mapping[str, Any]) -> frozenset[tuple[str, ...]]:
    """Return the paths marked by the class of a node, if it has been imported already; import nothing."""
    named = node.get(_TARGET)
    parts = path_of(named).split(".") if isinstance(named, str) else []
    shortest = 2 if parts[:1] == ["trainkit"] else 1  # trainkit itself holds no class, and imports its API on access
    for length in range(len(parts) - 1, shortest - 1, -1):
        target: Any = sys.modules.get(".".join(parts[:length]))
        if target is not None:
            with contextlib.suppress(Exception):  # a module's own __getattr__ may raise anything
                for name in parts[length:]:
                    target = getattr(target, name)
                return marked_in(target)
            break
    return frozenset()


def is_below(path: tuple[str, ...], found: Mapping[tuple[str, ...], Any]) -> bool:
    """Return whether a path lies below one of the paths found."""
    return any(path[:length] in found for length in range(1, len(path)))


def texts_in(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text below a value, also in lists, with its path."""
    if isinstance(values, str):
        if path:
            yield path, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from texts_in(value, (*path, str(key)))
    elif isinstance(values, Sequence) and not isinstance(values, bytes):
        for index, value in enumerate(values):
            yield from texts_in(value, (*path, str(index)))


_CONTAINERS: Final = ("headers", "tokens")
"""Suffixes of keys whose value is a mapping or list."""


def reference(key: str) -> str:
    """Return the argument that sets a key to a reference to an environment variable, quoted for a shell.

    Example:
        >>> print(reference("logger.wandb.api_key"), reference("logger.w.headers"))
        'logger.wandb.api_key=${oc.env:WANDB_API_KEY}' 'logger.w.headers=${oc.decode:${oc.env:W_HEADERS}}'
    """
    name = re.sub(r"\W", "_", "_".join(key.lstrip("+~").split(".")[-2:])).upper()
    variable = f"${{oc.env:{name}}}"
    return shlex.quote(f"{key}=${{oc.decode:{variable}}}" if key.endswith(_CONTAINERS) else f"{key}={variable}")


def dereferenced(value: Any, *, key: str) -> Any:
    """Return a value with its references to environment variables resolved, also in mappings and lists.

    Raises:
        ConfigError: a variable is not set.
    """
    if isinstance(value, Mapping):
        return {name: dereferenced(inner, key=f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [dereferenced(inner, key=key) for inner in value]
    variable = variable_of(value)
    if variable is None:
        return value
    if variable not in os.environ:
        rule = f"refers to the environment variable {variable}, which is not set here. Set it to the secret."
        raise ConfigError([Problem(key=key, value=value, rule=rule)])
    text = value[: value.index("${")] + os.environ[variable]
    try:
        found = parse_yaml(text) if "oc.decode" in value else text
    except ValueError:  # its message may quote the secret
        rule = f"refers to the environment variable {variable}, whose value is not YAML. Write it as {{KEY: VALUE}}."
        raise ConfigError([Problem(key=key, value=value, rule=rule)]) from None
    remember(found)
    return found


def with_variables(node: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """Return a node of a class in which references of secrets to environment variables are replaced by the values.

    Raises:
        ConfigError: a variable is not set.
    """
    return _filled(node, marked_in(target) if _refers_anywhere(node) else frozenset(), ())


def _refers_anywhere(values: Any) -> bool:
    return any(variable_of(text) is not None for _, text in texts_in(values))


def _filled(node: Mapping[str, Any], marked: frozenset[tuple[str, ...]], path: tuple[str, ...]) -> dict[str, Any]:
    filled = {}
    for name, value in node.items():
        inner = (*path, str(name))
        if is_secret_name(inner[-1], in_observer=True) or inner in marked:
            filled[name] = dereferenced(value, key=".".join(inner))
        else:
            filled[name] = _filled(value, marked, inner) if isinstance(value, Mapping) else value
    return filled


def reference_paths(values: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Return the keys of secrets that refer to environment variables; for items of a list, the key of the list."""
    if not _refers_anywhere(values):
        return set()
    hidden = secret_keys(_opaque(values))  # count a reference as a secret here, so that its key is found
    below = [(path, text) for path, text in texts_in(values) if path in hidden or is_below(path, hidden)]
    found = {path for path, text in below if variable_of(text) is not None}
    return {_of_mapping(values, path) for path in found}


def is_reference(values: Mapping[str, Any], path: tuple[str, ...], value: Any) -> bool:
    """Return whether the value of a secret key refers to an environment variable, or contains such references.

    Args:
        values: all values of the config.
        path: the key.
        value: its value there.
    """
    if all(variable_of(text) is None for _, text in texts_in(value, path)):  # spares the walk through all values
        return False
    return any(path == one[: len(path)] for one in reference_paths(values))


def _opaque(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: _opaque(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_opaque(value) for value in values]
    return REDACTED if variable_of(values) is not None else values


def _of_mapping(values: Mapping[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of the leaf that holds an item, as `trainkit.config.composition.leaves` defines it: a list is a
    leaf.
    """
    here: Any = values
    for depth, name in enumerate(path):
        if not isinstance(here, Mapping):
            return path[:depth]
        here = here[name]
    return path
