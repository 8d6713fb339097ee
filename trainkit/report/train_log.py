"""`train.log`: the terminal output of a run, as plain lines, without secrets.

Several processes of a run append whole lines to one log: its supervisor and rank 0. A line is written once it is
complete, so a killed process loses no complete line; it is not synced to the disk. If a program redraws a line, the log
has its last form (`ScreenText`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TextIO, cast

from trainkit.errors import TrainkitError
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
        self._path = path
        self._lock = threading.RLock()
        self._descriptor: int | None = None
        self._is_closed = False
        self._lost = 0
        self._pid = os.getpid()
        with self._lock, contextlib.suppress(OSError):
            if self._open() and separated and self._size():
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
            try:
                if not self._open():
                    return
                self._append(text.encode("utf-8", errors="backslashreplace"))
                self._lost = 0
            except OSError:
                self._lost += len(lines)

    def write_error(self, error: BaseException) -> None:
        """Append an error as the command line shows it."""
        if isinstance(error, KeyboardInterrupt):
            self.write(["stopped"])
        elif isinstance(error, TrainkitError):
            self.write(plain_lines(str(error)))
        else:
            self.write(plain_lines("".join(traceback.format_exception(error))))

    def close(self) -> None:
        """Close the file; later lines are dropped."""
        with self._lock:
            self._is_closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> bool:
        """Return whether the file is open; a path that is not a regular file, such as a link, is never opened.

        Raises:
            OSError: the folder or the disk refuses it.
        """
        if self._descriptor is not None or self._is_closed:
            return not self._is_closed
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):  # Windows has none of them
            flags |= getattr(os, name, 0)
        try:
            descriptor = os.open(self._path, flags, 0o644)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
            self._refuse()
            return False
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            self._refuse()
            return False
        self._descriptor = descriptor
        return True

    def _size(self) -> int:
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    def _refuse(self) -> None:
        self._is_closed = True
        unrecorded(sys.stderr).write(f"{self._path} is not a regular file, and this run writes no log.\n")

    def _append(self, content: bytes) -> None:
        assert self._descriptor is not None
        while content:
            content = content[os.write(self._descriptor, content) :]


def plain_lines(text: str) -> list[str]:
    r"""Return a text as lines without control characters.

    Example:
        >>> plain_lines("a\x1b[31mb\x1b[0m\x07\nc")
        ['ab', 'c']
    """
    screen = ScreenText()
    return [*screen.feed(text), *screen.finish()]


class LastingStream:
    """A text stream that outlives its terminal: once that is closed, further output is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        self._try(lambda: self.stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self.stream.flush)

    def finish(self) -> None:
        """Flush the rest."""
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


class _RecordedStream(LastingStream):
    """A text stream whose lines also go into a log."""

    def __init__(self, stream: TextIO, log: TrainLog) -> None:
        super().__init__(stream)
        self._log = log
        self._begin()

    def write(self, text: str) -> int:
        """Write a text, and the completed lines into the log."""
        if os.getpid() != self._pid:  # in a fork: the incomplete line belongs to the parent
            self._begin()
        with self._lock:
            self._log.write(self._screen.feed(text))
        return super().write(text)

    def finish(self) -> None:
        """Write the incomplete line into the log."""
        with self._lock:
            self._log.write(self._screen.finish())
        self.flush()

    def _begin(self) -> None:
        self._pid, self._lock, self._screen = os.getpid(), threading.RLock(), ScreenText()


class _LogAlone:
    """A text stream whose lines go only into the log, not to the terminal."""

    def __init__(self, log: TrainLog) -> None:
        self._log = log
        self._screen = ScreenText()

    def write(self, text: str) -> int:
        self._log.write(self._screen.feed(text))
        return len(text)

    def flush(self) -> None:
        """Do nothing: no output is buffered."""


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
        with _replaced_output(lambda stream: _RecordedStream(stream, log)):
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
    out, err = map(make, before)
    sys.stdout, sys.stderr = cast("Any", out), cast("Any", err)
    try:
        yield
    finally:
        out.finish()
        err.finish()
        if sys.stdout is out:
            sys.stdout = before[0]
        if sys.stderr is err:
            sys.stderr = before[1]


def unrecorded(stream: TextIO) -> TextIO:
    """Return the stream below a recorded one, for output that is redrawn in place; any other stream unchanged."""
    return cast("TextIO", LastingStream(stream.stream)) if isinstance(stream, _RecordedStream) else stream


def recorded_again(above: TextIO) -> TextIO:
    """Return a stream that writes to `above` and into the log of this process; `above` if there is none."""
    return cast("TextIO", _RecordedStream(above, _open_logs[-1])) if _open_logs else above


