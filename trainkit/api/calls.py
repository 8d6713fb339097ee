"""Compose the run that a call of `trainkit.train` describes: arguments, keys by name, and objects; and its result.

Classes and functions that can be imported by name become nodes like any other, which every strategy takes. Instances
(a model, a dataset) and classes of `__main__` are reached through a module that exists in this process only,
`python_objects`: a run with several processes refuses them, or reads the source of the classes from its folder: this
source, the imports that it uses, and the functions, classes and constants of `__main__` that it names.
"""

from __future__ import annotations

import ast
import base64
import copy
import hashlib
import html
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.check import check_names, folder_rule
from trainkit.config.check.recipe_keys import fitted
from trainkit.config.compose import compose as compose_run
from trainkit.config.composition import Composition, dotted, path_of
from trainkit.config.grammar import key_of, setting
from trainkit.config.schema import GROUPS, LIST_GROUPS, RunConfig
from trainkit.config.targets.allowed import ALLOWED_PACKAGES, IN_PROCESS, TARGET, importable, root_of
from trainkit.config.targets.build import INJECTED, imported, signature_of
from trainkit.config.values import expanded
from trainkit.errors import ConfigError, Problem, refuse
from trainkit.files import read_bytes, write_atomically
from trainkit.names import name_of, rule_of
from trainkit.numerics.copies import copied
from trainkit.objectives.base import Objective
from trainkit.report.numbers import figure
from trainkit.run.planning.plan import make_plan
from trainkit.trained.model import load_model

Definition = type | Callable[..., Any]
"""A class or a function."""

_MAIN: Final = "__main__"


def module_of(source: str) -> ModuleType:
    """Return a module of this process that holds what a source defines; its name contains a hash of the source."""
    module = ModuleType(f"notebook_{hashlib.sha256(source.encode()).hexdigest()[:12]}")
    exec(compile(source, f"<{module.__name__}>", "exec"), vars(module))  # noqa: S102 - the caller's own classes
    return module


def source_of(definitions: Mapping[str, Definition]) -> str:
    """Return the source of a module that defines classes and functions of `__main__`.

    Args:
        definitions: key for error messages -> class or function.

    Raises:
        ConfigError: there is no source, or it names an object that cannot be written as source.

    Example:
        >>> from trainkit.api import calls
        >>> calls.source_of({"model": calls.module_of}).startswith('\"\"\"')
        True
    """
    imports, bodies = dict[str, None](), dict[str, str]()  # name -> its definition, after those that it names
    problems, visited = list[Problem](), set[str]()

    def add(key: str, item: Definition) -> None:
        """Add a class or function, and, before it, the definitions that its source names."""
        name = item.__name__
        if name in visited:
            return
        visited.add(name)
        definition = _definition(item)
        if definition is None:
            rule = f"the source of {item.__qualname__} is not known. Define it at the top level of a cell or a module."
            problems.append(Problem(key=key, rule=rule))
            return
        text, node, namespace = definition
        for used in dict.fromkeys(part.id for part in ast.walk(node) if isinstance(part, ast.Name)):
            if used in namespace and used != name:
                add_global(key, name, used, namespace[used])
        bodies[name] = f"\n{text}"

    def add_global(key: str, user: str, name: str, value: Any) -> None:
        home, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(value, ModuleType):
            imports[f"import {value.__name__} as {name}"] = None
        elif isinstance(value, type | FunctionType) and home == _MAIN:
            add(key, value)
        elif isinstance(home, str) and isinstance(qualname, str) and "." not in qualname and home != _MAIN:
            imports[f"from {home} import {qualname} as {name}"] = None
        elif value is None or isinstance(value, str | int | float):
            bodies[name] = f"{name} = {value!r}"
        else:
            rule = f"{user} uses {name}, a {type(value).__name__} of this session, which is not written as source."
            problems.append(Problem(key=key, rule=f"{rule} Make it a parameter, or define it inside."))

    for key, item in definitions.items():
        add(key, item)
    refuse(problems)
    lines = ['"""Written by trainkit.train(write_source=True)."""', "", *imports, "", *bodies.values()]
    return "\n".join(lines) + "\n"


def _definition(item: Definition) -> tuple[str, ast.AST, Mapping[str, Any]] | None:
    """Return the source of a class or function, its syntax tree, and the namespace of its module."""
    values: Iterable[Any] = vars(item).values() if isinstance(item, type) else [item]
    functions = [inspect.unwrap(value) for value in values if callable(value)]
    local = [func for func in functions if isinstance(func, FunctionType) and func.__module__ == item.__module__]
    if not local or "<" in item.__qualname__:
        return None
    # inspect does not find the class of a notebook's cell; the file of its methods is the cell.
    text = "".join(linecache.getlines(local[0].__code__.co_filename))
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the cell has magics: the lines of a function are still known
        return None
    kinds = (ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in tree.body if isinstance(node, kinds) and node.name == item.__name__]
    if not nodes:
        return None
    node = nodes[-1]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno]), node, local[0].__globals__


