"""Examine the steps of a candidate, each compared with a plain loop that starts from the candidate's own checkpoint.

The answer uses the words of docs/numbers.md, and claims only what the evidence shows.

The probe: a short training under plain SGD, whose checkpoints give the gradient of every step by name.

SGD with momentum m keeps `b' = m b + g` for each parameter, and every strategy saves the optimizer state under the
canonical name of the parameter. So `g = b' - m b` is the gradient that the optimizer received, under every strategy,
without recording anything during a step. Without momentum, `g = (p - p') / lr`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.run.diagnosis.evidence import Expected, StepEvidence, Tensors, add_up
from trainkit.run.diagnosis.matching import (
    ORDER,
    Cause,
    Difference,
    Hypothesis,
    Match,
    Matching,
    differing_buffers,
    differing_gradients,
    differing_parameters,
    norm,
)
from trainkit.run.diagnosis.plain_loop import PlainLoop
from trainkit.run.diagnosis.updates import Replay, buffer_hypotheses, clipped, gradient_hypotheses, update_hypotheses
from trainkit.run.planning.plan import make_plan
from trainkit.run.runner import train
from trainkit.trainer.checkpoint.loading import load
from trainkit.trainer.manifest import list_complete

MOMENTUM: Final = 2.0**-10
"""Small, so that the subtracted part is small; a power of two, so that the product is exact."""
_MOVE: Final = 0.01
"""The fraction of the parameters' norm by which the first step of a probe moves them."""


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
_NO_GRADIENT: Final = 1e-12
"""A gradient below this fraction of the model's is zero except for rounding; AdamW turns such rounding into
full steps.
"""


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
    def differs(self) -> bool:
        """Whether a gradient or a buffer of a step differs from the plain loop's."""
        return bool(self.gradients.differences or self.buffers.differences)

    def record(self, step: int, errors: Mapping[str, float], wrong: Difference | None) -> None:
        """Record the comparison of the gradients of one step."""
        for name, error in errors.items():
            self.errors[name] = max(self.errors.get(name, 0.0), error)
        for name in () if wrong is None else wrong.found:
            self.first.setdefault(name, step + 1)


