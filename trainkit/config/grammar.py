"""Arguments as the user typed them: find the mistake in one, and the way to write it instead."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Final

from trainkit.config.interface import advice
from trainkit.config.secrets import reference
from trainkit.errors import ConfigError, Problem
from trainkit.redaction import REDACTED, redacted_argument

COMMAND_LINE: Final = "command line"
"""The origin of every argument."""

_OVERRIDE: Final = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w./@:$-]*(=.*)?", re.DOTALL)

_PLAIN_WORD: Final = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_OTHER_WORDS: Final = ("null", "true", "false", "inf", "nan")
"""Words that Hydra's grammar reads as something else than a text."""


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


def replacing(arguments: Sequence[str], *replacements: str) -> tuple[str, ...]:
    """Return the user's arguments followed by trainkit's own, which replace those of the same keys.

    Example:
        >>> replacing(["seed=1", "cv.fold=null"], "cv.fold=3")
        ('seed=1', 'cv.fold=3')
    """
    keys = {key_of(argument) for argument in replacements}
    return (*(argument for argument in arguments if key_of(argument) not in keys), *replacements)


def is_override(argument: str) -> bool:
    """Return whether an argument is `key=value`, `+key=value` or `~key`, and not a flag or a path from `/` or `.`.

    Example:
        >>> [is_override(text) for text in ("seed=1", "~recipe", "plan", "--k=1", "./lr=0.1")]
        [True, True, False, False, False]
    """
    if argument.startswith(("-", "/", "./", "../", "~/")):
        return False
    return "=" in argument or argument.startswith("~")


def quoted_form(argument: str) -> str:
    """Return the argument with its value quoted, for Hydra and for the shell.

    Example:
        >>> print(quoted_form("data.path=~/x"))
        'data.path="~/x"'
    """
    key, _, value = argument.partition("=")
    return shlex.quote(f"{key}={_quoted(value.strip(chr(34) + chr(39)))}")


def setting(key: str, value: object) -> str:
    r"""Return the argument that sets a key to a value, as Hydra's grammar reads it back.

    A text stays this text, also one like `null`, `1e5` or `a,b`; one that is a plain word is not quoted.

    Example:
        >>> print(setting("model", "mlp"), setting("name", "null"), setting("resume", "out/lr=0.1"))
        model=mlp name="null" resume="out/lr=0.1"
        >>> print(setting("model.hidden", [64, 1e-3, True, 'a "b" \\']))
        model.hidden=[64,0.001,true,"a \"b\" \\"]
    """
    return f"{key}={_value(value)}"


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str | PathLike):
        text = os.fspath(value) if isinstance(value, PathLike) else str.__str__(value)
        return text if _PLAIN_WORD.fullmatch(text) and text.lower() not in _OTHER_WORDS else _quoted(text)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_value, value))}]"
    return str(value).lower()  # numbers, True and False of numpy too


def _quoted(text: str) -> str:
    """Return a text in double quotes; Hydra reads a backslash as an escape only before a quote."""
    return '"' + re.sub(r'(\\*)("|\Z)', lambda match: match[1] * 2 + match[2].replace('"', '\\"'), text) + '"'


def unreadable(argument: str) -> Problem:
    """Return the problem of an argument that Hydra's grammar cannot parse."""
    key, separator, value = argument.partition("=")
    if not separator:
        verbs = "A verb comes first, and its own options begin with --."
        rule = f"is not key=value. {advice(verbs, 'Flags have names in Python: packages=[...], config_dirs=[...].')}"
    elif not key.lstrip("+~"):
        rule = "names no key. Write key=value."
    elif not _OVERRIDE.fullmatch(f"{key}=") or "" in key.split("."):
        rule = "is not key=value: a key is made of letters, digits, _ and dots."
    elif "@" in key:
        rule = f"takes no @package: the choice of a group stands at its own key. Write {key.partition('@')[0]}={value}."
    elif value.startswith(("{", "[")):
        rule = 'has a list or mapping that cannot be read. Quote its texts: key=\'["a b","c"]\'.'
    elif redacted_argument(argument) != argument or value == REDACTED:
        rule = f"is a secret, which a config takes by reference alone. Write {reference(key)}."
        return Problem(key=key, value=REDACTED, rule=rule, origin=COMMAND_LINE)
    else:
        rule = f"has a character that needs quotes. Write {quoted_form(argument)}"
    return Problem(key=argument, rule=rule, origin=COMMAND_LINE)