@dataclass(kw_only=True)
class Objects:
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
        if group == "data":
            return self._add_data(value)
        if not isinstance(value, _KINDS[group]):
            return [_misfit(group, value)]
        # The object of the caller stays as it is.
        copy_of = partial(copied, value) if isinstance(value, nn.Module) else partial(copy.deepcopy, value)
        self._register(group, copy_of)
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
        module = module_of(self.source)
        for group, (item, settings) in self.unnamed.items():
            self.nodes[group] = {TARGET: f"{module.__name__}.{item.__name__}", **settings}
        self.packages.append(module.__name__)
        self.written = module
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
        with importable([code], first=True):
            yield

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
            self._register(group, partial(factory, **settings), splits=getattr(factory, "splits", None))
            return []
        self.nodes[group] = {TARGET: path, **settings}
        if root_of(path) not in (*ALLOWED_PACKAGES, *self.packages):
            self.packages.append(root_of(path))
        return []

    def _add_optimizer(self, value: torch.optim.Optimizer) -> list[Problem]:
        if len(value.param_groups) > 1:
            rule = "has several groups of parameters. Give its class and optimizer.groups instead."
            return [Problem(key="optimizer", rule=rule)]
        parameters = signature_of(type(value)).keys
        settings = {key: setting for key, setting in value.defaults.items() if key in parameters}
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
        self._register("data", lambda split: splits[split], splits=tuple(splits))
        self.instances.append("data")
        return []

    def _register(self, group: str, make: Callable[..., Any], *, splits: Any = None) -> None:
        def target(**arguments: Any) -> Any:
            return make(**arguments)

        if group == "data":
            target = _data_target(make, splits)
        target.__module__, target.__qualname__ = IN_PROCESS, group
        setattr(self.module, group, target)
        self.nodes[group] = {TARGET: f"{IN_PROCESS}.{group}"}


