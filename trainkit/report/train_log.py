"""`train.log`: the terminal output of a run, as plain lines, without secrets.

Several processes of a run append whole lines to one log: its supervisor and rank 0. A line is written once it is
complete, so a killed process loses no complete line; it is not synced to the disk. What redraws itself in place, such
as the bar of the progress, writes below the recorded stream, and its lines into the log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TextIO, cast

from trainkit.errors import StorageError, TrainkitError, UnreadableError
from trainkit.files import open_descriptor
from trainkit.redaction import mask

_GONE: Final = frozenset({errno.EIO, errno.EPIPE, errno.ENXIO, errno.EBADF})
"""Error numbers of a write after the terminal was closed, or the reader of a pipe has ended."""


class TrainLog:
    """Appends lines to a log; write errors never end a run.

    Args:
        path: the path of the log; only a regular file is written to.
        separated: whether a line separates the output of an earlier run in this folder from the new output.
    """

    def __init__(self, path: Path, *, separated: bool = False) -> None:
        self._path, self._lock, self._pid = path, threading.RLock(), os.getpid()
        self._descriptor: int | None = None
        self._is_closed, self._lost = False, 0
        with contextlib.suppress(OSError, StorageError):
            if separated and (descriptor := self._open()) is not None and os.fstat(descriptor).st_size:
                now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
                self.write([f"----- {now} -----"])

    def write(self, lines: Sequence[str]) -> None:
        """Append lines; lines that cannot be written are counted, and the count is written once writing
        succeeds again.
        """
        if not lines:
            return
        if os.getpid() != self._pid:  # in a fork the thread that held the lock does not exist
            self._pid, self._lock = os.getpid(), threading.RLock()
        with self._lock:
            lost = [f"({self._lost} lines before this one could not be written)"] if self._lost else []
            text = "".join(f"{line}\n" for line in mask("\n".join([*lost, *lines])).split("\n"))
            content = text.encode("utf-8", errors="backslashreplace")
            try:
                if (descriptor := self._open()) is not None:
                    while content:
                        content = content[os.write(descriptor, content) :]
                    self._lost = 0
            except (OSError, StorageError):
                self._lost += len(lines)

    def write_error(self, error: BaseException) -> None:
        """Append an error as the command line shows it."""
        if isinstance(error, KeyboardInterrupt):
            self.write(["stopped"])
        elif isinstance(error, TrainkitError):
            self.write([*map(plain, str(error).split("\n"))])
        else:
            self.write([*map(plain, "".join(traceback.format_exception(error)).rstrip().split("\n"))])

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with self._lock:
            self._is_closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int | None:
        """Return the descriptor of the file; None if it is closed, or is not a regular file: a link is never opened.

        Raises:
            StorageError: the folder or the disk refuses it.
        """
        if self._descriptor is None and not self._is_closed:
            try:
                self._descriptor = open_descriptor(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            except UnreadableError:
                self._is_closed = True
                unrecorded(sys.stderr).write(f"{self._path} is not a regular file, and this run writes no log.\n")
        return self._descriptor


_ESCAPE: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # cursor movements, colours
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\)"  # titles, links
    r"|\x1b[^\[\]PX^_]"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]",  # the last ones change the order of a line
    re.DOTALL,
)
_LONGEST_LINE: Final = 1 << 14


def plain(line: str) -> str:
    r"""Return a line as it stood at last, without control characters: of a redrawn one, what follows the last return.

    Example:
        >>> plain("10 %\r\x1b[31mdone\x1b[0m\x07\r")
        'done'
    """
    return _ESCAPE.sub("", line.rstrip("\r").rpartition("\r")[2]).expandtabs().rstrip()


class LastingStream:
    """A text stream that outlives its terminal: once that is closed, further output is dropped.

    Args:
        stream: the stream that is written to.
        log: the log that complete lines are written to as well; None: there is none.
    """

    def __init__(self, stream: TextIO, log: TrainLog | None = None) -> None:
        self.stream = stream
        self._log, self._pid, self._tail, self._lock = log, os.getpid(), "", threading.RLock()

    def write(self, text: str) -> int:
        """Write a text, and the completed lines into the log."""
        if self._log is not None:
            self._record(self._log, text)
        self._try(lambda: self.stream.write(text))
        return len(text)

    def _record(self, log: TrainLog, text: str) -> None:
        if os.getpid() != self._pid:  # in a fork: the incomplete line belongs to the parent
            self._pid, self._tail, self._lock = os.getpid(), "", threading.RLock()
        with self._lock:
            *lines, tail = (self._tail + text).split("\n")
            if len(tail) > _LONGEST_LINE:  # a line that is redrawn, or never ends
                redrawn = tail.rstrip("\r").rpartition("\r")[2]
                lines, tail = (lines, redrawn) if len(redrawn) < len(tail) else ([*lines, tail], "")
            self._tail = tail
            log.write([plain(line) for line in lines])

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self.stream.flush)

    def finish(self) -> None:
        """Write the incomplete line into the log, and flush the stream."""
        with self._lock:
            if self._log is not None and self._tail:
                self._log.write([plain(self._tail)])
            self._tail = ""
        self.flush()

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            if error.errno in _GONE:
                silence(self.stream)

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # not initialised yet
            raise AttributeError(name)
        return getattr(self.stream, name)


def silence(stream: TextIO) -> None:
    """Redirect all further output to a stream, by this process and its children, to the null device."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


_open_logs: list[TrainLog] = []


@contextlib.contextmanager
def recorded_output(path: Path, *, separated: bool = False) -> Iterator[TrainLog]:
    """Record in a log what Python prints to standard output and standard error for the duration of the block.

    If the terminal is closed meanwhile, no error is raised: the log holds the further output.

    Yields:
        The log, for output after the block.
    """
    log = TrainLog(path, separated=separated)
    _open_logs.append(log)
    try:
        with _replaced_output(lambda stream: LastingStream(stream, log)):
            yield log
    finally:
        _open_logs.remove(log)
        log.close()


def lasting_output() -> contextlib.AbstractContextManager[None]:
    """Prevent errors of printing after the terminal was closed, for the duration of the block."""
    return _replaced_output(LastingStream)


@contextlib.contextmanager
def _replaced_output(make: Callable[[TextIO], LastingStream]) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:  # for a stream that the caller has closed
        out, err = (make(stream or nowhere) for stream in before)
        sys.stdout, sys.stderr = cast("Any", out), cast("Any", err)
        try:
            yield
        finally:
            out.finish()
            err.finish()
            sys.stdout = before[0] if sys.stdout is out else sys.stdout
            sys.stderr = before[1] if sys.stderr is err else sys.stderr


def unrecorded(stream: TextIO) -> TextIO:
    """Return the stream below a recorded one, for output that is redrawn in place; any other stream unchanged."""
    return cast("TextIO", LastingStream(stream.stream)) if isinstance(stream, LastingStream) else stream


def recorded_again(above: TextIO) -> TextIO:
    """Return a stream that writes to `above` and into the log of this process; `above` if there is none."""
    return cast("TextIO", LastingStream(above, _open_logs[-1])) if _open_logs else above


def open_log() -> TrainLog | None:
    """Return the log of this process; None if there is none."""
    return _open_logs[-1] if _open_logs else None
