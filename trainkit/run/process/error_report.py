"""The error report of a failed rank for the supervisor: a small JSON file, `live/rank_N.error.json`.

A report distinguishes an error that the rank caused itself from one that only reports the loss of another rank. The
text of an error is not enough: a message of user code may mention a peer. The class of the exception and the code that
raised it decide: torch.distributed, or trainkit's own connections between ranks.
"""

from __future__ import annotations

import contextlib
import dis
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from trainkit import errors
from trainkit.errors import (
    ConfigError,
    CrashLoopError,
    HangError,
    PeerError,
    Problem,
    StorageError,
    TrainkitError,
    UnreadableError,
    callback_note,
    chain_of,
)
from trainkit.files import read_map
from trainkit.redaction import mask
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import HeartbeatReading, read_heartbeat


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """Why a rank failed, from its own point of view."""

    rank: int
    kinds: tuple[str, ...]
    """The names of the exception's class and its bases, nearest first."""
    message: str
    traceback: str
    exit_code: int
    is_secondary: bool
    """Whether it only reports that another rank was lost."""
    is_permanent: bool
    """Whether a restart would fail the same way: an error that trainkit raised for a known reason."""
    problems: tuple[Mapping[str, Any], ...] = field(default=())
    """The problems of a ConfigError."""
    step: int | None = None
    """Updates completed when it failed; None: it had not begun."""
    phase: str = ""
    pid: int = 0
    host: str = ""

    @property
    def left_by(self) -> int | None:
        """The exit code that user code passed to `sys.exit`; None: it raised an error."""
        return self.exit_code if self.kinds[0] == SystemExit.__name__ else None

    def error(self, origin: str = "") -> TrainkitError:
        """Recreate the exception in this process: an error of trainkit with its class, any other as its message only;
        `origin` names the process that raised it.
        """
        classes = (getattr(errors, name, None) for name in self.kinds)
        kind = next((cls for cls in classes if isinstance(cls, type) and issubclass(cls, TrainkitError)), None)
        if kind is not None and issubclass(kind, ConfigError):
            problems = [
                {**problem, "origin": ", ".join(filter(None, (problem["origin"], origin)))} for problem in self.problems
            ]
            return ConfigError(Problem(**problem) for problem in problems)
        message = f"{origin}: {self.message}" if origin else self.message
        return kind(message) if kind is not None else TrainkitError(message)

    @property
    def summary(self) -> str:
        """The failure in one line."""
        lines = self.message.splitlines() or [self.kinds[0]]
        return lines[1].strip() if self.problems and len(lines) > 1 else lines[0]


@dataclass
class Reporter:
    """Writes the report of one rank about the first error; later errors are treated as its consequences."""

    path: Path | None
    """None: no report is written, because the ranks of this process have written theirs."""
    rank: int
    publish: Callable[[ErrorReport], None] = lambda _: None
    """Sends the report to ranks that cannot read the file; nothing: every process that needs it can."""
    report: ErrorReport | None = field(default=None, init=False)
    """The report; None: nothing has failed."""

    def __call__(self, error: BaseException) -> ErrorReport:
        """Report an error, unless one was reported before; return the report."""
        if self.report is None:
            path, rank = self.path, self.rank
            self.report = error_report(rank, error) if path is None else write_error_report(path, rank, error)
            self.publish(self.report)
        return self.report


def write_error_report(path: Path, rank: int, error: BaseException) -> ErrorReport:
    """Write the report of a failed rank, before it leaves, closes or waits for anything; return the report.

    If the file system refuses, the report is printed instead, so that it is in the log of the rank or on the terminal.
    """
    report = error_report(rank, error, read_heartbeat(path.with_name(f"rank_{rank}")))
    try:
        RunFolder(path.parent.parent).write_report(path, asdict(report))
    except OSError as refused:
        if not isinstance(error, StorageError):  # the parent detects that error itself, by the same folder
            problems = report.message if report.is_permanent else f"\n{report.traceback}"
            with contextlib.suppress(OSError):
                sys.stderr.write(f"rank {rank}: {problems}\n")
                sys.stderr.write(f"This report could not be written to {path}: {refused.strerror}.\n")
                sys.stderr.flush()
    return report


