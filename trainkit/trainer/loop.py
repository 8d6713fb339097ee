"""Train over tickets, with the same loop for every strategy, and run the actions between steps.

These are triggers at intervals, the hooks of callbacks, and the agreement of the ranks to stop or save.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, get_args

import torch

from trainkit.errors import CALLBACK_NOTE, StopKind, TrainkitError
from trainkit.names import name_of
from trainkit.numerics.batch import Ticket
from trainkit.objectives.base import Collective
from trainkit.strategies.base import Batch, Data, Executor, GradientListener, PhaseListener, StepOutcome, UpdateTensors
from trainkit.trainer.events import Callback, Row, Run
from trainkit.trainer.metrics_accumulator import MetricsAccumulator, each_of
from trainkit.trainer.time_limit import TimeLimit


class Trigger(NamedTuple):
    """An action between steps, at intervals."""

    act: Callable[[], None]
    """The action; may be collective, so that triggers are due at the same steps on every rank."""
    next_after: Callable[[int], int]
    """Returns the step after which the action is due next, from the current step."""


def every_n_steps(steps: int) -> Callable[[int], int]:
    """Return a function from a step to the next multiple of `steps`.

    Example:
        >>> every_n_steps(5)(0), every_n_steps(5)(5), every_n_steps(5)(7)
        (5, 10, 10)
    """
    return lambda step: (step // steps + 1) * steps


def every_steps_or_epochs(
    act: Callable[[], None], every_steps: int | None, every_epochs: float | None, per_epoch: int
) -> list[Trigger]:
    """Return the triggers of an action: by steps, by epochs of `per_epoch` steps, or by both.

    Example:
        >>> [trigger.next_after(5) for trigger in every_steps_or_epochs(lambda: None, 4, 0.5, per_epoch=6)]
        [8, 6]
    """
    rules = []
    if every_steps is not None:
        rules.append(every_n_steps(every_steps))
    if every_epochs is not None:
        length = every_epochs * per_epoch
        rules.append(lambda step: max(step + 1, math.ceil((math.floor(step / length + 1e-9) + 1) * length - 1e-9)))
    return [Trigger(act=act, next_after=next_after) for next_after in rules]


def at_sync_points(trigger: Trigger, next_sync_step: Callable[[int], int]) -> Trigger:
    """Return the trigger delayed to the next step at which replicas hold identical parameters."""
    return trigger._replace(next_after=lambda step: next_sync_step(trigger.next_after(step)))


class TriggerSchedule:
    """The triggers of a run, checked only when one is due."""

    def __init__(self, triggers: Sequence[Trigger], step: int) -> None:
        self._triggers, self._due = triggers, [trigger.next_after(step) for trigger in triggers]
        self.next_step = min(self._due, default=1 << 62)

    def is_due(self, act: Callable[[], None], step: int) -> bool:
        """Return whether an action is still due after a step."""
        return any(trigger.act == act and due <= step for trigger, due in zip(self._triggers, self._due, strict=True))

    def act(self, step: int) -> None:
        """Run the actions that are due, in order."""
        for index, trigger in enumerate(self._triggers):
            if step >= self._due[index]:
                trigger.act()
                self._due[index] = trigger.next_after(step)
        self.next_step = min(self._due, default=1 << 62)


@dataclass(kw_only=True)
class TrainingLoop:
    """The loop of one training: `train` runs all of it, and the user's own loop uses the same parts step by step.

    Iteration yields the next computation; `complete` receives its outcome, before the next iteration.
    """

    run: Run
    executor: Executor
    data: Data
    step_end: Sequence[Callable[..., None]]
    """Hooks of callbacks, called after each step."""
    journal: MetricsAccumulator
    timeline: TriggerSchedule
    last_step: int
    """Updates after which the loop ends."""
    next_sync_step: Callable[[int], int]
    interrupted: Callable[[], StopKind | None] | None
    """Returns how this process was asked to stop; None: the ranks of a group agree by a trigger."""
    on_phase: PhaseListener
    expect_unchanged: Callable[[], None]
    """Called before a step if no action has run since the previous one."""
    on_acted: Callable[[], None]
    """Called after actions: the steps go on, and a hang from now on is that of a step."""
    is_over: bool = False
    """Whether all steps are done, or the run was asked to stop."""
    has_acted: bool = True
    """Whether an action has run since the last step."""

    def train(self) -> None:
        """Train until the last step, or until the run is asked to stop."""
        executor = self.executor
        for ticket, batches in self:
            if not self.has_acted:
                self.expect_unchanged()
            self.complete(batches, executor.step(ticket, batches))

    def __iter__(self) -> Iterator[tuple[Ticket, Sequence[Batch]]]:
        """Yield a ticket and the batch of each of its shards; yield it again if its gradients overflowed."""
        state, data, on_phase, local = self.run.state, self.data, self.on_phase, self.executor.local
        change = local.guard.change
        if state.step >= self.last_step:
            self.is_over = True
            return
        for ticket in self.executor.tickets(state, self.last_step):
            if change() is not None:
                local.refuse_changed_params(state.step)
            on_phase("data", ticket.step)
            yield ticket, data.fetch(ticket)
            if self.is_over:
                return

    def complete(self, batches: Sequence[Batch], outcome: StepOutcome) -> bool:
        """Record an outcome and run the actions that are due after its step; return whether the step is completed."""
        run, state = self.run, self.run.state
        self.has_acted = False
        if not state.advance(outcome):
            return False
        self.journal.note(outcome)
        for hook in self.step_end:
            hook(run, outcome)
        if run.example is None and batches:
            run.keep_example(batches[0])
        if state.step >= self.timeline.next_step:
            self.executor.local.refuse_changed_params(state.step, flags=state.step < self.run.num_steps)
            self.timeline.act(state.step)
            self.has_acted = True
            self.on_acted()
        if self.interrupted is not None and (kind := self.interrupted()) is not None:
            run.request_stop(kind, kind=kind)
        stops = run.stop_reason is not None and self.next_sync_step(state.step) == state.step
        self.is_over = stops or state.step >= self.last_step
        return True


_INTERVAL_S: Final = 0.5
_KINDS: Final[tuple[StopKind, ...]] = get_args(StopKind)


class StopSaveDecision(NamedTuple):
    """The common decision of all ranks after a step."""

    stop: StopKind | None
    """How some rank was asked to stop; None: continue."""
    save: bool
    """Whether a save is due, as decided by rank 0."""
    length: int = 0
    """The length of the training in updates, as estimated by rank 0; 0 without a time limit."""


class StopSaveConsensus:
    """Exchanges at intervals whether any rank was asked to stop, and whether rank 0 decides to save.

    An exchange at every step would be expensive. Rank 0 chooses the number of steps until the next one, about half a
    second, and includes it in each exchange, so that every rank takes part after the same step. With a time limit it
    also estimates the length of the training, and chooses fewer steps near its end.
    """

    def __init__(
        self,
        collective: Collective,
        requested: Callable[[], StopKind | None],
        save_due: Callable[[], bool] = lambda: False,
        limit: TimeLimit | None = None,
    ) -> None:
        self._collective, self._requested, self._save_due = collective, requested, save_due
        self._limit = limit
        self.interval = 1
        """Steps until the next exchange; the same on every rank."""
        self._exchanged_at = time.perf_counter()

    def ask(self, step: int = 0, used: float = 0.0) -> StopSaveDecision:
        """Return the decision after `step` updates in `used` seconds, the same on every rank. Collective."""
        reason = self._requested()
        votes = [float(reason == kind) for kind in _KINDS] + [0.0, 0.0, 0.0]
        if self._collective.rank == 0:
            per_step = (time.perf_counter() - self._exchanged_at) / self.interval
            interval = max(1, min(int(_INTERVAL_S / max(per_step, 1e-9)), 2 * self.interval))
            length = 0
            if self._limit is not None:
                length = self._limit.estimate(step, used)
                interval = min(interval, self._limit.steps_to_next(step, used, length))
            votes[-3:] = self._save_due(), interval, length
        *counts, save, interval, length = self._collective.sum(torch.tensor(votes, dtype=torch.float64)).tolist()
        self.interval, self._exchanged_at = int(interval), time.perf_counter()
        stop = next((kind for kind, count in zip(_KINDS, counts, strict=True) if count), None)
        return StopSaveDecision(stop=stop, save=bool(save), length=int(length))


_log = logging.getLogger(__name__)


class CallbackHooks:
    """The callbacks of a run, in the order of their calls.

    Args:
        callbacks: all callbacks of the run.
        observers_end_run: whether an error of an observer ends the run, like that of any other callback.
    """

    def __init__(self, callbacks: Sequence[Callback], *, observers_end_run: bool = False) -> None:
        self._callbacks, self._observers_end_run = list(callbacks), observers_end_run
        self._left_out: set[int] = set()
        self.running: tuple[Callback, str] | None = None
        """The callback and the hook that are running."""
        self.failures: list[dict[str, str]] = []
        """The disabled observers: callback, hook, error."""

    def __iter__(self) -> Iterator[Callback]:
        """Yield the callbacks."""
        return iter(self._callbacks)

    def call(self, hook: str, *args: Any, suppressed: tuple[type[Exception], ...] = ()) -> None:
        """Call a hook of every callback; after an error of a suppressed class, the others are still called."""
        for callback in self._callbacks:
            with contextlib.suppress(*suppressed):
                self._call(callback, hook, *args)

    def with_listeners(self, on_phase: PhaseListener) -> PhaseListener:
        """Return a listener that passes each phase to the listeners of the callbacks, and then to `on_phase`."""
        listeners = [listener for callback in self._callbacks if (listener := callback.phase_listener()) is not None]
        return each_of(*listeners, on_phase)

    def gradient_listener(self) -> GradientListener | None:
        """Return a listener that passes gradients to the listeners of the callbacks; None if no callback has one."""
        listeners = [listener for callback in self._callbacks if (listener := callback.gradient_listener()) is not None]
        return GradientListeners(listeners) if listeners else None

    def rate_factor(self) -> Callable[[int], float] | None:
        """Return the product of the callbacks' factors on the learning rate; None if no callback has one."""
        factors = [callback.rate_factor for callback in self._callbacks if _overrides(callback, "rate_factor")]
        return (lambda step: math.prod(factor(step) for factor in factors)) if factors else None

    @property
    def change_steps(self) -> bool:
        """Whether a callback that does more than observe is called inside of a step, or after each one."""
        acting = [callback for callback in self._callbacks if not callback.observes]
        hooks = ("phase_listener", "gradient_listener", "step_end")
        return any(_overrides(callback, hook) for callback in acting for hook in hooks)

    def of(self, hook: str) -> list[Callable[..., Any]]:
        """Return a hook of the callbacks that override it, to call at each step.

        Each returns the value of the hook; None for a disabled callback.
        """
        return [partial(self._call, callback, hook) for callback in self._callbacks if _overrides(callback, hook)]

    def log_row(self, run: Run, row: Row) -> None:
        """Log a row with the figures of the callbacks; the figures of the trainer keep their names."""
        for figures in self.of("row_figures"):
            row = {**(figures(run) or {}), **row}
        self.call("log", run, row)

    def _call(self, callback: Callback, hook: str, *args: Any) -> Any:
        if id(callback) in self._left_out:
            return None
        outer, self.running = self.running, (callback, hook)
        try:
            return getattr(callback, hook)(*args)
        except Exception as error:
            name, text = name_of(type(callback)), f"{type(error).__name__}: {error}"
            # An error of trainkit is an error of the run, such as a full disk or an invalid config.
            if not callback.observes or self._observers_end_run or isinstance(error, TrainkitError):
                error.add_note(f"{CALLBACK_NOTE}{name}, hook {hook}")
                raise
            self._left_out.add(id(callback))
            self.failures.append({"callback": name, "hook": hook, "error": text})
            _log.warning("the callback %s failed in %s and is disabled from now on: %s", name, hook, text)
            return None
        finally:
            self.running = outer


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(Callback, hook)


class GradientListeners:
    """Combines several listeners into one."""

    def __init__(self, listeners: Sequence[GradientListener]) -> None:
        self._listeners = listeners

    def wants(self, step: int) -> bool:
        """Return whether one of them wants the gradients of the step."""
        return any(listener.wants(step) for listener in self._listeners)

    def take(self, step: int, tensors: UpdateTensors) -> None:
        """Pass the tensors to the listeners that want the step."""
        for listener in self._listeners:
            if listener.wants(step):
                listener.take(step, tensors)
