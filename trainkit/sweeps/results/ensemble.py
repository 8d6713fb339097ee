"""Combine the best runs of a sweep into one model, score it together with its members, and write it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from trainkit.config.grammar import refusal
from trainkit.config.identity import difference, run_config
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import build
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
from trainkit.trained.checking import batches_of
from trainkit.trained.model import load_model, write_model
from trainkit.trainer.evaluate import evaluate

_SAME: Final = ("data", "objective", "cv", "precision")
"""Keys that must be equal for all members: these are scored on the same samples, by the same loss, in the same
precision.
"""
_AVERAGED: Final = "averaged weights"
_BATCH: Final = 256
"""Samples per forward pass if the config does not set a number."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the compared models: a member, the ensemble, or the mean of the weights."""

    name: str
    """`job 3`, `ensemble of 3`, `averaged weights`."""
    model: nn.Module
    settings: str
    """Settings that distinguish it from the others."""
    node: Mapping[str, Any]
    """The node of a config that builds it."""


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
        runs, have = ("run", "has") if len(ranked) == 1 else ("runs", "have")
        raise refusal(f"--k {count}", f"only {len(ranked)} {runs} there {have} {board.goal.metric}.")
    return ranked[:count]


def combine(entries: Sequence[JobResult], *, checkpoint: Which = "last") -> list[Candidate]:
    """Load runs and combine them into one model.

    Returns:
        The members, their ensemble and, if their architectures are equal, the average of their weights, before batch
        statistics are counted.

    Raises:
        ConfigError: runs cannot be combined; names each key that prevents it.
        CheckpointError: weights are damaged or missing.
    """
    cfgs = [run_config(entry.folder) for entry in entries]
    if problems := _mismatches(entries, cfgs):
        raise ConfigError(problems)
    objective = _objective(cfgs[0])
    models = [load_model(entry.folder, checkpoint=checkpoint) for entry in entries]
    candidates = [
        Candidate(name=f"job {entry.job}", model=model, settings=" ".join(entry.overrides), node=cfg.model)
        for entry, model, cfg in zip(entries, models, cfgs, strict=True)
    ]
    way: Literal["probabilities", "outputs"] = "probabilities" if objective.log_scores else "outputs"
    node = {
        TARGET: "trainkit.models.Ensemble",
        "combine": way,
        "class_dim": objective.class_dim,
        "members": [dict(cfg.model) for cfg in cfgs],
    }
    joined = Ensemble(members=models, combine=way, class_dim=objective.class_dim).eval()
    candidates.append(Candidate(name=f"ensemble of {len(models)}", model=joined, settings=f"mean of {way}", node=node))
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in models]
    if all(other == shapes[0] for other in shapes[1:]):
        averaged = AveragedModel(models[0])
        for model in models:
            averaged.update_parameters(model)
        mean = copied(averaged.module).eval()
        candidates.append(Candidate(name=_AVERAGED, model=mean, settings="one model", node=cfgs[0].model))
    return candidates


def _mismatches(entries: Sequence[JobResult], cfgs: Sequence[RunConfig]) -> list[Problem]:
    best, *others = zip(entries, cfgs, strict=True)
    return [
        Problem(
            key=item.key,
            value=item.right,
            rule=f"job {entry.job} has it, and job {best[0].job}, the best, {item.left}. Members are scored on the "
            "same samples by the same loss: fix it in the sweep, or take a smaller --k.",
        )
        for entry, cfg in others
        for item in difference(best[1], cfg)
        if item.matters and item.key.split(".")[0] in _SAME
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


def score(
    candidates: Sequence[Candidate], cfg: RunConfig, *, devices: Sequence[torch.device]
) -> list[tuple[Candidate, dict[str, float]]]:
    """Score every candidate on the validation and test splits, each sample once; members share the devices.

    Args:
        candidates: the result of `combine`.
        cfg: the config of the best member.
        devices: the devices.

    Raises:
        DataError: a dataset is missing, damaged or empty.
    """
    splits, objective = folded(build_splits(cfg.data), cfg.cv), _objective(cfg)
    precision: Precision = build(cfg.precision, "precision")
    precision.apply_globally(devices[0].type)  # by default torch rounds the products of a convolution to ten bits
    size = cfg.eval.batch_size or _BATCH
    for candidate in candidates:
        if candidate.name == _AVERAGED:  # the batch statistics of the members are wrong for the averaged weights
            counted = batches_of(cfg, splits["train"], size, devices[0])
            update_bn((objective.split_batch(batch)[0] for batch in counted), candidate.model)
            candidate.model.eval()
    if precision.model_dtype is not precision.master_dtype:  # the written model keeps the master weights
        candidates = copy.deepcopy(candidates)
    for candidate in candidates:
        if isinstance(candidate.model, Ensemble):
            candidate.model.spread(devices)
        else:
            precision.adapt(candidate.model)
    scored = []
    for candidate in candidates:
        device, figures = next(candidate.model.parameters()).device, dict[str, float]()
        local = LocalModel(model=candidate.model, device=device, data_ranks=LocalCollective(), precision=precision)
        for split in (*validation_splits(splits), *test_splits(splits)):
            batches = batches_of(cfg, splits[split], size, device)
            figures |= evaluate(local, objective, batches, split=split).figures
        scored.append((candidate, figures))
    return scored


def export(candidates: Sequence[Candidate], folder: Path, *, about: Mapping[str, Any]) -> list[Path]:
    """Write the scored ensemble, and the averaged weights into `averaged` below it; return the folders."""
    paths = []
    for candidate in candidates:
        if isinstance(candidate.model, Ensemble) or candidate.name == _AVERAGED:
            paths.append(folder / "averaged" if candidate.name == _AVERAGED else folder)
            write_model(paths[-1], candidate.model, candidate.node, about=about)
    return paths
