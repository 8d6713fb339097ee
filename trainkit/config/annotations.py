"""Annotations as pydantic reads them: whether a plain value fits one, what one accepts in words, and its JSON Schema.

A value is checked as strict JSON, the form in which YAML gives it: a bool is not a number, text is not a number, and
numbers are finite. Parts of an annotation without a plain form (a tensor, a callable, a type variable) are not checked:
the class is trusted to validate them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from trainkit.config.docstrings import doc_lines, summary
from trainkit.config.values import closest, either
from trainkit.errors import ConfigError, yaml_text
from trainkit.fields import BROKEN, Limit, marks_in

DRAFT: Final = GenerateJsonSchema.schema_dialect
"""The edition of JSON Schema."""
Schema = dict[str, Any]
_STRICT: Final = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, extra="forbid")
_SCALARS: Final = frozenset({"boolean", "integer", "number", "string"})
_CLASS_ERRORS: Final = frozenset({"value_error", "assertion_error"})
"""Errors of a dataclass, which reports them again where it is built."""
_MISTYPED: Final = frozenset({"int_type", "float_type", "string_type", "bool_type", "literal_error", "finite_number"})
_NAMES: Final[Mapping[str, str]] = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
    "object": "a mapping",
}
_PLURALS: Final[Mapping[str, str]] = {
    "boolean": "true or false",
    "integer": "whole numbers",
    "number": "numbers",
    "string": "texts",
}


def misfit(value: Any, hint: Any) -> str | None:
    """Return what is wrong with a value by its annotation and limits; None if it fits or cannot be checked.

    Args:
        value: a plain value, as YAML gives it.
        hint: an annotation; strings and type variables are not checked.

    Returns:
        The rule as messages show it, `must be a whole number.`

    Example:
        >>> from typing import Literal
        >>> misfit(True, int), misfit(3, float), misfit("sqr", Literal["linear", "sqrt"])
        ('must be a whole number.', None, 'must be linear or sqrt. Did you mean sqrt?')
    """
    if (adapter := _adapter(hint)) is not None:
        try:
            adapter.validate_json(json.dumps([value], default=_plain), strict=True)
        except ValidationError as error:
            return _rule(value, hint, error.errors(include_url=False))
        except ConfigError:  # of a dataclass; the check that builds it names the key inside
            pass
    return None


def _rule(value: Any, hint: Any, errors: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the rule that a value breaks by pydantic's errors; None if the class itself is trusted to validate it."""
    kinds = {str(error["type"]) for error in errors}
    if kinds & _CLASS_ERRORS or _is_unchecked(errors, kinds):
        return None
    if BROKEN in kinds:
        return next(str(error["msg"]) for error in errors if error["type"] == BROKEN)
    if "finite_number" in kinds:
        return "must be finite."
    if isinstance(value, int | float):  # a time without its unit is a number
        for limit in marks_in(hint, Limit):
            if limit.regex is not None and re.fullmatch(limit.regex, yaml_text(value)) is None:
                return limit.rule
    quoted = "is text: it " if isinstance(value, str) and _reads_as_number(value) else ""
    near = closest(value, map(yaml_text, _choices_in(schema_of(hint)))) if isinstance(value, str) else None
    return f"{quoted}must be {expected(hint)}." + (f" Did you mean {near}?" if near else "")


def _plain(value: Any) -> Any:
    """Return the JSON form of a container of OmegaConf, in which Hydra hands over keys; of anything else, its text."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else str(value)


def _is_unchecked(errors: Sequence[Mapping[str, Any]], kinds: set[str]) -> bool:
    """Return whether a part without a plain form may take the value; a scalar is no tensor of `float | Tensor`."""
    unread = [error["input"] for error in errors if error["type"] == "needs_python_object"]
    opaque = any(isinstance(value, list | Mapping) for value in unread) or not kinds & _MISTYPED
    return "callable_type" in kinds or bool(unread and opaque)


def expected(hint: Any) -> str:
    """Return what an annotation accepts, in words.

    Example:
        >>> from typing import Literal
        >>> expected(int | None), expected(list[float]), expected(Literal["auto", True])
        ('a whole number or null', 'a list of numbers', 'auto or true')
    """
    schema = schema_of(hint)
    return _in_words(schema, schema.get("$defs", {}))


def schema_of(hint: Any) -> Schema:
    """Return the JSON Schema (draft 2020-12) of an annotation; empty for one without a plain form.

    Example:
        >>> from typing import Annotated
        >>> from trainkit.fields import at_least
        >>> schema_of(Annotated[int | None, at_least(1)]) == {"type": ["integer", "null"], "minimum": 1}
        True
    """
    if (adapter := _adapter(hint)) is None:
        return {}
    array_schema = adapter.json_schema(schema_generator=_Writer, union_format="primitive_type_array")
    defined = {"$defs": array_schema["$defs"]} if "$defs" in array_schema else {}
    return {**array_schema.get("items", {}), **defined}


def document_schema(kind: Any, *, title: str, version: int, is_open: bool = False) -> Schema:
    """Return the complete schema of a JSON document that a dataclass or TypedDict describes.

    Args:
        kind: the dataclass or TypedDict.
        title: the title of the document.
        version: its version.
        is_open: whether the document may hold further keys at its top.

    Example:
        >>> from typing_extensions import TypedDict
        >>> class Point(TypedDict):
        ...     x: int
        >>> document_schema(Point, title="a point", version=1)["properties"]
        {'x': {'type': 'integer'}}
    """
    schema = schema_of(kind)
    name = schema.pop("$ref").rpartition("/")[2]
    defined = dict(sorted(schema["$defs"].items()))
    root = {**defined.pop(name), "additionalProperties": is_open}
    return {"$schema": DRAFT, "title": title, "version": version, **root, **({"$defs": defined} if defined else {})}


class _Writer(GenerateJsonSchema):
    """Writes the schema of an annotation with the documentation of keys, and any value where nothing is checked."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Schema:
        del schema, error_info
        return {}

    def default_schema(self, schema: Any) -> Schema:
        return self.generate_inner(schema["schema"])  # defaults are not those of the run, which YAML files set

    def get_union_of_schemas(self, schemas: list[Schema]) -> Schema:
        checked = [schema for schema in schemas if schema]
        if len(checked) < len(schemas) and not any(str(schema.get("type")) in _SCALARS for schema in checked):
            return {}  # a class that YAML cannot write, and a scalar is never one
        union = super().get_union_of_schemas(checked)
        kinds = union.get("type", ())
        return {**union, "type": kinds[0]} if isinstance(kinds, list) and len(kinds) == 1 else union

    def dataclass_schema(self, schema: Any) -> Schema:
        return _documented(super().dataclass_schema(schema), schema["cls"])

    def typed_dict_schema(self, schema: Any) -> Schema:
        return _documented(super().typed_dict_schema(schema), schema["cls"])


