"""The record of a run's restarts, `restarts.jsonl`: one JSON object per line, over all commands that continued the run.

The process that restarts tasks writes it; every writer of result.json copies it there. It outlives the process, so that
restarts before and after a resume are counted together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from trainkit.errors import UnreadableError
from trainkit.files import Kind, expect_map, open_regular, parse_json, read_lines
from trainkit.redaction import mask

FILE: Final = "restarts.jsonl"
"""Name of the record in the run folder."""
_LISTED: Final = 1000
"""Number of restarts that result.json lists, the first of the run."""
_MOST_LINES: Final = 100_000
"""Lines of the record that are read."""
_LONGEST: Final = 300
"""Limit of the characters of a cause."""
_KINDS: Final[Mapping[str, Kind]] = {
    "kind": str,
    "step": (int, type(None)),
    "rank": (int, type(None)),
    "task": (str, type(None)),
    "cause": str,
    "checkpoint": (int, type(None)),
}


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One restart, as result.json lists it."""

    kind: Literal["all", "lost", "returned", "alone"]
    """all: every task; lost: every task except a lost replica (elastic); returned: every task, including a replica that
    was lost; alone: only this task.
    """
    cause: str
    """One line about the failed rank and its failure."""
    step: int | None = None
    """Updates that the failing rank had completed; None: the rank had not begun, or nothing failed."""
    rank: int | None = None
    """The failing rank, by its number in the attempt that failed."""
    task: str | None = None
    """The failing task, such as `worker:1`."""
    checkpoint: int | None = None
    """The step of the checkpoint that the run continued from; None: it continued without a checkpoint."""


def record_restart(folder: Path, restart: Restart) -> None:
    """Append a restart to the record; a record that cannot be written does not end the run."""
    lines = mask(restart.cause).splitlines() or [""]
    noted = {**asdict(restart), "cause": lines[0][:_LONGEST]}
    with contextlib.suppress(OSError, UnreadableError), open_regular(folder / FILE, "ab") as file:
        file.write(json.dumps(noted).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def restarts_of(folder: Path) -> dict[str, Any]:
    """Return `restarts` for result.json: at most the first 1,000; `restarts_not_listed` counts the rest.

    Malformed lines are skipped.
    """
    found: list[dict[str, Any]] = []
    count = 0
    with contextlib.suppress(UnreadableError):
        for line in itertools.islice(read_lines(folder / FILE), _MOST_LINES):
            restart = _parsed(line)
            count += restart is not None
            if restart is not None and len(found) < _LISTED:
                found.append(restart)
    return {"restarts": found, **({"restarts_not_listed": count - len(found)} if count > len(found) else {})}


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = expect_map(parse_json(line), _KINDS)
    except ValueError:
        return None
    return {key: content[key] for key in _KINDS}
