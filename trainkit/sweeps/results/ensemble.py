"""Combine the best runs of a sweep into one model, score it together with its members, and write it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from trainkit.config.grammar import refusal
from trainkit.config.identity import difference, run_config
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import build
from trainkit.data.hooks import DataHooks, Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import build_splits, folded, test_splits, validation_splits
from trainkit.errors import ConfigError, Problem
from trainkit.models.ensemble import Ensemble
from trainkit.numerics.copies import copied
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Objective, Supervised
from trainkit.strategies.base import LocalModel
from trainkit.strategies.collectives import LocalCollective
from trainkit.sweeps.results.job_results import FOLD, JobResult
from trainkit.sweeps.results.leaderboard import Leaderboard
from trainkit.trained.build import Which
from trainkit.trained.model import load_model, write_model
from trainkit.trainer.evaluate import evaluate

_SAME: Final = ("data", "objective", "cv", "precision")
"""Keys that must be equal for all members: these are scored on the same samples, by the same loss, in the same
precision.
"""
_BATCH: Final = 256
"""Samples per forward pass if the config does not set a number."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the compared models."""

    name: str
    """`job 3`, `ensemble of 3`, `averaged weights`."""
    model: nn.Module
    settings: str = ""
    """Settings that distinguish it from the others."""


@dataclass(frozen=True, kw_only=True)
class Combined:
    """Members, their ensemble and, if their architectures are equal, the average of their weights."""

    members: tuple[Candidate, ...]
    ensemble: Candidate
    averaged: Candidate | None
    cfg: RunConfig
    """The config of the best member."""
    nodes: tuple[Mapping[str, Any], ...]
    """The node that builds each member."""

    @property
    def all(self) -> tuple[Candidate, ...]:
        """All candidates, members first."""
        return (*self.members, self.ensemble, *([self.averaged] if self.averaged else []))


def best_of(board: Leaderboard, count: int) -> list[JobResult]:
    """Return the best `count` runs.

    Raises:
        ConfigError: fewer runs have the metric.
    """
    ranked = [entry for entry in board.entries if board.value(entry) is not None]
    if any(entry.repeats(FOLD) != [""] for entry in ranked):
        rule = "its runs are folds, each scored on other samples. Train the wanted points on all data, and use those."
        raise refusal("ensemble", rule)
    if count < 2:
        raise refusal(f"--k {count}", "an ensemble needs at least 2 members.")
    if len(ranked) < count:
        had = f"{len(ranked)} run{'' if len(ranked) == 1 else 's'}"
        raise refusal(f"--k {count}", f"only {had} there {'has' if len(ranked) == 1 else 'have'} {board.goal.metric}.")
    return ranked[:count]


def combine(entries: Sequence[JobResult], *, checkpoint: Which = "last") -> Combined:
    """Load runs and combine them into one model.

    Raises:
        ConfigError: runs cannot be combined; names each key that prevents it.
        CheckpointError: weights are damaged or missing.
    """
    cfgs = [run_config(entry.folder) for entry in entries]
    if problems := _mismatches(entries, cfgs):
        raise ConfigError(problems)
    objective = _objective(cfgs[0])
    models = [load_model(entry.folder, checkpoint=checkpoint) for entry in entries]
    members = tuple(
        Candidate(name=f"job {entry.job}", model=model, settings=" ".join(entry.overrides))
        for entry, model in zip(entries, models, strict=True)
    )
    averages = "probabilities" if objective.log_scores else "outputs"
    combine = cast("Literal['probabilities', 'outputs']", averages)
    joined = Ensemble(members=models, combine=combine, class_dim=objective.class_dim)
    return Combined(
        members=members,
        ensemble=Candidate(name=f"ensemble of {len(models)}", model=joined.eval(), settings=f"mean of {averages}"),
        averaged=_averaged(models),
        cfg=cfgs[0],
        nodes=tuple(cfg.model for cfg in cfgs),
    )