class Examiner:
    """Compares candidates with a plain loop at the common cut, in the precision that is used."""

    def __init__(self, reference: RunConfig) -> None:
        self._plan = make_plan(reference)
        self._loop = loop = PlainLoop(self._plan)
        self._initial = {name: tensor.cpu() for name, tensor in loop.tensors().items()}  # as those of a checkpoint
        with loop.reading():
            first = add_up(loop.shards(0), loop.buffers())
        self._rate = probe_rate(first, loop.params.values())
        whole = sum(norm(grad) ** 2 for grad in first.gradient.values()) ** 0.5
        self.without_gradient = frozenset(
            name for name in loop.params if norm(first.gradient.get(name)) < _NO_GRADIENT * whole
        )
        """The parameters whose gradient in the first step is zero except for rounding."""
        self.elements_without_gradient: dict[str, Tensor] = {
            name: mask.cpu()
            for name, grad in first.gradient.items()
            if name not in self.without_gradient and (mask := grad.abs() < _NO_GRADIENT * whole).any()
        }
        """Mask of the elements whose gradient is zero except for rounding, on the host; only for parameters where
        others are not.
        """

    def probe(self, candidate: RunConfig, *, num_replicas: int, folder: Path) -> Probed:
        """Train a candidate a few steps under plain SGD, and compare every step's gradients and buffers."""
        loop, sparse = self._loop, self._loop.sparse
        train(probe_config(candidate, rate=self._rate, momentum=0.0 if sparse else MOMENTUM), run_dir=folder)
        probed = Probed()
        with loop.reading():
            for step, before, after in transitions(folder, self._initial):
                loop.load(before)
                expected = add_up(loop.shards(step), loop.buffers(), loop.per_sample)
                found, errors = gradient_between(before, after, loop.params, rate=self._rate), dict[str, float]()
                read_from = before if sparse else None
                wrong = differing_gradients(step, expected, found, errors=errors, read_from=read_from, rate=self._rate)
                probed.record(step, errors, wrong)
                self._test(probed.gradients, wrong, self._gradient_hypotheses, num_replicas)
                moved = differing_buffers(step, expected.buffers, _below(after, "buffer/"))
                self._test(probed.buffers, moved, buffer_hypotheses, num_replicas)
        return probed

    def replay(self, *, num_replicas: int, folder: Path) -> Matching:
        """Repeat each step of a candidate's own training from its checkpoint, and test why a step differs."""
        matching = Matching()
        with self._loop.reading():
            for step, before, after in transitions(folder, self._initial):
                self._loop.load(before)
                evidence = self._loop.evidence(step, num_replicas=num_replicas)
                replay = self._replay_of(step, before)
                wrong = differing_parameters(
                    step,
                    replay.step(clipped(evidence.gradient, replay.max_norm)),
                    before=_below(before, "param/"),
                    found=_below(after, "param/"),
                    skipped=self.without_gradient,
                )
                if wrong is not None:
                    matching.add(wrong, update_hypotheses(evidence, replay))
                if matching.differences == _STEPS:
                    break
        return matching

    def _gradient_hypotheses(self, evidence: StepEvidence) -> Iterator[Hypothesis]:
        return gradient_hypotheses(evidence, rate_is_apart=not self._loop.sparse)

    def _test(
        self,
        matching: Matching,
        wrong: Difference | None,
        hypotheses: Callable[[StepEvidence], Iterator[Hypothesis]],
        num_replicas: int,
    ) -> None:
        if wrong is not None and matching.differences < _STEPS:
            matching.add(wrong, hypotheses(self._loop.evidence(wrong.step, num_replicas=num_replicas)))

    def _replay_of(self, step: int, before: Mapping[str, Tensor]) -> Replay:
        return Replay(
            cfg=self._plan.cfg,
            model=self._loop.model,
            params=self._loop.params,
            state={key: before[key] for key in before if key.startswith("optimizer/")},
            factor=self._plan.rate.factor(step),
            max_norm=self._plan.cfg.clip.max_norm,
        )


def _below(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}


def explain_probe(probed: Probed) -> Iterator[str]:
    """Yield a line about differing gradients, and a line about differing buffers."""
    if probed.gradients.differences:
        yield from _lines(probed.gradients, "gradient")
    if probed.buffers.differences:
        yield from _lines(probed.buffers, "buffer")


def explain_updates(updates: Matching) -> Iterator[str]:
    """Yield a line about differing updates whose gradients equal those of the plain loop."""
    if updates.differences:
        yield from _lines(updates, "param")
    else:
        yield (
            "not explained: every gradient, and every step taken alone from the candidate's own checkpoint, equals "
            "that of a plain loop; the difference is in state that a checkpoint does not hold"
        )


def explain_order() -> str:
    """Return the line for numbers that are equal only up to rounding although equal bits are promised."""
    return f"explained by: {_named(ORDER)} ({ORDER.page})"


def _lines(matching: Matching, kind: str) -> Iterator[str]:
    found = matching.matches
    if len(found) == 1:
        yield f"explained by: {_named(found[0].cause)}; {_fit(found[0], kind)} ({found[0].cause.page})"
    elif found:
        yield "explained by one of these, which the numbers cannot distinguish:"
        yield from (f"  {_named(match.cause)}; {_fit(match, kind)} ({match.cause.page})" for match in found)
    else:
        wrong = {"gradient": "gradients", "buffer": "buffers", "param": "updates, from correct gradients,"}[kind]
        yield f"not explained: the {wrong} differ from a plain loop's in a way that no known fault explains; ruled out:"
        yield f"  {'; '.join(dict.fromkeys(cause.words for cause in matching.tested))}"


def _named(cause: Cause) -> str:
    return f"{cause.title}: {cause.words}"


def _fit(match: Match, kind: str) -> str:
    form = f" ({match.form})" if match.form else ""
    return f"{kind}/{match.name} of step {match.step + 1} fits this to {match.error:.1g}{form}"
