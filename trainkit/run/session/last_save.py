"""The last checkpoint of a training that ends with an error: of the end of its last step, or none."""

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
    """Return whether an error may leave the training as it was after its last step, so that it can be saved.

    Errors of trainkit say that something is wrong with the training (numbers, replicas, checkpoints), but for those of
    data, memory and lost connections. After the second Ctrl-C nothing more is done.

    Example:
        >>> leaves_state_whole(ValueError()), leaves_state_whole(KeyboardInterrupt()), leaves_state_whole(DataError())
        (True, False, True)
    """
    if isinstance(error, TrainkitError):
        return isinstance(error, DataError | OutOfMemoryError | LinkError)
    return isinstance(error, Exception | SystemExit) and not isinstance(error, RollbackNeeded)


class LastSave:
    """Saves after an error, on the owner, if the state is certain and no other rank is needed.

    Args:
        run: what callbacks see of the run.
        keeper: writes checkpoints.
        scorer: knows what was evaluated.
    """

    def __init__(self, run: Run, keeper: Checkpointer, scorer: EvalRunner) -> None:
        self._run, self._keeper, self._scorer = run, keeper, scorer
        self._training: tuple[TriggerSchedule, MetricsAccumulator, Callable[[], None]] | None = None
        self._states: dict[str, Any] | None = None

    def begin(self, timeline: TriggerSchedule, journal: MetricsAccumulator, evaluate: Callable[[], None]) -> None:
        """Note that steps begin.

        Args:
            timeline: what happens between steps.
            journal: keeps the outcomes of steps.
            evaluate: what the timeline does to evaluate.
        """
        self._training = timeline, journal, evaluate

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep the states of the callbacks: an evaluation that stops in the middle has been shown to some of them."""
        self._states = self._keeper.callback_states()
        yield
        self._states = None

    def save(self, error: BaseException, enter: Callable[[str], None]) -> None:
        """Save where the training stands after an error, and say so.

        An error that comes of this is told and not raised: the one that ends the training counts.

        Args:
            error: what ends the training.
            enter: is told the phase that begins.
        """
        if self._training is None or not self._run.is_owner or not leaves_state_whole(error):
            return
        (timeline, journal, evaluate), step = self._training, self._run.state.step
        try:
            enter("save")
            due = timeline.is_due(evaluate, step) and not self._scorer.is_up_to_date
            saved = journal.is_sound() and self._keeper.save_alone(
                metric=self._scorer.metric, callbacks=self._states, evaluation_due=due
            )
        except Exception as problem:  # noqa: BLE001 - a device that has failed, a full disk
            said = next(iter(str(problem).splitlines()), type(problem).__name__)
            print(f"step {step} could not be saved after the error: {said}", file=sys.stderr, flush=True)  # noqa: T201
            return
        if saved:
            print(f"an error came after step {step}, which is saved", file=sys.stderr, flush=True)  # noqa: T201
