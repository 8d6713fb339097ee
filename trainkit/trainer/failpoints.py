"""Plant failures (failpoints), to test the effect of a process that dies, hangs or raises at a known moment.

    TRAINKIT_FAIL="rank=1,step=3,phase=backward,action=kill"

Separate several by `;`. Without `rank`, rank 0 fails; with `index`, the task of that index, on any rank; without `step`
or `phase`, in every one; with `attempt`, only in that attempt of the supervisor; with `life`, only in that restart of a
separately restarted task; with `while`, only as long as that file exists. Actions: kill (SIGKILL), stop (SIGSTOP), hang
(sleeps forever), raise (RuntimeError), full (no space left on device), exit (ends the process with code 7, without an
error report), slow (sleeps for 0.05 s and continues).
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from trainkit.errors import ConfigError, Problem

Phase = Literal[
    "start", "join", "load", "callback", "evaluate", "save", "data", "compile", "forward", "backward", "reduce",
    "update", "end", "idle",
]  # fmt: skip
"""The phases of a rank, in their order within one number of completed updates.

`join`: joins the process group and places the model. `load`: restores a checkpoint. `callback`: passes metrics or a
checkpoint to the callbacks. `compile`: torch.compile runs. `end`: the training has ended. `idle`: waits for requests.
"""

VARIABLE: Final = "TRAINKIT_FAIL"
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
ACTIONS: Final = ("kill", "stop", "hang", "raise", "full", "exit", "slow")


@dataclass(frozen=True, kw_only=True)
class Failpoint:
    """One planted failure."""

    action: str
    rank: int = 0
    step: int | None = None
    phase: str | None = None
    attempt: int | None = None
    life: int | None = None
    index: int | None = None
    marker: str | None = None

    def concerns(self, environ: Mapping[str, str]) -> bool:
        """Return whether this failpoint applies to the process of an environment."""
        if self.attempt is not None and str(self.attempt) != environ.get("TRAINKIT_ATTEMPT", "0"):
            return False
        if self.life is not None and str(self.life) != environ.get("TRAINKIT_LIFE", "0"):
            return False
        rank = environ.get("TRAINKIT_RANK", "0")
        if self.index is not None:
            return str(self.index) == environ.get("TRAINKIT_INDEX", rank)
        return str(self.rank) == rank

    def matches(self, phase: str, step: int) -> bool:
        """Return whether this failpoint applies to a phase and step."""
        now = self.phase in (None, phase) and self.step in (None, step)
        return now and (self.marker is None or os.path.exists(self.marker))  # noqa: PTH110 - no path is wanted

    def fail(self, phase: str, step: int) -> None:
        """Execute the action."""
        if self.action == "raise":
            raise RuntimeError(f"failpoint in {phase} of step {step}")
        if self.action == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.action == "exit":
            os._exit(7)
        if self.action == "slow":
            time.sleep(0.05)
            return
        if self.action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)
        while self.action != "stop":
            time.sleep(3600)


def parse(text: str) -> tuple[Failpoint, ...]:
    """Parse failpoints.

    Raises:
        ConfigError: a key, number, phase or action does not exist.

    Example:
        >>> parse("step=3,phase=save,action=kill")
        (Failpoint(action='kill', rank=0, step=3, phase='save', attempt=None, life=None, index=None, marker=None),)
    """
    return tuple(_parse_one(part) for part in text.split(";") if part.strip())


def _parse_one(text: str) -> Failpoint:
    pairs = dict(pair.strip().partition("=")[::2] for pair in text.split(","))
    numbers = {
        key: int(pairs[key]) for key in ("rank", "index", "step", "attempt", "life") if pairs.get(key, "").isdigit()
    }
    unknown = {key: value for key, value in pairs.items() if key not in numbers}
    phase = unknown.pop("phase", None)
    action, marker = unknown.pop("action", ""), unknown.pop("while", None)
    if unknown or action not in ACTIONS or phase not in (None, *PHASES):
        rule = (
            "write rank=N,index=N,step=N,attempt=N,life=N,phase=PHASE,while=FILE,action=ACTION with one of the phases "
            f"{', '.join(PHASES)} and one of the actions {', '.join(ACTIONS)}."
        )
        raise ConfigError([Problem(key=VARIABLE, value=text, rule=rule, origin="environment")])
    return Failpoint(action=action, phase=phase, marker=marker, **numbers)


def _of_this_process(environ: Mapping[str, str]) -> tuple[Failpoint, ...]:
    return tuple(point for point in parse(environ.get(VARIABLE, "")) if point.concerns(environ))


ARMED: tuple[Failpoint, ...] = _of_this_process(os.environ) if VARIABLE in os.environ else ()
"""The failpoints of this process."""


def reload(environ: Mapping[str, str]) -> None:
    """Read the failpoints again, because the environment changed after the import, as in a test."""
    global ARMED  # noqa: PLW0603 - one switch per process, read on the hot path
    ARMED = _of_this_process(environ)


def hit(phase: Phase, step: int) -> None:
    """Report that a phase begins."""
    for point in ARMED:
        if point.matches(phase, step):
            point.fail(phase, step)
