"""YAML files read with the line of every key, and the scalars that YAML 1.1 rewrites found out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from trainkit.errors import ConfigError, Problem
from trainkit.redaction import REDACTED, mask, secrets_in

__all__ = ["Document", "Trap", "read_document", "shown_text"]

KeyPath = tuple[str, ...]

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TRAPS: Final = (
    (re.compile(r"(?i:yes|no|on|off)"), "true or false"),
    (re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9_]*)?"), "a number in base 60"),
    (re.compile(r"[-+]?0[0-9_]*[0-9]"), "an octal number"),
)


class _Loader(_Base):  # type: ignore[misc]
    """PyYAML's safe loader, with floats as people write them (1e-3) and without dates, as OmegaConf reads them."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
    for first, pairs in _Base.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*
        |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


@dataclass(frozen=True, slots=True)
class Trap:
    """A plain scalar that YAML 1.1 reads as something else than it looks."""

    path: KeyPath
    line: int
    text: str
    rule: str


@dataclass(frozen=True, kw_only=True)
class Document:
    """One YAML file."""

    file: Path
    values: dict[str, Any]
    """Its content without the defaults list."""
    lines: Mapping[KeyPath, int]
    """Line of each key, from 1; mappings too."""
    traps: tuple[Trap, ...] = ()
    """Scalars that are not what they look like."""
    defaults: list[Any] = field(default_factory=list)
    """The defaults list, as written."""
    defaults_lines: tuple[int, ...] = ()
    """The line of each of its items."""
    package: str | None = None
    """Where the header `# @package X` puts the content."""

    @property
    def description(self) -> str:
        """The first comment of the file that is no header and no command, in one line."""
        with self.file.open(encoding="utf-8") as stream:
            for line in stream:
                text = line.lstrip("#").strip()
                if line.startswith("#") and text and not text.startswith(("@", "python -m", "trainkit ")):
                    return text
                if line.strip() and not line.startswith("#"):
                    break
        return ""


def read_document(file: Path) -> Document:
    """Read one YAML file of the configuration.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or is no mapping, with file and line.
    """
    text = _text_of(file)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Document(file=file, values={}, lines={}, package=_package_in(text))
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError([Problem(key=file.name, rule="must hold keys and values.", origin=f"{file}:1")])
        lines: dict[KeyPath, int] = {}
        traps = tuple(_scan(root, (), lines))
        values = loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(file, error)]) from error
    finally:
        loader.dispose()
    defaults = values.pop("defaults", None) or []
    if not isinstance(defaults, list):
        raise ConfigError([Problem(key="defaults", rule="must be a list.", origin=f"{file}:{lines['defaults',]}")])
    return Document(
        file=file,
        values=values,
        lines=lines,
        traps=tuple(trap for trap in traps if trap.path[:1] != ("defaults",)),
        defaults=defaults,
        defaults_lines=tuple(_item_lines(root)),
        package=_package_in(text),
    )


def shown_text(document: Document, group: str) -> str:
    """Return the text of a file without the secrets in it.

    Args:
        document: the file.
        group: the group that it is a choice of; in `logger` and `callbacks` more keys are secrets.
    """
    lines = document.file.read_text(encoding="utf-8").splitlines(keepends=True)
    above = () if group == "recipe" else (group,) if group not in ("logger", "callbacks") else (group, "NAME")
    found = [path[len(above) :] for path, _ in secrets_in(document.values, above)]
    starts = sorted({*document.lines.values(), len(lines) + 1})
    for path in reversed(found):
        key = path[: max(length for length in range(1, len(path) + 1) if path[:length] in document.lines)]
        start = document.lines[key]
        inner = [line for name, line in document.lines.items() if name[: len(key)] == key]
        end = next(line for line in starts if line > max(inner))
        text = lines[start - 1]
        head = text[: text.index(":") + 1] if ":" in text else text.rstrip()
        tail = [line for line in lines[start : end - 1] if not line.strip() or line.startswith("#")]
        lines[start - 1 : end - 1] = [f"{head} {REDACTED}\n", *tail]
    return mask("".join(lines))


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(key=str(file), rule=f"is not UTF-8 text: {error.reason}.")]) from error
    except OSError as error:
        raise ConfigError([Problem(key=str(file), rule=f"cannot be read: {error.strerror}.")]) from error


def _scan(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Iterator[Trap]:
    """Note the line of every key below a mapping, refuse keys given twice, and yield the traps."""
    if isinstance(node, yaml.ScalarNode):
        if trap := _trap_in(node, path):
            yield trap
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _scan(item, (*path, str(index)), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in lines and key.value != "<<":
                message = f"key {'.'.join(inner)} is here twice, first in line {lines[inner]}"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            lines[inner] = key.start_mark.line + 1
            if trap := _trap_in(key, inner):
                yield trap
            yield from _scan(value, inner, lines)


def _trap_in(node: yaml.Node, path: KeyPath) -> Trap | None:
    if not isinstance(node, yaml.ScalarNode) or node.style:  # quoted, or a block
        return None
    if node.tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        return None
    for shape, reading in _TRAPS:
        if shape.fullmatch(node.value):
            yaml_value = yaml.safe_load(node.value)
            meant = str(yaml_value).lower()
            rule = f"YAML reads this as {reading}, {meant}. Write {meant}, or quote it for text: '{node.value}'."
            return Trap(path=path, line=node.start_mark.line + 1, text=node.value, rule=rule)
    return None


def _item_lines(root: yaml.MappingNode) -> Iterator[int]:
    for key, value in root.value:
        if key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            yield from (item.start_mark.line + 1 for item in value.value)


def _package_in(text: str) -> str | None:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            return None
        if match := re.fullmatch(r"#\s*@package\s+(\S+)\s*", line):
            return match[1]
    return None


def _syntax_problem(file: Path, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error)
    origin = f"{file}:{mark.line + 1}" if mark is not None else str(file)
    return Problem(key=file.name, rule=f"is no YAML: {what}.", origin=origin)
