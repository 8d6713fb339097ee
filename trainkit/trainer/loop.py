"""The training loop over tickets, the same for every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainkit.strategies.base import Data, Executor, PhaseListener
from trainkit.trainer.events import Callback, Run, overriding
from trainkit.trainer.metrics_accumulator import MetricsAccumulator


@dataclass(kw_only=True)
class Trigger:
    """An action between steps, at intervals."""

    act: Callable[[], None]
    """The action; may be collective, so that triggers are due at the same steps on every rank."""
    next_after: Callable[[int], int]
    """Returns the step after which it is due next, from the current step."""
    due: int = 0
    """The step after which it is due."""

    def reschedule(self, step: int) -> None:
        """Set the step after which it is due next, from the current step."""
        self.due = self.next_after(step)


class TriggerSchedule:
    """The triggers of a run, checked only when one is due."""

    def __init__(self, triggers: Sequence[Trigger], step: int) -> None:
        self._triggers = list(triggers)
        for trigger in self._triggers:
            trigger.reschedule(step)
        self.next_step = min((one.due for one in self._triggers), default=1 << 62)

    def is_due(self, act: Callable[[], None], step: int) -> bool:
        """Return whether an action is still due after a step."""
        return any(one.act == act and one.due <= step for one in self._triggers)

    def act(self, step: int) -> None:
        """Run the actions that are due, in order."""
        for trigger in self._triggers:
            if step >= trigger.due:
                trigger.act()
                trigger.reschedule(step)
        self.next_step = min((one.due for one in self._triggers), default=1 << 62)


def train(
    run: Run,
    *,
    executor: Executor,
    data: Data,
    callbacks: Sequence[Callback],
    journal: MetricsAccumulator,
    timeline: TriggerSchedule,
    last_step: int,
    next_sync_step: Callable[[int], int],
    interrupted: Callable[[], str | None],
    on_phase: PhaseListener,
) -> None:
    """Train until `last_step`, or until the run is asked to stop.

    Args:
        run: the view that callbacks receive; its state advances.
        executor: computes tickets.
        data: provides the batches of tickets.
        callbacks: their hooks are called.
        journal: accumulates the outcomes.
        timeline: the triggers between steps.
        last_step: updates after which to end.
        next_sync_step: returns the first step >= a step at which the run may stop.
        interrupted: returns why this process, if it is the only one, must stop now; the ranks of a group agree by a
            trigger.
        on_phase: receives ("data", step) before the batches of a step are fetched.
    """
    state, step_end = run.state, overriding(callbacks, "step_end")
    if state.step >= last_step:
        return
    for ticket in executor.tickets(state, last_step):
        on_phase("data", ticket.step)
        batches = data.fetch(ticket)
        outcome = executor.step(ticket, batches)
        if not state.advance(outcome):
            continue
        journal.note(outcome)
        for hook in step_end:
            hook(run, outcome)
        if batches:
            run.keep_example(batches[0])
        if state.step >= timeline.next_step:
            timeline.act(state.step)
        reason = interrupted()
        if reason is not None:
            run.request_stop(reason)
        if state.step >= last_step:
            return
        if run.stop_reason is not None and next_sync_step(state.step) == state.step:
            return
