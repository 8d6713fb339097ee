"""Rules about several keys, in lists: between values, about optimizers, and about keys that have no effect.

A key without effect is never silently ignored: on the command line it is a problem. In a recipe or a file it is a note,
because another choice may have removed its effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from trainkit.config.annotations import misfit
from trainkit.config.composition import Composition, KeyPath, Level, dotted, lookup, path_of
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.optimizers import OWN_KEYS, RATIO_RULE, optimizer_node, passes_of
from trainkit.config.schema import RunConfig
from trainkit.config.sections import PredictConfig
from trainkit.config.targets.allowed import ALLOWED_PACKAGES, TARGET, name_problem, targets_in
from trainkit.config.targets.build import build, hooks_in, resolve_target
from trainkit.config.targets.checks import optimizer_limits
from trainkit.config.values import closest
from trainkit.errors import ConfigError, Problem
from trainkit.numerics.loss_scaling import KEYS as SCALING_KEYS

_ALSO_READ: Final[Mapping[str, tuple[str, ...]]] = {
    "elastic": ("supervisor",),
    "epochs": ("steps", "stop_after"),
    "init_from": ("resume",),
    "optimizer": ("optimizers",),
    "optimizers": ("optimizer",),
    "schedule": ("optimizers",),
    "stop_after_record": ("stop_after",),
    "stop_at_step": ("steps",),
    "sweep": ("cv",),
    "warmup": ("lr_scaling",),
}
"""Section of a key -> the other sections that its rules read."""
_TASK_KEYS: Final = frozenset(
    {"supervisor.join_timeout_s", "supervisor.evaluator_timeout_s", "supervisor.hang_timeout_s"}
)
"""Keys of the supervisor that have an effect in every process of a run, no matter who started it."""

_WITHOUT_M: Final = "has no effect without -m."

Values = Mapping[str, Any]
_RULES: Final[list[Callable[[Composition], Iterator[Problem]]]] = []
"""Rules between values; they import no target."""


def _is_unscaled(run: Values) -> bool:
    return run["lr_scaling"]["reference_batch"] is None or run["lr_scaling"]["rule"] == "none"


def _has_warmup(run: Values) -> bool:
    return bool(run["warmup"]["epochs"] or run["warmup"]["steps"])


_NO_EFFECT: Final[Sequence[tuple[str, str, Callable[[Values], object]]]] = (
    ("stop_after_record", "without stop_after.", lambda run: run["stop_after"] is None),
    ("compile.backend", "with compile.mode=off.", lambda run: run["compile"]["mode"] == "off"),
    ("eval.mode", "without eval.metric.", lambda run: run["eval"]["metric"] is None),
    ("loader.prefetch", "without workers. Give loader.num_workers.", lambda run: run["loader"]["num_workers"] == 0),
    ("init_from", "with resume: the weights are those of the checkpoint.",
     lambda run: run["resume"] not in (None, "auto") and run["init_from"] is not None),
    ("elastic.retry_s", "without elastic.min_replicas: the run needs all its replicas.",
     lambda run: run["elastic"]["min_replicas"] is None),
    ("elastic.min_replicas", "with supervisor.max_restarts=0: nothing restarts.",
     lambda run: run["elastic"]["min_replicas"] is not None and run["supervisor"]["max_restarts"] == 0),
    ("cv.fold cv.seed", "without cv.folds.", lambda run: run["cv"]["folds"] is None),
    (" ".join(f"predict.{item.name}" for item in fields(PredictConfig)), "on a training: it is for predict.", bool),
    ("numerics.lanes", "without numerics.reproducible=true.", lambda run: not run["numerics"]["reproducible"]),
    ("numerics.max_skips_in_a_row numerics.max_skipped_share", "without numerics.on_nonfinite=skip.",
     lambda run: run["numerics"]["on_nonfinite"] != "skip"),
    ("warmup.start", "without a warmup. Give warmup.epochs or warmup.steps.", lambda run: not _has_warmup(run)),
    ("warmup.start", "nothing is scaled, so base is the peak already.",
     lambda run: _has_warmup(run) and run["warmup"]["start"] == "base" and _is_unscaled(run)),
    ("lr_scaling.rule", "without lr_scaling.reference_batch: nothing is scaled.",
     lambda run: run["lr_scaling"]["reference_batch"] is None),
    ("lr_scaling.reference_batch", "with lr_scaling.rule=none.",
     lambda run: run["lr_scaling"]["reference_batch"] is not None and _is_unscaled(run)),
    ("optimizer.dampening", "without optimizer.momentum.",
     lambda run: "dampening" in run["optimizer"] and not run["optimizer"].get("momentum")),
)  # fmt: skip
"""Keys, why they have no effect, and when: other keys make them ineffective."""


def broken_rules(composition: Composition, problems: Sequence[Problem], *, multirun: bool) -> list[Problem]:
    """Return the broken rules between values, and keys without effect; a key has one of them at most.

    A rule that reads a section with a problem is left out: its answer may change with the correction.

    Args:
        composition: the run.
        problems: the problems of single values.
        multirun: whether keys about sweeps have an effect.
    """
    broken, sound = sections_of(problems), with_defaults(composition, problems)
    by_key = {
        problem.key: problem
        for problem in (
            *unused_keys(sound, multirun=multirun)[0],
            *(problem for rule in _RULES for problem in rule(sound)),
        )
        if not broken & {section_of(problem), *_ALSO_READ.get(section_of(problem), ())}
    }
    if isinstance(node := composition.values.get("optimizer"), Mapping):
        limits = (*_parameter_groups(composition, node), *optimizer_limits(composition, ("optimizer",), node))
        by_key |= {problem.key: problem for problem in limits}
    return list(by_key.values())


def with_defaults(composition: Composition, problems: Iterable[Problem]) -> Composition:
    """Return a composition with the defaults in place of each section that has a problem."""
    defaults, broken = RunConfig().to_dict(), sections_of(problems)
    return replace(composition, values=composition.values | {name: defaults[name] for name in broken & {*defaults}})


def sections_of(problems: Iterable[Problem]) -> set[str]:
    """Return the sections, groups and keys of the run that problems are about."""
    return {section_of(problem) for problem in problems}


def section_of(problem: Problem) -> str:
    """Return the first part of the key of a problem: a section, a group, or a key of the run."""
    return problem.key.partition(".")[0]


# -- between values -----------------------------------------------------------------------------------------------


@_RULES.append
def _length(composition: Composition) -> Iterator[Problem]:
    if all(composition.values[key] is None for key in ("epochs", "steps", "stop_after")):
        yield Problem(key="epochs", rule="a run needs a length. Give epochs, steps or stop_after.")


@_RULES.append
def _step_size(composition: Composition) -> Iterator[Problem]:
    total, micro, shards = (composition.values["batch"][key] for key in ("global_size", "micro_size", "accumulation"))
    if total is None and (micro is None or shards is None):
        rule = "a step needs a size. Give it, or both batch.micro_size and batch.accumulation."
        yield composition.problem("batch.global_size", rule, show_value=False)
    if total is not None and micro is not None and micro > total:
        rule = f"larger than batch.global_size={total}. Use {total} or less."
        yield composition.problem("batch.micro_size", rule, value=micro)
    if total is not None and shards is not None and shards > total:
        rule = f"more shards than samples: batch.global_size={total}. Use {total} or less."
        yield composition.problem("batch.accumulation", rule, value=shards)


@_RULES.append
def _counts(composition: Composition) -> Iterator[Problem]:
    lanes, cv = composition.values["numerics"]["lanes"], composition.values["cv"]
    if lanes & (lanes - 1):
        rule = f"must be a power of two. Use {1 << (lanes.bit_length() - 1)} or {1 << lanes.bit_length()}."
        yield composition.problem("numerics.lanes", rule, value=lanes)
    if cv["folds"] is not None and cv["fold"] is not None and cv["fold"] >= cv["folds"]:
        rule = f"there are cv.folds={cv['folds']}, counted from 0. Use {cv['folds'] - 1} or less."
        yield composition.problem("cv.fold", rule, value=cv["fold"])


@_RULES.append
def _base_rate(composition: Composition) -> Iterator[Problem]:
    if composition.values["optimizer"].get("lr") is None:
        rule = "is missing: the base learning rate. Give optimizer.lr=VALUE."
        yield composition.problem("optimizer.lr", rule, show_value=False)


@_RULES.append
def _named_optimizers(composition: Composition) -> Iterator[Problem]:
    entries, base = composition.values["optimizers"], composition.values["optimizer"]
    if not isinstance(entries, Mapping):
        yield composition.problem("optimizers", "must be a mapping: a name, and below it its keys.", value=entries)
        return
    for name, entry in entries.items():
        path = ("optimizers", str(name))
        if isinstance(entry, Mapping):
            yield from _named_optimizer(composition, path, entry, base)
        else:
            rule = "must be a mapping: match, ratio, schedule, and the keys of optimizer that differ."
            yield composition.problem(path, rule, value=entry)
    without = [str(name) for name, entry in entries.items() if isinstance(entry, Mapping) and not entry.get("match")]
    if len(without) > 1:
        rule = f"takes all remaining parameters, and so does {without[0]}. Give one of them match."
        yield composition.problem(("optimizers", without[1]), rule, show_value=False)


def _named_optimizer(composition: Composition, path: KeyPath, entry: Values, base: Values) -> Iterator[Problem]:
    for inner, value in targets_in(entry, path):
        if (refused := name_problem(value, (*ALLOWED_PACKAGES, *composition.packages))) is not None:
            yield composition.problem(inner, refused, value=value)
    match, schedule = entry.get("match"), entry.get("schedule")
    if match is not None and misfit(match, list[str]) is not None:
        rule = "must be a list of patterns: match: ['head.*', 'type:*Norm*']."
        yield composition.problem((*path, "match"), rule, value=match)
    if passes_of(entry.get("ratio", 1)) is None:
        yield composition.problem((*path, "ratio"), RATIO_RULE, value=entry["ratio"])
    if schedule is not None and not (isinstance(schedule, Mapping) and TARGET in schedule):
        yield composition.problem((*path, "schedule"), "must be a mapping with _target_.", value=schedule)
    if TARGET not in entry:
        keys = (*OWN_KEYS, *base)
        yield from (_no_key_of_optimizer(composition, (*path, key), keys) for key in entry if key not in keys)
    node = optimizer_node(base, entry)
    if node.get("lr") is None:
        rule = f"is missing: the base learning rate. Give {dotted((*path, 'lr'))}=VALUE."
        yield composition.problem((*path, "lr"), rule, show_value=False)
    names = tuple(dotted((*path, key)) for key in entry)
    yield from (problem for problem in optimizer_limits(composition, path, node) if problem.key in names)


def _no_key_of_optimizer(composition: Composition, path: KeyPath, keys: Iterable[str]) -> Problem:
    near = closest(path[-1], keys)
    hint = f" Did you mean {dotted((*path[:-1], near))}?" if near else ""
    return composition.problem(path, f"no such key of the optimizer.{hint}", show_value=False)


def _parameter_groups(composition: Composition, node: Values) -> Iterator[Problem]:
    """Check `optimizer.groups`: name -> patterns of its parameters, and the optimizer's keys that differ for them."""
    groups = node.get("groups")
    if groups is not None and not isinstance(groups, Mapping):
        rule = "must be a mapping: a name, and below it match and the keys that differ."
        yield composition.problem("optimizer.groups", rule, value=groups)
        return
    for name, group in (groups or {}).items():
        path = ("optimizer", "groups", name)
        if not isinstance(group, Mapping) or misfit(group.get("match"), list[str]) is not None:
            rule = "needs match, a list of patterns: match: ['*.bias', 'type:*Norm*']."
            yield composition.problem(path, rule, show_value=False)
            continue
        for key in (key for key in group if key != "match"):
            if key not in node or key in (TARGET, "groups"):
                yield _no_key_of_optimizer(composition, (*path, key), node)
            elif isinstance(node[key], int | float):
                wrong = misfit(group[key], bool if isinstance(node[key], bool) else float)
                if wrong is not None:
                    yield composition.problem((*path, key), wrong, value=group[key])


