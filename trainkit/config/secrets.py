"""Which keys of a config are secrets. A config gives a secret by reference alone, `${oc.env:X}`.

The reference stays a reference in the config and in every file; the process that builds the object reads the variable.
A literal secret is refused before anything starts, and no message shows it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any, Final

from trainkit.config.values import leaves, plain
from trainkit.errors import ConfigError, Problem
from trainkit.fields import secret_fields, signature_hints
from trainkit.files import parse_yaml
from trainkit.names import path_of
from trainkit.redaction import (
    REDACTED,
    has_password,
    is_secret_name,
    mask,
    remember,
    remember_passwords,
    secrets_in,
    variable_of,
    without_secrets,
)


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a composition, which may be refused, without secrets.

    In a text that contains a password in a URL, or the value of another secret, only that part is redacted.

    Example:
        >>> redacted({"logger": {"w": {"api_key": "k7", "project": "digits"}}})
        {'logger': {'w': {'api_key': '(redacted)', 'project': 'digits'}}}
    """
    shown: dict[str, Any] = without_secrets(values, remember_secrets(values))
    return shown


def literal_secrets(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each secret that is given as text, and for each URL with a password."""
    secrets = remember_secrets(values)
    yield from (literal_secret(".".join(path)) for path in secrets)
    for path, text in texts_in(values):
        if path not in secrets and not is_below(path, secrets) and has_password(text):
            rule = (
                "has a password, which files would show. Give it by a variable that its library reads, or a secret key."
            )
            yield Problem(key=".".join(path), value=mask(text), rule=rule)


def literal_secret(key: str) -> Problem:
    """Return the problem of a secret that is given as text."""
    rule = f"is a secret, and files and process lists would show it. Set a variable, and write {reference(key)}."
    return Problem(key=key, value=REDACTED, rule=rule)


def remember_secrets(values: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Let messages hide the secrets of a config from now on; return the secrets that have a key of their own."""
    secrets = secret_keys(values)
    remember(list(secrets.values()))
    for _, text in texts_in(values):
        remember_passwords(text)
    return secrets


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
    paths = {(*path, name) for name in secret_fields(target)}
    for name, hint in signature_hints(target).items():
        kind = plain(hint)
        if isinstance(kind, type) and is_dataclass(kind) and kind is not target:
            paths |= marked_in(kind, (*path, name))
    return frozenset(paths)


def _marks(node: Mapping[str, Any]) -> frozenset[tuple[str, ...]]:
    """Return the paths marked by the class of a node, if it has been imported already; import nothing."""
    text = node.get(_TARGET)
    parts = path_of(text).split(".") if isinstance(text, str) else []
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


def is_below(path: tuple[str, ...], paths: Mapping[tuple[str, ...], Any]) -> bool:
    """Return whether a path lies below one of these paths."""
    return any(path[:length] in paths for length in range(1, len(path)))


def texts_in(values: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], str]]:
    """Return every text below a value, also in lists, with its path."""
    if isinstance(values, Mapping):
        return [item for key, value in values.items() for item in texts_in(value, (*path, str(key)))]
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return [item for index, value in enumerate(values) for item in texts_in(value, (*path, str(index)))]
    return [(path, values)] if isinstance(values, str) and path else []


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
        resolved = parse_yaml(text) if "oc.decode" in value else text
    except ValueError:  # its message may quote the secret
        rule = f"refers to the environment variable {variable}, whose value is not YAML. Write it as {{KEY: VALUE}}."
        raise ConfigError([Problem(key=key, value=value, rule=rule)]) from None
    remember(resolved)
    return resolved


def with_variables(node: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """Return a node of a class in which references of secrets to environment variables are replaced by the values.

    Raises:
        ConfigError: a variable is not set.
    """
    if not _refers(node):
        return dict(node)
    marked = marked_in(target)

    def filled(values: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        result = {}
        for name, value in values.items():
            inner = (*path, str(name))
            if is_secret_name(inner[-1], "logger") or inner in marked:
                result[name] = dereferenced(value, key=".".join(inner))
            else:
                result[name] = filled(value, inner) if isinstance(value, Mapping) else value
        return result

    return filled(node, ())


def _refers(value: Any) -> bool:
    return any(variable_of(text) is not None for _, text in texts_in([value]))


def reference_paths(values: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Return the keys of secrets that refer to environment variables; for items of a list, the key of the list."""
    if not _refers(values):
        return set()
    secret_paths = [path for path, _ in secrets_in(values, marks=_marks, references=True)]
    refers = [path for path, value in leaves(values) if _refers(value)]
    return {path for path in refers if any(path[: len(other)] == other[: len(path)] for other in secret_paths)}
