"""The second phase of the check: compare the signatures of classes with the config."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass, replace
from typing import Any, Final

from trainkit.config.annotations import misfit
from trainkit.config.composition import Composition, KeyPath, dotted, lookup
from trainkit.config.secrets import dereferenced
from trainkit.config.targets.allowed import DATA_HOOKS, TARGET
from trainkit.config.targets.build import (
    GROUP_KEYS,
    INJECTED,
    Key,
    admitted,
    build,
    is_torch_scheduler,
    resolve_target,
    signature_of,
)
from trainkit.config.targets.choices import read_choice
from trainkit.config.targets.kinds import ANY_KIND, PLACES, Expected, expected_by
from trainkit.config.values import closest, plain
from trainkit.config.yaml_files import Document, shipped_conf
from trainkit.errors import ConfigError, Problem, TrainkitError, UnknownKey
from trainkit.fields import Reads, marks_in

_CHEAP: Final = (
    "schedule", "strategy", "precision", "average", "convert", "cluster", "hardware", "objective", "callbacks",
    "logger",
)  # fmt: skip
"""Groups whose own dataclasses are built so that they validate their values: none uses data or a device."""


def unchecked_keys(path: KeyPath, node: Mapping[str, Any]) -> list[str]:
    """Return keys that a class accepts only through `**kwargs`: they cannot be checked."""
    signature = signature_of(resolve_target(node[TARGET]))
    if not signature.takes_more:
        return []
    keys = (*signature.keys, *GROUP_KEYS.get(path[0], ()), TARGET)
    return [dotted((*path, name)) for name in node if name not in keys]


def _nested(node: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Yield the nodes with a `_target_` inside a node, at any depth, the outermost only."""
    for name, value in node.items():
        yield from _nodes_in(value, (*path, str(name)))


