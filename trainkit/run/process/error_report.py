"""What a failing rank leaves behind for the supervisor: a small JSON file, `live/rank_N.error.json`."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainkit import errors
from trainkit.errors import (
    ConfigError,
    CrashLoopError,
    HangError,
    Problem,
    StorageError,
    TrainkitError,
    UnreadableError,
)
from trainkit.reading import read_map
from trainkit.redaction import mask
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import HeartbeatReading, read_heartbeat
from trainkit.run.process.secondary_errors import is_after_effect

__all__ = ["ErrorReport", "Reporter", "error_report", "read_error_report", "report_from_json", "write_error_report"]


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """Why a rank failed, as it saw it."""

    rank: int
    kinds: tuple[str, ...]
    """The names of the exception's class and its bases, nearest first."""
    message: str
    traceback: str
    exit_code: int
    is_secondary: bool
    """Whether it only says that another rank is gone."""
    is_permanent: bool
    """Whether a restart would end the same way: one of our own errors, raised for a reason."""
    problems: tuple[Mapping[str, Any], ...] = field(default=())
    """Of a ConfigError: its problems."""
    step: int | None = None
    """Updates completed when it failed; None: it had not begun."""
    phase: str = ""
    pid: int = 0
    host: str = ""

    @property
    def left_by(self) -> int | None:
        """The exit code that user code ended the process with through `sys.exit`; None: it raised an error."""
        return self.exit_code if self.kinds[0] == SystemExit.__name__ else None

    def error(self, where: str = "") -> TrainkitError:
        """The exception again, in this process: one of ours as it was, of any other class nothing but its message.

        Args:
            where: the process that met it, where that is another than this one; put beside the place of each problem.
        """
        known = (getattr(errors, name) for name in self.kinds if name in errors.__all__)
        kind = next((found for found in known if isinstance(found, type) and issubclass(found, TrainkitError)), None)
        if kind is not None and issubclass(kind, ConfigError):
            told = [
                {**problem, "origin": ", ".join(filter(None, (problem["origin"], where)))} for problem in self.problems
            ]
            return ConfigError(Problem(**problem) for problem in told)
        message = f"{where}: {self.message}" if where else self.message
        return kind(message) if kind is not None else TrainkitError(message)

    @property
    def summary(self) -> str:
        """The failure in a line."""
        lines = self.message.splitlines() or [self.kinds[0]]
        return lines[1].strip() if self.problems and len(lines) > 1 else lines[0]


class Reporter:
    """Writes the report of one rank, of the first error that it is called with; later errors follow from that one.

    Args:
        path: the file of the report; None: none is written, the ranks of this process have written theirs.
        rank: the rank.
        tell: passes the report on, to ranks that cannot read the file.
    """

    def __init__(self, path: Path | None, rank: int, tell: Callable[[ErrorReport], None] | None = None) -> None:
        self._path, self._rank, self._tell = path, rank, tell
        self.words: ErrorReport | None = None
        """The report; None: nothing has failed."""

    def __call__(self, error: BaseException) -> ErrorReport:
        """Report an error, unless one was reported before; return what was reported."""
        if self.words is None:
            path, rank = self._path, self._rank
            self.words = error_report(rank, error) if path is None else write_error_report(path, rank, error)
            if self._tell is not None:
                self._tell(self.words)
        return self.words


def write_error_report(path: Path, rank: int, error: BaseException) -> ErrorReport:
    """Write the report of a rank that fails, before it leaves, closes or waits for anything; return the report.

    A report that the file system refuses is printed instead, so that it is in the log of the rank, or on the terminal.
    """
    words = error_report(rank, error, read_heartbeat(path.with_name(f"rank_{rank}")))
    try:
        RunFolder(path.parent.parent).write_report(path, asdict(words))
    except OSError as refused:
        if not isinstance(error, StorageError):  # of which the parent finds out itself, by the same folder
            _print_unwritten(path, words, refused)
    return words


def error_report(rank: int, error: BaseException, pulse: HeartbeatReading | None = None) -> ErrorReport:
    """Return the report of an error.

    Args:
        rank: the rank that fails.
        error: what was raised.
        pulse: how far the rank had come.
    """
    aftermath = is_after_effect(error)
    ours = isinstance(error, TrainkitError) and not isinstance(error, HangError | CrashLoopError)
    problems = error.problems if isinstance(error, ConfigError) else ()
    return ErrorReport(
        rank=rank,
        kinds=tuple(kind.__name__ for kind in type(error).__mro__),
        message=mask(str(error)),
        traceback=mask("".join(traceback.format_exception(error)).rstrip()),
        exit_code=_exit_code(error),
        is_secondary=aftermath,
        is_permanent=ours and not aftermath,
        problems=tuple(_problem_to_json(problem) for problem in problems),
        step=None if pulse is None else pulse.step,
        phase="" if pulse is None else pulse.phase,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that an error ends; of `sys.exit`, the code that Python ends with."""
    if isinstance(error, SystemExit):
        return 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    return error.exit_code if isinstance(error, TrainkitError) else 1


def _print_unwritten(path: Path, words: ErrorReport, refused: OSError) -> None:
    told = words.message if words.is_permanent else f"\n{words.traceback}"
    with contextlib.suppress(OSError):
        sys.stderr.write(f"rank {words.rank}: {told}\n")
        sys.stderr.write(f"This report could not be written to {path}: {refused.strerror}.\n")
        sys.stderr.flush()


def read_error_report(path: Path) -> ErrorReport | None:
    """What a rank wrote; None where it wrote nothing."""
    try:
        return report_from_json(read_map(path, {"kinds": list, "problems": list, "rank": int, "message": str}))
    except (UnreadableError, ValueError, TypeError, KeyError):
        return None


def report_from_json(content: Mapping[str, Any]) -> ErrorReport:
    """Last words out of the JSON they became."""
    return ErrorReport(**{**content, "kinds": tuple(content["kinds"]), "problems": tuple(content["problems"])})


def _problem_to_json(problem: Problem) -> dict[str, Any]:
    content: dict[str, Any] = {"key": problem.key, "rule": mask(problem.rule), "origin": problem.origin}
    if problem.value is not errors.MISSING:
        value = problem.shown_value
        plain = value is None or isinstance(value, bool | int | float | str)
        content["value"] = value if plain else str(value)
    return content
