"""Prove that a training which is killed and resumed ends as if nobody had: `trainkit prove --resume`."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, Problem, TrainkitError
from trainkit.prove.comparing import Comparison, compare, moved_by_rounding, worst
from trainkit.prove.proving import bare, in_double_precision, last_weights, scratch, with_precision
from trainkit.run.begin import RunRequest
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.process.setup import variables
from trainkit.run.runner import train
from trainkit.trainer import failpoints

_PHASES: Final = ("data", "forward", "backward", "update")
_EVERY: Final = 2
"""Steps between two checkpoints: the step that was interrupted may be the second one after a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Where a training is interrupted."""

    rank: int
    step: int
    """Updates that were complete."""
    phase: str
    is_killed: bool
    """Whether its process gets a SIGKILL; a training of one process, which is this one, fails by an error."""

    def __str__(self) -> str:
        cause = "killed" if self.is_killed else "ended by an error"
        return f"rank {self.rank} is {cause} in {self.phase} of step {self.step + 1}"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the failure for the trainings within the block."""
        action = "kill" if self.is_killed else "raise"
        planted = f"rank={self.rank},step={self.step},phase={self.phase},attempt=0,action={action}"
        try:
            with variables({failpoints.VARIABLE: planted}):
                failpoints.reload(os.environ)
                yield
        finally:
            failpoints.reload(os.environ)


@dataclass(frozen=True, kw_only=True)
class ResumeProof:
    """Whether a training that was interrupted ends as one that was not."""

    precision: str
    disturbance: Disturbance
    saved: int
    """The step of the checkpoint from which it was resumed."""
    resumed: Mapping[str, Sequence[Comparison]]
    """The placement on which it was resumed -> its weights, compared with those of the undisturbed training."""

    @property
    def holds(self) -> bool:
        """Whether it does on every placement."""
        return all(worst(comparisons) != "different" for comparisons in self.resumed.values())


def prove_resume(
    points: Sequence[tuple[str, RunConfig]], *, steps: int, log: Callable[[str], None] = lambda _: None
) -> ResumeProof:
    """Train the first config undisturbed, and again until it is interrupted; resume it under each config.

    Args:
        points: label and config; the first one is trained and resumed, too. With another number of processes that read
            samples it is resumed as well.
        steps: optimizer steps, 3 or more.
        log: logs the start of each run.

    Raises:
        ConfigError: a config cannot run here, cuts its steps otherwise than the first, or ends before.
        TrainkitError: a training failed, or did not fail where it had to.
    """
    plans = [make_plan(bare(cfg, steps)) for _, cfg in points]
    _refuse_others(plans, steps)
    first = plans[0]
    disturbance = _drawn(first, steps)
    placements = [(label, plan.cfg) for (label, _), plan in zip(points, plans, strict=True)]
    loader = replace(first.cfg.loader, num_workers=0 if first.cfg.loader.num_processes else 1)
    placements.append((f"{points[0][0]}, loader.num_workers={loader.num_workers}", replace(first.cfg, loader=loader)))
    with scratch() as folder:

        def undisturbed(precision: str) -> Mapping[int, Mapping[str, Tensor]]:
            return _last(_prepared(first.cfg, precision), folder / f"undisturbed_{precision}")

        # a training of several processes reports what its model does not do as an error of a rank
        tolerated = (TrainkitError, RuntimeError, TypeError)
        precision, expected = in_double_precision(undisturbed, log, training="undisturbed,", tolerated=tolerated)
        log(f"interrupted: {disturbance}")
        _interrupt(_prepared(first.cfg, precision), folder / "interrupted", disturbance)
        (saved,) = last_weights(folder / "interrupted")
        allowed, resumed = moved_by_rounding(map(first.highest_rate, range(steps))), {}
        for number, (label, cfg) in enumerate(placements):
            log(f"resumed on {label}")
            copy = shutil.copytree(folder / "interrupted", folder / str(number))
            weights = _last(replace(_prepared(cfg, precision), resume="auto"), copy)
            is_exact = number in (0, len(points)) or cfg.numerics.reproducible
            resumed[label] = [*compare(expected, weights, allowed=allowed, exact=is_exact)]
    return ResumeProof(precision=precision, disturbance=disturbance, saved=saved, resumed=resumed)


def _refuse_others(plans: Sequence[RunPlan], steps: int) -> None:
    """Refuse configs that are no placements of one training."""
    first, problems = plans[0], list[Problem]()
    for plan in plans:
        if plan.last_step < steps or steps < _EVERY + 1:
            rule = f"the training has {plan.last_step}, and --resume needs {max(steps, _EVERY + 1)} of --steps."
            problems.append(Problem(key="steps", rule=rule))
        if plan.components.strategy.facts_in(plan.context).changes_maths:
            rule = "is another training on each number of replicas, by design. Name strategies of one training."
            problems.append(Problem(key="strategy", rule=rule))
        if plan.batch.micro_size != first.batch.micro_size:
            sizes = f"{first.batch.micro_size} and {plan.batch.micro_size}"
            rule = f"is {sizes} for the strategies. Give one size, so that all cut their steps alike."
            problems.append(Problem(key="batch.micro_size", rule=rule))
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def _drawn(plan: RunPlan, steps: int) -> Disturbance:
    """Draw a disturbance after the first checkpoint, by the seed of the training."""
    numbers = random.Random(plan.cfg.seed)  # noqa: S311 - a moment, not a secret
    tasks = plan.training_tasks
    return Disturbance(
        rank=numbers.randrange(len(tasks)) if not plan.auxiliary_ranks else 0,
        step=numbers.randrange(_EVERY, steps),
        phase=numbers.choice(_PHASES),
        is_killed=len(tasks) > 1,
    )


def _prepared(cfg: RunConfig, precision: str) -> RunConfig:
    """Return the config of every run of a proof: saved every few steps, without restarts."""
    return replace(
        with_precision(cfg, precision),
        checkpoint=replace(cfg.checkpoint, every_steps=_EVERY),
        supervisor=replace(cfg.supervisor, max_restarts=0),
    )


def _interrupt(cfg: RunConfig, folder: Path, disturbance: Disturbance) -> None:
    """Train until the planted failure.

    Raises:
        TrainkitError: the training did not end there.
    """
    try:
        with disturbance.planted():
            train(RunRequest(cfg=cfg, run_dir=folder))
    except (TrainkitError, RuntimeError):
        return
    raise TrainkitError(f"the training was to be interrupted ({disturbance}), and finished")


def _last(cfg: RunConfig, folder: Path) -> Mapping[int, Mapping[str, Tensor]]:
    train(RunRequest(cfg=cfg, run_dir=folder))
    return last_weights(folder)
