"""Which keys are secret, by their name; texts and the command line of this process without secrets.

This module knows only names and texts. `trainkit.config.secrets` applies it to the values of a config, where
the class of a `_target_` can mark further fields with `trainkit.fields.secret`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

REDACTED: Final = "(redacted)"
"""The replacement of a secret in anything that is written or printed."""

_SERVICES: Final = (
    "api|auth|access|bearer|refresh|id|jwt|oauth|session|bot|user|private|personal|secret|deploy|security|service|hf|hub"
    "|huggingface|wandb|github|gitlab|bitbucket|slack|discord|telegram|neptune|comet|mlflow|clearml|databricks|azure"
    "|aws|gcp|google|kaggle|openai|anthropic|replicate"
)
_ANYWHERE: Final = re.compile(
    r"(.*_)?(secret|passw(or)?d|passphrase|pwd|api_?key|access_key|secret_key|private_key|credentials?|auth"
    rf"|authorization|webhook_url)|token|(.*_)?({_SERVICES})_token|pat|(github|gitlab|azure|devops|personal)_pat"
)
_HEADERS: Final = re.compile(r"(.*_)?headers")
"""Further names of secrets in the nodes of `logger` and `callbacks`, which connect to services."""
_KEYS: Final = re.compile(r".*_key|.*_token|tokens")
"""Further names of secrets in the nodes of `logger`; a callback may have tokens of a language model."""
_NEVER: Final = frozenset({"image_key", "special_tokens"})
_OBSERVERS: Final = frozenset({"logger", "callbacks"})
_WORD_BOUNDARY: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PASSWORD_IN_URL: Final = re.compile(r"(://[^/\s:@'\"]*:)([^/\s'\"]+)@")
_SCHEME: Final = re.compile(r"(Bearer|Basic|Token) ", re.IGNORECASE)
_VARIABLE: Final = r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*\}"
_REFERENCE: Final = re.compile(
    rf"(?:{_SCHEME.pattern})?{_VARIABLE}|\$\{{oc\.decode:\s*{_VARIABLE}\s*\}}", re.IGNORECASE
)
_SHORTEST: Final = 8
"""Minimum number of characters of a secret that `mask` replaces in any text; a shorter one is hidden by its key."""
_COMMON: Final = re.compile(r"\d+|[A-Za-z]?[a-z]{,15}|[A-Z]{,16}")
"""Numbers, and single words of at most 16 letters, which texts contain that quote no secret."""

_secrets: set[str] = set()


@lru_cache(maxsize=4096)  # a composition asks about each of its keys several times
def is_secret_name(name: str, group: str = "") -> bool:
    """Return whether a key of this name, without the keys above it, holds a secret; more names do in a `logger`.

    Example:
        >>> [is_secret_name(name) for name in ("api_key", "wandb_token", "image_key", "special_tokens", "tokens")]
        [True, True, False, False, False]
        >>> [is_secret_name(name, "logger") for name in ("tokens", "image_key")], is_secret_name("tokens", "callbacks")
        ([True, False], False)
    """
    plain = _WORD_BOUNDARY.sub("_", name).lower().replace("-", "_")
    if plain in _NEVER:
        return False
    is_header, is_key = group in _OBSERVERS and _HEADERS.fullmatch(plain), group == "logger" and _KEYS.fullmatch(plain)
    return bool(_ANYWHERE.fullmatch(plain) or is_header or is_key)


def is_secret(path: Sequence[str]) -> bool:
    """Return whether a key is secret by its full path: its own name, or that of a key above it, is secret.

    Example:
        >>> is_secret(("logger", "w", "headers", "X-Team")), is_secret(("data", "headers")), is_secret(("data", "auth"))
        (True, False, True)
    """
    group = path[0] if path else ""
    # in logger.NAME, NAME is chosen by the user and is not a key
    names = path[2:] if group in _OBSERVERS and len(path) > 2 else path
    return any(is_secret_name(name, group) for name in names)


Found = tuple[tuple[str, ...], Any]
Marks = Callable[[Mapping[str, Any]], frozenset[tuple[str, ...]]]


def secrets_in(
    values: Any,
    path: tuple[str, ...] = (),
    *,
    marks: Marks | None = None,
    marked: frozenset[tuple[str, ...]] = frozenset(),
    references: bool = False,
) -> Iterator[Found]:
    """Yield the secrets below a node; a mapping or list under a secret key is one secret as a whole.

    None, a bool, an empty text and a reference to an environment variable are not secrets.

    Args:
        values: plain values.
        path: the full key of the values.
        marks: returns the paths below a mapping that its class marks as secret.
        marked: paths below these values that are marked as secret.
        references: whether to yield references to environment variables as well.

    Yields:
        The full key of each secret, and its value.

    Example:
        >>> list(secrets_in({"logger": {"w": {"api_key": "k7", "headers": {"X": 1}, "project": "digits"}}}))
        [(('logger', 'w', 'api_key'), 'k7'), (('logger', 'w', 'headers'), {'X': 1})]
    """
    if isinstance(values, Mapping):
        marked |= marks(values) if marks is not None else frozenset()
        items: Any = ((str(key), value) for key, value in values.items())
    elif isinstance(values, list | tuple):
        items = ((str(index), value) for index, value in enumerate(values))
    else:
        return
    for name, value in items:
        inner = (*path, name)
        # logger.NAME is the name that the user gives to a node
        is_node = inner[0] in _OBSERVERS and len(inner) <= 2 and isinstance(value, Mapping)
        if (name,) in marked or (not is_node and is_secret_name(name, inner[0])):
            if _is_secret_value(value, references):
                yield inner, value
        elif isinstance(value, Mapping | list | tuple):
            below = frozenset(mark[1:] for mark in marked if mark[0] == name and mark[1:])
            yield from secrets_in(value, inner, marks=marks, marked=below, references=references)


def _is_secret_value(value: Any, references: bool) -> bool:
    if isinstance(value, Mapping | list | tuple):
        inner = value.values() if isinstance(value, Mapping) else value
        return any(_is_secret_value(item, references) for item in inner)
    return value not in (None, "") and not isinstance(value, bool) and (references or variable_of(value) is None)


def without_secrets(values: Any, secrets: Mapping[tuple[str, ...], Any], path: tuple[str, ...] = ()) -> Any:
    """Return values in which each secret is redacted, and texts are masked."""
    if path in secrets:
        return REDACTED
    if isinstance(values, Mapping):
        return {key: without_secrets(value, secrets, (*path, str(key))) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [without_secrets(value, secrets, (*path, str(index))) for index, value in enumerate(values)]
    return mask(values) if isinstance(values, str) else values


def variable_of(value: Any) -> str | None:
    """Return the environment variable of a value that consists of a single reference to it; else None.

    `${oc.decode:${oc.env:X}}` counts as well: the content of the variable is read as YAML, a mapping or list of
    secrets. A reference with a default, `${oc.env:X,abc}`, does not count: the default could be the secret itself.

    Example:
        >>> variable_of("${oc.env:API_KEY}"), variable_of("Bearer ${oc.env:API_KEY}"), variable_of("${oc.env:X,abc}")
        ('API_KEY', 'API_KEY', None)
    """
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return match[2] or match[3] if match else None


def remember(value: Any) -> None:
    """Let `mask` hide a secret, and every text inside of it, from now on."""
    if isinstance(value, Mapping):
        for inner in value.values():
            remember(inner)
    elif isinstance(value, str):
        _secrets.update(text for text in (value, _SCHEME.sub("", value)) if _is_distinct(text))
        remember_passwords(value)
    elif isinstance(value, list | tuple):
        for inner in value:
            remember(inner)


def remember_passwords(text: str) -> None:
    """Let `mask` hide the passwords of the URLs in a text, also outside of their URLs."""
    _secrets.update(match[2] for match in _PASSWORD_IN_URL.finditer(text) if _is_distinct(match[2]))


def has_password(text: str) -> bool:
    """Return whether a text contains a URL with a password."""
    return _PASSWORD_IN_URL.search(text) is not None


def _is_distinct(text: str) -> bool:
    """Return whether a text differs enough from ordinary words and numbers to be masked everywhere."""
    return len(text) >= _SHORTEST and _COMMON.fullmatch(text) is None and text != REDACTED and variable_of(text) is None


def mask(text: str) -> str:
    """Return a text without the secrets that this process knows, and without passwords in URLs.

    Example:
        >>> mask("cannot reach http://me:pw@host/x")
        'cannot reach http://me:(redacted)@host/x'
    """
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return _PASSWORD_IN_URL.sub(rf"\1{REDACTED}@", text) if "://" in text else text


def redacted_argument(argument: str) -> str:
    """Return a command-line argument without its secret.

    Example:
        >>> redacted_argument("logger.wandb.api_key=k7"), redacted_argument("optimizer.lr=0.1")
        ('logger.wandb.api_key=(redacted)', 'optimizer.lr=0.1')
        >>> redacted_argument("logger.w={api_key: k7}")
        'logger.w=(redacted)'
    """
    key, separator, value = argument.partition("=")
    path = tuple(key.lstrip("+~-").split("."))
    plain = value.strip("'\"")
    if not separator or plain in ("", "null", "true", "false", REDACTED) or variable_of(plain) is not None:
        return mask(argument)
    names = re.findall(r"""([\w-]+)['"]?\s*:""", value) if value[:1] in "{[" else []  # of a mapping, {api_key: k7}
    hidden = is_secret(path) or any(is_secret_name(name, path[0]) for name in names)
    return f"{key}={REDACTED}" if hidden else mask(argument)


class _MaskedStream:
    """A text stream that masks its output."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without secrets."""
        self._stream.write(mask(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write texts without secrets."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def forgetting_secrets() -> Iterator[None]:
    """Forget, at the end of the block, the secrets that were remembered within it."""
    before = set(_secrets)
    try:
        yield
    finally:
        _secrets.clear()
        _secrets.update(before)


@contextlib.contextmanager
def masked_output() -> Iterator[None]:
    """Mask secrets in everything that Python prints to standard output and standard error in the block.

    Secrets that are remembered in the block are forgotten at its end.
    """
    out, err = sys.stdout, sys.stderr
    masked_out, masked_err = (cast("Any", _MaskedStream(stream)) for stream in (out, err))
    sys.stdout, sys.stderr = masked_out, masked_err
    try:
        with forgetting_secrets():
            yield
    finally:
        if sys.stdout is masked_out:
            sys.stdout = out
        if sys.stderr is masked_err:
            sys.stderr = err
