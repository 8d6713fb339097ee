"""Effects of changing a key, the fingerprint of a training, and the keys in which a config differs from another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from typing_extensions import TypedDict

from trainkit.config.commands import shell_word
from trainkit.config.composition import (
    NOWHERE,
    Composition,
    KeyPath,
    Level,
    TrackedTree,
    dotted,
    lookup,
)
from trainkit.config.grammar import COMMAND_LINE, setting
from trainkit.config.schema import GROUPS, LIST_GROUPS, RunConfig, hints_of, load_resolved
from trainkit.config.secrets import is_below, redacted, secret_keys
from trainkit.config.targets.allowed import DATA_HOOKS, TARGET
from trainkit.config.targets.build import signature_of, target_of
from trainkit.config.values import leaves, plain
from trainkit.errors import ConfigError, Problem, UnreadableError, refuse
from trainkit.fields import NO_NEUTRAL, OnlyWith, Tag, Tagged, cosmetic, maths, placement, tag_in, tags_of
from trainkit.files import read_map
from trainkit.redaction import REDACTED, variable_of

_MAX_BYTES: Final = 1 << 30
"""Size limit of the files that hold a config; the states of callbacks in a checkpoint can be large."""
_PLACEMENT: Final = ("strategy", "cluster")
"""Groups whose choice is placement (where a training runs), unless the class declares otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A key that has different values in two configs."""

    key: str
    left: Any
    right: Any
    tag: Tag

    @property
    def matters(self) -> bool:
        """Whether the difference can change the result."""
        return self.tag is Tag.maths


def tag_of(cfg: RunConfig, path: KeyPath) -> Tagged:
    """Return what changing a key of a run can affect.

    Example:
        >>> tag_of(RunConfig(), ("seed",)).tag.value, tag_of(RunConfig(), ("loader", "prefetch")).tag.value
        ('maths', 'speed')
    """
    if path[0] in GROUPS:
        return _tag_in_group(cfg, path)
    hint: Any = RunConfig
    for name in path:
        hints = hints_of(plain(hint)) if is_dataclass(plain(hint)) else {}
        if name not in hints:
            return maths
        hint = hints[name]
    return tag_in(hint)


def _tag_in_group(cfg: RunConfig, path: KeyPath) -> Tagged:
    size = 2 if path[0] in LIST_GROUPS else 1
    node: Any = getattr(cfg, path[0])
    for name in path[1:size]:
        node = node.get(name) if isinstance(node, Mapping) else None
    if path[0] in ("logger", "hardware") or (path[0] in LIST_GROUPS and len(path) == 1):
        return cosmetic
    target = target_of(node)
    if path in (("average",), ("convert",)):
        return maths(neutral={})
    if target is None:
        return placement if path[0] in _PLACEMENT else maths
    if path[size:] in ((), (TARGET,)):
        return _tag_of_class(path[0], target)
    if path[0] == "data" and path[1] in DATA_HOOKS and path[1] not in tags_of(target):
        return maths(neutral=None)
    return _tag_below(target, path[size:])


def _tag_of_class(group: str, target: Callable[..., Any]) -> Tagged:
    """Return what choosing this class can affect; a class or its `facts` can declare `changes_maths`."""
    default = group not in (*_PLACEMENT, *LIST_GROUPS)
    if getattr(getattr(target, "facts", target), "changes_maths", default):
        return maths
    return placement if group in _PLACEMENT else cosmetic


def _tag_below(target: Callable[..., Any], path: KeyPath) -> Tagged:
    """Return the tag of a parameter, or of a key inside a parameter that is a dataclass with tags of its own."""
    tagged = tags_of(target).get(path[0], maths)
    key = signature_of(target).keys.get(path[0])
    hint = plain(key.hint) if key is not None else None
    if len(path) > 1 and is_dataclass(hint) and isinstance(hint, type):
        return _tag_below(hint, path[1:])
    return tagged


def maths_keys(cfg: RunConfig) -> dict[str, Any]:
    """Return every key that decides the result of a run, with its value, except keys at their baseline value.

    Secrets do not affect the result; they are left out too, so that no fingerprint is a hash of a secret.

    Example:
        >>> keys = maths_keys(RunConfig(seed=3))
        >>> keys["seed"], "loader.prefetch" in keys
        (3, False)
    """
    keys = {}
    for path, value in leaves(cfg.to_dict()):
        if variable_of(value) is None and not _is_unused(cfg, path):
            tagged = tag_of(cfg, path)
            if tagged.tag is Tag.maths and not _neutral(value, tagged):
                keys[dotted(path)] = value
    return keys


def _is_unused(cfg: RunConfig, path: KeyPath) -> bool:
    """Return whether the value of another key makes this key irrelevant to the result."""
    if path == ("numerics", "lanes"):
        return not cfg.numerics.reproducible
    if path == ("lr_scaling", "rule"):
        return cfg.lr_scaling.reference_batch is None
    if path == ("warmup", "start"):
        return not cfg.warmup.epochs and not cfg.warmup.steps
    if path in (("warmup", "epochs"), ("warmup", "steps")):
        return not getattr(cfg.warmup, path[1])
    if path[0] not in GROUPS or path[0] in LIST_GROUPS:
        return False
    node = getattr(cfg, path[0])
    only_with = getattr(target_of(node), "only_with", None)
    return isinstance(only_with, OnlyWith) and path[1] in only_with.unused(node)


def _neutral(value: Any, tag: Tagged) -> bool:
    if tag.neutral is NO_NEUTRAL:
        return False
    neutral = tag.neutral if isinstance(tag.neutral, tuple) else (tag.neutral,)
    return any(type(value) is type(item) and value == item for item in neutral)


def fingerprint(cfg: RunConfig) -> str:
    """Return the SHA-256 of a run's maths keys: equal fingerprints mean equal results up to rounding.

    `name`, placement, speed and display keys do not count; numbers count by value, 1 equals 1.0.

    Example:
        >>> fingerprint(RunConfig(name="a")) == fingerprint(RunConfig(name="b")) != fingerprint(RunConfig(seed=1))
        True
    """
    return digest_of(maths_keys(cfg))


def digest_of(values: Any) -> str:
    """Return the SHA-256 of plain values; keys count as texts, and numbers by value.

    Example:
        >>> digest_of({1: (2.0,)}) == digest_of({"1": [2]})
        True
    """
    return hashlib.sha256(json.dumps(_canonical(values), sort_keys=True).encode()).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    return [_canonical(item) for item in value] if isinstance(value, list | tuple) else value


def difference(left: RunConfig, right: RunConfig) -> list[Difference]:
    """Return the keys in which two runs differ, first the keys that can change the result.

    Example:
        >>> [(item.key, item.matters) for item in difference(RunConfig(seed=1), RunConfig(name="b"))]
        [('seed', True), ('name', False)]
    """
    lefts, rights = (dict(leaves(cfg.to_dict())) for cfg in (left, right))
    differences = []
    for path in dict.fromkeys((*lefts, *rights)):
        left_value, right_value = lefts.get(path), rights.get(path)
        if variable_of(left_value) or variable_of(right_value):  # a secret
            if left_value != right_value:
                differences.append(Difference(key=dotted(path), left=left_value, right=right_value, tag=Tag.cosmetic))
            continue
        left_plain, right_plain = _canonical(left_value), _canonical(right_value)
        if left_plain == right_plain and type(left_plain) is type(right_plain):  # True == 1
            continue
        # A key that only one of the two runs has: mirrored's compression, for example, compared with one device.
        sides = [
            (tag_of(cfg, path), values[path], cfg) for cfg, values in ((left, lefts), (right, rights)) if path in values
        ]
        tags = [tag for tag, _, _ in sides]
        can_matter = [
            tag
            for tag, value, cfg in sides
            if tag.tag is Tag.maths and not _neutral(value, tag) and not _is_unused(cfg, path)
        ]
        tag = Tag.maths if can_matter else _least_consequential(tags)
        differences.append(Difference(key=dotted(path), left=left_value, right=right_value, tag=tag))
    return sorted(differences, key=lambda item: not item.matters)


def run_config(run: Path) -> RunConfig:
    """Return the config of a run, whose `resolved.yaml` must describe the training that was done.

    The values are compared with those in `environment.json`, of the command that began or continued the run; without
    that file, with those in the newest checkpoint. Comments, order and formats may change, and keys that cannot change
    the result.

    Raises:
        ConfigError: the file is not the config of a run, or a key that decides the result was changed by hand.
        UnreadableError: the file cannot be read.
    """
    cfg = load_resolved(run / "resolved.yaml")
    newest_first = sorted(run.glob("checkpoints/step_*/meta.json"), reverse=True)
    for file in (run / "environment.json", *newest_first):
        try:
            begun = RunConfig.from_dict(read_map(file, {"config": dict}, limit=_MAX_BYTES)["config"])
        except (UnreadableError, ConfigError):  # absent, damaged, or of a run that did not store it
            continue
        if begun.to_dict() == cfg.to_dict():
            return cfg
        origin = str(run / "resolved.yaml")
        other = shell_word(setting("init_from", run))
        rule = f"Set it back in the file. For another training from these weights, start a new run with {other}"
        refuse(
            Problem(
                key=change.key,
                value=change.right,
                rule=f"was changed by hand after the run began with {change.left}. {rule}",
                origin=origin,
            )
            for change in difference(begun, cfg)
            if change.matters
        )
        return cfg
    return cfg


def other_training(
    differences: Iterable[Difference], *, run: Path, remedy: str = "Give it the same value."
) -> list[Problem]:
    """Return a problem for each difference that makes a config another training than that of the run to resume.

    A length or warmup that is replaced by another key of its kind is not a problem of its own: nobody gave it.

    Example:
        >>> changes = difference(RunConfig(steps=3), RunConfig(name="b", epochs=2.0))
        >>> [str(problem) for problem in other_training(changes, run=Path("outputs/a"))]
        ['epochs=2.0: the run to resume, outputs/a, has steps=3. Give it the same value.']
    """
    mattering = {change.key: change for change in differences if change.matters}
    for pair in EXCLUSIVE:
        both = [change for name in pair if (change := mattering.get(name)) is not None]
        if len(both) == 2 and sum(change.right is None for change in both) == 1:
            lost, won = sorted(both, key=lambda change: change.right is not None)
            del mattering[lost.key]
            if won.left is None:
                mattering[won.key] = replace(won, left=f"{lost.key}={lost.left}")
    return [
        Problem(key=change.key, value=change.right, rule=f"the run to resume, {run}, has {change.left}. {remedy}")
        for change in mattering.values()
    ]


EXCLUSIVE: Final = (("epochs", "steps"), ("warmup.epochs", "warmup.steps"), ("batch.micro_size", "batch.accumulation"))
"""Pairs of keys of which a config has one."""


def _least_consequential(tags: list[Tagged]) -> Tag:
    order = (Tag.placement, Tag.speed, Tag.cosmetic)
    return next((tag for tag in order if any(item.tag is tag for item in tags)), Tag.cosmetic)


class SettingKey(TypedDict):
    """A key of a run that differs from its recipe."""

    key: str
    """The key, or a group for its choice."""
    value: Any
    """The value of the run; secrets are redacted."""
    recipe: Any
    """The value of the recipe, or of the files below it; null if they do not set the key."""
    set_by: str
    """`command line`, or the file and line."""
    tag: str
    """Effect that the key can have: maths, placement, speed or cosmetic."""


def changed_keys(composition: Composition) -> list[SettingKey]:
    """Return the choices and keys that an experiment, a file of the user or an argument sets otherwise than the recipe.

    Empty for a config made by hand, which does not record who set a key.
    """
    cfg = composition.cfg
    return [*_choices(composition, cfg), *_keys(composition, cfg)]


def _choices(composition: Composition, cfg: RunConfig) -> Iterator[SettingKey]:
    """Yield the groups for which an argument takes another choice than the recipe."""
    usual: dict[str, Any] = {}
    for file in composition.files:
        if not file.group or file.level is Level.recipe:
            usual |= dict(_defaults(file.document.defaults))
    for group, choice in composition.choices.items():
        if group in GROUPS and group in composition.given_keys and choice != usual.get(group):
            yield SettingKey(
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


def _keys(composition: Composition, cfg: RunConfig) -> Iterator[SettingKey]:
    below = _values_below(composition)
    secrets = secret_keys(composition.values)
    for path, value in leaves(redacted(composition.values)):
        origin = composition.origin(path)
        by_user = origin.level > Level.recipe or not (origin.shipped or origin.level is Level.recipe)
        usual = lookup(below, path)
        if origin == NOWHERE or not by_user or usual == value or path in (("recipe",), ("resume",)):
            continue
        hidden = path in secrets or is_below(path, secrets)
        yield SettingKey(
            key=dotted(path),
            value=REDACTED if hidden else value,
            recipe=REDACTED if hidden and usual is not None else usual,
            set_by=origin.where,
            tag=tag_of(cfg, path).tag.value,
        )


def _values_below(composition: Composition) -> Mapping[str, Any]:
    """Return the values that the files up to the recipe set, secrets redacted."""
    tree = TrackedTree()
    tree.values = RunConfig().to_dict()
    for file in composition.files:
        if file.level <= Level.recipe and (file.shipped or file.level is Level.recipe):
            for name, value in file.document.values.items():
                tree.put((*file.package, name), value, NOWHERE)
    return redacted(tree.values)
