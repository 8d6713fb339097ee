"""Prove every candidate: compare its training with that of one device."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import nn

from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, Problem, StorageError
from trainkit.run.diagnosis import Examiner
from trainkit.run.equivalence.answers import Numbers, Proof, Sameness, same_training
from trainkit.run.equivalence.comparing import compare, moved_by_rounding
from trainkit.run.equivalence.running import (
    Case,
    Diagnosis,
    Weights,
    bare,
    diagnose,
    reference_weights,
    weights_by_step,
    with_precision,
)
from trainkit.run.folder.proof_records import keep_proof
from trainkit.run.planning.coupling import Coupling
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.notes import coupling_of, cut_notes, model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.storage import reporting

_ONE_DEVICE: Final = "trainkit.strategies.OneDevice"
_TEMPORARY: Final = "TMPDIR=FOLDER chooses where prove keeps the weights of its trainings."


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A candidate before it is trained."""

    label: str
    plan: RunPlan
    """The plan as it would be started, but without evaluation, callbacks and loggers."""
    started: RunPlan
    """The plan as it would be started."""
    sameness: Sameness | None
    notes: tuple[str, ...]


def prove(
    candidates: Sequence[tuple[str, RunConfig]],
    *,
    steps: int,
    same_cut: bool = False,
    command: str = "",
    log: Callable[[str], None] = lambda _: None,
    located: Callable[[int, ConfigError], ConfigError] = lambda _, error: error,
) -> list[Proof]:
    """Compare each candidate with one_device: their configs as started, and their parameters after steps with equal
    shards.

    The reference has the config of the first candidate. To compare numbers, every run has the smallest `micro_size` of
    all candidates, and float64 if the model allows it.

    Args:
        candidates: (label, checked config) of each.
        steps: optimizer steps.
        same_cut: skip the first answer.
        command: the command of the user, without secrets; stored with the proof.
        log: receives a line when a run begins.
        located: (number of a candidate, error about its config) -> the error with the places that set the keys.

    Returns:
        A proof for each candidate. Each is also stored (`trainkit.run.folder.proof_records`).

    Raises:
        ConfigError: a candidate cannot run here, or is the reference itself.
        TrainkitError: a candidate failed.
    """
    judged = _judged(candidates, steps=steps, same_cut=same_cut, located=located)
    sizes = replace(min(judged, key=lambda one: one.plan.batch.micro_size).plan.cfg.batch, accumulation=None)
    # A candidate whose replicas diverge between synchronisations ends later, at the next synchronisation.
    last = max(one.plan.last_step for one in judged)
    reference = replace(_on_one_device(judged[0].plan.cfg), batch=sizes, stop_at_step=last)
    proofs = []
    with _scratch() as folder:
        precision, expected = reference_weights(reference, Path(folder), log)
        reference = with_precision(reference, precision)
        examiner = None if reference.optimizers else Examiner(reference)
        for number, one in enumerate(judged):
            log(f"{one.label} on {one.plan.num_replicas} replica{'' if one.plan.num_replicas == 1 else 's'}")
            candidate = with_precision(replace(one.plan.cfg, batch=sizes), precision)
            found = weights_by_step(candidate, Path(folder) / str(number))
            case = _case(
                one, candidate=candidate, reference=reference, examiner=examiner, expected=expected, found=found
            )
            proof = _proof(one, case, diagnose(case, examiner, Path(folder) / str(number)))
            proofs.append(proof)
            if (failure := keep_proof(one.started, {"command": command, **_kept(proof)})) is not None:
                log(f"the proof could not be saved: {failure}")
    return proofs


def _case(
    one: _Candidate,
    *,
    candidate: RunConfig,
    reference: RunConfig,
    examiner: Examiner | None,
    expected: Weights,
    found: Weights,
) -> Case:
    """Compare the weights of a candidate with those of the reference."""
    masks = examiner.elements_without_gradient if examiner else {}
    comparisons = compare(
        expected,
        found,
        no_gradient=frozenset(f"param/{name}" for name in (examiner.without_gradient if examiner else ())),
        without_gradient={f"param/{name}": mask for name, mask in masks.items()},
        allowed=moved_by_rounding(map(one.plan.highest_rate, range(one.plan.last_step))),
        exact=candidate.numerics.reproducible,
    )
    return Case(
        label=one.label,
        reference=reference,
        plan=one.plan,
        candidate=candidate,
        expected=expected,
        found=found,
        comparisons=tuple(comparisons),
    )


