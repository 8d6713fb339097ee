"""Read the one-line docstring under a field from the source, without importing anything more."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any


def doc_lines(kind: Any) -> dict[str, str]:
    """Return field -> first line of the docstring under it, with inherited fields; empty for a class without source.

    Example:
        >>> from trainkit.config.sections import ClipConfig
        >>> doc_lines(ClipConfig)
        {'max_norm': "Largest global norm of a step's gradient; null does not clip."}
    """
    found: dict[str, str] = {}
    for base in reversed(getattr(kind, "__mro__", ())):
        found.update(_own_lines(base))
    return found


def doc_line(kind: Any, name: str) -> str:
    """Return the docstring line of one field, or an empty text."""
    return doc_lines(kind).get(name, "")


def _own_lines(kind: Any) -> dict[str, str]:
    if not getattr(kind, "__module__", "").startswith("trainkit"):
        return {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, text in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = text.value.value.strip().splitlines()[0]
    return found