def into_log_alone() -> TextIO | None:
    """Return a stream that writes only into the log of this process, not to the terminal; None if there is none."""
    return cast("TextIO", _LogAlone(_open_logs[-1])) if _open_logs else None


_TOKEN: Final = re.compile(
    r"\x1b\[(?P<numbers>[0-?]*)[ -/]*(?P<command>[@-~])"  # cursor movements, colours
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\)"  # titles, links
    r"|\x1b[^\[\]PX^_]"
    r"|(?P<control>[\r\n\b\t])"
    r"|(?P<text>[^\x00-\x1f\x7f-\x9f]+)",
    re.DOTALL,
)
_UNFINISHED: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?)?\Z")
"""An incomplete sequence, whose end is in the next piece of text."""
_REORDERING: Final = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Characters that make a terminal show a line in another order than it is written."""
_LONGEST_SEQUENCE: Final = 4096
_LONGEST_LINE: Final = 1 << 14
_MOST_ROWS: Final = 200
_LIVE_S: Final = 2.0
"""Seconds after an upward movement of the cursor during which lines within its reach may still change."""


class ScreenText:
    r"""The last rows of a terminal, which may still change; earlier rows are final.

    A row that is redrawn (a carriage return, a cursor that moves up) counts once, in its last form. Memory and the
    lines of a redrawn table are bounded.

    Example:
        >>> screen = ScreenText()
        >>> screen.feed("10 %\r20 %\r"), screen.feed("\x1b[32mdone\x1b[0m\nnext")
        ([], ['done'])
        >>> screen.finish()
        ['next']
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows = [""]
        self._at = 0
        self._column = 0
        self._held = 0
        """Rows above the last one that a redrawn table may change."""
        self._moved_up = -float("inf")
        self._unfinished = ""

    def feed(self, text: str) -> list[str]:
        """Process written text; return the final lines, without control characters."""
        if self._held and self._clock() - self._moved_up > _LIVE_S:
            self._held = 0
        lines = self._done()
        text = self._unfinished + text
        tail = _UNFINISHED.search(text, max(0, len(text) - _LONGEST_SEQUENCE))
        self._unfinished = text[tail.start() :] if tail else ""
        for token in _TOKEN.finditer(text, 0, tail.start() if tail else len(text)):
            if token["text"] is not None:
                self._put(_REORDERING.sub("", token["text"]))
            elif token["control"] is not None:
                self._control(token["control"])
            elif token["command"] is not None:
                self._command(token["command"], token["numbers"])
            lines += self._done()
        return lines

    def finish(self) -> list[str]:
        """Return the remaining rows, and reset the screen."""
        rows = self._rows
        self._rows, self._at, self._column, self._held, self._unfinished = [""], 0, 0, 0, ""
        while rows and not rows[-1]:
            rows.pop()
        return [row.rstrip() for row in rows]

    def _done(self) -> list[str]:
        lines = []
        while (len(self._rows) - 1 > self._held and self._at > 0) or len(self._rows) > _MOST_ROWS:
            lines.append(self._rows.pop(0).rstrip())
            self._at = max(0, self._at - 1)
        if len(self._rows[self._at]) > _LONGEST_LINE:
            lines.append(self._rows[self._at])
            self._rows[self._at], self._column = "", 0
        return lines

    def _put(self, text: str) -> None:
        row, end = self._rows[self._at], self._column + len(text)
        self._rows[self._at] = row[: self._column].ljust(self._column) + text + row[end:]
        self._column = end

    def _control(self, character: str) -> None:
        if character == "\n":
            self._at, self._column = self._at + 1, 0
            if self._at == len(self._rows):
                self._rows.append("")
        elif character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        else:
            self._put(" " * (8 - self._column % 8))

    def _command(self, command: str, numbers: str) -> None:
        first = numbers.partition(";")[0]
        number = int(first) if first.isdecimal() and len(first) < 6 else 0
        row = self._rows[self._at]
        if command == "A":  # up
            wanted = max(1, number)
            self._held = min(max(self._held, wanted), _MOST_ROWS - 1)
            self._moved_up = self._clock()
            self._at = max(0, self._at - wanted)
        elif command == "B":  # down
            self._at = min(len(self._rows) - 1, self._at + max(1, number))
        elif command == "G":  # to a column
            self._column = min(max(1, number), _LONGEST_LINE) - 1
        elif command == "K":  # erase in the row
            kept = {0: row[: self._column], 1: row[self._column :].rjust(len(row))}
            self._rows[self._at] = kept.get(number, "")
        elif command == "J":  # erase below, or all
            self._rows[self._at] = row[: self._column] if number == 0 else ""
            del self._rows[self._at + 1 :]
