"""Let a user's own loop drive the loop of the trainer step by step, with the same components and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.data.reading.collate import BatchesAsRead
from trainkit.errors import ConfigError, Problem, TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.run.session.loop_loss import FunctionLoss, LoopLoss, LossFunction
from trainkit.run.session.session import TaskSession
from trainkit.run.signals import REASONS, stop_error
from trainkit.strategies.base import Batch, Executor, LoopCall, StepOutcome
from trainkit.trainer.events import RollbackNeeded


class OwnLoop:
    """The steps of one task of a run, driven by a user's own loop.

    Between two calls the process counts as idle, because the user decides how long the loop itself takes.

    Args:
        task: the open session of the task.
        loop_loss: the loss of the steps, which the executor computes with.
        strategy: the name of the strategy, for messages.
    """

    def __init__(self, task: TaskSession, loop_loss: LoopLoss, *, strategy: str) -> None:
        self.task, self._loop_loss, self._name = task, loop_loss, strategy
        self._refused = task.parts.strategy.facts_in(task.plan.context).refused_calls
        self._compiles_step = task.cfg.compile.mode == "step"
        self._repeats = bool(task.plan.optimizers) or task.parts.precision.loss_scale().moves
        task.begin()
        self._current: tuple[Ticket, Sequence[Batch]] | None = None
        self._computed: tuple[Tensor | None, Tensor | float] | None = None
        self._in_batches = False
        self._begin()
        task.enter("idle")

    def _begin(self) -> None:
        self._loop = self.task.new_loop()
        self._tickets = iter(self._loop)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or the run was asked to stop."""
        return self._loop.is_over or self.task.run.state.step >= self.task.plan.last_step

    def batches(self) -> Iterator[list[Any]]:
        """Yield the batches of this rank's shards of each step; each step must be made before the next."""
        self._in_batches = True
        try:
            while (current := self._fetched()) is not None:
                ticket, batches = current
                yielded = list(batches)  # what the loop writes into them belongs to the step, and to its repetitions
                self._current = ticket, BatchesAsRead(yielded, keeps=self._repeats)
                yield yielded
                if self._current is not None and self._current[0] is ticket:
                    raise TrainingError(
                        f"no step was made with the batches of step {ticket.step}. Call session.step(), or "
                        "session.forward_backward() and session.update(), once for each iteration of "
                        "session.batches()."
                    )
        finally:
            self._in_batches = False

    def step(self, function: LossFunction | None) -> Tensor | None:
        """Make one step, again if its gradients overflowed; return the mean loss of this rank, () on the device."""
        self._use(function)
        self._refuse_with_gradients()
        step = self.task.run.state.step
        while True:
            ticket, batches = self._taken("step()")
            self.task.enter("data")
            outcome = self.task.executor.step(ticket, batches)
            if self._complete(batches, outcome) or self.task.run.state.step != step:
                return _mean(outcome.loss_sum, outcome.weight)
            following = self._fetched()
            self._current = following if following is None or following[0] != ticket else (ticket, batches)

    def forward_backward(self, function: LossFunction | None) -> Tensor | None:
        """Compute the gradients of the step; return the mean loss of this rank, () on the device."""
        self._use(function)
        executor = self._executor_apart()
        self._refuse_with_gradients()
        ticket, batches = self._taken("forward_backward()")
        self.task.enter("data")
        self._computed = executor.forward_backward(ticket, batches)
        self.task.enter("idle")
        return _mean(*self._computed)

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the mean gradients of the step, by name."""
        return self._executor_with_gradients("gradients()").gradients()

    def update(self) -> bool:
        """Update the parameters by the gradients; return False if they overflowed, and the step is to be repeated."""
        executor = self._executor_with_gradients("update()")
        assert self._current is not None
        self._computed = None
        _, batches = self._current
        self.task.enter("data")
        return self._complete(batches, executor.update())

    def evaluate(self) -> dict[str, float]:
        """Evaluate the validation splits, unless that is done at this step; return their metrics."""
        task = self.task
        if not task.validated:
            splits = ", ".join(task.parts.datasets)
            raise TrainingError(f"session.evaluate: the data has no validation split. It has: {splits}.")
        self._between_steps("evaluate()", task.evaluate)
        prefixes = tuple(f"{split}/" for split in task.validated)
        return {name: value for name, value in task.figures.items() if name.startswith(prefixes)}

    def save(self) -> None:
        """Write a checkpoint of this step, once."""
        self._between_steps("save()", self.task.save)

    def finish(self) -> dict[str, Any]:
        """End the training at the step at which the loop was left; return the content of result.json."""
        self._refuse_with_gradients()
        if not self.is_over:
            self._refuse_between_averages("the end of the loop")
        return self.task.finish()

    def _use(self, function: LossFunction | None) -> None:
        """Let the next step compute a loss; None: that of the objective.

        Raises:
            ConfigError: the strategy, or an objective with phases, does not support a loss for a single step.
        """
        if isinstance(self._loop_loss.configured, FunctionLoss):
            self._refuse(LoopCall.own_loss)
        if function is not None and function != self._loop_loss.configured.loss:
            self._refuse(LoopCall.own_loss)
            if self._loop_loss.configured.phases:
                rule = "has phases, each with its own loss. Use step() without loss_fn."
                raise ConfigError([Problem(key="objective", rule=rule)])
            if not callable(function):
                raise TrainingError(f"loss_fn is a {type(function).__name__}: give a function of (model, batch).")
            self.task.run.state.mark_own_loss()
        self._loop_loss.take(function)

    def _refuse(self, call: LoopCall) -> None:
        if self._compiles_step:
            rule = f"refuses {call.value}: a graph holds loss, gradients and update. Use compile.mode=default."
            raise ConfigError([Problem(key="compile.mode", value="step", rule=rule)])
        if reason := self._refused.get(call):
            raise ConfigError([Problem(key="strategy", value=self._name, rule=f"refuses {call.value}: {reason}")])

    def _executor_apart(self) -> Executor:
        self._refuse(LoopCall.apart)
        if self.task.plan.optimizers:
            rule = f"{LoopCall.apart.value} support one optimizer, and here each phase has its own update. Use step()."
            raise ConfigError([Problem(key="optimizers", rule=rule)])
        return self.task.executor

    def _executor_with_gradients(self, call: str) -> Executor:
        executor = self._executor_apart()
        if self._computed is None:
            raise TrainingError(f"session.{call} needs gradients: call session.forward_backward() first.")
        return executor

    def _refuse_with_gradients(self) -> None:
        if self._computed is not None:
            raise TrainingError("the gradients of this step are computed: call session.update() next.")

    def _refuse_between_averages(self, call: str) -> None:
        step = self.task.run.state.step
        following = self.task.plan.next_sync_step(step)
        if following != step and step < self.task.plan.last_step:
            raise TrainingError(
                f"{call} after step {step}: the replicas of strategy={self._name} differ until step {following}."
            )

    def _fetched(self) -> tuple[Ticket, Sequence[Batch]] | None:
        """Return the next ticket with its batches; None if the loop is over."""
        if self._current is None:
            self.task.enter("data")
            self._current = next(self._tickets, None)
            self.task.enter("idle")
        return self._current

    def _taken(self, call: str) -> tuple[Ticket, Sequence[Batch]]:
        if self._in_batches and self._current is None and not self.is_over:
            raise TrainingError(
                f"session.{call}: the step of these batches is already done. One iteration has one step."
            )
        current = self._fetched()
        if current is None:
            run, last = self.task.run, self.task.plan.last_step
            if run.stop_kind is not None:
                raise stop_error(
                    run.stop_kind, f"session.{call}: the run was asked to stop ({REASONS[run.stop_kind]})."
                )
            reason = run.stop_reason
            end = f"all {last} steps are done" if reason is None else f"the run ends ({reason})"
            raise TrainingError(f"session.{call}: {end}. End the loop, as `for ... in session.batches()` does.")
        return current

    def _complete(self, batches: Sequence[Batch], outcome: StepOutcome) -> bool:
        self._current = None
        try:
            is_done = self._loop.complete(batches, outcome)
        except RollbackNeeded as rollback:
            self.task.roll_back(rollback.step)
            self._begin()
            is_done = True
        self.task.enter("idle")
        return is_done

    def _between_steps(self, call: str, work: Callable[[], None]) -> None:
        self._refuse_between_averages(call)
        self._refuse_with_gradients()
        work()
        self.task.enter("idle")


def _mean(loss_sum: Tensor | None, weight: Tensor | float) -> Tensor | None:
    """Return the mean loss of a rank; None if it had no shard, NaN if it had no target."""
    if loss_sum is None:
        return None
    with torch.no_grad():
        return loss_sum / weight if isinstance(weight, Tensor) or weight else loss_sum * float("nan")
