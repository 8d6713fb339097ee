"""YAML files of the config: read one with the line of every key, and find the folders that hold them.

The folders are trainkit's own, inside the package once installed and beside it in a checkout, and those of the user.
Scalars that YAML 1.1 reads as something else than they look like are found, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from trainkit.errors import ConfigError, Problem, UnreadableError, refuse
from trainkit.files import MAX_YAML_BYTES, SafeLoader, UnreadableYAMLError, check_bounds, read_text
from trainkit.redaction import REDACTED, mask, secrets_in

KeyPath = tuple[str, ...]

_TRAPS: Final = (
    (re.compile(r"(?i:yes|no|on|off)"), "true or false"),
    (re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9_]*)?"), "a number in base 60"),
    (re.compile(r"[-+]?0[0-9_]*[0-9]"), "an octal number"),
)


class _Loader(SafeLoader):
    """A safe loader, which reads floats like 1e-3 and does not read dates, as in OmegaConf."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0].rpartition(":")[2] not in ("timestamp", "float", "value")]
    for first, pairs in SafeLoader.yaml_implicit_resolvers.items()
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """One YAML file; equal to itself alone, so that it can be a key."""

    file: Path
    values: dict[str, Any]
    """The content without the defaults list."""
    lines: Mapping[KeyPath, int]
    """Line of each key, from 1, including keys of mappings."""
    defaults: list[Any] = field(default_factory=list)
    """The defaults list, as written."""
    defaults_lines: tuple[int, ...] = ()
    """The line of each item of the defaults list."""
    package: str | None = None
    """The package given by the header `# @package X`: the path at which the content is merged."""
    of_class: frozenset[str] = frozenset()
    """Keys of `values` that the class of the choice gives, not the file (`trainkit.config.targets.choices`)."""

    @property
    def description(self) -> str:
        """The first comment of the file that is neither a header nor a command, in one line."""
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
        ConfigError: the file cannot be read, is not YAML, or is not a mapping; with file and line.
    """
    return _parsed(file, _text_of(file))


@lru_cache(maxsize=512)  # a sweep composes from the same files hundreds of times
def _parsed(file: Path, text: str) -> Document:
    loader = _Loader(text)
    try:
        check_bounds(text)
        root = loader.get_single_node()
        if root is None:
            return Document(file=file, values={}, lines={}, package=_header(text, r"package\s+(\S+)"))
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError([Problem(key=file.name, rule="must hold keys and values.", origin=f"{file}:1")])
        lines: dict[KeyPath, int] = {}
        problems = [replace(problem, origin=f"{file}:{problem.origin}") for problem in _scan(root, (), lines)]
        values = loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(file, error)]) from error
    finally:
        loader.dispose()
    defaults = values.pop("defaults", None) or []
    if not isinstance(defaults, list):
        raise ConfigError([Problem(key="defaults", rule="must be a list.", origin=f"{file}:{lines['defaults',]}")])
    items = next((value.value for key, value in root.value if key.value == "defaults"), ())
    item_lines = tuple(item.start_mark.line + 1 for item in items)
    refuse([*problems, *_item_problems(file, defaults, item_lines)])
    return Document(
        file=file,
        values=values,
        lines=lines,
        defaults=defaults,
        defaults_lines=item_lines,
        package=_header(text, r"package\s+(\S+)"),
    )


def shown_text(document: Document, group: str) -> str:
    """Return the text of a file without its secrets; in `logger` and `callbacks` more keys are secret."""
    lines = document.file.read_text(encoding="utf-8").splitlines(keepends=True)
    above: tuple[str, ...] = () if group in ("recipe", "experiment") else (group,)
    above = (group, "NAME") if group in ("logger", "callbacks") else above
    secret_paths = [path[len(above) :] for path, _ in secrets_in(document.values, above)]
    starts = sorted({*document.lines.values(), len(lines) + 1})
    for path in reversed(secret_paths):
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
        return read_text(file, limit=MAX_YAML_BYTES, follow=True)
    except UnreadableError as error:
        most = f"{MAX_YAML_BYTES:,} bytes at most"
        rule = f"cannot be read: {error.reason}. A config is a regular file of UTF-8 text, {most}."
        raise ConfigError([Problem(key=str(file), rule=rule)]) from None


def _scan(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Iterator[Problem]:
    """Record the line of every key below a mapping, refuse duplicate keys, and yield the plain scalars that YAML 1.1
    reads as something else than they look like, each with its line.
    """
    if isinstance(node, yaml.ScalarNode):
        traps = _TRAPS if not node.style and node.tag.rpartition(":")[2] in ("bool", "int", "float") else ()
        if reading := next((reading for shape, reading in traps if shape.fullmatch(node.value)), None):
            parsed = str(yaml.safe_load(node.value)).lower()
            rule = f"YAML reads this as {reading}, {parsed}. Write {parsed}, or quote it for text: '{node.value}'."
            yield Problem(key=".".join(path), value=node.value, rule=rule, origin=str(node.start_mark.line + 1))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _scan(item, (*path, str(index)), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":null"):
                raise UnreadableYAMLError(problem="holds a key that is not text", problem_mark=key.start_mark)
            inner = (*path, str(key.value))
            if inner in lines and key.value != "<<":
                message = f"key {'.'.join(inner)} is here twice, first in line {lines[inner]}"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            lines[inner] = key.start_mark.line + 1
            yield from _scan(key, inner, lines)
            yield from _scan(value, inner, lines)


def _item_problems(file: Path, defaults: Sequence[Any], lines: Sequence[int]) -> Iterator[Problem]:
    """Yield problems of items of a defaults list that name no choice, or a file outside of the config folders."""
    for item, line in zip(defaults, lines, strict=True):
        group, names = _item_parts(item)
        if not all(isinstance(name, str) for name in (group, *names)) or not (names or isinstance(item, Mapping)):
            rule = "each item must be GROUP: CHOICE, or CHOICE."
        elif not all(is_choice_path(f"{group}/{name}".removeprefix("/").removeprefix("/")) for name in names):
            rule = "names a file outside of the folders of the config. Give the name of a choice: GROUP: CHOICE."
        else:
            continue
        yield Problem(key="defaults", value=item, rule=rule, origin=f"{file}:{line}")


def _item_parts(item: Any) -> tuple[Any, list[Any]]:
    """Return the group that an item names, empty for an item that names only a choice, and its choices."""
    if not isinstance(item, Mapping):
        return "", [item]
    if len(item) != 1 or not str(next(iter(item))).strip():
        return None, []
    group, value = next(iter(item.items()))
    words = group.split() if isinstance(group, str) else [None]
    return words[-1], [] if value is None else value if isinstance(value, list) else [value]


def is_choice_path(path: str) -> bool:
    """Return whether a path stays below the folder that it begins in.

    Example:
        >>> [is_choice_path(path) for path in ("model/mlp", "model/../mlp", "model//mlp")]
        [True, False, False]
    """
    return all(part not in ("", ".", "..") and "\0" not in part for part in path.split("/"))


def _header(text: str, shape: str) -> str | None:
    """Return the values of the comments of this form, `# @...`, above all keys."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            return None
        if match := re.fullmatch(rf"#\s*@{shape}\s*", line):
            return match[1]
    return None


