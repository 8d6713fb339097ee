"""Collect the messages of errors from the code, by the section of docs/errors.md that each belongs to.

A message is a template: what is filled in when the error is raised stands in braces. Texts that are put together in
other functions are not found; the section says in general what they say.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from trainkit import errors
from trainkit.errors import ConfigError, Problem, TrainkitError
from trainkit.report.error_address import anchor_of_problem, anchor_of_title
from trainkit.trained.checking import NotExportableError

_CLASSES: Final[Mapping[str, type[TrainkitError]]] = {
    name: kind
    for name, kind in {**vars(errors), "NotExportableError": NotExportableError}.items()
    if isinstance(kind, type) and issubclass(kind, TrainkitError) and not issubclass(kind, ConfigError)
}
_FEWEST_WORDS: Final = 3


def messages(package: Path) -> dict[str, list[str]]:
    """Return the messages of each section, as templates."""
    texts_of: dict[str, set[str]] = {}
    for file in sorted(package.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for anchor, text in _of(node):
                texts_of.setdefault(anchor, set()).add(text)
    return {anchor: sorted(texts) for anchor, texts in texts_of.items()}


def with_messages(page: str, texts_of: Mapping[str, Sequence[str]]) -> str:
    """Return a page of Markdown with the messages of each section at its end."""
    parts = re.split(r"^(?=##+ )", page, flags=re.MULTILINE)
    titles = (part.partition("\n")[0].lstrip("#") for part in parts)
    lists = (listing(texts_of.get(anchor_of_title(title), ())) for title in titles)
    return "".join(f"{part.rstrip()}\n\n{texts}\n\n" for part, texts in zip(parts, lists, strict=True))


def listing(texts: Sequence[str]) -> str:
    """Return messages as a list of HTML, folded until it is opened; nothing for no messages."""
    if not texts:
        return ""
    rows = "".join(f"<li><code>{escape(text)}</code></li>" for text in texts)
    return f"<details><summary>{len(texts)} messages of the code</summary><ul>{rows}</ul></details>"


def _of(top: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield section and text of each error that a function or class makes."""
    assigned = [
        (target.id, node.lineno, node.value)
        for node in ast.walk(top)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    for call in ast.walk(top):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        name = call.func.id
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        if name == Problem.__name__ and "rule" in arguments:
            key, text = _text(arguments["key"], ()), _text(arguments["rule"], assigned)
            anchor = anchor_of_problem(Problem(key=key, rule=""))
            text = f"{key}: {text}" if text else ""
        elif name in _CLASSES and call.args:
            anchor, text = _CLASSES[name].anchor, _text(call.args[0], assigned)
        else:
            continue
        if len(text.split()) >= _FEWEST_WORDS:
            yield anchor, text


def _text(node: ast.expr, assigned: Sequence[tuple[str, int, ast.expr]]) -> str:
    """Return a text as a template; empty where the code that is read does not hold it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value, ()) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if not assigned:
        return f"{{{ast.unparse(node)}}}"
    before = [(line, value) for name, line, value in assigned if isinstance(node, ast.Name) and name == node.id]
    nearest = max((pair for pair in before if pair[0] < node.lineno), key=lambda pair: pair[0], default=None)
    return "" if nearest is None or not isinstance(nearest[1], ast.Constant | ast.JoinedStr) else _text(nearest[1], ())
