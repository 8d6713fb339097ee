"""The facts of one key of a config: type, unit, default, meaning and tag."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Final

from pydantic_core import to_jsonable_python

from trainkit.config.annotations import expected, holds_quantity
from trainkit.config.composition import Composition, KeyPath, Level, lookup
from trainkit.config.docstrings import doc_line, summary
from trainkit.config.identity import tag_of
from trainkit.config.optimizers import OWN_KEYS, optimizer_node
from trainkit.config.schema import GROUPS, LIST_GROUPS, RunConfig, hints_of
from trainkit.config.targets.allowed import DATA_HOOKS, TARGET
from trainkit.config.targets.build import resolve_target, signature_of
from trainkit.config.targets.choices import REQUIRED
from trainkit.config.targets.kinds import ANY_KIND, PLACES, Expected
from trainkit.config.values import plain
from trainkit.fields import Limit, Tag, Unit, marks_in

GROUP_KEY_DOCS: Final[Mapping[str, tuple[Any, str]]] = {
    TARGET: (str, "The class or function that this node builds, package.module.Name."),
    "groups": (
        dict[str, dict[str, Any]],
        "Parameters with keys of their own, by name: match, and the keys that differ.",
    ),
    "match": (str | list[str], "Patterns of the names of parameters, and type:CLASS for the modules that hold them."),
    "ratio": (int | str, "Passes of this optimizer in a step, or 1/N for one in every N steps."),
    "schedule": (dict[str, Any], "The schedule of this optimizer; without it, that of the run."),
    "collate": (str | dict[str, Any], "The function that makes a batch of samples; a dotted name, or a node."),
    "batch_transform": (
        str | dict[str, Any],
        "The function that changes each batch on its device; a dotted name, or a node.",
    ),
    "sampler": (str | dict[str, Any], "The function from a dataset to the weights of its samples."),
}
"""Key that no class of the config takes as a parameter -> its annotation and its documentation."""


NO_UNIT: Final = "none"
"""The unit of a key that holds no quantity: text, a choice, a path, true or false, an index."""


def unit_of(hint: Any) -> str:
    """Return the unit that the annotation of a key declares; `NO_UNIT` for a key that holds no quantity.

    Example:
        >>> from trainkit.fields import unit
        >>> unit_of(typing.Annotated[float, unit("seconds")]), unit_of(int), unit_of(str)
        ('seconds', 'a plain number', 'none')
    """
    declared = (mark.name for mark in marks_in(hint, Unit))
    return next(declared, "a plain number" if holds_quantity(hint) else NO_UNIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyFacts:
    """The facts of one key."""

    type: str
    """The accepted values, in words."""
    unit: str
    """The unit of a quantity; `none` for a key that holds no quantity."""
    default: Any
    """The value without a setting of the user, as YAML holds it; `???` for a required key."""
    meaning: str
    """One line of documentation."""
    tag: Tag
    """Effect that a change of the key can have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Param:
    """The parameter that a path leads to."""

    hint: Any = Any
    meaning: str = ""
    default: Any = REQUIRED


def facts_of(composition: Composition, path: KeyPath) -> KeyFacts:
    """Return the facts of a key of a composition; imports the class of its node.

    Raises:
        ConfigError: a node names a class that no config may name there.

    Example:
        >>> from trainkit.config.compose import compose
        >>> facts = facts_of(compose(["recipe=null"]), ("checkpoint", "every_s"))
        >>> facts.type, facts.unit, facts.default, facts.tag.value
        ('a number or null, more than 0', 'seconds', 600.0, 'cosmetic')
    """
    cfg = composition.cfg
    parameter = _parameter_at(cfg, path)
    return KeyFacts(
        type=type_text(parameter.hint),
        unit=unit_of(parameter.hint),
        default=_default(composition, path, parameter),
        meaning=parameter.meaning,
        tag=tag_of(cfg, path).tag,
    )


def type_text(hint: Any) -> str:
    """Return what an annotation accepts, with its limits, in words.

    Example:
        >>> from trainkit.fields import at_least
        >>> type_text(typing.Annotated[int | None, at_least(1)]), type_text(Any)
        ('a whole number or null, at least 1', 'any value')
    """
    if plain(hint) in (Any, object):
        return "any value"
    limits = [limit.rule.removeprefix("must be ").rstrip(".") for limit in marks_in(hint, Limit)]
    return ", ".join([expected(hint), *limits])


def _parameter_at(cfg: RunConfig, path: KeyPath) -> _Param:
    if path[0] == "optimizers" and len(path) > 1:
        return _of_named_optimizer(cfg, path)
    if path[0] not in GROUPS or len(path) == 1:
        return _of_fields(RunConfig, path)
    size = 2 if path[0] in LIST_GROUPS else 1
    node = lookup(getattr(cfg, path[0]), path[1:size])
    if not isinstance(node, Mapping):
        return _Param()
    return _of_node(node, path[size:], {"data": DATA_HOOKS, "optimizer": ("groups",)}.get(path[0], ()))


