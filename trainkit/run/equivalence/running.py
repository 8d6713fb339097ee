"""Train a few steps with equal shards, read the weights after each, and compare the gradients with a plain loop's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torch import Tensor

from trainkit.config.identity import Difference, difference
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, DataError
from trainkit.frames import first_line
from trainkit.run.diagnosis import ORDERED, Examiner, Probed, explain_probe, explain_updates
from trainkit.run.equivalence.comparing import Comparison, Verdict, is_rounding, worst
from trainkit.run.planning.plan import RunPlan
from trainkit.run.runner import train
from trainkit.trainer.checkpoint.loading import load
from trainkit.trainer.manifest import list_complete

Weights = Mapping[int, Mapping[str, Tensor]]
"""Updates -> `param/...` or `buffer/...` -> tensor."""

_PRECISION: Final = "trainkit.numerics.Precision"


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


def reference_weights(
    cfg: RunConfig, folder: Path, log: Callable[[str], None]
) -> tuple[str, dict[int, dict[str, Tensor]]]:
    """Train the reference in fp64, or in fp32 if the model does not run in fp64.

    Returns:
        The precision that was used, and the weights after every step.
    """
    try:
        log("reference: one_device in fp64")
        return "fp64", weights_by_step(with_precision(cfg, "fp64"), folder / "reference_fp64")
    except (ConfigError, DataError):
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        log(f"the model does not run in fp64 ({first_line(error)}); reference: one_device in fp32")
        return "fp32", weights_by_step(with_precision(cfg, "fp32"), folder / "reference_fp32")


def last_weights(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Return the weights in the last checkpoint of a run folder, by its step."""
    last = max(list_complete(folder / "checkpoints"), key=lambda checkpoint: checkpoint.step)
    return {last.step: _weights(load(last.folder).tensors)}


def weights_by_step(cfg: RunConfig, folder: Path) -> dict[int, dict[str, Tensor]]:
    """Train in a folder, and return the weights after every step that has a checkpoint."""
    train(cfg, run_dir=folder)
    found = sorted(list_complete(folder / "checkpoints"), key=lambda checkpoint: checkpoint.step)
    return {one.step: _weights(load(one.folder).tensors) for one in found}


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer/")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A candidate and the reference, both trained: the input of a diagnosis."""

    label: str
    reference: RunConfig
    """The config of the reference: one_device at the common cut, in the precision that was used."""
    plan: RunPlan
    """The plan of the candidate, as it would be started."""
    candidate: RunConfig
    """The config of the candidate at the common cut, in the same precision."""
    expected: Weights
    """The weights of the reference after every step."""
    found: Weights
    """The weights of the candidate after every step that it saved."""
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The gradients of a candidate, and why its numbers differ, if they do."""

    gradients: tuple[Comparison, ...] = ()
    """Every gradient of a probe compared with a plain loop's; empty if the strategy is another training by design."""
    lines: tuple[str, ...] = ()
    """Lines that name the broken rule; empty if none is broken."""


def diagnose(case: Case, examiner: Examiner | None, folder: Path) -> Diagnosis:
    """Probe the gradients of a candidate; if its numbers differ, name the rule that it breaks.

    There is no examiner if the run has several optimizers: a plain loop has one.

    Raises:
        TrainkitError: the probe failed.
    """
    if case.plan.components.strategy.facts_in(case.plan.context).changes_maths:
        return Diagnosis()
    if examiner is None:
        differs = worst(case.comparisons) == "different"
        return Diagnosis(lines=("not explained: the run has several optimizers",) if differs else ())
    own = replace(case.candidate, strategy=case.reference.strategy)
    apart = [one for one in difference(case.reference, own) if one.matters]
    if apart:  # the rules are applied at the candidate's own settings
        examiner = Examiner(own)
    probed = examiner.probe(
        case.candidate, num_replicas=case.plan.num_replicas, folder=folder.with_name(f"{folder.name}_probe")
    )
    lines = tuple(_explained(case, examiner, probed, folder, apart))
    return Diagnosis(gradients=tuple(_gradients(probed)), lines=lines)


def _gradients(probed: Probed) -> Iterator[Comparison]:
    for name, error in probed.errors.items():
        first = probed.first.get(name)
        verdict: Verdict = "different" if first is not None else "rounding" if error else "equal"
        yield Comparison(name=f"gradient/{name}", verdict=verdict, error=error, first_step=first)


def _explained(
    case: Case, examiner: Examiner, probed: Probed, folder: Path, apart: Sequence[Difference]
) -> Iterator[str]:
    if probed.differs:
        yield from explain_probe(probed)
    elif worst(case.comparisons) != "different":
        return
    elif case.candidate.numerics.reproducible and is_rounding(case.expected, case.found):
        yield ORDERED
    else:
        try:
            updates = examiner.replay(num_replicas=case.plan.num_replicas, folder=folder)
        except Exception as error:  # noqa: BLE001 - a user's optimizer may fail in any way outside of its strategy
            yield f"not explained: an update cannot be replayed by itself ({type(error).__name__}: {error})"
            return
        if apart and not updates.differences:
            keys = ", ".join(f"{one.key} is {one.right} here and {one.left} in the reference" for one in apart)
            yield f"explained by: the config: {keys}"
        else:
            yield from explain_updates(updates)
