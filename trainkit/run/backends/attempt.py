"""An attempt of a process backend at a run; its processes communicate through the run folder that they share."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trainkit.errors import AbsentFileError, UnreadableError
from trainkit.files import Kind, open_regular, read_map, read_text, write_json_atomically
from trainkit.run.agent.evidence import ProcessEvidence
from trainkit.run.agent.failure import Failure, facts_of, failure_of
from trainkit.run.agent.policy import ExternalRestart, record_relaunch
from trainkit.run.folder.fencing_token import FencingToken
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import read_error_report
from trainkit.run.process.worker_group import ProcessExit

_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_ATTEMPTS: Final = ".attempts"
"""The file of a run folder that counts the attempts."""


class RankError(RuntimeError):
    """A rank failed: the backend restarts all ranks."""


def begin_attempt(payload: Mapping[str, Any], key: str = "") -> list[str] | None:
    """Prepare the folder for another attempt; for rank 0, before any other rank begins.

    Returns:
        The number of the attempt and its fencing token, for every rank; None if a further attempt would fail in the
        same way.
    """
    folder = RunFolder(Path(payload["folder"]))
    number = int(_attempts(folder).get("count", 0))
    last = failure_in(folder) if number else None
    attempt, relaunch = None, ExternalRestart(raised=frozenset(), refusal=None)
    if number and (last is None or not last.is_permanent):
        relaunch = record_relaunch(
            folder,
            None if last is None else last.headline,
            None if last is None else last.rank,
            before=_attempts(folder).get("raised", ()),
            tolerant=payload.get("elastic", False),
        )
    if (last is None or not last.is_permanent) and relaunch.refusal is None:
        if number:
            with _open_rank_0_log(folder) as file:
                what = last.headline if last else "The processes have ended."
                file.write(f"{what} {payload['kind']} starts all again.\n")
        folder.begin()
        folder.open_live()
        attempt = [str(number), FencingToken.acquire(folder).token]
    noted = {"raised": relaunch.to_json(), "refusal": relaunch.refusal or ""}
    write_json_atomically(folder.path / _ATTEMPTS, {"count": number + 1, "key": key, "attempt": attempt, **noted})
    return attempt


def refusal_in(folder: RunFolder) -> str:
    """Return the reason why the last attempt did not begin; empty if it began."""
    return str(_attempts(folder).get("refusal", ""))


def wait_for_attempt(payload: Mapping[str, Any], key: str) -> list[str] | None:
    """Wait for the result of `begin_attempt` on rank 0, and return it; for the other ranks.

    Raises:
        RankError: rank 0 did not begin, or this host does not see its folder.
    """
    folder, deadline = RunFolder(Path(payload["folder"])), time.monotonic() + _TIMEOUT_S
    while (found := _attempts(folder)).get("key") != key:
        if time.monotonic() > deadline:
            raise RankError(f"rank 0 did not begin within {_TIMEOUT_S:g} s in {folder.path}. Do all hosts share it?")
        time.sleep(_POLL_S)
    attempt: list[str] | None = found["attempt"]
    return attempt


def _attempts(folder: RunFolder) -> dict[str, Any]:
    try:
        kinds: dict[str, Kind] = {
            "count": int,
            "key": str,
            "attempt": (list, type(None)),
            "raised": list,
            "refusal": str,
        }
        return read_map(folder.path / _ATTEMPTS, kinds)
    except AbsentFileError:
        return {}


def _open_rank_0_log(folder: RunFolder) -> Any:
    folder.logs.mkdir(parents=True, exist_ok=True)
    return io.TextIOWrapper(open_regular(folder.log_of(0), "ab"), encoding="utf-8")


def stop_file(folder: RunFolder) -> Path:
    """Return the path of the file that asks every rank to save and stop; its content is the reason."""
    return folder.path / ".stop"


def stop_reason(folder: RunFolder) -> str:
    """Return why every rank is to stop; empty if there is no request."""
    try:
        return read_text(stop_file(folder), limit=64)
    except UnreadableError:
        return ""


def forget_attempts(folder: RunFolder) -> None:
    """Reset the count of attempts, before the backend starts anything."""
    for left in (folder.path / _ATTEMPTS, stop_file(folder)):
        left.unlink(missing_ok=True)


def may_restart(payload: Mapping[str, Any]) -> bool:
    """Return whether a failed attempt is worth another: no stop was requested, and the failure is not permanent."""
    folder = RunFolder(Path(payload["folder"]))
    last = failure_in(folder)
    return not stop_file(folder).exists() and (last is None or not last.is_permanent)


def failure_in(folder: RunFolder) -> Failure | None:
    """Return the first failure of the last attempt; None if no rank left an error report."""
    found = {
        int(rank): report
        for path in folder.live.glob("rank_*.error.json")
        if (rank := path.name.split("_")[1].split(".")[0]).isdigit() and (report := read_error_report(path)) is not None
    }
    if not found:
        return None
    exits = [ProcessExit(attempt=0, rank=rank, code=report.exit_code) for rank, report in found.items()]
    evidence = ProcessEvidence(folder)
    failure = failure_of(folder, evidence, facts_of(folder, evidence, exits=exits))
    report = found[failure.rank]
    if report.is_secondary:
        return replace(
            failure, headline=f"rank {failure.rank} lost its connection to another rank, which wrote no error report."
        )
    return replace(failure, headline=report.message) if report.kinds[0] == RankError.__name__ else failure
