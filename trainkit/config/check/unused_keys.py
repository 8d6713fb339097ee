"""Keys that the user set and that have no effect in this composition. They are never silently ignored.

On the command line such a key is a problem. In a recipe or a file it is a note, because another choice may have removed
its effect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trainkit.config.composition import Composition, Level, lookup, path_of
from trainkit.config.targets.allowed import TARGET
from trainkit.errors import ConfigError, Problem
from trainkit.numerics.loss_scaling import KEYS as SCALING_KEYS


def unused_keys(composition: Composition, *, multirun: bool) -> tuple[list[Problem], list[str]]:
    """Find the keys without effect that can be found without importing a target.

    Returns:
        Problems (set on the command line) and notes (set in a recipe or in the user's own files).
    """
    multirun = multirun or composition.is_sweep
    problems: list[Problem] = []
    notes: list[str] = []
    values = composition.values
    sweeping = _unused_by_plugins(composition) if multirun else ()
    for key, rule in (*_ineffective(values, multirun=multirun), *sweeping):
        origin = composition.origin(key)
        problem = composition.problem(key, rule, value=_value(composition, key))
        if origin.level is Level.command_line:
            problems.append(problem)
        elif origin.level is Level.recipe or (origin.where and not origin.shipped):
            notes.append(str(problem))
    if not multirun:
        problems += _hydra_sweep_keys(composition)
    return problems, notes


def unused_keys_in_launch(composition: Composition) -> list[Problem]:
    """Find the keys without effect that depend on the classes and on this machine; torch is imported by now."""
    problems = []
    for key, rule in _ineffective_here(composition.values):
        if composition.origin(key).level is Level.command_line or key == "precision":
            problems.append(composition.problem(key, rule, value=_value(composition, key)))
    keys = ["supervisor.max_restarts", "supervisor.join_timeout_s"]
    keys += ["numerics.check_replicas_every", "elastic.min_replicas"]
    given = [key for key in keys if composition.origin(key).level is Level.command_line]
    if composition.values["eval"]["beside"]:  # a second process, which the supervisor watches
        given = [key for key in given if not key.startswith("supervisor.")]
    if given and _processes(composition.values) == 1 and not _started_externally(composition.values):
        rule = "has no effect: this strategy runs in one process."
        problems += [composition.problem(key, rule, value=_value(composition, key)) for key in given]
    return problems


def _value(composition: Composition, key: str) -> Any:
    if key == "precision":
        return composition.choices.get("precision")
    return lookup(composition.values, path_of(key))


_OF_EVERY_TASK: Final = frozenset(
    {"supervisor.join_timeout_s", "supervisor.evaluator_timeout_s", "supervisor.hang_timeout_s"}
)
"""Keys of the supervisor that have an effect in every process of a run, no matter who started it."""


def unused_keys_with_classes(composition: Composition, launcher: str | None) -> list[Problem]:
    """Return problems for supervisor keys that have no effect because an external launcher owns the processes."""
    rules = {"supervisor.join_timeout_s": "has no effect: no other process was started."}
    if launcher is not None:
        rule = f"has no effect: {launcher} started the processes and supervises them."
        keys = (f"supervisor.{name}" for name in composition.values["supervisor"])
        rules = {key: rule for key in keys if key not in _OF_EVERY_TASK}
    given = [key for key in rules if composition.origin(key).level is Level.command_line]
    return [composition.problem(key, rules[key], value=_value(composition, key)) for key in given]


def _ineffective(values: Mapping[str, Any], *, multirun: bool) -> Iterator[tuple[str, str]]:
    """Yield key and reason for every key that has no effect because of the values of other keys."""
    yield from _unused_schedule_keys(values)
    yield from _unused_numerics_keys(values["numerics"])
    if values["compile"]["mode"] == "off":
        yield "compile.backend", "has no effect with compile.mode=off."
    if values["eval"]["metric"] is None:
        yield "eval.mode", "has no effect without eval.metric."
    if values["loader"]["num_workers"] == 0:
        yield "loader.prefetch", "has no effect without workers. Give loader.num_workers."
    if values["steps"] is not None and (values["stop_at_step"] or 0) >= values["steps"]:
        yield "stop_at_step", f"has no effect: the run has steps={values['steps']}."
    if values["resume"] not in (None, "auto") and values["init_from"] is not None:
        yield "init_from", "has no effect with resume: the weights are those of the checkpoint."
    if values["elastic"]["min_replicas"] is None:
        yield "elastic.retry_s", "has no effect without elastic.min_replicas: the run needs all its replicas."
    elif values["supervisor"]["max_restarts"] == 0:
        yield "elastic.min_replicas", "has no effect with supervisor.max_restarts=0: nothing restarts."
    if values["cv"]["folds"] is None:
        yield from ((f"cv.{name}", "has no effect without cv.folds.") for name in ("fold", "seed"))
    yield from ((f"predict.{name}", "has no effect on a training: it is for predict.") for name in values["predict"])
    if not multirun:
        yield from ((f"sweep.{name}", "has no effect without -m.") for name in values["sweep"])
    elif values["sweep"]["resume"] is not None:
        yield "sweep.name", "has no effect with sweep.resume, which names the folder."
    yield from ((f"precision.{name}", SCALING_KEYS.reason) for name in SCALING_KEYS.unused(values["precision"]))


def _unused_by_plugins(composition: Composition) -> Iterator[tuple[str, str]]:
    """Yield the keys of a sweep that have no effect with its sweeper or its launcher, as declared by their classes."""
    from trainkit.config.compose import unused_sweep_keys  # noqa: PLC0415 - for sweeps only: imports Hydra

    sweep = composition.values["sweep"]
    for group, choice in (("hydra/sweeper", composition.sweeper), ("hydra/launcher", composition.launcher)):
        yield from ((f"sweep.{name}", reason) for name, reason in unused_sweep_keys(group, choice, sweep))


def _unused_numerics_keys(numerics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield unused keys of the order of summation and of skipped steps."""
    if not numerics["reproducible"]:
        yield "numerics.lanes", "has no effect without numerics.reproducible=true."
    if numerics["on_nonfinite"] != "skip":
        limits = ("max_skips_in_a_row", "max_skipped_share")
        yield from ((f"numerics.{name}", "has no effect without numerics.on_nonfinite=skip.") for name in limits)


def _unused_schedule_keys(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield unused keys about the learning rate."""
    warmup, scaling, optimizer = values["warmup"], values["lr_scaling"], values["optimizer"]
    unscaled = scaling["reference_batch"] is None or scaling["rule"] == "none"
    if not warmup["epochs"] and not warmup["steps"]:
        yield "warmup.start", "has no effect without a warmup. Give warmup.epochs or warmup.steps."
    elif warmup["start"] == "base" and unscaled:
        yield "warmup.start", "has no effect: nothing is scaled, so base is the peak already."
    if scaling["reference_batch"] is None:
        yield "lr_scaling.rule", "has no effect without lr_scaling.reference_batch: nothing is scaled."
    elif unscaled:
        yield "lr_scaling.reference_batch", "has no effect with lr_scaling.rule=none."
    entries = values["optimizers"].values()
    own = "has no effect: each of optimizers has its own."
    for name in optimizer if entries else ():
        if all(name in entry or TARGET in entry for entry in entries):
            yield f"optimizer.{name}", own
    if entries and all(entry.get("schedule") is not None for entry in entries):
        yield from ((f"schedule.{name}", own) for name in values["schedule"])
    if "dampening" in optimizer and not optimizer.get("momentum"):
        yield "optimizer.dampening", "has no effect without optimizer.momentum."


def _hydra_sweep_keys(composition: Composition) -> Iterator[Problem]:
    for override in composition.hydra_overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key.startswith(("hydra.sweep.", "hydra.launcher", "hydra.sweeper", "hydra/launcher", "hydra/sweeper")):
            yield Problem(key=key, value=value, rule="has no effect without -m.", origin="command line")


def _ineffective_here(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from trainkit.config.targets.build import build, hooks_in, resolve_target  # noqa: PLC0415 - imports targets: second phase only

    loader = values["loader"]
    dataset = resolve_target(values["data"]["_target_"])
    in_memory = (hasattr(dataset, "tensors") or hasattr(dataset, "gather")) and loader["cache"] is not False
    in_memory = in_memory and hooks_in(values["data"]).get("collate") is None  # which is given samples one by one
    if hooks_in(values["data"]).get("sampler") is not None:
        yield "loader.shuffle", "has no effect: data.sampler draws the sample of each position."
    if in_memory or loader["cache"] is True:
        reason = "has no effect: the dataset is in memory. With loader.cache=false its samples are read one by one."
        yield from ((f"loader.{name}", reason) for name in ("num_workers", "prefetch"))
    if not _cuda():
        if rule := build(values["precision"], "precision").rule_without_cuda():
            yield "precision", rule
        if loader["pin_memory"] is True:
            yield "loader.pin_memory", "has no effect: there is no CUDA GPU here to copy to."


def _processes(values: Mapping[str, Any]) -> int | None:
    """Return the number of processes that the strategy starts; None where that depends on more than the config."""
    from trainkit.config.targets.build import build  # noqa: PLC0415 - imports targets: second phase only

    count = getattr(build(values["strategy"], "strategy"), "num_processes", None)
    try:
        return int(count(_num_gpus())) if callable(count) else None
    except ConfigError:
        return None  # planning reports the problem


def _started_externally(values: Mapping[str, Any]) -> bool:
    """Return whether an external launcher, not this machine's supervisor, starts the processes."""
    from trainkit.config.targets.build import build  # noqa: PLC0415 - imports targets: second phase only

    if TARGET not in values["cluster"]:
        return False
    try:
        cluster = build(values["cluster"], "cluster")
        return getattr(cluster, "starts_processes", False) or cluster.launch(os.environ) is not None
    except ConfigError:
        return False  # the run reports the problem


def _num_gpus() -> int:
    import torch  # noqa: PLC0415 - second phase only

    return torch.cuda.device_count()


def _cuda() -> bool:
    import torch  # noqa: PLC0415 - second phase only

    return torch.cuda.is_available()