def _of_named_optimizer(cfg: RunConfig, path: KeyPath) -> _Param:
    entry = cfg.optimizers.get(path[1])
    if not isinstance(entry, Mapping) or len(path) == 2:
        return _Param(hint=dict[str, Any], meaning=doc_line(RunConfig, "optimizers"))
    if path[2] == "schedule" and len(path) > 3:
        return _of_node(entry["schedule"], path[3:], ())
    return _of_node(optimizer_node(cfg.optimizer, entry), path[2:], ("groups", *OWN_KEYS))


def _of_fields(kind: type, path: KeyPath) -> _Param:
    """Return the field of a dataclass, or of a dataclass inside it."""
    hint = hints_of(kind).get(path[0])
    if hint is None:
        return _Param()
    meaning = doc_line(kind, path[0])
    inner = plain(hint)
    if len(path) > 1:
        return _of_fields(inner, path[1:]) if is_dataclass(inner) and isinstance(inner, type) else _entry(hint, meaning)
    return _Param(hint=hint, meaning=meaning, default=default_of(kind, path[0]))


def _of_node(node: Mapping[str, Any], path: KeyPath, group_keys: tuple[str, ...], kind: Expected = ANY_KIND) -> _Param:
    """Return the parameter of the class of a node, or of a node or dataclass inside it."""
    target = resolve_target(node[TARGET], kind) if isinstance(node.get(TARGET), str) else None
    if not path:
        return _Param(hint=dict[str, Any], meaning=summary(target))
    name, key = path[0], signature_of(target).keys.get(path[0]) if target is not None else None
    if name == TARGET or (key is None and name in group_keys):
        hint, meaning = GROUP_KEY_DOCS[name]
        if name == "groups" and len(path) == 3:  # a key of one group of parameters
            return _of_node(node, path[2:], ("match",))
        parameter = _Param(hint=hint, meaning=meaning, default=None)
    else:
        meaning = doc_line(target, name)
        parameter = _Param(hint=key.hint if key else Any, meaning=meaning, default=default_of(target, name))
    return parameter if len(path) == 1 else _below(node, path, parameter)


def _below(node: Mapping[str, Any], path: KeyPath, parameter: _Param) -> _Param:
    """Return what a path leads to inside the parameter `path[0]` of a node."""
    inner = node.get(path[0])
    if isinstance(inner, Mapping) and TARGET in inner:
        return _of_node(inner, path[1:], (), PLACES.get(f"data.{path[0]}", ANY_KIND))
    section = plain(parameter.hint)
    if is_dataclass(section) and isinstance(section, type):
        return _of_fields(section, path[1:])
    below = lookup(inner, path[1:-1])
    if isinstance(below, Mapping) and TARGET in below:
        return _of_node(below, path[-1:], ())
    return _entry(parameter.hint, parameter.meaning)


def _entry(hint: Any, meaning: str) -> _Param:
    """Return the parameter of an entry with a free name in a mapping."""
    members = [plain(item) for item in (hint, *typing.get_args(plain(hint)))]
    mappings = [
        item for item in members if isinstance(typing.get_origin(item), type) and len(typing.get_args(item)) == 2
    ]
    value = typing.get_args(mappings[0])[1] if mappings else Any
    return _Param(hint=value, meaning=meaning, default=None)


def default_of(target: Any, name: str) -> Any:
    """Return the default of a parameter as YAML holds it; `???` if there is none.

    Example:
        >>> from trainkit.models.mlp import Mlp
        >>> default_of(Mlp, "dropout"), default_of(Mlp, "hidden"), default_of(RunConfig, "model")
        (0.0, '???', {})
    """
    declared = next((item for item in fields(target) if item.name == name), None) if is_dataclass(target) else None
    if declared is not None and declared.default_factory is not MISSING:
        return to_jsonable_python(declared.default_factory(), serialize_unknown=True)
    key = signature_of(target).keys.get(name)
    return REQUIRED if key is None or key.required else to_jsonable_python(key.default, serialize_unknown=True)


def _default(composition: Composition, path: KeyPath, parameter: _Param) -> Any:
    """Return the value of the choice's file or of conf/config.yaml, else the default of the class."""
    size = 2 if path[0] in LIST_GROUPS else 1
    target = lookup(composition.values, (*path[:size], TARGET)) if path[0] in GROUPS else None
    values = (
        value
        for _, file, value in composition.set_below_recipe(path)
        if file.level is Level.defaults or file.document.values.get(TARGET) == target
    )
    return next(values, parameter.default)
