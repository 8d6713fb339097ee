"""A step in phases: passes over the same shards, each with its own loss and an update of its own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import mix64, name_id
from trainkit.strategies.base import Batch, LeftOut, Phase, Status, StepContext, StepOutcome, UpdateParams
from trainkit.strategies.core.optimizer import NamedSteppers, Updater
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep, apply_update, observer

R = TypeVar("R", bound=Replica)


@dataclass(frozen=True, kw_only=True)
class _Part(Generic[R]):
    """The objects for computing a phase."""

    phase: Phase
    replica: R
    """The replica that computes and updates the parameters of the phase's optimizer."""
    stepper: NamedSteppers
    others: tuple[nn.Parameter, ...]
    """The trainable parameters of the model that belong to other phases."""
    contexts: tuple[StepContext, ...]
    """The contexts, one per pass of a step."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute no gradients of the other phases' parameters inside."""
        for param in self.others:
            param.requires_grad_(False)
        try:
            yield
        finally:
            for param in self.others:
                param.requires_grad_(True)


@dataclass(kw_only=True)
class _Progress:
    """The completed passes of a step: after an overflow, a pass is repeated without the earlier ones."""

    step: int
    works: list[tuple[str, ShardStep, Tensor | None]] = field(default_factory=list)
    """Phase, the pass, the norm of its gradient."""


class PhasedStep(Generic[R]):
    """Runs the steps of a replica whose objective has phases, or which has several optimizers.

    Each pass of a phase is like a whole step: forward and backward over the shards, one reduction, one update. All
    passes of a step have the same batch. Without phases there is one pass, and all optimizers step.

    Args:
        whole: the replica, with all parameters and optimizers.
        stepper: steps the optimizers.
        training: plan, objective, phases and update rule.
        make_step: function that makes one pass.
    """

    def __init__(
        self,
        whole: R,
        stepper: NamedSteppers,
        training: StepContext,
        make_step: Callable[[R, Ticket, Sequence[Batch], StepContext], ShardStep],
    ) -> None:
        self._whole, self._training, self._make_step = whole, training, make_step
        self._parts = [_part(whole, stepper, training, phase) for phase in training.phases]
        self._parts = self._parts or [_only_part(whole, stepper, training)]
        self._progress = _Progress(step=-1)

    def take(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Run every pass of a step, or the rest of one that overflowed."""
        step, whole = ticket.step, self._whole
        if self._progress.step != step:
            self._progress = _Progress(step=step)
        done = self._progress.works
        passes = [(part, one) for part in self._parts for one in part.contexts[: part.phase.num_passes(step)]]
        for part, context in passes[len(done) :]:
            work, status, norm = self._pass(part, context, ticket, batches)
            if status is Status.retry:
                return StepOutcome(step, status, work.loss_sum, work.weight)
            done.append((part.phase.name, work, norm))
            if status is Status.skipped:
                self.forget()
                part.replica.buffers.recover()
                whole.end_update(step)
                left_out = (LeftOut.whole(self._training.plan, step),)
                return StepOutcome(step, status, work.loss_sum, work.weight, None, left_out)
        self.forget()
        whole.end_update(step)
        return _outcome(step, done, has_phases=bool(self._training.phases))

    def _pass(
        self, part: _Part[R], context: StepContext, ticket: Ticket, batches: Sequence[Batch]
    ) -> tuple[ShardStep, Status, Tensor | None]:
        whole, replica = self._whole, part.replica
        replica.set_loss_scale(whole.loss_scale)
        part.stepper.begin_step(ticket.step)
        with part.alone():
            work = self._make_step(replica, ticket, batches, context)
            sums = work.run()
        replica.on_phase("update", ticket.step)
        whole.begin_update(ticket.step)
        status, norm = apply_update(
            replica,
            sums,
            work.divisor,
            context.rule(ticket.step),
            loss_sum=work.loss_sum,
            observe=observer(replica, context, ticket.step),
        )
        whole.set_loss_scale(replica.loss_scale)
        return work, status, norm

    def forget(self) -> None:
        """Begin the next step with its first pass."""
        self._progress = _Progress(step=-1)

    def reset_buffers(self) -> None:
        """Restore the buffers that the forward passes of an interrupted step have changed."""
        for part in self._parts:
            part.replica.buffers.recover()

    def close(self) -> None:
        """Close the reducers of the phases; not collective."""
        for part in self._parts:
            if part.replica is not self._whole:
                part.replica.reducer.close()


def _part(whole: R, stepper: NamedSteppers, training: StepContext, phase: Phase) -> _Part[R]:
    own = stepper.only(phase.name)
    replica = whole.restricted(own.names, own)
    trained = dict(whole.model.named_parameters())
    key = name_id(phase.name)
    contexts = tuple(
        replace(training, phase=phase.name, draw_key=mix64(key ^ number), rule=_at_own_rate(training))
        for number in range(phase.repeats)
    )
    others = tuple(trained[name] for name in whole.params if name not in own.names)
    return _Part(phase=phase, replica=replica, stepper=own, others=others, contexts=contexts)


def _only_part(whole: R, stepper: NamedSteppers, training: StepContext) -> _Part[R]:
    context = replace(training, rule=_at_own_rate(training))
    return _Part(phase=Phase(name=""), replica=whole, stepper=stepper, others=(), contexts=(context,))


def _at_own_rate(training: StepContext) -> Callable[[int], UpdateParams]:
    """Return the rule of an update whose optimizers have their own learning rates."""
    return lambda version: replace(training.rule(version), lr_factor=1.0)


def set_rates(stepper: Updater, step: int, rule: UpdateParams) -> UpdateParams:
    """Set the learning rates of a step whose optimizers have their own; return the rule of its one update."""
    if not isinstance(stepper, NamedSteppers):
        return rule
    stepper.begin_step(step)
    return replace(rule, lr_factor=1.0)


def _outcome(step: int, done: Sequence[tuple[str, ShardStep, Tensor | None]], *, has_phases: bool) -> StepOutcome:
    """Return the outcome of a step: the sums over its passes, and those of each phase."""
    losses = [work.loss_sum for _, work, _ in done if work.loss_sum is not None]
    norms = [norm for _, _, norm in done if norm is not None]
    phases: dict[str, tuple[Tensor | None, Tensor | float]] = {}
    for name, work, _ in done:
        before, weight = phases.get(name, (None, 0.0))
        phases[name] = _sum(before, work.loss_sum), weight + work.weight
    terms: dict[str, Tensor] = {}
    for _, work, _ in done:
        terms.update({name: terms[name] + term if name in terms else term for name, term in work.terms.items()})
    return StepOutcome(
        step,
        Status.applied,
        sum(losses[1:], losses[0]) if losses else None,
        sum((work.weight for _, work, _ in done[1:]), done[0][1].weight),
        torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]))
        if len(norms) > 1
        else norms[0]
        if norms
        else None,
        terms=terms,
        phases=phases if has_phases else {},
    )


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other
