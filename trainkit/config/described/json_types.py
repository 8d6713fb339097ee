"""JSON Schema (draft 2020-12) of an annotation: what `trainkit.config.values.misfit` accepts, for other programs."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, Literal, Union

from trainkit.config.described.docstrings import doc_lines, summary
from trainkit.config.described.key_facts import REQUIRED, default_of
from trainkit.config.values import plain
from trainkit.fields import Limit, limits_in, signature_hints

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
_SCALARS: Final = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_LISTS: Final = (list, tuple, set, frozenset, Sequence, Iterable, typing.Collection)
_UNCHECKED: Final[Schema] = {}
"""The schema of a part of an annotation without a plain form: it accepts everything."""


@dataclass(kw_only=True)
class Definitions:
    """The dataclasses and TypedDicts of a schema, each written once below `$defs`."""

    schemas: dict[str, Schema] = field(default_factory=dict)

    def of(self, hint: Any) -> Schema:
        """Return the schema of an annotation.

        Example:
            >>> from trainkit.fields import at_least
            >>> Definitions().of(typing.Annotated[int | None, at_least(1)])
            {'type': ['integer', 'null'], 'minimum': 1}
        """
        found = self._of_plain(_unwrapped(hint))
        for limit in limits_in(hint):
            found = {**found, **_of_limit(limit)}
        return found

    def _of_plain(self, hint: Any) -> Schema:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        kind = origin or hint
        if hint in _SCALARS or origin is Literal:
            return {"enum": list(arguments)} if origin is Literal else {"type": _SCALARS[hint]}
        if origin is Union or origin is types.UnionType:
            return self._of_union(arguments)
        if kind in _LISTS:
            return self._of_list(kind, arguments)
        if typing.is_typeddict(kind) or is_dataclass(kind):
            return self.reference(kind)
        return self._of_class(kind, arguments) if isinstance(kind, type) else _UNCHECKED

    def _of_class(self, kind: type, arguments: tuple[Any, ...]) -> Schema:
        if issubclass(kind, Mapping):
            return {
                "type": "object",
                **({"additionalProperties": self.of(arguments[1])} if len(arguments) == 2 else {}),
            }
        if issubclass(kind, Enum):
            return {"enum": list(dict.fromkeys(name for item in kind for name in (item.value, item.name)))}
        return {"type": "string"} if issubclass(kind, PurePath) else _UNCHECKED

    def _of_union(self, arguments: tuple[Any, ...]) -> Schema:
        members = [self.of(item) for item in arguments]
        checked = [item for item in members if item != _UNCHECKED]
        if len(checked) < len(members) and not any(plain(item) in (int, float, str, bool) for item in arguments):
            return _UNCHECKED  # a class that YAML cannot write, and a scalar is never one
        flat = [item["type"] for item in checked if item.keys() == {"type"}]
        if len(flat) == len(checked):
            kinds = list(dict.fromkeys(flat))
            return {"type": kinds[0] if len(kinds) == 1 else kinds}
        return {"anyOf": checked}

    def _of_list(self, kind: Any, arguments: tuple[Any, ...]) -> Schema:
        if not arguments:
            return {"type": "array"}
        if kind is tuple and arguments[-1] is not Ellipsis:
            size = {"minItems": len(arguments), "maxItems": len(arguments)}
            return {"type": "array", "prefixItems": [self.of(item) for item in arguments], **size}
        items = self.of(arguments[0])
        return {"type": "array", **({"items": items} if items else {})}

    def reference(self, kind: Any) -> Schema:
        """Return a reference to a dataclass or TypedDict, and define it."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in self.schemas:
            self.schemas[name] = {}  # a class may hold itself
            self.schemas[name] = self.of_fields(kind)
        return {"$ref": f"#/$defs/{name}"}

    def of_fields(self, kind: Any) -> Schema:
        """Return the schema of the fields of a dataclass or TypedDict; no other key is accepted."""
        hints, docs = _hints(kind), doc_lines(kind)
        properties = {name: {**self.of(hint), **_described(docs.get(name))} for name, hint in hints.items()}
        found: Schema = {"type": "object", **_described(summary(kind)), "properties": properties}
        required = _required(kind, hints)
        return {**found, **({"required": required} if required else {}), "additionalProperties": False}


def document_schema(kind: Any, *, title: str, version: int, is_open: bool = False) -> Schema:
    """Return the complete schema of a JSON document that a dataclass or TypedDict describes.

    Args:
        kind: the dataclass or TypedDict.
        title: the title of the document.
        version: its version.
        is_open: whether the document may hold further keys at its top.

    Example:
        >>> class Point(typing.TypedDict):
        ...     x: int
        >>> document_schema(Point, title="a point", version=1)["properties"]
        {'x': {'type': 'integer'}}
    """
    definitions = Definitions()
    own = {**definitions.of_fields(kind), "additionalProperties": is_open}
    defined = {"$defs": dict(sorted(definitions.schemas.items()))} if definitions.schemas else {}
    return {"$schema": DRAFT, "title": title, "version": version, **own, **defined}


def _hints(kind: Any) -> Mapping[str, Any]:
    if typing.is_typeddict(kind):
        return typing.get_type_hints(kind, include_extras=True)
    hints = signature_hints(kind)
    return {name: hints[name] for name, item in kind.__dataclass_fields__.items() if item.init and name in hints}


def _required(kind: Any, hints: Mapping[str, Any]) -> list[str]:
    """Return the required keys; `__required_keys__` is wrong where annotations are text."""
    if typing.is_typeddict(kind):
        return sorted(name for name, hint in hints.items() if typing.get_origin(hint) is not typing.NotRequired)
    return [name for name in hints if default_of(kind, name) == REQUIRED]


def _described(text: str | None) -> Schema:
    return {"description": text} if text else {}


def _unwrapped(hint: Any) -> Any:
    """Return the type inside an annotation, without `Annotated` and the like."""
    hint = plain(hint)
    while typing.get_origin(hint) in (typing.Required, typing.NotRequired):
        hint = plain(typing.get_args(hint)[0])
    return hint


def _of_limit(limit: Limit) -> Schema:
    found: Schema = {}
    if math.isfinite(limit.low):
        found["exclusiveMinimum" if limit.open_low else "minimum"] = limit.low
    if math.isfinite(limit.high):
        found["exclusiveMaximum" if limit.open_high else "maximum"] = limit.high
    if limit.regex is not None:
        found["pattern"] = f"^(?:{limit.regex})$"
    return found
