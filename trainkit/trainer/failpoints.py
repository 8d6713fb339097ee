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
    step: int | None = None
    phase: str | None = None
    marker: str | None = None
    """It only fails as long as this file exists."""
    process: Mapping[str, int]
    """The values that `TRAINKIT_RANK`, `_INDEX`, `_ATTEMPT` and `_LIFE` must have, those that are given."""

    def fail(self, phase: str, step: int) -> None:
        """Execute the action."""
        match self.action:
            case "raise":
                raise RuntimeError(f"failpoint in {phase} of step {step}")
            case "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "exit":
                os._exit(7)
            case "slow":
                time.sleep(0.05)
            case "hang":
                while True:
                    time.sleep(3600)
            case "kill" | "stop":
                os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def parse(text: str) -> tuple[Failpoint, ...]:
    """Parse failpoints.

    Raises:
        ConfigError: a key, number, phase or action does not exist.

    Example:
        >>> parse("step=3,phase=save,action=kill")
        (Failpoint(action='kill', step=3, phase='save', marker=None, process={'RANK': 0}),)
    """
    failpoints = []
    for part in filter(str.strip, text.split(";")):
        pairs = dict(pair.strip().partition("=")[::2] for pair in part.split(","))
        names = ("rank", "index", "step", "attempt", "life")
        numbers = {name: int(pairs.pop(name)) for name in names if pairs.get(name, "").isdigit()}
        phase, action, marker = pairs.pop("phase", None), pairs.pop("action", ""), pairs.pop("while", None)
        if pairs or action not in ACTIONS or phase not in (None, *PHASES):
            rule = (
                "write rank=N,index=N,step=N,attempt=N,life=N,phase=PHASE,while=FILE,action=ACTION with one of the "
                f"phases {', '.join(PHASES)} and one of the actions {', '.join(ACTIONS)}."
            )
            raise ConfigError([Problem(key=VARIABLE, value=part, rule=rule, origin="environment")])
        step = numbers.pop("step", None)
        if "index" in numbers:  # on any rank
            numbers.pop("rank", None)
        else:
            numbers.setdefault("rank", 0)
        process = {name.upper(): number for name, number in numbers.items()}
        failpoints.append(Failpoint(action=action, step=step, phase=phase, marker=marker, process=process))
    return tuple(failpoints)


ARMED: tuple[Failpoint, ...] = ()
"""The failpoints of this process."""


def reload(environ: Mapping[str, str]) -> None:
    """Read the failpoints: at the import, and again where the environment has changed since, as in a test."""
    global ARMED  # noqa: PLW0603 - one switch per process, read on the hot path
    ids = {name: environ.get(f"TRAINKIT_{name}", "0") for name in ("RANK", "ATTEMPT", "LIFE")}
    ids["INDEX"] = environ.get("TRAINKIT_INDEX", ids["RANK"])
    points = parse(environ.get(VARIABLE, ""))
    ARMED = tuple(point for point in points if all(ids[name] == str(value) for name, value in point.process.items()))


reload(os.environ)


def hit(phase: Phase, step: int) -> None:
    """Report that a phase begins."""
    for point in ARMED:
        matches = point.phase in (None, phase) and point.step in (None, step)
        if matches and (point.marker is None or os.path.exists(point.marker)):  # noqa: PTH110 - no path is wanted
            point.fail(phase, step)
