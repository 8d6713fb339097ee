"""`trainkit [train] OVERRIDES`: run one training, or with -m one per combination of comma lists."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from trainkit.cluster.local import LAUNCHERS, VARIABLE, detect, launch_problems
from trainkit.config.grammar import COMMAND_LINE, key_of, refusal, replacing
from trainkit.config.values import MOST_PROCESSES, whole_number
from trainkit.errors import CheckpointError, ConfigError, Problem, refuse
from trainkit.verbs.support.call import Call
from trainkit.verbs.support.one_file import kept_in

if TYPE_CHECKING:
    from torch import nn

    from trainkit.config.composition import Composition
    from trainkit.run.planning.plan import RunPlan


def run(call: Call) -> int:
    """Train; return the exit code."""
    if call.multirun:
        return sweep(call)
    from trainkit.api import choose_workers  # noqa: PLC0415 - nothing is imported to refuse an argument
    from trainkit.config.check import checked_names, checked_values  # noqa: PLC0415 - the same
    from trainkit.config.compose import compose  # noqa: PLC0415 - the same

    composition = compose(call.overrides, config_dirs=call.config_dirs, packages=call.packages)
    if composition.is_sweep:
        return sweep(call)
    refuse_environment(composition)
    composition = checked_names(composition)
    with template_of(composition):
        composition = checked_values(composition)
        from trainkit.run.runner import train_composition  # noqa: PLC0415 - imports torch

        copying = nullcontext if call.file is None else functools.partial(kept_in, file=call.file)
        return exit_code(train_composition(composition, choose_workers=choose_workers, kept_in=copying))


def template_of(composition: Composition) -> AbstractContextManager[None]:
    """Return a context that first forks the template of the ranks, if there will be several.

    The names of the composition are checked. Code of the user has not been imported, unless the check did: then, and
    with a strategy of the user's, the ranks are forked from a new interpreter.
    """
    from trainkit.config.targets.build import build  # noqa: PLC0415 - nothing is imported to refuse an argument
    from trainkit.run.process.fork_server import template  # noqa: PLC0415 - the same

    values = composition.values
    strategy = values.get("strategy") or {}
    local = composition.choices.get("cluster") in ("local", "debug") and detect(os.environ) is None
    if "torch" in sys.modules or not local or not str(strategy.get("_target_")).startswith("trainkit."):
        return nullcontext()
    try:
        is_parallel = values["eval"]["beside"] or build(strategy, "strategy").num_processes(0) > 1
    except (ConfigError, TypeError, ValueError):  # the check that follows names the keys
        return nullcontext()
    return template() if is_parallel else nullcontext()


def template_of_job(call: Call) -> AbstractContextManager[None]:
    """Return the same context for a prediction or evaluation, of one rank unless the command names a strategy."""
    from trainkit.run.process.fork_server import template  # noqa: PLC0415 - nothing is imported to refuse an argument

    has_strategy = any(key_of(line).partition(".")[0] == "strategy" for line in call.overrides)
    return template() if has_strategy else nullcontext()


def refuse_environment(composition: Composition) -> None:
    """Refuse variables of a launcher that contradict one another, at once: the check of the config imports torch.

    Raises:
        ConfigError: as in `trainkit.cluster.local.detect`.
    """
    launcher = (composition.values.get("cluster") or {}).get("launcher")
    if composition.choices.get("cluster") != "local" or launcher not in (*LAUNCHERS, "auto", "none"):
        return
    try:
        detect(os.environ, launcher=launcher)
    except ConfigError as error:
        raise composition.with_origins(error) from error


def exit_code(result: Mapping[str, Any]) -> int:
    """Return the exit code that a run ended with.

    4 for a finished training whose model could not be written, with the reason on standard error.

    Example:
        >>> exit_code({"exit_code": 130})
        130
    """
    if result.get("model_error"):
        sys.stderr.write(f"the training has finished, and its model could not be written: {result['model_error']}\n")
        return CheckpointError.exit_code
    return int(result.get("exit_code", 1))


def sweep(call: Call) -> int:
    """Check every point, then pass the sweep to Hydra's sweeper and the cluster's launcher."""
    from trainkit.config.compose.jobs import multirun  # noqa: PLC0415 - for sweeps only
    from trainkit.report.train_log import lasting_output  # noqa: PLC0415 - the same
    from trainkit.run.process.fork_server import JOB_IMPORTS, template  # noqa: PLC0415 - the same
    from trainkit.verbs.support.points import sweep_points, with_values  # noqa: PLC0415 - the same

    start = f"the sweep without the launcher ({VARIABLE}=none), or each point with it"
    rules = dict.fromkeys(("hydra.run.dir", "hydra.run"), "is the folder of a single run. Give hydra.sweep.dir.")
    if call.multirun:
        rules["hydra.mode"] = "has no effect with -m."
    pairs = [(key_of(line), line.partition("=")[2]) for line in call.overrides if key_of(line) in rules]
    problems = [*launch_problems("-m", "run every point", start)]
    problems += [Problem(key=key, value=text, rule=rules[key], origin=COMMAND_LINE) for key, text in pairs]
    refuse(problems)
    call = expand_folds(call)
    points = sweep_points(call.overrides, call.config_dirs, call.packages)
    with template(JOB_IMPORTS), lasting_output():
        if points := with_values(points):
            refuse_open_folds(points)
            from trainkit.run.planning.notes import plan_all_points  # noqa: PLC0415 - imports torch

            num_gpus, crowding = _gpus_elsewhere(points[0]), _crowding(points)
            if points[0].cfg.sweep.budget is None or points[0].launcher != "slots":
                plan_all_points(points, num_gpus=num_gpus, check=crowding)
            else:
                _plan_within_budget(points, crowding)
            notes = dict.fromkeys(note for point in points for note in point.notes)
            sys.stdout.writelines(f"note: {note}\n" for note in notes)
        outcome = multirun(
            call.overrides,
            config_dirs=call.config_dirs,
            packages=call.packages,
            task=functools.partial(sweep_job, packages=call.packages),
            check=_check_point,
        )
    codes = [job.return_value for batch in outcome or () for job in batch]  # the exit code of each
    return int(any(code is None or (isinstance(code, int) and code != 0) for code in codes))  # None: not run


def _plan_within_budget(
    points: Sequence[Composition], check: Callable[[RunPlan, nn.Module], Sequence[Problem]]
) -> None:
    """Plan all points, and refuse a sweep whose planned times pass its budget; a resumed one is only stopped by it.

    Raises:
        ConfigError: every problem of every plan, or the budget.
    """
    from trainkit.run.estimates.outlook import outlook_of  # noqa: PLC0415
    from trainkit.run.planning.notes import plan_all_points  # noqa: PLC0415
    from trainkit.sweeps.budget import Budget  # noqa: PLC0415 - for sweeps only
    from trainkit.sweeps.loop import Slots  # noqa: PLC0415

    cfg = points[0].cfg
    slots = Slots.here(cfg.sweep)
    budget = Budget.of(cfg, on_gpus=slots.on_gpus)
    planned: list[tuple[float, float] | None] = []

    def checked(plan: RunPlan, model: nn.Module) -> Sequence[Problem]:
        problems, outlook = check(plan, model), outlook_of(plan, model)
        seconds = plan.stop_after_s if outlook.budget is None else outlook.budget.hours.middle * 3600
        devices = plan.components.strategy.num_slots(slots.count if slots.on_gpus else 0)
        planned.append(None if seconds is None else (seconds, devices / slots.jobs_per_device))
        return problems

    plan_all_points(points, check=checked)
    estimates = [item for item in planned if item is not None]
    if budget is not None and estimates and cfg.sweep.resume is None:
        budget.refuse(estimates, slots=slots.count, jobs=cfg.sweep.trials or len(points))
    if len(estimates) < len(planned) or not planned:
        text = "is not held against plans: the time of a job is not known. Give hardware=this"
        sys.stdout.write(f"note: sweep.budget={cfg.sweep.budget} {text}\n")


def _crowding(points: Sequence[Composition]) -> Callable[[RunPlan, nn.Module], Sequence[Problem]]:
    """Return the check of the memory that jobs of this host share; jobs elsewhere have their own."""
    if points[0].launcher != "slots":
        return lambda *_: ()
    from trainkit.run.estimates.this_machine import available_bytes, crowding_problems  # noqa: PLC0415 - imports torch
    from trainkit.sweeps.loop import Slots  # noqa: PLC0415 - for sweeps only

    settings = points[0].cfg.sweep
    slots = Slots.here(settings)
    jobs = min(slots.total, settings.trials or len(points))
    return functools.partial(
        crowding_problems, jobs=jobs, jobs_per_device=slots.jobs_per_device, host_bytes=available_bytes()
    )


def _gpus_elsewhere(point: Composition) -> int | None:
    """Return the GPUs of a job on the nodes of its queue; None if jobs run here."""
    if point.launcher != "submitit_slurm":
        return None
    key = "hydra.launcher.gpus_per_node"
    values = [line.partition("=")[2] for line in point.hydra_overrides if key_of(line) == key]
    return whole_number(values[-1], low=0, high=MOST_PROCESSES) or 0 if values else 0


def _check_point(composition: Composition) -> Composition:
    from trainkit.config.check import check_names  # noqa: PLC0415 - for sweeps only
    from trainkit.config.check.recipe_keys import fitted  # noqa: PLC0415 - the same

    composition, problems = fitted(composition, functools.partial(check_names, multirun=True))
    refuse(problems)
    return composition


def sweep_job(cfg: Any, *, packages: tuple[str, ...] = ()) -> int:
    """Run one job of a sweep, under any Hydra launcher, in a separate process so that no state leaks between jobs."""
    import subprocess  # noqa: PLC0415 - for sweeps only
    from pathlib import Path  # noqa: PLC0415

    from trainkit.config.compose.jobs import job_command  # noqa: PLC0415

    del cfg
    command, folder = job_command(packages)
    Path(folder).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 - our own command
    code = done.returncode
    if code != 0:
        sys.stderr.write(f"{folder}: exit code {code}\n")
    return code


_LISTING: Final = ("basic", "grid", "random")
"""Sweepers that know all their points in advance."""


def expand_folds(call: Call) -> Call:
    """Return the call with `cv.fold` swept over all folds, if it requests cross-validation without naming a fold.

    Raises:
        ConfigError: a sweep would give its points different folds, or only some of them.
    """
    from trainkit.config.compose import Composer  # noqa: PLC0415 - for sweeps only

    composer = Composer(call.config_dirs, call.packages)
    parsed, _ = composer.parse(call.overrides)
    swept = {item.key_or_group for item in parsed if item.is_sweep_override()}
    if "cv.folds" in swept:
        raise refusal("cv.folds", "must be one number: a sweep compares points on the same folds.")
    single = [item.input_line or "" for item in parsed if not item.is_sweep_override()]
    composition = composer.compose(single, for_others=True)
    cv = composition.values.get("cv") or {}
    folds = cv.get("folds")
    # The check reports its problems, together with all others.
    if not isinstance(folds, int) or folds < 2 or cv.get("fold") is not None or "cv.fold" in swept:
        return call
    if composition.sweeper not in _LISTING:
        rule = (
            f"{composition.sweeper} learns from each single run, and a point has one run per fold. Use grid or random."
        )
        raise refusal("hydra/sweeper", rule)
    return replace(call, overrides=replacing(call.overrides, f"cv.fold=range({folds})"))


def refuse_open_folds(points: Iterable[Composition]) -> None:
    """Refuse points of a sweep that are cross-validations, with several runs each.

    Raises:
        ConfigError: a recipe among several sets cv.folds.
    """
    for point in points:
        if point.asks_for_folds:
            rule = "only some points of the sweep use it. Give it on the command line, or cv.fold too."
            raise ConfigError([point.problem("cv.folds", rule, value=point.values["cv"]["folds"])])