# -- without effect -----------------------------------------------------------------------------------------------


def unused_keys(composition: Composition, *, multirun: bool) -> tuple[list[Problem], list[str]]:
    """Find the keys without effect that can be found without importing a target.

    Returns:
        Problems (set on the command line) and notes (set in a recipe or in the user's own files).
    """
    multirun = multirun or composition.is_sweep
    problems: list[Problem] = []
    notes: list[str] = []
    sweep = composition.values["sweep"]
    about_sweeps = _unused_in_sweep(composition) if multirun else ((f"sweep.{key}", _WITHOUT_M) for key in sweep)
    for key, rule in (*_without_effect(composition.values), *about_sweeps):
        origin = composition.origin(key)
        if origin.level is Level.command_line or origin.level is Level.recipe or (origin.where and not origin.shipped):
            problem = composition.problem(key, rule, value=lookup(composition.values, path_of(key)))
            if origin.level is Level.command_line:
                problems.append(problem)
            else:
                notes.append(str(problem))
    for override in () if multirun else composition.hydra_overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key.startswith(("hydra.sweep.", "hydra.launcher", "hydra.sweeper", "hydra/launcher", "hydra/sweeper")):
            problems.append(Problem(key=key, value=value, rule=_WITHOUT_M, origin=COMMAND_LINE))
    return problems, notes


