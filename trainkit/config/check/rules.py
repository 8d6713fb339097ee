"""Check values of a config against each other, without an import of a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from trainkit.config.annotations import misfit
from trainkit.config.check.optimizers import named_optimizer_problems
from trainkit.config.check.unused_keys import unused_keys
from trainkit.config.composition import Composition, dotted
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.checks import optimizer_limits
from trainkit.config.values import closest
from trainkit.errors import Problem

_ALSO_READ: Final[Mapping[str, tuple[str, ...]]] = {
    "elastic": ("supervisor",),
    "epochs": ("steps",),
    "init_from": ("resume",),
    "optimizer": ("optimizers",),
    "optimizers": ("optimizer",),
    "schedule": ("optimizers",),
    "stop_at_step": ("steps",),
    "sweep": ("cv",),
    "warmup": ("lr_scaling",),
}
"""Section of a key -> the other sections that its rules read."""


def broken_rules(composition: Composition, known: Sequence[Problem], *, multirun: bool) -> list[Problem]:
    """Return the broken rules between values, and keys without effect; a key has one of them at most.

    A rule that reads a section with a known problem is left out: its answer may change with the correction.

    Args:
        composition: the run.
        known: the problems of single values.
        multirun: whether keys about sweeps have an effect.
    """
    broken, sound = sections_of(known), with_defaults(composition, known)
    found = {
        problem.key: problem
        for problem in (*unused_keys(sound, multirun=multirun)[0], *_rules(sound))
        if not broken & {section_of(problem), *_ALSO_READ.get(section_of(problem), ())}
    }
    if isinstance(composition.values.get("optimizer"), Mapping):
        found |= {problem.key: problem for problem in _optimizer_values(composition)}
    return list(found.values())


def with_defaults(composition: Composition, known: Iterable[Problem]) -> Composition:
    """Return a composition with the defaults in place of each section that has a problem."""
    defaults, broken = RunConfig().to_dict(), sections_of(known)
    return replace(composition, values=composition.values | {name: defaults[name] for name in broken & {*defaults}})


def sections_of(problems: Iterable[Problem]) -> set[str]:
    """Return the sections, groups and keys of the run that problems are about."""
    return {section_of(problem) for problem in problems}


def section_of(problem: Problem) -> str:
    """Return the first part of the key of a problem: a section, a group, or a key of the run."""
    return problem.key.partition(".")[0]


def _rules(composition: Composition) -> Iterator[Problem]:
    """Check run-level values against each other."""
    values = composition.values
    batch = values["batch"]
    if values["epochs"] is None and values["steps"] is None:
        yield Problem(key="epochs", rule="a run needs a length. Give epochs or steps.")
    whole, micro = batch["global_size"], batch["micro_size"]
    if whole is None and (micro is None or batch["accumulation"] is None):
        rule = "a step needs a size. Give it, or both batch.micro_size and batch.accumulation."
        yield Problem(key="batch.global_size", rule=rule, origin=composition.origin("batch.global_size").where)
    if whole is not None and micro is not None and micro > whole:
        rule = f"larger than batch.global_size={whole}. Use {whole} or less."
        yield composition.problem("batch.micro_size", rule, value=micro)
    if whole is not None and batch["accumulation"] is not None and batch["accumulation"] > whole:
        rule = f"more shards than samples: batch.global_size={whole}. Use {whole} or less."
        yield composition.problem("batch.accumulation", rule, value=batch["accumulation"])
    lanes = values["numerics"]["lanes"]
    if lanes & (lanes - 1):
        rule = f"must be a power of two. Use {1 << (lanes.bit_length() - 1)} or {1 << lanes.bit_length()}."
        yield composition.problem("numerics.lanes", rule, value=lanes)
    folds, fold = values["cv"]["folds"], values["cv"]["fold"]
    if folds is not None and fold is not None and fold >= folds:
        rule = f"there are cv.folds={folds}, counted from 0. Use {folds - 1} or less."
        yield composition.problem("cv.fold", rule, value=fold)
    if values["optimizer"].get("lr") is None:
        rule = "is missing: the base learning rate. Give optimizer.lr=VALUE."
        yield composition.problem("optimizer.lr", rule, show_value=False)
    if values["optimizers"] != {}:
        yield from named_optimizer_problems(composition)


def _optimizer_values(composition: Composition) -> Iterator[Problem]:
    """Check the limits that all optimizers of torch share, before torch is imported."""
    node = composition.values["optimizer"]
    yield from _parameter_groups(composition, node)
    yield from optimizer_limits(composition, ("optimizer",), node)


def _parameter_groups(composition: Composition, node: Mapping[str, Any]) -> Iterator[Problem]:
    """Check `optimizer.groups`: name -> patterns of its parameters, and the optimizer's keys that differ for them."""
    groups = node.get("groups")
    if groups is None:
        return
    if not isinstance(groups, Mapping):
        rule = "must be a mapping: a name, and below it match and the keys that differ."
        yield composition.problem("optimizer.groups", rule, value=groups)
        return
    for name, group in groups.items():
        path = ("optimizer", "groups", name)
        if not isinstance(group, Mapping) or misfit(group.get("match"), list[str]) is not None:
            rule = "needs match, a list of patterns: match: ['*.bias', 'type:*Norm*']."
            yield composition.problem(path, rule, show_value=False)
            continue
        for key in group:
            if key != "match" and (key not in node or key in (TARGET, "groups")):
                near = closest(key, node)
                hint = f" Did you mean {dotted((*path, near))}?" if near else ""
                yield composition.problem((*path, key), f"no such key of the optimizer.{hint}", show_value=False)
            elif key != "match" and isinstance(node[key], int | float):
                wrong = misfit(group[key], type(node[key]) if isinstance(node[key], bool) else float)
                if wrong is not None:
                    yield composition.problem((*path, key), wrong, value=group[key])