@contextmanager
def _scratch() -> Iterator[str]:
    """Make a temporary folder for the weights of all trainings.

    Raises:
        StorageError: it cannot be created or written.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix="trainkit-prove-")
    except OSError as error:
        raise StorageError(f"prove has no folder for temporary files: {error.strerror}. {_TEMPORARY}") from error
    with temporary as folder:
        try:
            with reporting(Path(folder)):
                yield folder
        except StorageError as error:
            raise StorageError(f"{error} {_TEMPORARY}") from error


def _judged(
    candidates: Sequence[tuple[str, RunConfig]],
    *,
    steps: int,
    same_cut: bool,
    located: Callable[[int, ConfigError], ConfigError],
) -> list[_Candidate]:
    """Plan every candidate, refuse a candidate that proves nothing, and compute the first answer; train nothing."""
    plans, problems = [], list[Problem]()
    for number, (_, cfg) in enumerate(candidates):
        try:
            plan = make_plan(bare(cfg, steps))
        except ConfigError as error:
            raise located(number, error) from error
        found = plan.components.strategy.proof_problems(plan.context)
        problems += located(number, ConfigError(found)).problems if found else []
        plans.append(plan)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    reference = make_plan(_on_one_device(bare(candidates[0][1], steps)))
    known: dict[str, Coupling] = {}
    judged = []
    for (label, cfg), plan in zip(candidates, plans, strict=True):
        model = meta_model(plan)
        notes = model_notes(plan, model, lambda _key: False)
        coupling = partial(_coupling, plan, model, known)
        accumulates = cfg.batch.accumulation is not None
        sameness = None if same_cut else same_training(reference, plan, coupling, accumulates=accumulates)
        notes += cut_notes(plan, coupling)
        started = replace(plan, cfg=replace(cfg, batch=plan.cfg.batch, cluster=plan.cfg.cluster))
        judged.append(_Candidate(label=label, plan=plan, started=started, sameness=sameness, notes=tuple(notes)))
    return judged


def _coupling(plan: RunPlan, model: nn.Module, known: dict[str, Coupling]) -> Coupling:
    """Probe the model of a plan, unless an earlier candidate had the same model, objective and data."""
    cfg = plan.cfg
    node = json.dumps([cfg.model, cfg.objective, cfg.data, cfg.seed], default=str)
    if node not in known:
        known[node] = coupling_of(plan, model, at_any_size=True)
    return known[node]


def _on_one_device(cfg: RunConfig) -> RunConfig:
    return replace(cfg, strategy={"_target_": _ONE_DEVICE, "device": "auto"})


def _proof(one: _Candidate, case: Case, diagnosis: Diagnosis) -> Proof:
    micro_size = case.candidate.batch.micro_size
    assert micro_size is not None
    return Proof(
        label=one.label,
        replicas=one.plan.num_replicas,
        sameness=one.sameness,
        numbers=Numbers(
            precision=case.candidate.precision["value"],
            micro_size=micro_size,
            steps=tuple(case.found),
            comparisons=case.comparisons,
            gradients=diagnosis.gradients,
            explanation=diagnosis.lines,
        ),
        notes=one.notes,
    )


def _kept(proof: Proof) -> dict[str, Any]:
    """Return the content of the record of a proof."""
    numbers = proof.numbers
    return {
        "same_training": None if proof.sameness is None else proof.sameness.verdict,
        "same_numbers": numbers.verdict,
        "micro_size": numbers.micro_size,
        "steps": max(numbers.steps),
        "precision": numbers.precision,
        "largest_error": max(one.error for one in numbers.comparisons),
    }
