"""`status.json`: the current state of a run, and whether it was killed.

The process with the lock of the folder writes it (the only process of a run, its supervisor, or rank 0 of an external
launch), from a separate thread, so that a step costs nothing. A killed process leaves its last state; a reader checks
whether the process lives, or, on another host, the age of the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self

from trainkit.cluster.host import Machine, ProcessId
from trainkit.errors import TrainkitError, UnreadableError, status_of_error
from trainkit.files import read_map
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.signals import EXIT_CODES
from trainkit.trainer.ownership import uncontested

FILE: Final = "status.json"
ENDED: Final = frozenset({*EXIT_CODES, "failed"} - {"resized"})
"""States of a run that has ended: the statuses of `result.json`."""
_VERSION: Final = 1
_WRITE_S: Final = 2.0
"""Seconds between two reads of the step."""
_REFRESH_S: Final = 15.0
"""Seconds after which the file is written again although nothing has changed."""
_SILENT_S: Final = 120.0
"""Age of the file from which a run on another host counts as silent: clocks may differ by a minute."""
_LIMIT: Final = 1 << 16
_KINDS: Final[dict[str, Any]] = {
    "state": str, "step": (int, type(None)), "pid": int, "process_start": int, "host": str, "boot_id": str,
    "processes": str, "resumable": bool, "updated": (int, float),
}  # fmt: skip


class StatusFile:
    """Writes `status.json` for the duration of its block."""

    def __init__(self, folder: RunFolder, *, confirm: Callable[[], None] = uncontested) -> None:
        self._folder = folder
        self._confirm = confirm
        machine, mark = Machine.here(), ProcessId.of(os.getpid())
        self._constant = {
            "version": _VERSION,
            "pid": mark.pid,
            "process_start": mark.started,
            "host": machine.host,
            "boot_id": machine.boot_id,
            "boot_time": machine.boot_time,
            "processes": machine.processes,
        }
        self._step_now: Callable[[], int | None] = lambda: None
        self._step: int | None = None
        self._last_step: int | None = None
        self._changed, self._has_ended = threading.Event(), threading.Event()
        self._written: tuple[Any, ...] = ()
        self._written_at = -float("inf")
        self._thread = threading.Thread(target=self._update_loop, name="status", daemon=True)

    def follow(self, step_now: Callable[[], int | None]) -> None:
        """Read the step of the run from a function from now on; None means that the run is starting."""
        self._step_now = step_now
        self._changed.set()

    def aim_at(self, last_step: int) -> None:
        """Set the number of updates after which the run ends."""
        self._last_step = last_step

    def __enter__(self) -> Self:
        self._write("starting")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._changed.set()
        self._thread.join()
        result = self._folder.read_result() or {}
        found = str(result.get("status")) if error is None else status_of_error(error)
        if isinstance(result.get("steps"), int):
            self._step = result["steps"]
        self._write(found if found in ENDED else "finished", sync=True)

    def _update_loop(self) -> None:
        while not self._has_ended.is_set():
            self._changed.wait(_WRITE_S)
            self._changed.clear()
            if not self._has_ended.is_set():
                step = self._step_now()
                self._step = self._step if step is None else step
                self._write("starting" if step is None else "running")

    def _write(self, state: str, *, sync: bool = False) -> None:
        """Write the file if something has changed, or it is old; write errors are ignored."""
        current = (state, self._step, any(self._folder.checkpoints.glob("step_*/manifest.json")))
        if current == self._written and time.monotonic() - self._written_at < _REFRESH_S:
            return
        content = {
            "state": state,
            "step": self._step,
            "last_step": self._last_step,
            "resumable": current[2],
            "updated": round(time.time(), 3),
            "updated_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **self._constant,
        }
        path = self._folder.path / FILE
        draft = path.with_name(f".{FILE}")  # a fixed name: a killed process leaves at most one such file
        with contextlib.suppress(OSError, TrainkitError):
            self._confirm()
            draft.unlink(missing_ok=True)
            with draft.open("x", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=2) + "\n")
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            draft.replace(path)
            self._written, self._written_at = current, time.monotonic()


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
        at = "" if self.step is None else f"at step {self.step:,}"
        if self.is_running:
            return ", ".join(filter(None, (f"runs as {self.where}", at, self.note)))
        if self.state == "silent":
            return ", ".join(filter(None, ("is silent", at, self.note)))
        return f"{_PHRASES.get(self.state, f'was {self.state}')} {at}".rstrip()


_PHRASES: Final = {
    "unknown": "is in an unknown state",
    "failed": "failed",
    "finished": "has finished",
    "hangup": "lost its terminal",
}


def read_status(folder: RunFolder, *, here: Machine | None = None, now: float | None = None) -> RunStatus:
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
    state, note = _state_of(content, here or Machine.here(), time.time() if now is None else now)
    return RunStatus(
        state=state if ended is None or state in ("starting", "running") else ended,
        step=content["step"],
        resumable=resumable,
        updated=content["updated"],
        where=f"process {content['pid']} on {_plain(content['host'])}",
        note=note,
    )


def _state_of(content: dict[str, Any], here: Machine, now: float) -> tuple[str, str]:
    """Return the state of a run, and the evidence for it."""
    state = content["state"]
    if state in ENDED:
        return state, ""
    if state not in ("starting", "running"):
        return "unknown", ""
    age = max(0.0, now - content["updated"])
    if content["host"] == here.host and content["boot_id"] != here.boot_id:
        return "killed", f"{here.host} was restarted since then"
    if (content["host"], content["processes"]) == (here.host, here.processes):
        mark = ProcessId(content["pid"], content["process_start"])
        if mark.state:  # this system provides the state of processes
            return (state if mark.lives else "killed"), ""
    evidence = f"last update {age:,.0f} s ago" + (" on another host" if content["host"] != here.host else "")
    return (state if age <= _SILENT_S else "silent"), evidence


def _plain(text: str) -> str:
    return "".join(character for character in text[:64] if character.isprintable())
