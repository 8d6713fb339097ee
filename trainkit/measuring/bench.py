"""Measure the same training under several choices: each round runs one turn of every choice."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from trainkit.config.schema import RunConfig
from trainkit.errors import StorageError
from trainkit.measuring.figures import Choice
from trainkit.measuring.turns import Target, Turn, config_until, measured_config, run_turn
from trainkit.run.signals import raised_stops

WARMUP_STEPS: Final = 10
"""Steps at the start of each turn that are not measured."""
MOST_STEPS: Final = 100_000
_FIRST_STEPS: Final = 20
"""Measured steps of the turn before the first round, which determines the number of steps of the other turns."""
_FEWEST_STEPS: Final = 10
_TURN_S: Final = 2.0
"""Intended duration of the measured steps of a turn, unless the user gives their number."""
_MOST_TRIES, _PAUSE_S = 100, 0.1
"""Tries to remove a folder, and seconds between them."""


class StartTurn(Protocol):
    """Runs a turn."""

    def __call__(self, cfg: RunConfig, folder: Path) -> Turn:
        """Train a config in a new folder, and return its measurement."""


@dataclass(kw_only=True)
class Candidate:
    """A training to measure."""

    label: str
    """The arguments that distinguish it from the other candidates."""
    cfg: RunConfig
    """The checked config."""
    num_steps: int
    """Steps of the whole training."""

    def most_steps(self) -> int:
        """Return the number of steps after the warm-up."""
        return min(self.num_steps - WARMUP_STEPS, MOST_STEPS)


def bench(
    candidates: Sequence[Candidate],
    *,
    rounds: int,
    steps: int | None = None,
    target: Target | None = None,
    log: Callable[[str], None] = lambda _: None,
    start: StartTurn = run_turn,
) -> list[Choice]:
    """Measure each candidate once per round, in turns; each turn is a training in its own processes.

    Only one turn runs at a time. A candidate whose turn fails has no further turns; the others continue.

    Args:
        candidates: the trainings to measure.
        rounds: turns of each candidate.
        steps: measured steps of a turn; None: as many as take two seconds; an uncounted turn before the first round
            determines them.
        target: train until this result instead of a number of steps.
        log: receives a line when a turn begins.
        start: runs a turn in a folder that does not exist yet.

    Returns:
        The measurements, in the order of the candidates.
    """
    found = [Choice(label=one.label) for one in candidates]
    with scratch_folder() as folder:
        if target is not None:
            configs = [config_until(one.cfg, target) for one in candidates]
        elif steps is not None:
            configs = [_config(one, steps) for one in candidates]
        else:
            configs = [
                _calibrated(one, choice, partial(start, folder=folder / str(place)), log)
                for place, (one, choice) in enumerate(zip(candidates, found, strict=True))
            ]
        for number in range(rounds):
            for place, choice in enumerate(found):
                if not choice.failure:
                    log(f"round {number + 1} of {rounds}: {choice.label}")
                    choice.add(start(configs[place], folder / f"{place}_{number}"))
    return found


def _calibrated(
    one: Candidate, choice: Choice, start: Callable[[RunConfig], Turn], log: Callable[[str], None]
) -> RunConfig:
    """Run a turn that does not count, and return a config whose turns take about two seconds."""
    log(f"warm-up: {choice.label}")
    choice.cold = start(_config(one, _FIRST_STEPS))
    choice.failure = choice.cold.failure
    figures = choice.cold.figures
    step_s = figures["seconds"] / max(figures["steps"], 1) if figures else math.inf
    return _config(one, max(_FEWEST_STEPS, math.ceil(_TURN_S / max(step_s, 1e-6))))


def _config(one: Candidate, steps: int) -> RunConfig:
    return measured_config(one.cfg, warmup_steps=WARMUP_STEPS, num_steps=max(1, min(steps, one.most_steps())))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder for the files of all turns; a stop signal ends the block, and the folder is removed.

    Raises:
        StorageError: it cannot be created. TerminatedError, HangupError: a stop signal was received.
    """
    with raised_stops(), ExitStack() as stack:
        try:
            folder = Path(tempfile.mkdtemp(prefix="trainkit-bench-"))
        except OSError as error:
            where = "TMPDIR=FOLDER chooses where bench keeps the files of its trainings."
            raise StorageError(f"bench has no folder for temporary files: {error.strerror}. {where}") from error
        for _ in range(2):  # a signal may interrupt the first
            stack.callback(_remove, folder)
        yield folder


def _remove(folder: Path) -> None:
    """Remove a folder; processes of an ended turn may still write for a moment."""
    tries = 0
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            tries += 1
            if tries == _MOST_TRIES:
                raise
            time.sleep(_PAUSE_S)