def _documented(schema: Schema, kind: Any) -> Schema:
    docs = doc_lines(kind)
    keys = {name: {**entry, **_described(docs.get(name))} for name, entry in schema.get("properties", {}).items()}
    rest = {name: value for name, value in schema.items() if name not in ("title", "description")}
    return {"type": "object", **_described(summary(kind)), **rest, "properties": keys}


def _described(text: str | None) -> Schema:
    return {"description": text} if text else {}


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    """Return pydantic's adapter of a list of such values: a dataclass inside takes over its settings; None for an
    annotation that it cannot read.
    """
    try:
        return _cached_adapter(hint)
    except TypeError:  # a mark that cannot be hashed
        return _new_adapter(hint)


def _new_adapter(hint: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(list[hint], config=_STRICT)
    except (PydanticUserError, NameError):
        return None


_cached_adapter: Final = lru_cache(maxsize=4096)(_new_adapter)


def _choices_in(schema: Schema, defs: Schema | None = None) -> Iterator[Any]:
    """Yield the words and numbers that an annotation lists: those of a Literal, an enum, or a union with one."""
    defs = schema.get("$defs", {}) if defs is None else defs
    schema = _target(schema, defs)
    yield from schema.get("enum", [schema["const"]] if "const" in schema else [])
    for option in schema.get("anyOf", ()):
        yield from _choices_in(option, defs)


def _target(schema: Schema, defs: Schema) -> Schema:
    return defs[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _in_words(schema: Schema, defs: Schema) -> str:
    schema, kind = _target(schema, defs), schema.get("type", "object")
    if "anyOf" in schema:
        words = [_in_words(option, defs) for option in schema["anyOf"]]
        return either(name for word in words for name in (("true", "false") if word == _NAMES["boolean"] else (word,)))
    if choices := list(_choices_in(schema, defs)):
        return either(map(yaml_text, choices))
    if isinstance(kind, list):
        return either(_in_words({"type": name}, defs) for name in kind)
    if "properties" in schema:
        return f"a mapping with the keys {', '.join(schema['properties'])}"
    if kind == "array":
        return _items_in_words(schema, defs)
    return "a path" if schema.get("format") == "path" else _NAMES[kind]


def _items_in_words(schema: Schema, defs: Schema) -> str:
    fixed = schema.get("prefixItems", [])
    item = fixed[0] if fixed else schema.get("items", {})
    if not item:
        return "a list"
    noun = next((plural for kind, plural in _PLURALS.items() if item == {"type": kind}), None)
    count = f"{len(fixed)} " if len(fixed) > 1 else ""
    return f"a list of {count}{noun or f'items that are each {_in_words(item, defs)}'}"


def holds_quantity(hint: Any) -> bool:
    """Return whether the values are numbers, alone or in a list; a number beside text is an index or a name.

    Example:
        >>> holds_quantity(int | None), holds_quantity(list[float]), holds_quantity(int | str), holds_quantity(bool)
        (True, True, False, False)
    """
    kinds = set(_types_in(schema_of(hint)))
    return bool(kinds & {"integer", "number"}) and "string" not in kinds


def _types_in(schema: Schema) -> Iterator[str]:
    if "enum" in schema or "const" in schema:
        return
    kinds = schema.get("type", ())
    yield from [kinds] if isinstance(kinds, str) else kinds
    inner = schema.get("additionalProperties")
    inside = [*schema.get("anyOf", ()), *schema.get("prefixItems", ()), schema.get("items"), inner]
    for part in inside:
        if isinstance(part, Mapping):
            yield from _types_in({**part})


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
