"""Turn objects of a Python session into nodes of a config.

Classes and functions that can be imported by name become nodes like any other, which every strategy takes. Instances
(a model, a dataset) and classes of `__main__` are reached through a module that exists in this process only,
`python_objects`: a run with several processes refuses them, or reads the source of the classes from its folder
(`trainkit.api.source`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainkit.api.source import Definition, module_of, source_of
from trainkit.config.targets.allowed import ALLOWED_PACKAGES, IN_PROCESS, TARGET, root_of
from trainkit.config.targets.build import INJECTED, imported, signature_of
from trainkit.errors import ConfigError, Problem
from trainkit.files import write_atomically
from trainkit.names import name_of, rule_of
from trainkit.numerics.copies import copied
from trainkit.objectives.base import Objective


@dataclass(kw_only=True)
class Given:
    """The Python objects of a call of `trainkit.train`, as nodes of a config."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Group -> node."""
    choices: dict[str, str] = field(default_factory=dict)
    """Group -> name of a choice."""
    packages: list[str] = field(default_factory=list)
    """Packages of the given classes, which the caller trusts by giving them."""
    unnamed: dict[str, tuple[Definition, dict[str, Any]]] = field(default_factory=dict)
    """Group -> class or function that cannot be imported by name, and its settings."""
    instances: list[str] = field(default_factory=list)
    """Groups given as instances."""
    source: str | None = None
    """The source of the classes of `unnamed`, once requested."""
    module: ModuleType = field(default_factory=lambda: ModuleType(IN_PROCESS))
    """Module that holds the objects in this process."""
    written: ModuleType | None = None
    """Module that the written source defines, in this process."""

    @property
    def in_process(self) -> bool:
        """Whether the nodes can be built in this process only."""
        return bool(self.instances or self.unnamed)

    def add(self, group: str, value: object) -> list[Problem]:
        """Add the value that was given for a group.

        Args:
            group: model, data, objective or optimizer.
            value: the name of a choice; a class, a function or a `functools.partial` of either; or an instance.

        Returns:
            The problems of a value that fits no group.
        """
        if isinstance(value, str):
            self.choices[group] = value
            return []
        if group == "optimizer" and isinstance(value, torch.optim.Optimizer):
            return self._add_optimizer(value)
        factory, settings = _unwrapped(value)
        if factory is not None:
            return self._add_factory(group, factory, settings)
        kinds = _KINDS[group]
        if group == "data":
            return self._add_data(value)
        if not isinstance(value, kinds):
            return [_misfit(group, value)]
        # The object of the caller stays as it is.
        if isinstance(value, nn.Module):
            self._register(group, functools.partial(copied, value))
        else:
            self._register(group, functools.partial(copy.deepcopy, value))
        self.instances.append(group)
        return []

    def write_source(self) -> None:
        """Let nodes name a module whose source `kept_in` writes, instead of this process's classes.

        Raises:
            ConfigError: a class has no source, or names what cannot be written.
        """
        if not self.unnamed:
            return
        odd = [group for group, (_, settings) in self.unnamed.items() if not all(map(_is_plain, settings.values()))]
        if odd:
            rule = "its settings must be numbers, texts, lists and mappings to be written into the run's folder."
            raise ConfigError([Problem(key=group, rule=rule) for group in odd])
        self.source = source_of({group: item for group, (item, _) in self.unnamed.items()})
        written = module_of(self.source)
        for group, (item, settings) in self.unnamed.items():
            self.nodes[group] = {TARGET: f"{written.__name__}.{item.__name__}", **settings}
        self.packages.append(written.__name__)
        self.written = written
        self.unnamed.clear()

    @contextmanager
    def kept_in(self, folder: Path) -> Iterator[None]:
        """Write the source below a run's folder, so that processes started within the block can import it."""
        if self.source is None or self.written is None:
            yield
            return
        code = folder / "code"
        code.mkdir(exist_ok=True)
        write_atomically(code / f"{self.written.__name__}.py", self.source)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(code.absolute()), *([before] if before else [])])
        try:
            yield
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before

    def _add_factory(self, group: str, factory: Definition, settings: Mapping[str, Any]) -> list[Problem]:
        if isinstance(factory, type) and group == "objective" and issubclass(factory, nn.Module):
            return [_misfit(group, factory)]
        needed = [name for name, key in signature_of(factory).keys.items() if key.required and name not in settings]
        missing = [name for name in needed if name not in INJECTED.get(group, ())]
        if missing:
            call = ", ".join([factory.__name__, *(f"{name}=VALUE" for name in missing)])
            rule = f"{factory.__qualname__} needs {', '.join(missing)}. Give functools.partial({call})."
            return [Problem(key=group, rule=rule)]
        path = _path_of(factory)
        if path is None or not all(map(_is_plain, settings.values())):
            self.unnamed[group] = factory, dict(settings)
            self._register(group, functools.partial(factory, **settings), splits=getattr(factory, "splits", None))
            return []
        self.nodes[group] = {TARGET: path, **settings}
        if root_of(path) not in (*ALLOWED_PACKAGES, *self.packages):
            self.packages.append(root_of(path))
        return []

    def _add_optimizer(self, value: torch.optim.Optimizer) -> list[Problem]:
        if len(value.param_groups) > 1:
            rule = "has several groups of parameters. Give its class and optimizer.groups instead."
            return [Problem(key="optimizer", rule=rule)]
        known = signature_of(type(value)).keys
        settings = {key: setting for key, setting in value.defaults.items() if key in known}
        return self._add_factory("optimizer", type(value), _plain(settings))

    def _add_data(self, value: object) -> list[Problem]:
        """Add one dataset for training, a pair for training and validation, or a mapping from split to dataset."""
        if isinstance(value, Mapping):
            splits = dict(value)
        elif isinstance(value, tuple) or (isinstance(value, list) and any(map(_is_split, value))):
            splits = dict(zip(("train", "val"), value, strict=False)) if len(value) == 2 else {}
        else:
            splits = {"train": value}
        if "train" not in splits or not all(_is_dataset(part) for part in splits.values()):
            return [_misfit("data", value)]
        self._register("data", functools.partial(_split, splits), splits=tuple(splits))
        self.instances.append("data")
        return []

    def _register(self, group: str, make: Callable[..., Any], *, splits: Any = None) -> None:
        def target(**given: Any) -> Any:
            return make(**given)

        if group == "data":
            target = _data_target(make, splits)
        target.__module__, target.__qualname__ = IN_PROCESS, group
        setattr(self.module, group, target)
        self.nodes[group] = {TARGET: f"{IN_PROCESS}.{group}"}


