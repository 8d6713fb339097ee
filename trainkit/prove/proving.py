"""Prove every candidate: train a few steps with equal shards, and compare each step with that of one device.

The gradients of a probe are compared with a plain loop's; a rule that is broken is named.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from trainkit.config.identity import difference
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, DataError, Problem, StorageError, first_line
from trainkit.files import parse_json, read_lines, reporting
from trainkit.prove.comparing import (
    Numbers,
    Proof,
    Sameness,
    compare,
    is_rounding,
    moved_by_rounding,
    same_training,
    worst,
)
from trainkit.prove.examining import ORDERED, Examiner, Probed, explain_probe, explain_updates
from trainkit.run.begin import RunRequest
from trainkit.run.planning.notes import Coupling, coupling_of, cut_notes, model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.planning.proof_records import keep_proof
from trainkit.run.runner import train
from trainkit.trained.build import meta_model
from trainkit.trainer.checkpoint.tensors import load
from trainkit.trainer.manifest import list_complete

T = TypeVar("T")

_ONE_DEVICE: Final = "trainkit.strategies.OneDevice"
_PRECISION: Final = "trainkit.numerics.Precision"
Weights = Mapping[int, Mapping[str, Tensor]]
"""Updates -> `param/...` or `buffer/...` -> tensor."""


def bare(cfg: RunConfig, steps: int) -> RunConfig:
    """Return the config with a checkpoint after every step, and without evaluation, callbacks and loggers."""
    return replace(
        cfg,
        stop_at_step=steps,
        resume=None,
        quiet=True,
        callbacks={},
        logger={},
        log_every_steps=1,
        loader=replace(cfg.loader, num_workers=cfg.loader.num_processes),
        eval=replace(cfg.eval, every_steps=None, every_epochs=None, beside=False),
        checkpoint=replace(
            cfg.checkpoint,
            every_steps=1,
            every_epochs=None,
            keep_last=1 << 30,
            keep_best=0,
            background=False,
            export=False,
        ),
    )


def with_precision(cfg: RunConfig, value: str) -> RunConfig:
    """Return the config with another precision, and without converted layers, which round to eight bits in any
    precision.
    """
    return replace(cfg, precision={"_target_": _PRECISION, "value": value}, convert={})


def in_double_precision(
    work: Callable[[str], T],
    log: Callable[[str], None],
    *,
    training: str,
    tolerated: tuple[type[Exception], ...] = (RuntimeError, TypeError),
) -> tuple[str, T]:
    """Return fp64 and the result of a training in it, or fp32 and that in fp32 if the model does not run in fp64.

    Args:
        work: trains in the precision that it is given.
        log: logs the start of a training.
        training: name of the training in the log.
        tolerated: errors that mean that the model does not run in fp64; those of config and data never do.
    """
    try:
        log(f"{training} in fp64")
        return "fp64", work("fp64")
    except (ConfigError, DataError):
        raise
    except tolerated as error:
        log(f"the model does not run in fp64 ({first_line(error)}); {training} in fp32")
        return "fp32", work("fp32")


def last_weights(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Return the weights in the last checkpoint of a run folder, by its step."""
    last = max(list_complete(folder / "checkpoints"), key=lambda checkpoint: checkpoint.step)
    return {last.step: _weights(load(last.folder).tensors)}


def _weights_by_step(cfg: RunConfig, folder: Path) -> dict[int, dict[str, Tensor]]:
    """Train in a folder, and return the weights after every step that has a checkpoint."""
    train(RunRequest(cfg=cfg, run_dir=folder))
    checkpoints = sorted(list_complete(folder / "checkpoints"), key=lambda checkpoint: checkpoint.step)
    return {checkpoint.step: _weights(load(checkpoint.folder).tensors) for checkpoint in checkpoints}


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer/")}


