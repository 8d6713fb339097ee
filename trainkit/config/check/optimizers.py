"""Check `optimizers`: several optimizers by name, each with the parameters that it updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.config.annotations import misfit
from trainkit.config.composition import Composition, dotted
from trainkit.config.optimizers import OWN_KEYS, RATIO_RULE, optimizer_node, passes_of
from trainkit.config.targets.allowed import ALLOWED_PACKAGES, TARGET, name_problem, targets_in
from trainkit.config.targets.checks import OtherChoices, optimizer_limits, target_problems
from trainkit.config.targets.kinds import PLACES
from trainkit.config.values import closest
from trainkit.errors import Problem


def named_optimizer_problems(composition: Composition) -> Iterator[Problem]:
    """Yield what is wrong with the entries, without importing a target."""
    entries, base = composition.values["optimizers"], composition.values["optimizer"]
    if not isinstance(entries, Mapping):
        yield composition.problem("optimizers", "must be a mapping: a name, and below it its keys.", value=entries)
        return
    for name, entry in entries.items():
        path = ("optimizers", str(name))
        if not isinstance(entry, Mapping):
            rule = "must be a mapping: match, ratio, schedule, and the keys of optimizer that differ."
            yield composition.problem(path, rule, value=entry)
            continue
        yield from _entry_problems(composition, path, entry, base)
    without = [str(name) for name, entry in entries.items() if isinstance(entry, Mapping) and not entry.get("match")]
    if len(without) > 1:
        rule = f"takes all remaining parameters, and so does {without[0]}. Give one of them match."
        yield composition.problem(("optimizers", without[1]), rule, show_value=False)


def _entry_problems(
    composition: Composition, path: tuple[str, str], entry: Mapping[str, Any], base: Mapping[str, Any]
) -> Iterator[Problem]:
    for inner, value in targets_in(entry, path):
        rule = name_problem(value, (*ALLOWED_PACKAGES, *composition.packages))
        if rule is not None:
            yield composition.problem(inner, rule, value=value)
    match, schedule = entry.get("match"), entry.get("schedule")
    if match is not None and misfit(match, list[str]) is not None:
        rule = "must be a list of patterns: match: ['head.*', 'type:*Norm*']."
        yield composition.problem((*path, "match"), rule, value=match)
    if passes_of(entry.get("ratio", 1)) is None:
        yield composition.problem((*path, "ratio"), RATIO_RULE, value=entry["ratio"])
    if schedule is not None and not (isinstance(schedule, Mapping) and TARGET in schedule):
        yield composition.problem((*path, "schedule"), "must be a mapping with _target_.", value=schedule)
    if TARGET not in entry:
        for key in entry:
            if key not in (*OWN_KEYS, *base):
                near = closest(key, (*OWN_KEYS, *base))
                hint = f" Did you mean {dotted((*path, near))}?" if near else ""
                yield composition.problem((*path, key), f"no such key of the optimizer.{hint}", show_value=False)
    lr = optimizer_node(base, entry).get("lr")
    if lr is None:
        rule = f"is missing: the base learning rate. Give {dotted((*path, 'lr'))}=VALUE."
        yield composition.problem((*path, "lr"), rule, show_value=False)
    own = tuple(dotted((*path, key)) for key in entry)
    limits = optimizer_limits(composition, path, optimizer_node(base, entry))
    yield from (problem for problem in limits if problem.key in own)


def named_optimizer_targets(composition: Composition, alternatives: OtherChoices) -> Iterator[Problem]:
    """Yield the keys that the classes of the entries do not take; imports their targets."""
    entries = composition.values["optimizers"]
    if not isinstance(entries, Mapping) or not isinstance(composition.values["optimizer"], Mapping):
        return  # the first phase reports it
    for name, entry in entries.items():
        path = ("optimizers", str(name))
        if not isinstance(entry, Mapping):
            continue
        node = optimizer_node(composition.values["optimizer"], entry)
        found = target_problems(composition, path, node, alternatives, PLACES["optimizer"]) if TARGET in node else ()
        for problem in found:
            if TARGET in entry or problem.key.startswith(tuple(dotted((*path, key)) for key in entry)):
                yield problem
        if isinstance(entry.get("schedule"), Mapping) and TARGET in entry["schedule"]:
            place = (*path, "schedule")
            yield from target_problems(composition, place, entry["schedule"], alternatives, PLACES["schedule"])
