"""Arguments as the user typed them: find the mistake in one, and the way to write it instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Final

from trainkit.config.secrets import reference
from trainkit.errors import ConfigError, Problem
from trainkit.redaction import REDACTED, redacted_argument

COMMAND_LINE: Final = "command line"
"""The origin of every argument."""

_OVERRIDE: Final = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w./@:$-]*(=.*)?", re.DOTALL)


def refusal(key: str, rule: str) -> ConfigError:
    """Return the error of one argument; its rule names the violation and the remedy."""
    return ConfigError([Problem(key=key, rule=rule, origin=COMMAND_LINE)])


def key_of(argument: str) -> str:
    """Return the key or group that an argument gives.

    Example:
        >>> key_of("+model.width=3"), key_of("~callbacks")
        ('model.width', 'callbacks')
    """
    return argument.lstrip("+~").partition("=")[0]


def replacing(arguments: Sequence[str], *own: str) -> tuple[str, ...]:
    """Return the user's arguments followed by trainkit's own, which replace those of the same keys.

    Example:
        >>> replacing(["seed=1", "cv.fold=null"], "cv.fold=3")
        ('seed=1', 'cv.fold=3')
    """
    keys = {key_of(argument) for argument in own}
    return (*(argument for argument in arguments if key_of(argument) not in keys), *own)


def quoted_form(argument: str) -> str:
    """Return the argument with its value quoted, for Hydra and for the shell.

    Example:
        >>> print(quoted_form("data.path=~/x"))
        'data.path="~/x"'
    """
    key, _, value = argument.partition("=")
    inner = value.strip("\"'").replace("\\", "\\\\").replace('"', '\\"')
    return shlex.quote(f'{key}="{inner}"')


def unreadable(argument: str) -> Problem:
    """Return the problem of an argument that Hydra's grammar cannot parse."""
    key, separator, value = argument.partition("=")
    if not separator:
        rule = "is not key=value. A verb comes first, and its own options begin with --."
        return Problem(key=argument, rule=rule, origin=COMMAND_LINE)
    if not _OVERRIDE.fullmatch(f"{key}=") or not key:
        rule = "is not key=value: a key is made of letters, digits, _ and dots."
        return Problem(key=argument, rule=rule, origin=COMMAND_LINE)
    if value[:1] in "{[" and value:
        rule = 'has a list or mapping that cannot be read. Quote its texts: key=\'["a b","c"]\'.'
        return Problem(key=argument, rule=rule, origin=COMMAND_LINE)
    if redacted_argument(argument) != argument or value == REDACTED:
        if value.strip("'\"") == REDACTED:
            rule = f"stands for a secret that is not stored. Give it again: {key}=... or {reference(key)}."
        else:
            rule = f"has a character that needs quotes. Write '{key}=\"...\"', or {reference(key)}."
        return Problem(key=key, value=REDACTED, rule=rule, origin=COMMAND_LINE)
    rule = f"has a character that needs quotes. Write {quoted_form(argument)}"
    return Problem(key=argument, rule=rule, origin=COMMAND_LINE)