@dataclass(frozen=True, kw_only=True)
class Candidate:
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
        A proof for each candidate. Each is also stored (`trainkit.run.planning.proof_records`).

    Raises:
        ConfigError: a candidate cannot run here, or is the reference itself.
        TrainkitError: a candidate failed.
    """
    judged = _judged(candidates, steps=steps, same_cut=same_cut, located=located)
    proofs = []
    with scratch() as folder:
        reference = Reference.of(judged, folder, log)
        for number, candidate in enumerate(judged):
            replicas = candidate.plan.num_replicas
            log(f"{candidate.label} on {replicas} replica{'' if replicas == 1 else 's'}")
            proofs.append(reference.proof(candidate, folder / str(number), command=command, log=log))
    return proofs


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The training of one device with which candidates are compared."""

    cfg: RunConfig
    precision: str
    expected: Weights
    losses: Tensor
    """(steps,) float64, the loss of every step."""
    examiner: Examiner | None
    """None if the run has several optimizers: a plain loop has one."""

    @classmethod
    def of(cls, judged: Sequence[Candidate], folder: Path, log: Callable[[str], None]) -> Reference:
        """Train the reference with the config of the first candidate and the smallest cut of all."""
        smallest = min(judged, key=lambda candidate: candidate.plan.batch.micro_size)
        sizes = replace(smallest.plan.cfg.batch, accumulation=None)
        # A candidate whose replicas diverge between synchronisations ends later, at the next synchronisation.
        last = max(candidate.plan.last_step for candidate in judged)
        cfg = replace(on_one_device(judged[0].plan.cfg), batch=sizes, stop_at_step=last)

        def trained(precision: str) -> dict[int, dict[str, Tensor]]:
            return _weights_by_step(with_precision(cfg, precision), folder / f"reference_{precision}")

        precision, expected = in_double_precision(trained, log, training="reference: one_device")
        reference = with_precision(cfg, precision)
        return cls(
            cfg=reference,
            precision=precision,
            expected=expected,
            losses=_losses(folder / f"reference_{precision}"),
            examiner=None if cfg.optimizers else Examiner(reference),
        )

    def numbers(self, candidate: Candidate, folder: Path, *, is_layout: bool = False) -> tuple[Numbers, Probed | None]:
        """Train a candidate, and compare its numbers; a layout also by losses and initial weights.

        Raises:
            TrainkitError: the candidate failed.
        """
        examiner, batch = self.examiner, self.cfg.batch
        assert batch.micro_size is not None, "each plan has one"
        cfg = with_precision(replace(candidate.plan.cfg, batch=batch), self.precision)
        actual = _weights_by_step(cfg, folder)
        masks = examiner.elements_without_gradient if examiner else {}
        comparisons = compare(
            self.expected,
            actual,
            no_gradient=frozenset(f"param/{name}" for name in (examiner.without_gradient if examiner else ())),
            without_gradient={f"param/{name}": mask for name, mask in masks.items()},
            allowed=moved_by_rounding(map(candidate.plan.highest_rate, range(candidate.plan.last_step))),
            exact=cfg.numerics.reproducible,
        )
        numbers = Numbers(
            precision=self.precision, micro_size=batch.micro_size, steps=tuple(actual), comparisons=tuple(comparisons)
        )
        if is_layout:
            losses = compare({0: {"loss": self.losses}}, {0: {"loss": _losses(folder)}})
            numbers = replace(numbers, losses=next(losses))
        if candidate.plan.components.strategy.facts_in(candidate.plan.context).changes_maths:
            return numbers, None
        return _diagnosed(
            numbers,
            cfg,
            self.cfg,
            plan=candidate.plan,
            examiner=examiner,
            folder=folder,
            only_rounded=cfg.numerics.reproducible and is_rounding(self.expected, actual),
            is_layout=is_layout,
        )

    def proof(self, candidate: Candidate, folder: Path, *, command: str, log: Callable[[str], None]) -> Proof:
        """Return and store the proof of a candidate."""
        numbers, _ = self.numbers(candidate, folder)
        record = {
            "command": command,
            "same_training": None if candidate.sameness is None else candidate.sameness.verdict,
            "same_numbers": numbers.verdict,
            "micro_size": numbers.micro_size,
            "steps": max(numbers.steps),
            "precision": self.precision,
            "largest_error": max(comparison.error for comparison in numbers.comparisons),
        }
        if (failure := keep_proof(candidate.started, record)) is not None:
            log(f"the proof could not be saved: {failure}")
        return Proof(
            label=candidate.label,
            replicas=candidate.plan.num_replicas,
            sameness=candidate.sameness,
            numbers=numbers,
            notes=candidate.notes,
        )


def _losses(folder: Path) -> Tensor:
    """Return (steps,) float64, the losses of a run folder whose rows are those of single steps."""
    rows = [parse_json(line) for line in read_lines(folder / "metrics.jsonl")]
    return torch.tensor([row["train/loss"] for row in rows if "train/loss" in row], dtype=torch.float64)