@contextmanager
def registered(objects: Objects) -> Iterator[None]:
    """Let this process import the objects of a call while the block runs."""
    modules = {IN_PROCESS: objects.module} if objects.in_process else {}
    if objects.written is not None:
        modules[objects.written.__name__] = objects.written
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    except ConfigError as error:  # the problem of a given object gets the key of its group: nobody wrote a `_target_`
        local = [isinstance(item.value, str) and root_of(item.value) == IN_PROCESS for item in error.problems]
        if not any(local):
            raise
        raise ConfigError(
            Problem(key=item.key.removesuffix(f".{TARGET}"), rule=item.rule) if is_local else item
            for item, is_local in zip(error.problems, local, strict=True)
        ) from error
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "model": (nn.Module,),
    "data": (),
    "objective": (Objective,),
    "optimizer": (torch.optim.Optimizer,),
}
_ACCEPTED: Final[Mapping[str, str]] = {
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
    return Problem(key=group, rule=f"is given as {name}. It must be {_ACCEPTED[group]}.")


def _unwrapped(value: object) -> tuple[Definition | None, dict[str, Any]]:
    """Return the class or function in a value and its settings by name; None for an instance."""
    if isinstance(value, partial) and (positional := _by_name(value)) is not None:
        factory, settings = _unwrapped(value.func)
        return factory, {**settings, **_plain({**positional, **value.keywords})}
    is_factory = isinstance(value, type) or (callable(value) and hasattr(value, "__code__"))
    return (value, {}) if is_factory and callable(value) else (None, {})


def _by_name(value: partial[Any]) -> dict[str, Any] | None:
    """Return the positional arguments of a `functools.partial` by name; None where they have no names."""
    if not value.args:
        return {}
    try:
        signature = inspect.signature(value.func)
        arguments = signature.bind_partial(*value.args).arguments
    except (TypeError, ValueError):
        return None
    can_be_named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fits = all(signature.parameters[name].kind is can_be_named and name not in value.keywords for name in arguments)
    return arguments if fits else None


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


_GROUPS: Final = "optimizer.groups"


def composed(
    run: Composition | RunConfig | Sequence[str],
    values: Mapping[str, object],
    keys: Mapping[str, Any],
    *,
    write_source: bool = False,
    config_dirs: Sequence[str | Path] = (),
    packages: Sequence[str] = (),
) -> tuple[Composition, Objects]:
    """Return the composition of a call, and the objects that it was given.

    Args:
        run: arguments, a composition, or a config made by hand.
        values: group -> name, class, function, instance, keys of its choice, or None.
        keys: keys and choices by name.
        write_source: whether the source of classes of this session is to be written into the run's folder.
        config_dirs: the user's config folders.
        packages: packages that targets may come from.

    Raises:
        ConfigError: every problem found.
    """
    objects = Objects()
    # a mapping holds keys of the group's choice; for data, datasets by split
    settings = {group: value for group, value in values.items() if group != "data" and isinstance(value, Mapping)}
    values, keys = {**values, **dict.fromkeys(settings)}, {**keys, **settings}
    problems = [item for group, value in values.items() if value is not None for item in objects.add(group, value)]
    problems += _part_of_model(values["model"], values["optimizer"])
    refuse(problems)
    if write_source:
        objects.write_source()
    refuse([*_odd_values(keys)])
    arguments = [*(setting(group, name) for group, name in objects.choices.items()), *_arguments(keys)]
    if isinstance(run, RunConfig):
        run, packages = _of_config(run, packages), ()
    if isinstance(run, Composition):
        searched = {"config_dirs": config_dirs, "packages": packages}
        beside = [*map(key_of, arguments), *(name for name, value in searched.items() if value)]
        if beside:
            rule = "is given together with a whole config. Give it to trainkit.compose."
            raise ConfigError([Problem(key=key, rule=rule) for key in beside])
        composition = run
    else:
        has_object = any(group in objects.nodes for group in ("model", "data"))
        has_recipe = any(key_of(argument) == "recipe" for argument in (*run, *arguments))
        recipe = ["recipe=null"] if has_object and not has_recipe else []
        composition = compose_run([*recipe, *run, *arguments], config_dirs=config_dirs, packages=packages)
    composition, others = fitted(composition, check_names)
    problems = [*_replaced_keys(objects, composition.given_keys), *_without_rate(objects), *others]
    refuse(problems)
    trusted = dict.fromkeys((*composition.packages, *objects.packages, *([IN_PROCESS] if objects.in_process else [])))
    return replace(_with_nodes(composition, objects.nodes), packages=tuple(trusted)), objects


def _of_config(cfg: RunConfig, packages: Sequence[str]) -> Composition:
    """Return the composition of a config made by hand: a group that it leaves out is that of `recipe=null`.

    Callbacks and loggers are lists of what is wanted: left out, there are none.
    """
    defaults = compose_run(["recipe=null"]).values
    missing = {group: defaults[group] for group in GROUPS if group not in LIST_GROUPS and not getattr(cfg, group)}
    return Composition(values={**cfg.to_dict(), **missing}, overrides=("recipe=null",), packages=tuple(packages))


def run_folder(run_dir: str | Path | None) -> Path | None:
    """Return the folder that a call names for its run.

    Raises:
        ConfigError: it is empty text, no file system accepts it, or there is a file in its place.
    """
    if run_dir is None:
        return None
    text = os.fspath(run_dir)
    if rule := folder_rule(text):
        raise ConfigError([Problem(key="run_dir", value=text, rule=rule)])
    return Path(expanded(text))


def _with_nodes(composition: Composition, nodes: Mapping[str, dict[str, Any]]) -> Composition:
    """Return a composition with nodes of objects, which replace choices with all of their keys.

    Groups of parameters that arguments set stay beside an optimizer; those of the replaced choice fit only that choice.
    """
    origins = {path: origin for path, origin in composition.origins.items() if path[0] not in nodes}
    values = {**composition.values, **nodes}
    if "optimizer" in nodes:
        keys = [key for key in composition.given_keys if key.startswith(_GROUPS)]
        names = {path_of(key)[2] for key in keys if key != _GROUPS}
        base_groups = composition.values["optimizer"].get("groups") or {}
        if groups := {name: group for name, group in base_groups.items() if name in names or _GROUPS in keys}:
            values["optimizer"] = {**nodes["optimizer"], "groups": groups}
            origins |= {path: item for path, item in composition.origins.items() if dotted(path).startswith(_GROUPS)}
    return replace(composition, values=values, origins=origins)


def refuse_processes(objects: Objects, cfg: RunConfig, launch: LaunchEnvironment | None) -> None:
    """Refuse objects of this process where a run has several processes, or runs in another process.

    Raises:
        ConfigError: each group that is given as such an object.
    """
    if not objects.in_process:
        return
    plan = make_plan(cfg, launch=launch)
    if len(plan.tasks) == 1 and plan.backend is None:
        return
    reason = f"the strategy starts {len(plan.tasks)} processes, and each builds it itself."
    remedy = "Give a class or function that can be imported by name, or functools.partial of it"
    rules = dict.fromkeys(objects.instances, f"is an object of this process; {reason} {remedy}.")
    rules |= {
        group: f"{item.__qualname__} is defined in this session; {reason} {remedy}, or write_source=True, which writes "
        "its source into the run's folder."
        for group, (item, _) in objects.unnamed.items()
    }
    raise ConfigError([Problem(key=group, rule=rule) for group, rule in rules.items()])


def _part_of_model(model: object, optimizer: object) -> Iterator[Problem]:
    """Yield the problem of an optimizer that updates other parameters than those of the given model."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        return
    trained = {id(param) for param in model.parameters() if param.requires_grad}
    updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not trained <= updated:
        rule = f"updates {len(trained & updated)} of the {len(trained)} parameters of the given model that are trained."
        yield Problem(key="optimizer", rule=f"{rule} Freeze the others (requires_grad=False), or give its class.")


def _without_rate(objects: Objects) -> Iterator[Problem]:
    """Yield the problem of an optimizer class that was given without its learning rate."""
    node = objects.nodes.get("optimizer")
    if node is not None and "lr" not in node:
        name = node[TARGET].rpartition(".")[2]
        rule = f"is given without lr, the base learning rate. Give functools.partial({name}, lr=VALUE)."
        yield Problem(key="optimizer", rule=rule)


def _replaced_keys(objects: Objects, keys: Sequence[str]) -> Iterator[Problem]:
    """Yield the keys of a choice that an object replaces."""
    for key in keys:
        group = key.partition(".")[0]
        if group in objects.nodes and not key.startswith(_GROUPS):
            yield Problem(key=key, rule=f"has no effect: {group} is given as an object.")


def _odd_values(keys: Mapping[str, Any], path: str = "") -> Iterator[Problem]:
    """Yield the problems of values that the command line cannot express."""
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _odd_values(value, f"{path}{key}.")
        elif isinstance(value, list | tuple):
            for item in value:
                yield from _odd_values({key: item}, path)
        elif value is not None and not isinstance(
            value, str | int | float | PathLike | np.bool_ | np.integer | np.floating
        ):
            rule = "Keys take numbers, texts and lists; only model, data, objective and optimizer take objects."
            yield Problem(key=f"{path}{key}", rule=f"is given as {type(value).__qualname__}. {rule}")


def _arguments(keys: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield an argument for each key; a mapping that is empty, or has other keys than names, is one value."""
    for key, value in keys.items():
        if isinstance(value, Mapping) and value and all(map(str.isidentifier, map(str, value))):
            yield from _arguments(value, f"{path}{key}.")
        else:
            yield setting(f"{path}{key}", value)


_MOST: Final = 6
"""Number of plots shown in a notebook."""


class TrainingResult(dict[str, Any]):
    """The content of `result.json`, and `folder`, the run folder.

    Example:
        >>> TrainingResult({"metrics": {"val/loss": 0.5}, "folder": "run"}).metrics["val/loss"]
        0.5
    """

    def __init__(
        self, content: Mapping[str, Any], *, objects: Objects | None = None, packages: Sequence[str] = ()
    ) -> None:
        super().__init__(content)
        self._objects = objects or Objects()
        self._packages = packages

    def __reduce__(self) -> tuple[type[TrainingResult], tuple[dict[str, Any]]]:
        """Pickle the content alone: objects of this process stay here."""
        return TrainingResult, (dict(self),)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self["folder"])

    @property
    def metrics(self) -> dict[str, float]:
        """Name -> last value, `val/accuracy` ..."""
        return dict(self.get("metrics") or {})

    @property
    def best(self) -> Path | None:
        """The best checkpoint by `eval.metric`; None if nothing was evaluated."""
        return Path(self["best"]) if self.get("best") else None

    def model(self, checkpoint: Literal["best", "last"] | None = None) -> nn.Module:
        """Return the trained model on the CPU, in evaluation mode.

        Args:
            checkpoint: which checkpoint; None: the best, or the last where nothing was evaluated.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        which = checkpoint or ("last" if self.best is None else "best")
        with registered(self._objects):
            return load_model(self.folder, checkpoint=which, packages=self._packages)

    def _repr_html_(self) -> str:
        """Return a table of the figures, and the curves, for a notebook."""
        rows = {"status": self.get("status"), "steps": self.get("steps"), "folder": self["folder"]}
        rows |= {name: figure(value) for name, value in self.metrics.items()}
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
            for name, value in rows.items()
        )
        plots = sorted((self.folder / "plots").glob("*.png"))[:_MOST]
        images = "".join(
            f"<img alt='{html.escape(plot.stem)}' style='max-width:32em' "
            f"src='data:image/png;base64,{base64.b64encode(read_bytes(plot)).decode()}'>"
            for plot in plots
        )
        return f"<table>{cells}</table><div>{images}</div>"
