"""The end of the evaluator of an attempt: `live/evaluated.json`, which the result of the run waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainkit.errors import UnreadableError
from trainkit.files import read_map, write_json_atomically
from trainkit.run.folder.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class EvaluatorEnd:
    """The end of an evaluator."""

    status: Literal["finished", "failed", "timed out", "stopped"]
    reason: str | None = None
    """Reason why it has not finished."""


def report_end(folder: RunFolder, end: EvaluatorEnd) -> None:
    """Report that no more checkpoints are evaluated; for the evaluator, or for the supervisor that gives up on it."""
    write_json_atomically(folder.evaluated, {"status": end.status, "reason": end.reason})


def reported_end(folder: RunFolder) -> EvaluatorEnd | None:
    """Return the reported end; None: the evaluator still works, or is lost."""
    try:
        found = read_map(folder.evaluated, {"status": str, "reason": (str, type(None))})
    except UnreadableError:
        return None
    return EvaluatorEnd(status="finished" if found["status"] == "finished" else "failed", reason=found["reason"])