@contextmanager
def registered(given: Given) -> Iterator[None]:
    """Let this process import the objects of a call while the block runs."""
    modules = {IN_PROCESS: given.module} if given.in_process else {}
    if given.written is not None:
        modules[given.written.__name__] = given.written
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    except ConfigError as error:
        if not any(map(_names_object, error.problems)):
            raise
        raise ConfigError(map(_of_group, error.problems)) from error
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _names_object(problem: Problem) -> bool:
    return isinstance(problem.value, str) and root_of(problem.value) == IN_PROCESS


def _of_group(problem: Problem) -> Problem:
    """Return the problem of a given object with the key of its group: the user wrote no `_target_`."""
    if not _names_object(problem):
        return problem
    return Problem(key=problem.key.removesuffix(f".{TARGET}"), rule=problem.rule)


def refusal(given: Given, num_tasks: int) -> ConfigError:
    """Return the problems of objects that the processes of a strategy cannot build."""
    several = f"the strategy starts {num_tasks} processes, and each builds it itself."
    named = "Give a class or function that can be imported by name, or functools.partial of it"
    rules = dict.fromkeys(given.instances, f"is an object of this process; {several} {named}.")
    rules |= {
        group: f"{item.__qualname__} is defined in this session; {several} {named}, or write_source=True, which writes "
        "its source into the run's folder."
        for group, (item, _) in given.unnamed.items()
    }
    return ConfigError([Problem(key=group, rule=rule) for group, rule in rules.items()])


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "model": (nn.Module,),
    "data": (),
    "objective": (Objective,),
    "optimizer": (torch.optim.Optimizer,),
}
_WANTED: Final[Mapping[str, str]] = {
    "model": "a torch.nn.Module, a class or function that makes one, or the name of a choice, such as mlp",
    "data": "a dataset, such as TensorDataset(x, y), a pair (training, validation), a mapping from split to dataset "
    "that has train, a class or function that makes one, or the name of a choice, such as digits",
    "objective": "a trainkit Objective, a class or function that makes one, or the name of a choice: classification "
    "(cross-entropy), regression (squared error), own_loss (the model returns it)",
    "optimizer": "a torch.optim.Optimizer, its class in functools.partial with the settings, or the name of a choice, "
    "such as adamw",
}


def _misfit(group: str, value: object) -> Problem:
    name = value.__qualname__ if isinstance(value, type) else type(value).__qualname__
    return Problem(key=group, rule=f"is given as {name}. It must be {_WANTED[group]}.")


def _unwrapped(value: object) -> tuple[Definition | None, dict[str, Any]]:
    """Return the class or function in a value and its settings by name; None for an instance."""
    if isinstance(value, functools.partial) and (named := _by_name(value)) is not None:
        factory, settings = _unwrapped(value.func)
        return factory, {**settings, **_plain({**named, **value.keywords})}
    is_factory = isinstance(value, type) or (callable(value) and hasattr(value, "__code__"))
    return (value, {}) if is_factory and callable(value) else (None, {})


def _by_name(value: functools.partial[Any]) -> dict[str, Any] | None:
    """Return the positional arguments of a `functools.partial` by name; None where they have no names."""
    if not value.args:
        return {}
    try:
        signature = inspect.signature(value.func)
        named = signature.bind_partial(*value.args).arguments
    except (TypeError, ValueError):
        return None
    can_be_named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fits = all(signature.parameters[name].kind is can_be_named and name not in value.keywords for name in named)
    return named if fits else None


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float)


def _path_of(factory: Definition) -> str | None:
    """Return the dotted name by which any process can import a class or function; None if there is none."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "<")
    if not module or module == "__main__" or "<" in name:
        return None
    path = name_of(factory)
    try:
        return path if rule_of(path) is None and imported(path) == factory else None
    except ConfigError:
        return None


def _is_dataset(value: object) -> bool:
    if isinstance(value, Tensor | Mapping | str):
        return False
    return isinstance(value, Dataset) or (hasattr(value, "__len__") and hasattr(value, "__getitem__"))


def _is_split(value: object) -> bool:
    """Return whether an element of a list is a dataset, not a sample."""
    return isinstance(value, Dataset) or (_is_dataset(value) and not isinstance(value, list | tuple | np.ndarray))


def _split(splits: Mapping[str, Any], split: str) -> Any:
    return splits[split]


def _data_target(make: Callable[..., Any], splits: Sequence[str] | Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a target for the group data, with the signature and the splits of `make`."""
    takes_split = "split" in signature_of(make).keys

    def with_split(split: str) -> Any:
        return make(split=split)

    def without_split() -> Any:
        return make()

    target: Callable[..., Any] = with_split if takes_split else without_split
    if splits is not None:
        setattr(target, "splits", splits)  # noqa: B010 - where `splits_of` looks for them
    return target
