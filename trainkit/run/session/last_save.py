"""The last checkpoint of a training that ends with an error: the state after its last step, or none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainkit.errors import DataError, LinkError, OutOfMemoryError, TrainkitError
from trainkit.run.session.checkpointer import Checkpointer
from trainkit.run.session.evaluation import EvalRunner
from trainkit.trainer.events import Run
from trainkit.trainer.left_out import RollbackNeeded
from trainkit.trainer.loop import TriggerSchedule
from trainkit.trainer.metrics_accumulator import MetricsAccumulator

__all__ = ["LastSave", "leaves_state_whole"]


def leaves_state_whole(error: BaseException) -> bool:
    """Return whether the state after the last step may still be valid after an error, so that it can be saved.

    Errors of trainkit mean that something is wrong with the training (numbers, replicas, checkpoints), except for those
    of data, memory and lost connections. After a second Ctrl-C nothing is saved.

    Example:
        >>> leaves_state_whole(ValueError()), leaves_state_whole(KeyboardInterrupt()), leaves_state_whole(DataError())
        (True, False, True)
    """
    if isinstance(error, TrainkitError):
        return isinstance(error, DataError | OutOfMemoryError | LinkError)
    return isinstance(error, Exception | SystemExit) and not isinstance(error, RollbackNeeded)


class LastSave:
    """Saves after an error, on rank 0, if the state is certainly valid and no other rank is needed.

    Args:
        run: the view of the run that callbacks receive.
        checkpointer: writes checkpoints.
        evaluation: holds the evaluation results.
    """

    def __init__(self, run: Run, checkpointer: Checkpointer, evaluation: EvalRunner) -> None:
        self._run, self._checkpointer, self._evaluation = run, checkpointer, evaluation
        self._training: tuple[TriggerSchedule, MetricsAccumulator, Callable[[], None]] | None = None
        self._states: dict[str, Any] | None = None

    def begin(self, timeline: TriggerSchedule, journal: MetricsAccumulator, evaluate: Callable[[], None]) -> None:
        """Record that the steps begin.

        Args:
            timeline: the triggers between steps.
            journal: accumulates the outcomes of steps.
            evaluate: the action of the evaluation trigger.
        """
        self._training = timeline, journal, evaluate

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Store the states of the callbacks: an evaluation that fails midway may have changed some of them."""
        self._states = self._checkpointer.callback_states()
        yield
        self._states = None

    def save(self, error: BaseException, enter: Callable[[str], None]) -> None:
        """Save the state of the training after an error, and print a line about it.

        An error of the save itself is printed and not raised: the error that ends the training is more important.

        Args:
            error: the error that ends the training.
            enter: receives the phase that begins.
        """
        if self._training is None or not self._run.is_owner or not leaves_state_whole(error):
            return
        (timeline, journal, evaluate), step = self._training, self._run.state.step
        try:
            enter("save")
            due = timeline.is_due(evaluate, step) and not self._evaluation.is_up_to_date
            saved = journal.is_sound() and self._checkpointer.save_alone(
                metric=self._evaluation.metric, callbacks=self._states, evaluation_due=due
            )
        except Exception as problem:  # noqa: BLE001 - a device that has failed, a full disk
            reason = next(iter(str(problem).splitlines()), type(problem).__name__)
            print(f"step {step} could not be saved after the error: {reason}", file=sys.stderr, flush=True)  # noqa: T201
            return
        if saved:
            print(f"an error came after step {step}, which is saved", file=sys.stderr, flush=True)  # noqa: T201