def _mismatches(entries: Sequence[JobResult], cfgs: Sequence[RunConfig]) -> list[Problem]:
    best, *others = zip(entries, cfgs, strict=True)
    return [
        Problem(
            key=one.key,
            value=one.right,
            rule=f"job {entry.job} has it, and job {best[0].job}, the best, {one.left}. Members are scored on the same "
            "samples by the same loss: fix it in the sweep, or take a smaller --k.",
        )
        for entry, cfg in others
        for one in difference(best[1], cfg)
        if one.matters and one.key.split(".")[0] in _SAME
    ]


def _objective(cfg: RunConfig) -> Supervised:
    objective: Objective = build(cfg.objective, "objective")
    if not isinstance(objective, Supervised):
        rule = "the model computes its loss itself and has no other output to average."
        raise ConfigError([Problem(key="objective", value=cfg.objective[TARGET].rpartition(".")[2], rule=rule)])
    if isinstance(objective.input, list | tuple):
        rule = "names several fields, and an ensemble passes one field to its members."
        raise ConfigError([Problem(key="objective.input", value=objective.input, rule=rule)])
    return objective


def _averaged(models: Sequence[nn.Module]) -> Candidate | None:
    """Return the model with the mean weights, before batch statistics are counted; None if the members have different
    parameters.
    """
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in models]
    if any(other != shapes[0] for other in shapes[1:]):
        return None
    averaged = AveragedModel(models[0])
    for model in models:
        averaged.update_parameters(model)
    return Candidate(name="averaged weights", model=copied(averaged.module).eval(), settings="one model")


def score(combined: Combined, *, devices: Sequence[torch.device]) -> list[tuple[Candidate, dict[str, float]]]:
    """Score every candidate on the validation and test splits, each sample once; members share the devices.

    Raises:
        DataError: a dataset is missing, damaged or empty.
    """
    cfg = combined.cfg
    splits = folded(build_splits(cfg.data), cfg.cv)
    precision: Precision = build(cfg.precision, "precision")
    precision.apply_globally(devices[0].type)  # by default torch rounds the products of a convolution to ten bits
    if combined.averaged is not None:
        # Count the batch statistics for the averaged weights: those of the members are wrong for them.
        averaged, split_batch = combined.averaged.model.to(devices[0]), _objective(cfg).split_batch
        update_bn((split_batch(batch)[0] for batch in _batches(splits["train"], cfg, devices[0])), averaged)
        averaged.eval()
    if precision.model_dtype is not precision.master_dtype:  # the written model keeps the master weights
        combined = copy.deepcopy(combined)
    for candidate in (*combined.members, *([combined.averaged] if combined.averaged else [])):
        precision.adapt(candidate.model)
    cast("Ensemble", combined.ensemble.model).spread(devices)
    named = [*validation_splits(splits), *test_splits(splits)]
    return [
        (one, {name: value for split in named for name, value in _metrics_of(one, splits[split], split, cfg).items()})
        for one in combined.all
    ]


def _metrics_of(candidate: Candidate, dataset: Any, split: str, cfg: RunConfig) -> dict[str, float]:
    device = next(candidate.model.parameters()).device
    precision: Precision = build(cfg.precision, "precision")
    local = LocalModel(model=candidate.model, device=device, data_ranks=LocalCollective(), precision=precision)
    return evaluate(local, build(cfg.objective, "objective"), _batches(dataset, cfg, device), split=split).figures


def _batches(dataset: Any, cfg: RunConfig, device: torch.device) -> EvalBatches:
    size = cfg.eval.batch_size or _BATCH
    reading = Reading(device=device, settings=cfg.loader, hooks=DataHooks.of(cfg.data))
    return EvalBatches(dataset, reading, batch_size=size, rank=0, num_ranks=1)


def export(combined: Combined, folder: Path, *, about: Mapping[str, Any]) -> list[Path]:
    """Write the scored ensemble, and the averaged weights into `averaged` below it; return the folders."""
    joined = cast("Ensemble", combined.ensemble.model)
    node = {
        TARGET: "trainkit.models.Ensemble",
        "combine": joined.combine,
        "class_dim": joined.class_dim,
        "members": [dict(one) for one in combined.nodes],
    }
    write_model(folder, joined, node, about=about)
    if combined.averaged is None:
        return [folder]
    below = folder / "averaged"
    write_model(below, combined.averaged.model, combined.nodes[0], about=about)
    return [folder, below]
