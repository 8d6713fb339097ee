"""The loop over tickets, the same for every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainkit.strategies.base import Data, Placed, StepContext, Strategy
from trainkit.trainer.events import Callback, Run, overriding
from trainkit.trainer.metrics_accumulator import MetricsAccumulator

__all__ = ["Trigger", "TriggerSchedule", "train"]


@dataclass(kw_only=True)
class Trigger:
    """Something done between steps, now and then."""

    act: Callable[[], None]
    """Does it; may be collective, so occasions fall on the same steps on every rank."""
    next_after: Callable[[int], int]
    """The step after which it is due next, from the step it is at."""
    due: int = 0
    """The step after which it is due."""


class TriggerSchedule:
    """The occasions of a run, looked at only when one is due."""

    def __init__(self, occasions: Sequence[Trigger], step: int) -> None:
        self._occasions = list(occasions)
        for occasion in self._occasions:
            occasion.due = occasion.next_after(step)
        self.next_step = min((one.due for one in self._occasions), default=1 << 62)

    def is_due(self, act: Callable[[], None], step: int) -> bool:
        """Return whether something that is done now and then is still to be done after a step."""
        return any(one.act == act and one.due <= step for one in self._occasions)

    def act(self, step: int) -> None:
        """Do what is due, in order."""
        for occasion in self._occasions:
            if step >= occasion.due:
                occasion.act()
                occasion.due = occasion.next_after(step)
        self.next_step = min((one.due for one in self._occasions), default=1 << 62)


def train(
    run: Run,
    *,
    strategy: Strategy,
    placed: Placed,
    data: Data,
    training: StepContext,
    callbacks: Sequence[Callback],
    journal: MetricsAccumulator,
    timeline: TriggerSchedule,
    last_step: int,
    interrupted: Callable[[], str | None],
) -> None:
    """Train until `last_step`, or until the run is asked to stop.

    Args:
        run: what callbacks see; its state advances.
        strategy: computes tickets.
        placed: what the strategy placed here.
        data: gives their batches.
        training: plan, objective and update rule.
        callbacks: look on.
        journal: keeps the outcomes.
        timeline: what happens between steps.
        last_step: updates after which to end.
        interrupted: why this process, being the only one, shall stop now; ranks of a group agree on the timeline.
    """
    state, step_end = run.state, overriding(callbacks, "step_end")
    if state.step >= last_step:
        return
    for ticket in strategy.tickets(training.plan, state, placed, last_step):
        if placed.on_phase is not None:
            placed.on_phase("data", ticket.step)
        batches = data.fetch(ticket)
        outcome = strategy.step(placed, ticket, batches, training)
        if not state.advance(outcome):
            continue
        journal.note(outcome)
        for hook in step_end:
            hook(run, outcome)
        if run.example is None and batches:
            run.example = batches[0]
        if state.step >= timeline.next_step:
            timeline.act(state.step)
        reason = interrupted()
        if reason is not None:
            run.request_stop(reason)
        if state.step >= last_step:
            return
        if run.stop_reason is not None and strategy.settles_at(state.step) == state.step:
            return
