"""`trainkit explain KEY OVERRIDES`: a key's value, where it was set, and what changing it can affect."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Final

from trainkit.errors import ConfigError, Problem, yaml_text
from trainkit.fields import Tag
from trainkit.redaction import REDACTED
from trainkit.verbs.support.call import Call, Flag

USAGE: Final = "KEY OVERRIDES"
FLAGS: Final[Mapping[str, Flag]] = {}
_MEANINGS: Final = {
    Tag.maths: "maths: changes the result",
    Tag.placement: "placement: where it runs; the result stays, to rounding",
    Tag.speed: "speed: how fast it runs; the result stays",
    Tag.cosmetic: "cosmetic: what is shown or kept; the result stays",
}


def run(call: Call) -> int:
    """Print the explanation."""
    call.check_arity(arguments=1)
    for line in explanation(call):
        sys.stdout.write(f"{line}\n")
    return 0


def explanation(call: Call) -> Iterator[str]:
    """Yield the lines of the explanation.

    Raises:
        ConfigError: there is no such key, or the composition has problems.
    """
    from trainkit.api import compose  # noqa: PLC0415 - Hydra only where one composes
    from trainkit.config.composition import dotted, leaves, lookup  # noqa: PLC0415
    from trainkit.config.secrets import redacted, secret_keys  # noqa: PLC0415
    from trainkit.config.values import closest  # noqa: PLC0415

    composition = compose(call.overrides, config_dirs=call.config_dirs, packages=call.packages)
    key = call.arguments[0]
    path = tuple(key.split("."))
    keys = [dotted(inner) for inner, _ in leaves(composition.values)]
    if not any(name == key or name.startswith(f"{key}.") for name in keys):
        near = closest(key, [*keys, *composition.values])
        hint = f"Did you mean {near}?" if near else f"There are: {', '.join(composition.values)}."
        raise ConfigError([Problem(key=key, rule=f"no such key in this composition. {hint}", origin="command line")])
    value = lookup(redacted(composition.values)[0], path)
    if any(path[:length] in secret_keys(composition.values) for length in range(1, len(path))):
        value = REDACTED  # a part of a secret
    choice = composition.choices.get(key)
    if choice is not None:
        yield f"{key}={'[' + ','.join(choice) + ']' if isinstance(choice, list) else choice}"
    if isinstance(value, Mapping):
        width = max((len(dotted((*path, *inner))) for inner, _ in leaves(value)), default=0)
        for inner, item in leaves(value):
            name = dotted((*path, *inner))
            yield f"  {name:<{width}}  {yaml_text(item):<12}  {composition.origin((*path, *inner)).where}".rstrip()
    else:
        yield f"{key}={yaml_text(value)}"
        yield f"  set by   {composition.origin(path).where or 'nothing: the default'}"
    doc, tag = _doc_and_tag(composition.cfg, path)
    if doc:
        yield f"  means    {doc}"
    if not isinstance(value, Mapping):
        yield f"  changes  {tag}"
    for note in composition.notes:
        if key.split(".")[0] in note:
            yield f"  note     {note}"


def _doc_and_tag(cfg: Any, path: tuple[str, ...]) -> tuple[str, str]:
    from trainkit.config.identity import tag_of  # noqa: PLC0415
    from trainkit.config.schema import GROUPS, LIST_GROUPS, RunConfig, hints_of  # noqa: PLC0415
    from trainkit.config.targets.allowed import TARGET  # noqa: PLC0415 - imports the target
    from trainkit.config.targets.build import resolve_target  # noqa: PLC0415 - imports the target
    from trainkit.config.values import plain  # noqa: PLC0415

    kind: Any = RunConfig
    names = list(path)
    if path[0] in GROUPS and len(path) > 1:
        size = 2 if path[0] in LIST_GROUPS else 1
        node = getattr(cfg, path[0])
        node = node.get(path[1], {}) if size == 2 else node
        names = list(path[size:])
        kind = resolve_target(node[TARGET]) if isinstance(node, Mapping) and TARGET in node else None
    for name in names[:-1]:
        hint = plain(hints_of(kind).get(name)) if is_dataclass(kind) and isinstance(kind, type) else None
        kind = hint if is_dataclass(hint) else None
    doc = doc_line(kind, names[-1]) if kind is not None and names else ""
    return doc, _MEANINGS[tag_of(cfg, path).tag]


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
