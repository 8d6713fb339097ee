"""Examine the steps of a candidate, each compared with a plain loop that starts from the candidate's own checkpoint.

The answer uses the words of docs/numbers.md, and claims only what the evidence shows.

The probe: a short training under plain SGD, whose checkpoints give the gradient of every step by name.

SGD with momentum m keeps `b' = m b + g` for each parameter, and every strategy saves the optimizer state under the
canonical name of the parameter. So `g = b' - m b` is the gradient that the optimizer received, under every strategy,
without recording anything during a step. Without momentum, `g = (p - p') / lr`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.prove.comparing import ULPS, Comparison
from trainkit.prove.faults import (
    NO_GRADIENT,
    ORDER,
    Difference,
    Matching,
    Replay,
    Shard,
    Tensors,
    averaged_buffers,
    buffer_hypotheses,
    clipped,
    differing,
    differing_buffers,
    differing_parameters,
    distance,
    gradient_hypotheses,
    norm,
    update_hypotheses,
)
from trainkit.prove.plain_loop import PlainLoop
from trainkit.run.planning.plan import make_plan
from trainkit.run.runner import train
from trainkit.trainer.checkpoint.tensors import load
from trainkit.trainer.manifest import list_complete

MOMENTUM: Final = 2.0**-10
"""Small, so that the subtracted part is small; a power of two, so that the product is exact."""
_MOVE: Final = 0.01
"""The fraction of the parameters' norm by which the first step of a probe moves them."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The results that points 3 and 4 of the numbers contract derive from the shards of a step."""

    gradient: Tensors
    """The sum over all shards, divided by the total weight."""
    scale: Mapping[str, float]
    """The sum of the norms of the terms of that sum, which bounds its rounding."""
    buffers: Tensors
    """The buffers after the step."""


def add_up(shards: Iterable[Shard], buffers: Tensors, per_sample: Container[str] = ()) -> Expected:
    """Return the expected result of a step; the shards are consumed one at a time.

    Args:
        shards: the shards of the step.
        buffers: the buffers before the step.
        per_sample: names of the buffers that hold state per sample.
    """
    total: dict[str, Tensor] = {}
    scale: dict[str, float] = {}
    seen: list[Shard] = []
    for shard in shards:
        for name, gradient in shard.gradient.items():
            total[name] = total[name] + gradient if name in total else gradient
            scale[name] = scale.get(name, 0.0) + float(gradient.norm())
        seen.append(replace(shard, gradient={}))
    weight = sum(shard.weight for shard in seen) or 1.0
    size = sum(shard.size for shard in seen)
    return Expected(
        gradient={name: gradient / weight for name, gradient in total.items()},
        scale={name: value / weight for name, value in scale.items()},
        buffers=averaged_buffers(seen, [shard.size / size for shard in seen], buffers, per_sample),
    )


def differing_gradients(
    step: int, expected: Expected, found: Tensors, *, errors: dict[str, float], read_from: Tensors | None, rate: float
) -> Difference | None:
    """Compare the gradients of a step; None if all are equal up to rounding.

    Args:
        step: the step.
        expected: the result of the plain loop.
        found: the gradients of the candidate.
        errors: mapping that receives the relative error of each parameter.
        read_from: the parameters whose difference gave the gradient; None: the gradient itself was saved.
        rate: the learning rate that this difference was divided by.
    """
    least = NO_GRADIENT * math.hypot(*expected.scale.values())
    full = {name: expected.gradient.get(name, torch.zeros_like(grad)) for name, grad in found.items()}
    allowed: dict[str, float] = {}
    for name, grad in found.items():
        scale, epsilon = expected.scale.get(name, 0.0), torch.finfo(grad.dtype).eps
        read = 0.0 if read_from is None else 4 * epsilon * norm(read_from[f"param/{name}"]) / rate
        allowed[name] = max(ULPS * epsilon * scale, least) + read
        off = distance(full[name], grad)
        errors[name] = off / (scale if scale > least else least / NO_GRADIENT) if off else 0.0
    return differing(step, full, found, allowed)


def probe_rate(expected: Expected, params: Iterable[Tensor]) -> float:
    """Return the probe's learning rate: a power of two that moves the parameters by a hundredth in the first step."""
    gradient = math.hypot(*(float(grad.norm()) for grad in expected.gradient.values()))
    size = math.hypot(*(float(param.detach().norm()) for param in params))
    if not (gradient > 0 and size > 0 and math.isfinite(gradient)):
        return 1.0
    return float(2.0 ** math.floor(math.log2(_MOVE * size / gradient)))


