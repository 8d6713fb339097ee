"""The proof of every candidate: its training beside that of one device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trainkit.config.schema import RunConfig
from trainkit.run.diagnosis import Examiner
from trainkit.run.memory import abstract_model
from trainkit.run.model_facts import model_notes
from trainkit.run.plan import make_plan
from trainkit.run.proof.comparing import Comparison, Verdict, compare, worst
from trainkit.run.proof.diagnosing import Case, Diagnosis, diagnose
from trainkit.run.proof.running import (
    bare,
    reference_weights,
    weights_by_step,
    with_precision,
)

__all__ = ["Numbers", "Proof", "prove"]

_ONE_DEVICE: Final = "trainkit.strategies.one_device.OneDevice"


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The second answer: whether the numbers are the same at one common cut."""

    precision: str
    """The precision in which both were trained."""
    micro_size: int
    """The common cut: both were trained with this `batch.micro_size`."""
    steps: tuple[int, ...]
    """The updates after which both were compared: those after which the candidate's replicas are alike."""
    comparisons: tuple[Comparison, ...]
    gradients: tuple[Comparison, ...] = ()
    """The gradients of a probe against a plain loop's; empty where the strategy is another training."""
    explanation: tuple[str, ...] = ()
    """Lines that name the rule which the candidate breaks; empty where it breaks none."""

    @property
    def verdict(self) -> Verdict:
        """The worst of the comparisons; gradients that differ make the numbers differ."""
        return worst([*self.comparisons, *(one for one in self.gradients if one.verdict == "different")])

    @property
    def first(self) -> Comparison | None:
        """The first difference: the earliest step, and in it the first parameter."""
        wrong = [one for one in self.comparisons if one.verdict == "different"]
        return min(wrong, key=lambda one: one.first_step or 0, default=None)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One candidate against the reference."""

    label: str
    """The strategy as the user named it."""
    replicas: int
    numbers: Numbers
    changes_maths: bool = False
    """Whether the strategy says of itself that it is another training."""


def prove(
    candidates: Sequence[tuple[str, RunConfig]], *, steps: int, say: Callable[[str], None] = lambda _: None
) -> list[Proof]:
    """Train a few steps under each candidate and on one device, and compare every parameter after every step.

    Every run has one `micro_size`, the smallest of the candidates', and float64 where the model allows.

    Args:
        candidates: (label, checked config) of each.
        steps: optimizer steps.
        say: is told which run begins.

    Returns:
        A proof for each candidate.

    Raises:
        ConfigError: a candidate cannot run here.
        TrainkitError: a candidate failed.
    """
    plans = [(label, make_plan(bare(cfg, steps))) for label, cfg in candidates]
    for _, plan in plans:
        model_notes(plan, abstract_model(plan))  # refuses a plan that does not fit the model before any is trained
    finest = min((plan for _, plan in plans), key=lambda plan: plan.batch.micro_size)
    sizes = replace(finest.cfg.batch, accumulation=None)
    # A candidate whose replicas train apart ends later, where they are alike.
    last = max(plan.last_step for _, plan in plans)
    reference = replace(
        plans[0][1].cfg, batch=sizes, stop_at_step=last, strategy={"_target_": _ONE_DEVICE, "device": "auto"}
    )
    with tempfile.TemporaryDirectory(prefix="trainkit-prove-") as folder:
        precision, expected = reference_weights(reference, Path(folder), say)
        reference = with_precision(reference, precision)
        examiner = Examiner(reference)
        without = frozenset(f"param/{name}" for name in examiner.without_gradient)
        proofs = []
        for place, (label, plan) in enumerate(plans):
            say(f"{label} on {plan.num_replicas} replica{'' if plan.num_replicas == 1 else 's'}")
            cfg = with_precision(replace(plan.cfg, batch=sizes), precision)
            found = weights_by_step(cfg, Path(folder) / str(place))
            allowed = 1e-8 * sum(plan.rate(step) for step in range(plan.last_step))
            case = Case(
                label=label,
                reference=reference,
                plan=plan,
                candidate=cfg,
                expected=expected,
                found=found,
                comparisons=tuple(
                    compare(
                        expected,
                        found,
                        no_gradient=without,
                        allowed=allowed,
                        exact=cfg.numerics.reproducible,
                    )
                ),
            )
            proofs.append(_proof(case, precision, diagnose(case, examiner, Path(folder) / str(place))))
    return proofs


def _proof(case: Case, precision: str, diagnosis: Diagnosis) -> Proof:
    micro_size = case.candidate.batch.micro_size
    assert micro_size is not None
    return Proof(
        label=case.label,
        replicas=case.plan.num_replicas,
        numbers=Numbers(
            precision=precision,
            micro_size=micro_size,
            steps=tuple(case.found),
            comparisons=case.comparisons,
            gradients=diagnosis.gradients,
            explanation=diagnosis.lines,
        ),
        changes_maths=case.plan.parts.strategy.is_another_training,
    )
