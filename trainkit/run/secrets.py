"""Secrets stay out of what is written: a key that names one has its value replaced before a file is made.

Workers get the values through their environment, which no file keeps.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trainkit.errors import ConfigError, Problem

__all__ = ["REDACTED", "VARIABLE", "redacted", "redacted_argument", "restored"]

REDACTED: Final = "(redacted)"
"""What stands in a file where a secret was."""
VARIABLE: Final = "TRAINKIT_SECRETS"
"""The environment variable of workers that holds key -> value, as JSON."""

_NAMES: Final = re.compile(
    r"(^|_)(secret|passw(or)?d|passphrase|api_?key|access_key|secret_key|private_key|credentials?)$"
    r"|^token$|(^|_)(api|auth|access|bearer|hf|hub|refresh)_token$",
    re.IGNORECASE,
)
_PASSWORD_IN_URL: Final = re.compile(r"://[^/\s@:]+:[^/\s@]+@")


def redacted(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A copy without secrets, and the secrets by their full key.

    Secret is a text under a key that names one (`api_key`, `password`, `token`, `hub_token`, not `bos_token`), and a
    URL that holds a password.

    Example:
        >>> redacted({"logger": {"api_key": "k7", "project": "digits"}})
        ({'logger': {'api_key': '(redacted)', 'project': 'digits'}}, {'logger.api_key': 'k7'})
    """
    secrets = {".".join(path): text for path, text in _texts(values, ()) if _is_secret(path[-1], text)}
    return _replaced(values, (), dict.fromkeys(secrets, REDACTED)), secrets


def restored(values: Mapping[str, Any], secrets: Mapping[str, str]) -> dict[str, Any]:
    """The values with their secrets back in place.

    Raises:
        ConfigError: a secret is needed that was not given.
    """
    problems = [
        Problem(
            key=key,
            value=REDACTED,
            rule=f"a secret is not kept in the run folder. Give it again: {key}=... on the command line.",
        )
        for key in (".".join(path) for path, text in _texts(values, ()) if text == REDACTED)
        if key not in secrets
    ]
    if problems:
        raise ConfigError(problems)
    return typing.cast("dict[str, Any]", _replaced(values, (), secrets))


def redacted_argument(argument: str) -> str:
    """A command-line argument without its secret.

    Example:
        >>> redacted_argument("logger.wandb.api_key=k7"), redacted_argument("optimizer.lr=0.1")
        ('logger.wandb.api_key=(redacted)', 'optimizer.lr=0.1')
    """
    key, separator, value = argument.partition("=")
    name = key.rpartition(".")[2].lstrip("+~-").replace("-", "_")
    return f"{key}={REDACTED}" if separator and _is_secret(name, value) else argument


def _is_secret(name: str, text: str) -> bool:
    return bool(text) and (_NAMES.search(name) is not None or _PASSWORD_IN_URL.search(text) is not None)


def _texts(values: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _texts(value, (*path, str(key)))
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes):
        for index, value in enumerate(values):
            yield from _texts(value, (*path, str(index)))
    elif isinstance(values, str) and path:
        yield path, values


def _replaced(values: Any, path: tuple[str, ...], by_key: Mapping[str, str]) -> Any:
    if isinstance(values, Mapping):
        return {key: _replaced(value, (*path, str(key)), by_key) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_replaced(value, (*path, str(index)), by_key) for index, value in enumerate(values)]
    return by_key.get(".".join(path), values)
