"""Read the documentation of a class's keys: the text under a field, or the `Args:` of a docstring."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

_ENTRY: Final = re.compile(r"(\w+)\s*(?:\([^)]*(?:\([^)]*\)[^)]*)*\))?\s*:\s*(.*)")
"""`name: text`, or `name (type, optional): text` as torch writes it."""
_NOTES: Final = re.compile(r"\s*\(default: [^)]*\)|\s*\(optional\)")


@lru_cache(maxsize=512)  # a schema of the config asks several times for each class
def doc_lines(kind: Any) -> dict[str, str]:
    """Return key -> its documentation in one line, with inherited keys, for a class or function.

    A field's line is the docstring under it; a parameter's is its entry below `Args:`.

    Example:
        >>> from trainkit.config.sections import ClipConfig
        >>> doc_lines(ClipConfig)
        {'max_norm': "Largest global norm of a step's gradient; null does not clip."}
        >>> import torch
        >>> doc_lines(torch.optim.SGD)["momentum"]
        'Momentum factor.'
    """
    lines: dict[str, str] = {}
    for base in reversed(getattr(kind, "__mro__", (kind,))):
        lines.update(_arguments(base))
        lines.update(_fields(base))
    return lines


def doc_line(kind: Any, name: str) -> str:
    """Return the line of one key, or an empty text.

    Example:
        >>> from trainkit.models.mlp import Mlp
        >>> doc_line(Mlp, "hidden")
        'Width of each hidden layer; empty for a linear model.'
    """
    return doc_lines(kind).get(name, "")


def summary(kind: Any) -> str:
    """Return the first line of a docstring, or an empty text.

    Example:
        >>> from trainkit.models.mlp import Mlp
        >>> summary(Mlp)
        'Linear layers with an activation between; inputs of any shape are flattened.'
    """
    return next(iter((inspect.getdoc(kind) or "").splitlines()), "")


def _fields(kind: Any) -> dict[str, str]:
    if not inspect.isclass(kind) or kind.__module__ in ("builtins", "torch.nn.modules.module"):
        return {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    lines = {}
    for field, text in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            lines[field.target.id] = text.value.value.strip().splitlines()[0]
    return lines


def _arguments(kind: Any) -> dict[str, str]:
    """Return the entries of `Args:` in the docstrings of a class and its constructor."""
    documented = [kind, vars(kind).get("__init__")] if inspect.isclass(kind) else [kind]
    return {name: text for item in documented if item is not None for name, text in _entries(item)}


def _entries(documented: Any) -> Iterator[tuple[str, str]]:
    docstring = documented.__doc__ if isinstance(getattr(documented, "__doc__", None), str) else ""
    lines = inspect.cleandoc(docstring).splitlines()
    start = next((index for index, line in enumerate(lines) if line.strip() in ("Args:", "Arguments:")), None)
    if start is None:
        return
    outer = _indent(lines[start])
    block = list(itertools.takewhile(lambda line: not line.strip() or _indent(line) > outer, lines[start + 1 :]))
    inner = min((_indent(line) for line in block if line.strip()), default=0)
    name, parts = "", list[str]()
    for line in [*block, " " * inner + "_:"]:
        match = _ENTRY.fullmatch(line.strip()) if line.strip() and _indent(line) == inner else None
        if match is None:
            parts.append(line.strip())
            continue
        if name and (text := _sentence(" ".join(parts))):
            yield name, text
        name, parts = match[1], [match[2]]


def _sentence(text: str) -> str:
    """Return the first sentence, which begins with a capital letter and ends with a full stop."""
    plain = " ".join(_NOTES.sub("", text).split())
    first = re.split(r"(?<=[^.][.])\s+(?=[A-Z])", plain, maxsplit=1)[0].rstrip(".")
    return f"{first[0].upper()}{first[1:]}." if first else ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