def unused_keys_in_launch(composition: Composition) -> list[Problem]:
    """Find the keys without effect that depend on the classes and on this machine; torch is imported by now."""
    values = composition.values
    rules = dict(item for unused in (_unused_reading, _unused_cuda, _unused_processes) for item in unused(values))
    rule, choice = rules.pop("precision", None), composition.choices.get("precision")
    problems = [] if rule is None else [composition.problem("precision", rule, value=choice)]
    return [*problems, *_on_command_line(composition, rules)]


def unused_keys_with_classes(composition: Composition, launcher: str | None) -> list[Problem]:
    """Return problems for supervisor keys that have no effect because an external launcher owns the processes."""
    rules = {"supervisor.join_timeout_s": "has no effect: no other process was started."}
    if launcher is not None:
        rule = f"has no effect: {launcher} started the processes and supervises them."
        keys = (f"supervisor.{name}" for name in composition.values["supervisor"])
        rules = {key: rule for key in keys if key not in _TASK_KEYS}
    return _on_command_line(composition, rules)


def _on_command_line(composition: Composition, rules: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each of the keys that the command line gives."""
    keys = [key for key in rules if composition.origin(key).level is Level.command_line]
    return [composition.problem(key, rules[key], value=lookup(composition.values, path_of(key))) for key in keys]


def _without_effect(run: Values) -> Iterator[tuple[str, str]]:
    """Yield key and reason for keys that other keys make ineffective; import no target."""
    for keys, why, when in _NO_EFFECT:
        if when(run):
            where = "has no effect " if why.startswith(("with", "on ")) else "has no effect: "
            yield from ((key, f"{where}{why}") for key in keys.split())
    yield from ((f"precision.{name}", SCALING_KEYS.reason) for name in SCALING_KEYS.unused(run["precision"]))
    if run["steps"] is not None and (run["stop_at_step"] or 0) >= run["steps"]:
        yield "stop_at_step", f"has no effect: the run has steps={run['steps']}."
    nodes, reason = run["optimizers"], "has no effect: each of optimizers has its own."
    entries = [entry for entry in nodes.values() if isinstance(entry, Mapping)] if isinstance(nodes, Mapping) else []
    for name in run["optimizer"] if entries else ():
        if all(name in entry or TARGET in entry for entry in entries):
            yield f"optimizer.{name}", reason
    if entries and all(entry.get("schedule") is not None for entry in entries):
        yield from ((f"schedule.{name}", reason) for name in run["schedule"])


def _unused_in_sweep(composition: Composition) -> Iterator[tuple[str, str]]:
    """Yield the keys of a sweep that have no effect with its sweeper or its launcher, as declared by their classes."""
    from trainkit.config.compose import unused_sweep_keys  # noqa: PLC0415 - for sweeps only: imports Hydra

    sweep = composition.values["sweep"]
    if sweep["resume"] is not None:
        yield "sweep.name", "has no effect with sweep.resume, which names the folder."
    for group, choice in (("hydra/sweeper", composition.sweeper), ("hydra/launcher", composition.launcher)):
        yield from ((f"sweep.{name}", reason) for name, reason in unused_sweep_keys(group, choice, sweep))


def _unused_reading(values: Values) -> Iterator[tuple[str, str]]:
    loader, hooks = values["loader"], hooks_in(values["data"])
    dataset = resolve_target(values["data"][TARGET])
    in_memory = (hasattr(dataset, "tensors") or hasattr(dataset, "gather")) and loader["cache"] is not False
    in_memory = in_memory and hooks.get("collate") is None  # which is given samples one by one
    if hooks.get("sampler") is not None:
        yield "loader.shuffle", "has no effect: data.sampler draws the sample of each position."
    if in_memory or loader["cache"] is True:
        reason = "has no effect: the dataset is in memory. With loader.cache=false its samples are read one by one."
        yield from ((f"loader.{name}", reason) for name in ("num_workers", "prefetch"))


def _unused_cuda(values: Values) -> Iterator[tuple[str, str]]:
    import torch  # noqa: PLC0415 - second phase only

    if not torch.cuda.is_available():
        if rule := build(values["precision"], "precision").rule_without_cuda():
            yield "precision", rule
        if values["loader"]["pin_memory"] is True:
            yield "loader.pin_memory", "has no effect: there is no CUDA GPU here to copy to."


def _unused_processes(values: Values) -> Iterator[tuple[str, str]]:
    keys = ["numerics.check_replicas_every", "elastic.min_replicas"]
    if not values["eval"]["beside"]:  # a second process, which the supervisor watches
        keys += ["supervisor.max_restarts", "supervisor.join_timeout_s"]
    if _processes(values) == 1 and not _started_externally(values):
        yield from ((key, "has no effect: this strategy runs in one process.") for key in keys)


def _processes(values: Values) -> int | None:
    """Return the number of processes that the strategy starts; None where that depends on more than the config."""
    import torch  # noqa: PLC0415 - second phase only

    count = getattr(build(values["strategy"], "strategy"), "num_processes", None)
    try:
        return int(count(torch.cuda.device_count())) if callable(count) else None
    except ConfigError:
        return None  # planning reports the problem


def _started_externally(values: Values) -> bool:
    """Return whether an external launcher, not this machine's supervisor, starts the processes."""
    if TARGET not in values["cluster"]:
        return False
    try:
        cluster = build(values["cluster"], "cluster")
        return getattr(cluster, "starts_processes", False) or cluster.launch(os.environ) is not None
    except ConfigError:
        return False  # the run reports the problem
