"""Examine the steps of a candidate, each compared with a plain loop that starts from the candidate's own checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torch import Tensor

from trainkit.config.schema import RunConfig
from trainkit.run.diagnosis.differences import (
    Difference,
    differing_buffers,
    differing_gradients,
    differing_parameters,
    norm,
)
from trainkit.run.diagnosis.evidence import StepEvidence, Tensors, add_up
from trainkit.run.diagnosis.gradients import buffer_hypotheses, gradient_hypotheses
from trainkit.run.diagnosis.matching import Hypothesis, Matching
from trainkit.run.diagnosis.plain_loop import PlainLoop
from trainkit.run.diagnosis.probe import MOMENTUM, gradient_between, probe_config, probe_rate, transitions
from trainkit.run.diagnosis.updates import Replay, clipped, update_hypotheses
from trainkit.run.planning.plan import make_plan
from trainkit.run.runner import train

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
    """Parameter -> the largest error of its gradient, over the norms of the shards' gradients."""
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
        self._initial = loop.tensors()
        with loop.reading():
            first = add_up(loop.shards(0), loop.buffers())
        self._rate = probe_rate(first, loop.params.values())
        whole = sum(norm(grad) ** 2 for grad in first.gradient.values()) ** 0.5
        self.without_gradient = frozenset(
            name for name in loop.params if norm(first.gradient.get(name)) < _NO_GRADIENT * whole
        )
        """The parameters whose gradient in the first step is zero except for rounding."""
        self.elements_without_gradient: dict[str, Tensor] = {
            name: mask
            for name, grad in first.gradient.items()
            if name not in self.without_gradient and (mask := grad.abs() < _NO_GRADIENT * whole).any()
        }
        """Parameter -> mask of the elements of which the same is true; only parameters that have other elements."""

    def probe(self, candidate: RunConfig, *, num_replicas: int, folder: Path) -> Probed:
        """Train a candidate a few steps under plain SGD, and compare every step's gradients and buffers."""
        loop, sparse = self._loop, self._loop.sparse
        train(probe_config(candidate, rate=self._rate, momentum=0.0 if sparse else MOMENTUM), run_dir=folder)
        probed = Probed()
        with loop.reading():
            for step, before, after in transitions(folder, self._initial):
                loop.load(before)
                expected = add_up(loop.shards(step), loop.buffers())
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
