"""Remove the secrets of a config from everything that is written, and restore them in the processes that need them.

A secret given literally reaches the workers of its run through their environment. A secret given as a reference,
`${oc.env:X}`, stays a reference in the config and in every file; the process that builds the object reads the variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trainkit.bounded_yaml import MAX_BYTES, parse_yaml
from trainkit.config.schema import RunConfig
from trainkit.config.secrets.keys import is_below, secret_keys, texts_in
from trainkit.config.secrets.references import reference
from trainkit.errors import ConfigError, Problem, UnreadableError
from trainkit.reading import read_text
from trainkit.redaction import (
    REDACTED,
    mask,
    redacted_argument,
    remember,
    remember_passwords,
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
    found = secret_keys(values)
    remember(list(found.values()))
    for _, text in texts_in(values):
        remember_passwords(text)
    shown = without_secrets(values, found)
    kept = {path: text for path, text in texts_in(values) if path not in found and not is_below(path, found)}
    masked = {path: text for path, text in kept.items() if mask(text) != text}
    return shown, {".".join(path): value for path, value in {**found, **masked}.items()}


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

    Args:
        secrets: their full keys, or arguments without their values.
        carrier: what would write them, in words.
        key: the key that selected the carrier.

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
