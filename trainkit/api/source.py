"""Write the source of classes that a notebook or script defines into a module that other processes import.

A class of `__main__` cannot be imported by the processes that a strategy starts. Its source, the imports that it uses,
and the functions, classes and constants of `__main__` that it names make a module of their own.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final

from trainkit.errors import ConfigError, Problem

Definition = type | Callable[..., Any]
"""A class or a function."""

_MAIN: Final = "__main__"


def module_of(source: str) -> ModuleType:
    """Return a module of this process that holds what a source defines; its name contains a hash of the source."""
    module = ModuleType(f"notebook_{hashlib.sha256(source.encode()).hexdigest()[:12]}")
    exec(compile(source, f"<{module.__name__}>", "exec"), vars(module))  # noqa: S102 - the caller's own classes
    return module


def source_of(definitions: Mapping[str, Definition]) -> str:
    """Return the source of a module that defines classes and functions of `__main__`.

    Args:
        definitions: key for error messages -> class or function.

    Raises:
        ConfigError: there is no source, or it names an object that cannot be written as source.

    Example:
        >>> from trainkit.api import source
        >>> source.source_of({"model": source.module_of}).startswith('\"\"\"')
        True
    """
    collector = _Collector()
    for key, item in definitions.items():
        collector.add(key, item)
    if collector.problems:
        raise ConfigError(collector.problems)
    lines = ['"""Written by trainkit.train(write_source=True)."""', "", *dict.fromkeys(collector.imports), ""]
    return "\n".join([*lines, *collector.bodies.values()]) + "\n"


class _Collector:
    """The imports and definitions found so far."""

    def __init__(self) -> None:
        self.imports: list[str] = []
        self.bodies: dict[str, str] = {}
        """Name -> its definition, after the definitions that it names."""
        self.problems: list[Problem] = []
        self._seen: set[str] = set()

    def add(self, key: str, item: Definition) -> None:
        """Add a class or function, and, before it, the definitions that its source names."""
        name = item.__name__
        if name in self._seen:
            return
        self._seen.add(name)
        found = _definition(item)
        if found is None:
            rule = f"the source of {item.__qualname__} is not known. Define it at the top level of a cell or a module."
            self.problems.append(Problem(key=key, rule=rule))
            return
        text, node, namespace = found
        for used in _names(node):
            if used in namespace and used != name:
                self._add_global(key, name, used, namespace[used])
        self.bodies[name] = f"\n{text}"

    def _add_global(self, key: str, user: str, name: str, value: Any) -> None:
        home, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(value, ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif isinstance(value, type | FunctionType) and home == _MAIN:
            self.add(key, value)
        elif isinstance(home, str) and isinstance(qualname, str) and "." not in qualname and home != _MAIN:
            self.imports.append(f"from {home} import {qualname} as {name}")
        elif value is None or isinstance(value, str | int | float):
            self.bodies[name] = f"{name} = {value!r}"
        else:
            rule = f"{user} uses {name}, a {type(value).__name__} of this session, which is not written as source."
            self.problems.append(Problem(key=key, rule=f"{rule} Make it a parameter, or define it inside."))


def _definition(item: Definition) -> tuple[str, ast.AST, Mapping[str, Any]] | None:
    """Return the source of a class or function, its syntax tree, and the namespace of its module."""
    function = next(_functions_of(item), None)
    if function is None or "<" in item.__qualname__:
        return None
    # inspect does not find the class of a notebook's cell; the file of its methods is the cell.
    text = "".join(linecache.getlines(function.__code__.co_filename))
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the cell has magics: the lines of a function are still known
        return None
    kinds = (ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in tree.body if isinstance(node, kinds) and node.name == item.__name__]
    if not nodes:
        return None
    node = nodes[-1]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno]), node, function.__globals__


def _functions_of(item: Definition) -> Iterator[FunctionType]:
    found: Iterable[Any] = vars(item).values() if isinstance(item, type) else [item]
    for value in found:
        function = inspect.unwrap(value) if callable(value) else None
        if isinstance(function, FunctionType) and function.__module__ == item.__module__:
            yield function


def _names(node: ast.AST) -> Iterator[str]:
    """Yield each name that the source reads, in source order."""
    yield from dict.fromkeys(one.id for one in ast.walk(node) if isinstance(one, ast.Name))