def probe_config(cfg: RunConfig, *, rate: float, momentum: float = MOMENTUM) -> RunConfig:
    """Return the config with plain SGD at a constant rate: no decay, clipping, warmup or schedule."""
    fused = {"fused": True} if cfg.optimizer.get("fused") else {}
    optimizer = {"_target_": "torch.optim.SGD", "lr": rate, "momentum": momentum, **fused}
    return replace(
        cfg,
        optimizer=optimizer,
        schedule={"_target_": "trainkit.schedules.Constant"},
        clip=replace(cfg.clip, max_norm=None),
        warmup=replace(cfg.warmup, steps=None, epochs=None),
        lr_scaling=replace(cfg.lr_scaling, reference_batch=None),
    )


def transitions(
    folder: Path, initial: Mapping[str, Tensor]
) -> Iterator[tuple[int, Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """Yield (step, tensors before it, tensors after it) of every step between two checkpoints of a run."""
    before, updates = initial, 0
    for checkpoint in sorted(list_complete(folder / "checkpoints"), key=lambda one: one.step):
        after = load(checkpoint.folder).tensors
        if checkpoint.step == updates + 1:
            yield updates, before, after
        before, updates = after, checkpoint.step


def gradient_between(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Iterable[str], *, rate: float
) -> Tensors:
    """Return the gradient that the optimizer of a probe received between two checkpoints.

    Example:
        >>> one = {"param/w": torch.tensor([1.0])}
        >>> other = {"param/w": torch.tensor([0.5]), "optimizer/momentum_buffer/w": torch.tensor([2.0])}
        >>> gradient_between(one, other, ["w"], rate=0.25)["w"].tolist()
        [2.0]
        >>> gradient_between(one, {"param/w": torch.tensor([0.5])}, ["w"], rate=0.25)["w"].tolist()
        [2.0]
    """
    keeps = any(key.startswith("optimizer/momentum_buffer/") for key in after)
    found: dict[str, Tensor] = {}
    for name in names:
        slot = f"optimizer/momentum_buffer/{name}"
        if slot in after:
            now = after[slot]
            found[name] = now - MOMENTUM * before[slot] if slot in before else now
        elif keeps:  # a parameter without a gradient has no slot
            found[name] = torch.zeros_like(after[f"param/{name}"])
        else:
            found[name] = (before[f"param/{name}"] - after[f"param/{name}"]) / rate
    return found


_STEPS: Final = 3
"""Number of differing steps on which hypotheses are tested."""


@dataclass
class Probed:
    """The results of probing a candidate."""

    errors: dict[str, float] = field(default_factory=dict)
    """Parameter -> the largest error of its gradient, divided by the norms of the shards' gradients."""
    first: dict[str, int] = field(default_factory=dict)
    """Parameter -> the first update whose gradient differs beyond rounding."""
    gradients: Matching = field(default_factory=Matching)
    """The causes of differing gradients."""
    buffers: Matching = field(default_factory=Matching)
    """The causes of differing buffers."""

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparison of each gradient."""
        return [
            Comparison(
                name=f"gradient/{name}",
                verdict="different" if name in self.first else "rounding" if error else "equal",
                error=error,
                first_step=self.first.get(name),
            )
            for name, error in self.errors.items()
        ]

    @property
    def differs(self) -> bool:
        """Whether a gradient or a buffer of a step differs from the plain loop's."""
        return bool(self.gradients.differences or self.buffers.differences)


class Examiner:
    """Compares candidates with a plain loop at the common cut, in the precision that is used."""

    def __init__(self, reference: RunConfig) -> None:
        self._plan = make_plan(reference)
        self._loop = loop = PlainLoop(self._plan)
        self._initial = {name: tensor.cpu() for name, tensor in loop.tensors().items()}  # as those of a checkpoint
        with loop.reading():
            first = add_up(loop.shards(0), loop.buffers())
        self._rate = probe_rate(first, loop.params.values())
        least = NO_GRADIENT * math.hypot(*map(norm, first.gradient.values()))
        self.without_gradient = frozenset(name for name in loop.params if norm(first.gradient.get(name)) < least)
        """The parameters whose gradient in the first step is zero except for rounding."""
        masks = {name: (grad.abs() < least).cpu() for name, grad in first.gradient.items()}
        self.elements_without_gradient: dict[str, Tensor] = {
            name: mask for name, mask in masks.items() if name not in self.without_gradient and mask.any()
        }
        """Mask of the elements whose gradient is zero except for rounding, on the host; only for parameters where
        others are not.
        """

    def probe(self, candidate: RunConfig, *, num_replicas: int, folder: Path) -> Probed:
        """Train a candidate a few steps under plain SGD, and compare every step's gradients and buffers."""
        loop, sparse, probed = self._loop, self._loop.sparse, Probed()
        train(probe_config(candidate, rate=self._rate, momentum=0.0 if sparse else MOMENTUM), run_dir=folder)
        with loop.reading():
            for step, before, after in transitions(folder, self._initial):
                loop.load(before)
                expected = add_up(loop.shards(step), loop.buffers(), loop.per_sample)
                found, errors = gradient_between(before, after, loop.params, rate=self._rate), dict[str, float]()
                read_from = before if sparse else None
                wrong = differing_gradients(step, expected, found, errors=errors, read_from=read_from, rate=self._rate)
                for name, error in errors.items():
                    probed.errors[name] = max(probed.errors.get(name, 0.0), error)
                for name in () if wrong is None else wrong.found:
                    probed.first.setdefault(name, step + 1)
                of_gradients = partial(gradient_hypotheses, rate_is_apart=not sparse)
                moved = differing_buffers(step, expected.buffers, _below(after, "buffer/"))
                for matching, one, hypotheses in (
                    (probed.gradients, wrong, of_gradients),
                    (probed.buffers, moved, buffer_hypotheses),
                ):
                    if one is not None and matching.differences < _STEPS:
                        matching.add(one, hypotheses(loop.evidence(step, num_replicas=num_replicas)))
        return probed

    def replay(self, *, num_replicas: int, folder: Path) -> Matching:
        """Repeat each step of a candidate's own training from its checkpoint, and test why a step differs."""
        matching, cfg, loop = Matching(), self._plan.cfg, self._loop
        with loop.reading():
            for step, before, after in transitions(folder, self._initial):
                loop.load(before)
                evidence = loop.evidence(step, num_replicas=num_replicas)
                state = {key: before[key] for key in before if key.startswith("optimizer/")}
                factor = self._plan.rate.factor(step)
                replay = Replay(cfg=cfg, model=loop.model, params=loop.params, state=state, factor=factor)
                wrong = differing_parameters(
                    step,
                    replay.step(clipped(evidence.gradient, cfg.clip.max_norm)),
                    before=_below(before, "param/"),
                    found=_below(after, "param/"),
                    skipped=self.without_gradient,
                )
                if wrong is not None:
                    matching.add(wrong, update_hypotheses(evidence, replay))
                if matching.differences == _STEPS:
                    break
        return matching


def _below(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}


def explain_probe(probed: Probed) -> list[str]:
    """Return lines about differing gradients and about differing buffers."""
    return [*_lines(probed.gradients, "gradient"), *_lines(probed.buffers, "buffer")]


def explain_updates(updates: Matching) -> list[str]:
    """Return lines about differing updates whose gradients equal those of the plain loop."""
    state = (
        "not explained: every gradient, and every step taken alone from the candidate's own checkpoint, equals that of "
        "a plain loop; the difference is in state that a checkpoint does not hold"
    )
    return [*_lines(updates, "param")] or [state]


ORDERED: Final = f"explained by: {ORDER.named} ({ORDER.page})"
"""The line for numbers that are equal only up to rounding although equal bits are promised."""


def _lines(matching: Matching, kind: str) -> Iterator[str]:
    lines = [
        f"{cause.named}; {kind}/{match.name} of step {match.step + 1} fits this to {match.error:.1g}"
        f"{f' ({match.form})' if match.form else ''} ({cause.page})"
        for cause, match in matching.matches.items()
    ]
    if len(lines) == 1:
        yield f"explained by: {lines[0]}"
    elif lines:
        yield "explained by one of these, which the numbers cannot distinguish:"
        yield from (f"  {line}" for line in lines)
    elif matching.differences:
        wrong = {"gradient": "gradients", "buffer": "buffers", "param": "updates, from correct gradients,"}[kind]
        yield f"not explained: the {wrong} differ from a plain loop's in a way that no known fault explains; ruled out:"
        yield f"  {'; '.join(dict.fromkeys(cause.words for cause in matching.tested))}"