def error_report(rank: int, error: BaseException, heartbeat: HeartbeatReading | None = None) -> ErrorReport:
    """Return the report of an error."""
    is_secondary, text, exit_code = is_after_effect(error), str(error), 1
    if not isinstance(error, ConfigError):  # the callback that raised it is named at the end of the first line
        first, newline, rest = text.partition("\n")
        text = f"{first}{callback_note(error)}{newline}{rest}"
    if isinstance(error, SystemExit):  # the code that Python ends with
        exit_code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    elif isinstance(error, TrainkitError):
        exit_code = error.exit_code
    is_own = isinstance(error, TrainkitError) and not isinstance(error, HangError | CrashLoopError)
    problems = error.problems if isinstance(error, ConfigError) else ()
    return ErrorReport(
        rank=rank,
        kinds=tuple(kind.__name__ for kind in type(error).__mro__),
        message=mask(text),
        traceback=mask("".join(traceback.format_exception(error)).rstrip()),
        exit_code=exit_code,
        is_secondary=is_secondary,
        is_permanent=is_own and not is_secondary,
        problems=tuple(_problem_to_json(problem) for problem in problems),
        step=None if heartbeat is None else heartbeat.step,
        phase="" if heartbeat is None else heartbeat.phase,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


def read_error_report(path: Path) -> ErrorReport | None:
    """Return the report that a rank wrote; None if there is none."""
    try:
        return report_from_json(read_map(path, {"kinds": list, "problems": list, "rank": int, "message": str}))
    except (UnreadableError, ValueError, TypeError, KeyError):
        return None


def reports_in(folder: RunFolder) -> dict[int, ErrorReport]:
    """Return the report of each rank that left one."""
    ranks = (path.name.split("_")[1].partition(".")[0] for path in folder.live.glob("rank_*.error.json"))
    reports = ((int(rank), read_error_report(folder.error_of(int(rank)))) for rank in ranks if rank.isdigit())
    return {rank: report for rank, report in reports if report is not None}


def report_from_json(content: Mapping[str, Any]) -> ErrorReport:
    """Parse an error report from its JSON."""
    return ErrorReport(**{**content, "kinds": tuple(content["kinds"]), "problems": tuple(content["problems"])})


def _problem_to_json(problem: Problem) -> dict[str, Any]:
    content: dict[str, Any] = {"key": problem.key, "rule": mask(problem.rule), "origin": problem.origin}
    if problem.value is not errors.MISSING:
        value = problem.shown_value
        plain = value is None or isinstance(value, bool | int | float | str)
        content["value"] = value if plain else str(value)
    return content


_TRANSPORTS: Final = ("torch.distributed.", "trainkit.strategies.", "trainkit.run.", "trainkit.trainer.checkpoint.")
"""Packages that exchange data between ranks."""
_TORCH_ERRORS: Final = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)
"""Classes that C++ code of torch.distributed raises; they depend on the version of torch."""
_LOST: Final = re.compile(
    r"gloo/transport/|connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|failed to recv"
    r"|timed out|wait timeout|ncclRemoteError|ncclSystemError|remote process exited|communicator was aborted",
    re.IGNORECASE,
)
_OWN: Final = re.compile(
    r"enforce fail|out of memory|cannot allocate memory|no space left|address already in use|EADDRINUSE",
    re.IGNORECASE,
)
"""Errors of this rank that the same libraries raise: mismatched sizes, no memory, a port in use."""
_RAISED: Final = frozenset({"RAISE_VARARGS", "RERAISE"})


def is_after_effect(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, only reports that another rank was lost.

    Example:
        >>> is_after_effect(RuntimeError("Connection reset by peer"))
        False
    """
    origin = "", True
    for cause in chain_of(error):
        origin = _origin_of(cause) or origin  # a cause that was never raised belongs to the error that names it
        if isinstance(cause, PeerError) or _is_lost_connection(cause, *origin):
            return True
    return False


def _is_lost_connection(error: BaseException, module: str, by_statement: bool) -> bool:
    in_transport = f"{module}.".startswith(_TRANSPORTS)
    if isinstance(error, ConnectionError):  # also trainkit's LinkError
        return in_transport
    if type(error).__name__ not in _TORCH_ERRORS or (by_statement and not in_transport):
        return False
    text = str(error)
    return _LOST.search(text) is not None and _OWN.search(text) is None


def _origin_of(error: BaseException) -> tuple[str, bool] | None:
    """Return the innermost module that is not of the standard library, and whether a `raise` statement of the innermost
    code raised the error: otherwise C code that it called did.
    """
    trace, module, by_statement = error.__traceback__, "", True
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        module = module if name.partition(".")[0] in sys.stdlib_module_names else name
        by_statement = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] in _RAISED
        trace = trace.tb_next
    return None if error.__traceback__ is None else (module, by_statement)