def hint_for_word(word: str) -> str | None:
    """Return the equivalent of a word of other libraries; a shipped choice declares it: `# @word WORD HINT`."""
    files = sorted(shipped_conf().glob("*/*.yaml"))
    hints = (_header(_text_of(file), rf"word\s+{re.escape(word)}\s+(\S.*?)") for file in files)
    return next(filter(None, hints), None)


def _syntax_problem(file: Path, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    origin = f"{file}:{mark.line + 1}" if mark is not None else str(file)
    if isinstance(error, UnreadableYAMLError):
        return Problem(key=file.name, rule=f"{error.problem}.", origin=origin)
    reason = getattr(error, "problem", None) or " ".join(str(error).split())
    return Problem(key=file.name, rule=f"is not YAML: {reason}.", origin=origin)


def shipped_conf() -> Path:
    """Return the folder of trainkit's own YAMLs."""
    return _shipped("conf")


def shipped_recipes() -> Path:
    """Return the folder of trainkit's recipes."""
    return _shipped("recipes")


def shipped_template() -> Path:
    """Return the folder that `trainkit init` copies."""
    return _shipped("template")


def shipped_docs() -> Path:
    """Return the folder of the pages that the command line shows."""
    return _shipped("docs")


@cache
def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parent.parent
    return next((folder for folder in (package / name, package.parent / name) if folder.is_dir()), package / name)


_FOLDERS: Final[list[tuple[Path, ...]]] = [()]
"""The folders of the calls that run, innermost last."""
_VARIABLE: Final = "TRAINKIT_CONFIG_DIRS"
"""The environment variable that passes the folders to a worker, separated as in PATH; only printed commands use it."""


@contextmanager
def with_config_dirs(folders: Sequence[Path]) -> Iterator[None]:
    """Let commands that are printed while the block runs name these absolute folders."""
    _FOLDERS.append(tuple(folders))
    try:
        yield
    finally:
        _FOLDERS.pop()


def config_dir_arguments(folders: Sequence[Path] | None = None) -> list[str]:
    """Return the arguments that name config folders in a command printed by trainkit.

    Args:
        folders: absolute paths; None for those of the running call. Folders below the current one become relative.

    Example:
        >>> config_dir_arguments([Path("/srv/conf")]), config_dir_arguments([])
        (['--config-dir', '/srv/conf'], [])
    """
    cwd = Path.cwd()
    arguments = []
    for folder in _FOLDERS[-1] if folders is None else folders:
        shown = os.path.relpath(folder, cwd) if folder.is_relative_to(cwd) else str(folder)
        arguments += ["--config-dir", shown]
    return arguments


def config_dir_environ() -> dict[str, str]:
    """Return the variable that passes the folders of this process to a worker."""
    return {_VARIABLE: os.pathsep.join(map(str, _FOLDERS[-1]))} if _FOLDERS[-1] else {}


def config_dirs_from(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders that the parent process was started with.

    Example:
        >>> [str(folder) for folder in config_dirs_from({"TRAINKIT_CONFIG_DIRS": "/srv/conf"})], config_dirs_from({})
        (['/srv/conf'], ())
    """
    return tuple(Path(name) for name in environ.get(_VARIABLE, "").split(os.pathsep) if name)