def _nodes_in(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        yield from [(path, value)] if TARGET in value else _nested(value, path)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _nodes_in(item, (*path, str(index)))


def _validates_itself(path: KeyPath, target: Any) -> bool:
    is_shipped = getattr(target, "__module__", "").startswith("trainkit.")
    return path[0] in _CHEAP and is_shipped and inspect.isclass(target) and is_dataclass(target)


class OtherChoices:
    """Reads the other choices of a group, only when a message needs them."""

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self._documents: dict[str, dict[str, Document]] = {}

    def choices(self, group: str) -> list[str]:
        """Return the names of a group's choices."""
        return sorted(self.documents(group))

    def documents(self, group: str) -> dict[str, Document]:
        """Return choice -> its file, without broken files: the composition does not use them."""
        if group not in self._documents:
            documents: dict[str, Document] = {}
            for folder in (*self.composition.config_dirs, shipped_conf()):
                for file in sorted((folder / group).glob("*.yaml")):
                    if file.stem in documents:
                        continue
                    with suppress(ConfigError):
                        documents[file.stem] = read_choice(file)
            self._documents[group] = documents
        return self._documents[group]

    def unknown(self, path: KeyPath, name: str, choice: str, known_keys: Iterable[str]) -> Problem:
        """Return the problem of an unknown key, with the choices that have this key or the closest known key."""
        keys = [key for key in known_keys if not key.startswith("_")]
        group = path[0]
        rule = f"no such key in {choice}."
        owners = [other for other, document in self.documents(group).items() if name in document.values]
        near = closest(name, keys)
        if owners and near is None and len(path) == 1:
            rule += (
                f" It belongs to {', '.join(owners)}: add {group}={owners[0] if len(owners) == 1 else 'ONE OF THEM'}."
            )
        elif near is not None:
            rule += f" Did you mean {dotted((*path, near))}?"
        else:
            rule += f" There are: {', '.join(keys)}." if keys else " It has none."
        key = (*path, name)
        return UnknownKey(key=dotted(key), rule=rule, origin=self.composition.origin(key).where)


class NodeCheck(OtherChoices):
    """Finds the problems of the nodes of a composition."""

    def problems(self, path: KeyPath, node: Mapping[str, Any], expected: Expected | None = None) -> list[Problem]:
        """Return the problems of a node by its class: unknown or missing keys, values of a wrong type."""
        try:
            target = admitted(node, expected or PLACES.get(path[0], ANY_KIND))
        except ConfigError as error:
            return [self.composition.problem((*path, item.key), item.rule, value=item.value) for item in error.problems]
        except TrainkitError:
            raise
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
            rule = f"cannot be imported: {type(error).__name__}: {error}"
            return [self.composition.problem((*path, TARGET), rule, value=node[TARGET])]
        problems = list(self._against_signature(path, node, target))
        hints = {name: key.hint for name, key in signature_of(target).keys.items()}
        hooks = [key for key in DATA_HOOKS if path == ("data",) and key in node and key not in hints]
        for key in hooks:
            problems += self._hook_problems((*path, key), node[key])
        for inner, value in _nested(node, path):
            if inner[len(path)] not in hooks:
                expected = expected_by(hints.get(inner[len(path)], Any))
                problems += self.problems(inner, value, expected)
        if not problems and _validates_itself(path, target):
            problems += self._construction_errors(path, node)
        return problems

    def _hook_problems(self, path: KeyPath, value: Any) -> Iterator[Problem]:
        """Yield what is wrong with a key of `data` that names code: a dotted name, or a node with `_target_`."""
        node = {TARGET: value} if isinstance(value, str) else value
        if isinstance(node, Mapping) and TARGET in node:
            suffix = f".{TARGET}" if isinstance(value, str) else ""
            for problem in self.problems(path, node, PLACES[dotted(path)]):
                yield replace(problem, key=problem.key.removesuffix(suffix))
        elif value is not None:
            rule = "must be the dotted name of a function or class, package.module.name, or a mapping with _target_."
            yield self.composition.problem(path, rule, value=value)

    def _against_signature(self, path: KeyPath, node: Mapping[str, Any], target: Any) -> Iterator[Problem]:
        group = path[0]
        top = len(path) == 1 or (len(path) == 2 and group in ("callbacks", "logger", "optimizers"))
        signature = signature_of(target)
        injected = INJECTED.get(group, ()) if top else ()
        if is_torch_scheduler(target):
            injected = ("optimizer", "last_epoch")
        if dotted(path) in PLACES and not top and not isinstance(target, type):
            injected = tuple(signature.keys)[:1]  # what a function of `data` is called with
        extra = [key for key in GROUP_KEYS.get(group, ()) if key not in signature.keys] if top else []
        keys = {name: key for name, key in signature.keys.items() if name not in injected}
        for name, value in node.items():
            if name == TARGET or name in extra:
                continue
            if name in keys:
                yield from self._value_problems((*path, name), value, keys[name])
            elif name in injected:
                rule = "is set by trainkit: it is not a key of the config."
                yield self.composition.problem((*path, name), rule, show_value=False)
            elif not signature.takes_more:
                yield self.unknown(path, name, self._name_of(path, target), tuple(dict.fromkeys((*keys, *extra))))
        missing = [name for name, key in keys.items() if key.required and name not in node]
        for name in missing:
            rule = f"is missing: {self._name_of(path, target)} needs it. Give {dotted((*path, name))}=VALUE."
            yield self.composition.problem((*path, name), rule, show_value=False)

    def _value_problems(self, path: KeyPath, value: Any, key: Key) -> Iterator[Problem]:
        hint = plain(key.hint)
        if isinstance(value, Mapping):
            if TARGET in value:
                return
            if is_dataclass(hint):
                yield from self._section_problems(path, value, hint)
                return
        # A default of None means that null is accepted, even where the annotation lacks it.
        if value is None and key.default is None and not key.required:
            return
        try:
            used = dereferenced(value, key=dotted(path))  # all references left are to secrets
        except ConfigError as error:
            yield from (self.composition.problem(path, item.rule, value=item.value) for item in error.problems)
            return
        if (rule := misfit(used, key.hint)) is not None:
            yield self.composition.problem(path, rule, value=value)
        else:
            yield from self.absent_files(path, used, key.hint)

    def absent_files(self, path: KeyPath, value: Any, hint: Any) -> Iterator[Problem]:
        """Yield the problems of a key that names files or folders that a run reads, by the mark of its annotation."""
        mark = next(iter(marks_in(hint, Reads)), None)
        if mark is None or not self.composition.reads_files:
            return
        optional = bool(mark.unless) and lookup(self.composition.values, (*path[:-1], mark.unless)) is True
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name not in mark.words and (rule := mark.rule(name, may_be_absent=optional)):
                yield self.composition.problem(path, rule, value=value)

    def _section_problems(self, path: KeyPath, values: Mapping[str, Any], kind: Any) -> Iterator[Problem]:
        """Yield problems of a mapping given for a dataclass, whose fields are the keys."""
        keys = signature_of(kind).keys
        for name, value in values.items():
            if name in keys:
                yield from self._value_problems((*path, name), value, keys[name])
            else:
                near = closest(name, keys)
                hint = f"Did you mean {dotted((*path, near))}?" if near else f"There are: {', '.join(keys)}."
                yield self.composition.problem((*path, name), f"no such key. {hint}", show_value=False)

    def _name_of(self, path: KeyPath, target: Any) -> str:
        """Return the name of a node's class for messages: the choice, unless the node holds another class."""
        choice = path[1] if len(path) == 2 else self.composition.choices.get(path[0])
        from_choice = any(
            file.package == path
            and file.document.values.get(TARGET, "").rpartition(".")[2] == getattr(target, "__name__", "")
            for file in self.composition.files
        )
        return str(choice) if from_choice and choice else str(getattr(target, "__name__", target))

    def _construction_errors(self, path: KeyPath, node: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield the problems that the class reports when it is built."""
        try:
            build(node, path[0])
        except ConfigError as error:
            for item in error.problems:
                key = item.key if item.key.startswith(dotted(path)) else dotted((*path, item.key))
                yield Problem(
                    key=key, value=item.value, rule=item.rule, origin=item.origin or self.composition.origin(key).where
                )
        except (TypeError, ValueError) as error:
            yield self.composition.problem(path, f"{error}", show_value=False)


_NOT_NEGATIVE: Final = ("lr", "weight_decay", "eps", "momentum")


def optimizer_limits(composition: Composition, path: KeyPath, node: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield values beyond the limits that all optimizers of torch share.

    Args:
        composition: the composition, for the origins of the keys.
        path: the path of the node.
        node: the optimizer.
    """
    if isinstance(rate := node.get("lr"), list | Mapping):  # torch's annotation, `float | Tensor`, may mean a list
        yield composition.problem((*path, "lr"), "must be a number.", value=rate)
    for name in _NOT_NEGATIVE:
        value = node.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
            yield composition.problem((*path, name), "must not be negative.", value=value)
    betas = node.get("betas")
    for value in betas if isinstance(betas, list) else ():
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value < 1:
            yield composition.problem((*path, "betas"), "each must be at least 0 and less than 1.", value=betas)
    if node.get("nesterov") is True and (not node.get("momentum") or node.get("dampening")):
        prefix = dotted(path)
        rule = f"needs {prefix}.momentum above 0 and {prefix}.dampening=0."
        yield composition.problem((*path, "nesterov"), rule, value=True)
    if node.get("foreach") is True and node.get("fused") is True:
        rule = f"fused and foreach are two ways of doing the same. Add {dotted(path)}.fused=false."
        yield composition.problem((*path, "foreach"), rule, value=True)
