"""The keys of a run that differ from its recipe, with who set each, for the page of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from trainkit.config.composition import (
    NOWHERE,
    Composition,
    KeyPath,
    Level,
    TrackedTree,
    dotted,
    leaves,
    lookup,
)
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.identity import tag_of
from trainkit.config.schema import GROUPS, RunConfig
from trainkit.config.secrets import is_below, redacted, secret_keys
from trainkit.redaction import REDACTED


class ChangedKey(TypedDict):
    """A key of a run that differs from its recipe."""

    key: str
    """The key, or a group for its choice."""
    value: Any
    """The value of the run; secrets are redacted."""
    recipe: Any
    """The value of the recipe, or of the files below it; null where they do not set the key."""
    set_by: str
    """`command line`, or the file and line."""
    tag: str
    """What the key can affect: maths, placement, speed or cosmetic."""


def changed_keys(composition: Composition) -> list[ChangedKey]:
    """Return the choices and keys that an experiment, a file of the user or an argument sets otherwise than the recipe.

    Empty for a config made by hand, which does not say who set what.
    """
    cfg = composition.cfg
    return [*_choices(composition, cfg), *_keys(composition, cfg)]


def _choices(composition: Composition, cfg: RunConfig) -> Iterator[ChangedKey]:
    """Yield the groups for which an argument takes another choice than the recipe."""
    usual: dict[str, Any] = {}
    for file in composition.files:
        if not file.group or file.level is Level.recipe:
            usual |= dict(_defaults(file.document.defaults))
    given = {key_of(line) for line in composition.overrides}
    for group, choice in composition.choices.items():
        if group in GROUPS and group in given and choice != usual.get(group):
            yield ChangedKey(
                key=group,
                value=choice,
                recipe=usual.get(group),
                set_by=COMMAND_LINE,
                tag=tag_of(cfg, (group,)).tag.value,
            )


def _defaults(items: list[Any]) -> Iterator[tuple[str, Any]]:
    for item in items:
        if isinstance(item, Mapping):
            for name, choice in item.items():
                yield str(name).removeprefix("override ").strip().lstrip("/"), choice


def _keys(composition: Composition, cfg: RunConfig) -> Iterator[ChangedKey]:
    below = _values_below(composition)
    secrets = secret_keys(composition.values)
    for path, value in leaves(redacted(composition.values)[0]):
        origin = composition.origin(path)
        by_user = origin.level > Level.recipe or not (origin.shipped or origin.level is Level.recipe)
        usual = lookup(below, path)
        if origin == NOWHERE or not by_user or usual == value or path in (("recipe",), ("resume",)):
            continue
        hidden = path in secrets or is_below(path, secrets)
        yield ChangedKey(
            key=dotted(path),
            value=REDACTED if hidden else value,
            recipe=REDACTED if hidden and usual is not None else usual,
            set_by=origin.where,
            tag=tag_of(cfg, path).tag.value,
        )


def _values_below(composition: Composition) -> Mapping[str, Any]:
    """Return the values that the files up to the recipe set, secrets redacted."""
    tree = TrackedTree()
    for file in composition.files:
        if file.level <= Level.recipe and (file.shipped or file.level is Level.recipe):
            _put(tree, file.package, file.document.values)
    return redacted(tree.values)[0]


def _put(tree: TrackedTree, package: KeyPath, values: Mapping[str, Any]) -> None:
    if package:
        tree.put(package, values, NOWHERE)
        return
    for name, value in values.items():
        tree.put((str(name),), value, NOWHERE)
