"""References to environment variables, `${oc.env:X}`, in place of secrets.

The reference stays in the config and in every file. The process that builds the object reads the variable.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

from trainkit.bounded_yaml import parse_yaml
from trainkit.config.secrets.keys import is_below, marked_in, secret_keys, texts_in
from trainkit.errors import ConfigError, Problem
from trainkit.redaction import REDACTED, is_secret_name, remember, variable_of

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
    hidden = secret_keys(_opaque(values))  # count a reference as a secret here, so that its key is found
    below = [(path, text) for path, text in texts_in(values) if path in hidden or is_below(path, hidden)]
    found = {path for path, text in below if variable_of(text) is not None}
    return {_of_mapping(values, path) for path in found}


def is_reference(values: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    """Return whether the value of a key refers to an environment variable, or contains such references."""
    return any(path == one[: len(path)] for one in reference_paths(values))


def _opaque(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: _opaque(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_opaque(value) for value in values]
    return REDACTED if variable_of(values) is not None else values


def _of_mapping(values: Mapping[str, Any], path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of the leaf that holds an item, as `trainkit.config.provenance.leaves` defines it: a list is a
    leaf.
    """
    here: Any = values
    for depth, name in enumerate(path):
        if not isinstance(here, Mapping):
            return path[:depth]
        here = here[name]
    return path
