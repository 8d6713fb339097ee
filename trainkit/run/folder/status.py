"""`status.json`: read the current state of a run, and whether it was killed.

`trainkit.run.record` writes the file. A killed process leaves its last state; a reader checks whether the process
lives, or, on another host, the age of the file.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from trainkit.cluster.host import Machine, ProcessId
from trainkit.errors import UnreadableError
from trainkit.files import read_map
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.signals import EXIT_CODES

FILE: Final = "status.json"
ENDED: Final = frozenset({*EXIT_CODES, "failed"} - {"resized"})
"""States of a run that has ended: the statuses of `result.json`."""
_SILENT_S: Final = 120.0
"""Age of the file from which a run on another host counts as silent: clocks may differ by a minute."""
_LIMIT: Final = 1 << 16
_KINDS: Final[dict[str, Any]] = {
    "state": str, "step": (int, type(None)), "pid": int, "process_start": int, "host": str, "boot_id": str,
    "processes": str, "resumable": bool, "updated": (int, float),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The state of a run according to its folder."""

    state: str
    """`starting`, `running`, `killed`, `silent` (on another host, its file is old), `unknown`, or one of `ENDED`."""
    step: int | None = None
    resumable: bool = False
    """Whether there is a complete checkpoint."""
    updated: float | None = None
    """Seconds since the epoch."""
    where: str = ""
    """Description of the process, `process 12 on host`."""
    note: str = ""
    """The evidence for `state`, if it is not certain."""

    @property
    def is_running(self) -> bool:
        """Whether the process of the run is, or probably is, running."""
        return self.state in ("starting", "running")

    def summary(self) -> str:
        """Return the state in a few words.

        Example:
            >>> RunStatus(state="killed", step=120).summary()
            'was killed at step 120'
            >>> RunStatus(state="running", step=3, where="process 7 on a").summary()
            'runs as process 7 on a, at step 3'
        """
        position = "" if self.step is None else f"at step {self.step:,}"
        if self.is_running:
            return ", ".join(filter(None, (f"runs as {self.where}", position, self.note)))
        if self.state == "silent":
            return ", ".join(filter(None, ("is silent", position, self.note)))
        return f"{_PHRASES.get(self.state, f'was {self.state}')} {position}".rstrip()


_PHRASES: Final = {
    "unknown": "is in an unknown state",
    "failed": "failed",
    "finished": "has finished",
    "hangup": "lost its terminal",
}


def read_status(folder: RunFolder, *, machine: Machine | None = None, now: float | None = None) -> RunStatus:
    """Find the state of a run from `status.json`, `result.json` and the process table; no content is trusted."""
    result = folder.read_result() or {}
    ended = result.get("status")
    ended = ended if isinstance(ended, str) and ended in ENDED else None
    steps = result.get("steps")
    resumable = any(folder.checkpoints.glob("step_*/manifest.json"))
    try:
        content = read_map(folder.path / FILE, _KINDS, limit=_LIMIT)
    except UnreadableError:
        return RunStatus(state=ended or "unknown", step=steps if isinstance(steps, int) else None, resumable=resumable)
    state, note = _state_of(content, machine or Machine.here(), time.time() if now is None else now)
    host = "".join(character for character in content["host"][:64] if character.isprintable())
    return RunStatus(
        state=state if ended is None or state in ("starting", "running") else ended,
        step=content["step"],
        resumable=resumable,
        updated=content["updated"],
        where=f"process {content['pid']} on {host}",
        note=note,
    )


def _state_of(content: dict[str, Any], machine: Machine, now: float) -> tuple[str, str]:
    """Return the state of a run, and the evidence for it."""
    state = content["state"]
    if state in ENDED:
        return state, ""
    if state not in ("starting", "running"):
        return "unknown", ""
    age = max(0.0, now - content["updated"])
    if content["host"] == machine.host and content["boot_id"] != machine.boot_id:
        return "killed", f"{machine.host} was restarted since then"
    if (content["host"], content["processes"]) == (machine.host, machine.processes):
        mark = ProcessId(content["pid"], content["process_start"])
        if mark.state:  # this system provides the state of processes
            return (state if mark.lives else "killed"), ""
    evidence = f"last update {age:,.0f} s ago" + (" on another host" if content["host"] != machine.host else "")
    return (state if age <= _SILENT_S else "silent"), evidence
