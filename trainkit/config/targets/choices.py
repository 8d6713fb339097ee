"""The YAML of a choice, completed by the defaults of its class.

A shipped file holds what differs from its class. The class itself is not imported: most need torch, and a wrong key is
refused before that takes its second. Its keys are read from its source, so a default of such a class is a literal, a
constant, or an object of a dataclass.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import INJECTED
from trainkit.config.yaml_files import Document, read_document, shipped_conf
from trainkit.names import NAMES

REQUIRED: Final = "???"
"""The value, in a YAML file, of a key that the user must give."""
_ROOT: Final = Path(__file__).resolve().parents[3]
_Default = tuple[str, ast.expr | None]
"""The module in which a default stands, and its expression."""


def read_choice(file: Path) -> Document:
    """Return the YAML file of a choice; in a file of trainkit's own, the class gives the keys that it leaves out.

    A file that names a class of another package is not completed: with another version of that package, a run would
    have other keys.

    Raises:
        ConfigError: as `read_document`.

    Example:
        >>> choice = read_choice(shipped_conf() / "schedule" / "cosine.yaml")
        >>> choice.values, choice.of_class
        ({'_target_': 'trainkit.schedules.Cosine', 'end': 0.0}, frozenset({'end'}))
    """
    document = read_document(file)
    is_own = file.is_relative_to(shipped_conf()) and document.values.get(TARGET) in NAMES
    return _completed(document) if is_own else document


@cache
def _completed(document: Document) -> Document:
    target = document.values[TARGET]
    defaults = keys_declared(target)
    for name in INJECTED.get(document.file.parent.name, ()):
        defaults.pop(name, None)
    values = {TARGET: target, **defaults, **document.values}
    return replace(document, values=values, of_class=frozenset(defaults.keys() - document.values.keys()))


def keys_declared(name: str) -> dict[str, Any]:
    """Return key -> default of a public class of trainkit, in the order of the class; `???` for a key without one.

    Example:
        >>> keys_declared("trainkit.models.Mlp")["hidden"], keys_declared("trainkit.models.Mlp")["dropout"]
        ('???', 0.0)
    """
    declared = _declared(NAMES[name], name.rpartition(".")[2])
    return {key: _value(module, node) for key, (module, node) in declared.items()}


def _declared(module: str, kind: str) -> dict[str, _Default]:
    """Return the parameters of a class: the fields of a dataclass and its bases, or those of the constructor."""
    module, node = _definition(module, kind)
    keys: dict[str, _Default] = {}
    if not isinstance(node, ast.ClassDef):
        return keys
    for base in reversed(node.bases):
        keys |= _declared(module, base.id) if isinstance(base, ast.Name) else {}
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return keys | {name: (module, value) for name, value in _fields(node)}
    for init in (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"):
        args = init.args
        defaults = [*[None] * (len(args.args) - len(args.defaults)), *args.defaults, *args.kw_defaults]
        pairs = zip([*args.args, *args.kwonlyargs], defaults, strict=True)
        keys = {parameter.arg: (module, value) for parameter, value in pairs if parameter.arg != "self"}
    return keys


def _fields(kind: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the fields that the constructor of a dataclass takes, each with the expression of its default."""
    for field in kind.body:
        if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
            continue
        options: dict[str | None, ast.expr] = {}
        if isinstance(field.value, ast.Call):
            options = {option.arg: option.value for option in field.value.keywords}
        if "init" in options:
            continue
        value, factory = options.get("default", field.value), options.get("default_factory")
        if isinstance(factory, ast.Lambda):
            value = factory.body
        elif isinstance(factory, ast.Name):
            value = ast.Dict(keys=[], values=[]) if factory.id == "dict" else ast.List(elts=[])
        yield ast.unparse(field.target), value


def _value(module: str, node: ast.expr | None) -> Any:
    """Return a default as YAML holds it."""
    if isinstance(node, ast.Name):
        module, statement = _definition(module, node.id)
        return _value(module, getattr(statement, "value", None))
    if isinstance(node, ast.Call):  # of a dataclass
        keywords = {str(keyword.arg): (module, keyword.value) for keyword in node.keywords}
        keys = _declared(module, ast.unparse(node.func)) | keywords
        return {key: _value(*default) for key, default in keys.items()}
    value = REQUIRED if node is None else ast.literal_eval(node)
    return [*value] if isinstance(value, tuple) else value


@cache
def _definition(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """Return the statement that defines a name, and its module; imports from trainkit are followed.

    Only this statement is parsed, and of a class without a constructor only what stands above its methods: to parse
    whole modules takes a tenth of a second.
    """
    text = _source(module)
    if start := re.search(rf"^(?:@.*\n)*(?:class {name}\b|{name}\b *[:=]).*", text, re.MULTILINE):
        end = re.compile(r"^[^\s)\]}]", re.MULTILINE).search(text, start.end())
        source = text[start.start() : end.start() if end else None]
        if "    def __init__" not in source:
            source = re.split(r"^    (?:@|def )", source, maxsplit=1, flags=re.MULTILINE)[0]
        return module, ast.parse(source).body[0]
    for home, names in re.findall(r"^from (trainkit\.\S+) import ([^(\n]+|\([^)]*\))", text, re.MULTILINE):
        if name in re.findall(r"\w+", names):
            return _definition(home, name)
    return module, None


@cache
def _source(module: str) -> str:
    return _ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