def _diagnosed(
    numbers: Numbers,
    candidate: RunConfig,
    reference: RunConfig,
    *,
    plan: RunPlan,
    examiner: Examiner | None,
    folder: Path,
    only_rounded: bool,
    is_layout: bool,
) -> tuple[Numbers, Probed | None]:
    """Return the numbers with the gradients of a probe and, if they differ, the rule that the candidate breaks; and
    what the probe found.

    Raises:
        TrainkitError: the probe failed.
    """
    differs = worst(numbers.comparisons) == "different"
    if examiner is None:
        return replace(numbers, explanation=("not explained: the run has several optimizers",) if differs else ()), None
    cfg = replace(candidate, strategy=reference.strategy)
    diffs = [diff for diff in difference(reference, cfg) if diff.matters]
    if diffs:  # the rules are applied at the candidate's own settings
        examiner = Examiner(cfg)
    probed = examiner.probe(
        candidate, num_replicas=plan.num_replicas, folder=folder.with_name(f"{folder.name}_probe"), begins=is_layout
    )
    numbers = replace(numbers, gradients=tuple(probed.comparisons), begins=probed.begins)
    if probed.differs:
        return replace(numbers, explanation=tuple(explain_probe(probed))), probed
    if not differs:
        return numbers, probed
    if only_rounded:
        return replace(numbers, explanation=(ORDERED,)), probed
    try:
        updates = examiner.replay(num_replicas=plan.num_replicas, folder=folder)
    except Exception as error:  # noqa: BLE001 - a user's optimizer may fail in any way outside of its strategy
        lines = [f"not explained: an update cannot be replayed by itself ({type(error).__name__}: {error})"]
    else:
        keys = ", ".join(f"{diff.key} is {diff.right} here and {diff.left} in the reference" for diff in diffs)
        is_config = bool(diffs and not updates.differences)
        lines = [f"explained by: the config: {keys}"] if is_config else explain_updates(updates)
    return replace(numbers, explanation=tuple(lines)), probed


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a temporary folder for the weights of all trainings.

    Raises:
        StorageError: it cannot be created or written.
    """
    remedy = "TMPDIR=FOLDER chooses where prove keeps the weights of its trainings."
    try:
        temporary = tempfile.TemporaryDirectory(prefix="trainkit-prove-")
    except OSError as error:
        raise StorageError(f"prove has no folder for temporary files: {error.strerror}. {remedy}") from error
    try:
        with temporary as folder, reporting(Path(folder)):
            yield Path(folder)
    except StorageError as error:
        raise StorageError(f"{error} {remedy}") from error


def _judged(
    candidates: Sequence[tuple[str, RunConfig]],
    *,
    steps: int,
    same_cut: bool,
    located: Callable[[int, ConfigError], ConfigError],
) -> list[Candidate]:
    """Plan every candidate, refuse a candidate that proves nothing, and compute the first answer; train nothing."""
    plans, problems = [], list[Problem]()
    for number, (_, cfg) in enumerate(candidates):
        try:
            plan = make_plan(bare(cfg, steps))
        except ConfigError as error:
            raise located(number, error) from error
        refusals = plan.components.strategy.proof_problems(plan.context)
        problems += located(number, ConfigError(refusals)).problems if refusals else []
        plans.append(plan)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    reference = make_plan(on_one_device(bare(candidates[0][1], steps)))
    couplings: dict[str, Coupling] = {}
    judged = []
    for (label, cfg), plan in zip(candidates, plans, strict=True):
        model = meta_model(plan.cfg)
        notes = model_notes(plan, model, lambda _key: False)
        coupling = partial(_coupling, plan, model, couplings)
        accumulates = cfg.batch.accumulation is not None
        sameness = None if same_cut else same_training(reference, plan, coupling, accumulates=accumulates)
        notes += cut_notes(plan, coupling)
        started = replace(plan, cfg=replace(cfg, batch=plan.cfg.batch, cluster=plan.cfg.cluster))
        judged.append(Candidate(label=label, plan=plan, started=started, sameness=sameness, notes=tuple(notes)))
    return judged


def _coupling(plan: RunPlan, model: nn.Module, couplings: dict[str, Coupling]) -> Coupling:
    """Probe the model of a plan, unless an earlier candidate had the same model, objective and data."""
    cfg = plan.cfg
    node = json.dumps([cfg.model, cfg.objective, cfg.data, cfg.seed], default=str)
    if node not in couplings:
        couplings[node] = coupling_of(plan, model, at_any_size=True)
    return couplings[node]


def on_one_device(cfg: RunConfig) -> RunConfig:
    """Return the config of the same training on one device."""
    return replace(cfg, strategy={"_target_": _ONE_DEVICE, "device": "auto"})
