"""An attempt of an engine at a run, as its processes see it through the run folder that they share."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trainkit.bounded_json import Kind
from trainkit.errors import AbsentFileError, UnreadableError
from trainkit.reading import open_regular, read_map, read_text
from trainkit.run.folder.fencing_token import FencingToken
from trainkit.run.folder.run_folder import RunFolder, write_json_atomically
from trainkit.run.process.error_report import read_error_report
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.rendezvous.external_restarts import ExternalRestart, record_relaunch
from trainkit.run.supervisor.failure import Failure, root_cause

__all__ = [
    "RankError",
    "begin_attempt",
    "failure_in",
    "forget_attempts",
    "may_restart",
    "refusal_in",
    "stop_file",
    "stop_reason",
    "wait_for_attempt",
]

_PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.1
_ATTEMPTS: Final = ".attempts"
"""The file of a run folder that counts them."""


class RankError(RuntimeError):
    """A rank ended otherwise than cleanly: the engine starts all again."""


def begin_attempt(cargo: Mapping[str, Any], key: str = "") -> list[str] | None:
    """Prepare the folder for another attempt; for rank 0, before any other begins.

    Args:
        cargo: of `worker_payload`.
        key: what `wait_for_attempt` knows this attempt by, where the engine cannot tell the others.

    Returns:
        The number of the attempt and the token of its fence, for every rank; None where a further attempt would end as
        the last one did.
    """
    folder = RunFolder(Path(cargo["folder"]))
    number = int(_attempts(folder).get("count", 0))
    last = failure_in(folder) if number else None
    attempt, relaunch = None, ExternalRestart(raised=frozenset(), refusal=None)
    if number and (last is None or not last.is_permanent):
        relaunch = record_relaunch(
            folder,
            None if last is None else last.headline,
            None if last is None else last.rank,
            before=_attempts(folder).get("raised", ()),
            tolerant=cargo.get("elastic", False),
        )
    if (last is None or not last.is_permanent) and relaunch.refusal is None:
        if number:
            with _rank_0_says(folder) as file:
                what = last.headline if last else "The processes are gone."
                file.write(f"{what} {cargo['kind']} starts all again.\n")
        folder.begin()
        folder.open_live()
        attempt = [str(number), FencingToken.acquire(folder).token]
    noted = {"raised": relaunch.to_json(), "refusal": relaunch.refusal or ""}
    write_json_atomically(folder.path / _ATTEMPTS, {"count": number + 1, "key": key, "attempt": attempt, **noted})
    return attempt


def refusal_in(folder: RunFolder) -> str:
    """Return why the last attempt did not begin; empty where it did."""
    return str(_attempts(folder).get("refusal", ""))


def wait_for_attempt(cargo: Mapping[str, Any], key: str) -> list[str] | None:
    """What `begin_attempt` gave rank 0, once it has; for the other ranks.

    Raises:
        RankError: rank 0 did not come, or this host does not see its folder.
    """
    folder, deadline = RunFolder(Path(cargo["folder"])), time.monotonic() + _PATIENCE_S
    while (found := _attempts(folder)).get("key") != key:
        if time.monotonic() > deadline:
            raise RankError(f"rank 0 did not begin within {_PATIENCE_S:g} s in {folder.path}. Do all hosts share it?")
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


def _rank_0_says(folder: RunFolder) -> Any:
    folder.logs.mkdir(parents=True, exist_ok=True)
    return io.TextIOWrapper(open_regular(folder.log_of(0), "ab"), encoding="utf-8")


def stop_file(folder: RunFolder) -> Path:
    """The file that asks every rank to save and stop; it says why."""
    return folder.path / ".stop"


def stop_reason(folder: RunFolder) -> str:
    """Return why every rank is to stop; empty where no file says so."""
    try:
        return read_text(stop_file(folder), limit=64)
    except UnreadableError:
        return ""


def forget_attempts(folder: RunFolder) -> None:
    """Begin to count anew; before the engine starts anything."""
    for left in (folder.path / _ATTEMPTS, stop_file(folder)):
        left.unlink(missing_ok=True)


def may_restart(cargo: Mapping[str, Any]) -> bool:
    """Whether a failed attempt is worth another: nobody asked for a stop, and it may end otherwise."""
    folder = RunFolder(Path(cargo["folder"]))
    last = failure_in(folder)
    return not stop_file(folder).exists() and (last is None or not last.is_permanent)


def failure_in(folder: RunFolder) -> Failure | None:
    """The failure that came first in the last attempt; None where no rank left a word."""
    found = {
        rank: words
        for path in folder.live.glob("rank_*.error.json")
        if (rank := path.name.split("_")[1].split(".")[0]).isdigit() and (words := read_error_report(path)) is not None
    }
    if not found:
        return None
    exits = [ProcessExit(attempt=0, rank=int(rank), code=words.exit_code) for rank, words in found.items()]
    failure = root_cause(folder, exits, [])
    words = found[str(failure.rank)]
    if words.is_secondary:
        return replace(failure, headline=f"rank {failure.rank} lost another, which said nothing.")
    return replace(failure, headline=words.message) if words.kinds[0] == RankError.__name__ else failure
