"""Build the object that a node with `_target_` describes, and read the signature of its class."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, Final

from trainkit.config.secrets import with_variables
from trainkit.config.targets.allowed import DATA_HOOKS, TARGET, allowed_packages, name_problem, root_of
from trainkit.config.targets.kinds import (
    ANY_KIND,
    PLACES,
    TORCH_SCHEDULER,
    Expected,
    argument_problem,
    expected_by,
    keys_set_as_attributes,
    target_problem,
)
from trainkit.config.values import plain
from trainkit.errors import ConfigError, Problem, TrainkitError, named_first_line
from trainkit.extras import install_command
from trainkit.fields import signature_hints
from trainkit.names import path_of

INJECTED: Final[Mapping[str, tuple[str, ...]]] = {
    "optimizer": ("params",),
    "optimizers": ("params",),
    "data": ("split",),
}
"""Group -> parameters of its classes that trainkit supplies; they are not keys of the config."""
GROUP_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "optimizer": ("groups",),
    "optimizers": ("groups",),
    "data": DATA_HOOKS,
}
"""Group -> keys of its node that belong to the group, unless the class has parameters of these names."""


_EXTRAS: Final[Mapping[str, str]] = {"PIL": "images", "torchmetrics": "metrics", "transformers": "huggingface"}
"""Package -> the extra of trainkit that installs it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A parameter of a target, as a key of the config."""

    hint: Any
    """The annotation; Any if it cannot be resolved."""
    required: bool
    """Whether it has no default."""
    default: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """The parameters of a target."""

    keys: Mapping[str, Key]
    """Parameters that can be given by name."""
    takes_more: bool
    """Whether it takes `**kwargs`: further keys are accepted without a check."""


def is_torch_scheduler(target: Any) -> bool:
    """Return whether a target is a class of `torch.optim.lr_scheduler`, or derived from one."""
    return isinstance(target, type) and TORCH_SCHEDULER.holds(target)


def resolve_target(path: str, expected: Expected = ANY_KIND) -> Any:
    """Import the class or function that a `_target_` names, and refuse one that this place of the config must not call.

    Modules of packages that are not allowed are not imported, and the target is not called.

    Args:
        path: package.module.Name.
        expected: what its place accepts (`trainkit.config.targets.kinds.PLACES`).

    Raises:
        ConfigError: there is no such module or name, or a config must not name it here.
        TrainkitError: torch cannot be imported.

    Example:
        >>> resolve_target("torch.nn.Linear").__name__
        'Linear'
    """
    rule = name_problem(path, allowed_packages())
    if rule is None:
        try:
            import torch  # noqa: F401, PLC0415 - names of targets are checked without it
        except Exception as error:  # the next import of torch would fail in another way, which says nothing
            raise TrainkitError(f"torch cannot be imported: {named_first_line(error)}.") from error
        target = imported(path)
        rule = target_problem(path, target, expected)
    if rule is not None:
        raise _refused(path, rule)
    return target


def target_of(node: Any, expected: Expected = ANY_KIND) -> Any:
    """Return the class or function of a node; None if it is no node, or names none that may be imported."""
    if not isinstance(node, Mapping) or not isinstance(node.get(TARGET), str):
        return None
    try:
        return resolve_target(node[TARGET], expected)
    except ConfigError:
        return None


def class_built_by(node: Mapping[str, Any]) -> type | None:
    """Return the class that a node builds; None if its target is a function."""
    target = resolve_target(node[TARGET])
    return target if isinstance(target, type) else None


def admitted(node: Mapping[str, Any], expected: Expected = ANY_KIND) -> Any:
    """Return the target of a node once it and its arguments are known to be allowed; call nothing.

    Raises:
        ConfigError: as `resolve_target`; or an argument would make the target run downloaded code or unpickle a file.
    """
    target = resolve_target(node[TARGET], expected)
    refused = argument_problem(node[TARGET], target, node)
    if refused is not None:
        key, value, rule = refused
        raise ConfigError([Problem(key=key, value=value, rule=rule)])
    return target


def imported(path: str) -> Any:
    """Return the object of a dotted path without calling it; the package must be an allowed one.

    Raises:
        ConfigError: there is no such module or name.
    """
    parts = path_of(path).split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            target: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise _refused(path, _install(error.name)) from error
        for name in parts[length:]:
            if not hasattr(target, name):
                raise _refused(path, f"there is no {name} in {module_name}.")
            target = getattr(target, name)
            if isinstance(target, ModuleType) and root_of(target.__name__) != parts[0]:
                raise _refused(path, f"{name} is the module {target.__name__}, which {module_name} imports for itself.")
        if not callable(target):
            raise _refused(path, "is neither a class nor a function.")
        return target
    if parts[0] in _EXTRAS:
        raise _refused(path, _install(parts[0]))
    raise _refused(path, f"there is no module {parts[0]}. Is it installed, or in the current folder?")


def _install(package: str | None) -> str:
    """Return what is wrong and how to install a package that is missing."""
    extra = _EXTRAS.get((package or "").split(".")[0])
    hint = f" Install it: {install_command(extra, extra)}" if extra else ""
    return f"its module needs {package}, which is not installed.{hint}"


def _refused(path: str, rule: str) -> ConfigError:
    return ConfigError([Problem(key=TARGET, value=path, rule=rule)])


def signature_of(target: Callable[..., Any]) -> Signature:
    """Return the parameters that a class or function takes by name.

    Returns:
        Its keys in order; without a readable signature, no keys and `takes_more`.

    Example:
        >>> def f(size: int, *, rate: float = 0.5): ...
        >>> {name: key.required for name, key in signature_of(f).keys.items()}
        {'size': True, 'rate': False}
    """
    return _signature_of_class(target) if isinstance(target, type) else _signature(target)


def _signature(target: Callable[..., Any]) -> Signature:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return Signature(keys={}, takes_more=True)
    hints = signature_hints(target)
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keys = {
        item.name: Key(
            hint=hints.get(item.name, Any), required=item.default is inspect.Parameter.empty, default=item.default
        )
        for item in parameters
        if item.kind in keyword_kinds
    }
    keys |= {name: Key(hint=Any, required=False) for name in keys_set_as_attributes(target) if name not in keys}
    takes_more = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)
    return Signature(keys=keys, takes_more=takes_more)


_signature_of_class: Final = lru_cache(maxsize=512)(_signature)  # one check of a config asks 30 times


def build(node: Mapping[str, Any], group: str | None = None, /, **injected: Any) -> Any:
    """Build the object that a node describes, after the objects inside it.

    Args:
        node: plain values with `_target_`; nested nodes with `_target_`, also in lists, are built too.
        group: the group of the node, which decides what kind of class it accepts; None accepts any kind.
        injected: further arguments, such as an optimizer's `params`.

    Returns:
        The object that the target returns. Lists become tuples, and text a Path or enum member, where the annotation
        requires it. A secret that refers to an environment variable becomes its value.

    Raises:
        ConfigError: there is no `_target_`, it cannot be imported, no config may name it there, or the variable of a
            secret is not set.

    Example:
        >>> build({"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}, "model")
        Linear(in_features=3, out_features=2, bias=True)
    """
    return _build(node, PLACES.get(group or "", ANY_KIND), (group,) if group else (), injected)


def hooks_in(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a `data` node that name code in addition to its class: `collate`, `batch_transform`,
    `sampler`.

    A key that is a parameter of the class belongs to the class.
    """
    hooks = [key for key in DATA_HOOKS if key in node]
    parameters = signature_of(resolve_target(node[TARGET], PLACES["data"])).keys if hooks else {}
    return {key: node[key] for key in hooks if key not in parameters}


def build_callable(value: str | Mapping[str, Any], key: str) -> Callable[..., Any]:
    """Return the function, or the object of a class, that a key of `data` names.

    Args:
        value: a dotted name, or a node with `_target_` and settings. The settings of a class are those of its
            constructor, and its object is called; the settings of a function are passed in each call.
        key: the full key, `data.collate`.

    Raises:
        ConfigError: as `build`; or the object cannot be called.
    """
    path = tuple(key.split("."))
    if isinstance(value, str):
        value = {TARGET: value}
    target, arguments = _prepared(value, PLACES[key], path)
    if not isinstance(target, type):
        return partial(target, **arguments) if arguments else target
    instance = target(**arguments)
    if not callable(instance):
        rule = f"an object of {target.__name__} cannot be called: it has no method __call__."
        raise ConfigError([Problem(key=key, value=value[TARGET], rule=rule)])
    return typing.cast("Callable[..., Any]", instance)


def _build(node: Mapping[str, Any], expected: Expected, path: tuple[str, ...], injected: Mapping[str, Any]) -> Any:
    target, arguments = _prepared(node, expected, path)
    return target(**arguments, **injected)


def _prepared(node: Mapping[str, Any], expected: Expected, path: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """Return the target of a node and its arguments, after the objects inside it were built."""
    if TARGET not in node:
        rule = f"is missing next to {', '.join(map(str, node)) or 'no keys'}."
        raise ConfigError([Problem(key=".".join((*path, TARGET)), rule=rule)])
    try:
        target = admitted(node, expected)
    except ConfigError as error:
        raise ConfigError([replace(item, key=".".join((*path, item.key))) for item in error.problems]) from error
    hints = {name: key.hint for name, key in signature_of(target).keys.items()}
    arguments = {
        name: _cast(_built(value, (*path, str(name)), expected_by(hints.get(name, Any))), hints.get(name, Any))
        for name, value in with_variables(node, target).items()
        if name != TARGET
    }
    return target, arguments


def _built(value: Any, path: tuple[str, ...], expected: Expected) -> Any:
    if isinstance(value, Mapping):
        if TARGET in value:
            return _build(value, expected, path, {})
        return {key: _built(item, (*path, str(key)), expected) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_built(item, (*path, str(index)), expected) for index, item in enumerate(value)]
    return value


def _cast(value: Any, hint: Any) -> Any:
    """Convert a plain value to its annotated type, by conversions that lose nothing."""
    hint = plain(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if arguments and origin not in (list, tuple, dict):
        members = [plain(member) for member in arguments]
        return next((converted for member in members if (converted := _cast(value, member)) is not value), value)
    if isinstance(value, list) and (origin or hint) is tuple:
        return tuple(_cast(item, arguments[0]) if arguments else item for item in value)
    if isinstance(value, str) and isinstance(hint, type) and issubclass(hint, PurePath):
        return Path(value).expanduser()
    if isinstance(value, str) and isinstance(hint, type) and issubclass(hint, Enum):
        return next((member for member in hint if value == member.value), value)
    if isinstance(value, Mapping) and is_dataclass(hint) and isinstance(hint, type):
        keys = signature_of(hint).keys
        return hint(**{name: _cast(item, keys[name].hint if name in keys else Any) for name, item in value.items()})
    return value
