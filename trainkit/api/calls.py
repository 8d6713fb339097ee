"""Compose the run that a call of `trainkit.train` describes: arguments, keys by name, and objects."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from trainkit.api.objects import Given, refusal
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.config.check import check_names, fitted, folder_rule
from trainkit.config.compose import compose as compose_run
from trainkit.config.composition import Composition, dotted, path_of
from trainkit.config.grammar import key_of, setting
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import IN_PROCESS, TARGET
from trainkit.config.values import expanded
from trainkit.errors import ConfigError, Problem
from trainkit.run.planning.plan import make_plan

_GROUPS: Final = "optimizer.groups"


def composed(
    run: Composition | RunConfig | Sequence[str],
    objects: Mapping[str, object],
    keys: Mapping[str, Any],
    *,
    write_source: bool,
    config_dirs: Sequence[str | Path] = (),
    packages: Sequence[str] = (),
) -> tuple[Composition, Given]:
    """Return the composition of a call, and the objects that it was given.

    Args:
        run: arguments, a composition, or a config made by hand.
        objects: group -> name, class, function, instance or None.
        keys: keys and choices by name.
        write_source: whether the source of classes of this session is to be written into the run's folder.
        config_dirs: the user's config folders.
        packages: packages that targets may come from.

    Raises:
        ConfigError: every problem found.
    """
    given = Given()
    problems = [problem for group, value in objects.items() if value is not None for problem in given.add(group, value)]
    problems += _part_of_model(objects["model"], objects["optimizer"])
    if problems:
        raise ConfigError(problems)
    if write_source:
        given.write_source()
    odd = [*_odd_values(keys)]
    if odd:
        raise ConfigError(odd)
    arguments = [*(setting(group, name) for group, name in given.choices.items()), *_arguments(keys)]
    if isinstance(run, RunConfig):
        run = Composition(values=run.to_dict(), overrides=("recipe=null",))
    if isinstance(run, Composition):
        searched = {"config_dirs": config_dirs, "packages": packages}
        beside = [*map(key_of, arguments), *(name for name, value in searched.items() if value)]
        if beside:
            rule = "is given together with a whole config. Give it to trainkit.compose."
            raise ConfigError([Problem(key=key, rule=rule) for key in beside])
        composition = run
    else:
        own = any(group in given.nodes for group in ("model", "data"))
        named = any(key_of(argument) == "recipe" for argument in (*run, *arguments))
        recipe = ["recipe=null"] if own and not named else []
        composition = compose_run([*recipe, *run, *arguments], config_dirs=config_dirs, packages=packages)
    composition, found = fitted(composition, check_names)
    problems = [*_beside(given, composition.given), *_without_rate(given), *found]
    if problems:
        raise ConfigError(problems)
    trusted = dict.fromkeys((*composition.packages, *given.packages, *([IN_PROCESS] if given.in_process else [])))
    return replace(_with_nodes(composition, given.nodes), packages=tuple(trusted)), given


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
    """Return a composition with nodes of objects, which replace choices with all of their keys."""
    origins = {path: origin for path, origin in composition.origins.items() if path[0] not in nodes}
    values = {**composition.values, **nodes}
    if "optimizer" in nodes and (groups := _given_groups(composition)):
        values["optimizer"] = {**nodes["optimizer"], "groups": groups}
        origins |= {path: origin for path, origin in composition.origins.items() if dotted(path).startswith(_GROUPS)}
    return replace(composition, values=values, origins=origins)


def _given_groups(composition: Composition) -> dict[str, Any]:
    """Return the groups of parameters that arguments set; groups of the replaced choice fit only that choice."""
    keys = [key for key in composition.given if key.startswith(_GROUPS)]
    groups = composition.values["optimizer"].get("groups") or {}
    names = {path_of(key)[2] for key in keys if key != _GROUPS}
    return {name: group for name, group in groups.items() if name in names or _GROUPS in keys}


def refuse_several(given: Given, cfg: RunConfig, launch: LaunchEnvironment | None) -> None:
    """Refuse objects of this process where a run has several processes, or runs in another process.

    Raises:
        ConfigError: each group that is given as such an object.
    """
    if not given.in_process:
        return
    plan = make_plan(cfg, launch=launch)
    if len(plan.tasks) > 1 or plan.backend is not None:
        raise refusal(given, len(plan.tasks))


def _part_of_model(model: object, optimizer: object) -> Iterator[Problem]:
    """Yield the problem of an optimizer that updates other parameters than those of the given model."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        return
    wanted = {id(param) for param in model.parameters() if param.requires_grad}
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not wanted <= held:
        rule = f"updates {len(wanted & held)} of the {len(wanted)} parameters of the given model that are trained."
        yield Problem(key="optimizer", rule=f"{rule} Freeze the others (requires_grad=False), or give its class.")


def _without_rate(given: Given) -> Iterator[Problem]:
    """Yield the problem of an optimizer class that was given without its learning rate."""
    node = given.nodes.get("optimizer")
    if node is not None and "lr" not in node:
        name = node[TARGET].rpartition(".")[2]
        rule = f"is given without lr, the base learning rate. Give functools.partial({name}, lr=VALUE)."
        yield Problem(key="optimizer", rule=rule)


def _beside(given: Given, keys: Sequence[str]) -> Iterator[Problem]:
    """Yield the keys of a choice that an object replaces."""
    for key in keys:
        group = key.partition(".")[0]
        if group in given.nodes and not key.startswith(_GROUPS):
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
