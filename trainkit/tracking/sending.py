"""Send a run folder to a tracker: in a separate process during a training, or later.

    python -m trainkit.tracking.sending        started by a training, which writes the request to its standard input
    python -m trainkit.tracking RUN            later, for data that a training could not send

A service may hang, or end its process: only this process waits for it. The training reports its end by a line on the
standard input, or dies, which closes it; then the process ends within a limited time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trainkit.errors import UnreadableError
from trainkit.files import expect_map, open_descriptor, parse_json
from trainkit.redaction import mask
from trainkit.tracking.records import NewRows, ending_of, files_of, is_placement, tracked_run
from trainkit.tracking.service import Service, service_of
from trainkit.tracking.state import FOLDER, TrackingState, read_state, write_state

END: Final = "end"
"""The line that reports the end of a run, after its result was written."""
ASKS, ANSWERS, TROUBLE = "asks", "answers", "trouble"
_POLL_S: Final = 1.0
_RETRY_S: Final = (5.0, 15.0, 60.0)
"""Seconds between attempts after one, two, and more failures in a row."""


@dataclass(kw_only=True)
class Sender:
    """Sends the new data of a run folder to one tracker."""

    folder: Path
    state: TrackingState
    tell: Callable[[str, str], None] = lambda _kind, _text: None
    """Receives events and their text: asks, answers, trouble with its reason."""
    service: Service | None = None
    """The open service; None before, and after an error."""

    def __post_init__(self) -> None:
        self._rows = NewRows(self.folder, self.state.sent)

    def send_new(self) -> None:
        """Send the new rows.

        Raises:
            Exception: any error of the service; earlier confirmed rows are recorded.
        """
        self.tell(ASKS, "")
        if self.service is None:
            service = service_of(self.state.tracker)
            run = tracked_run(self.folder, self.state)
            service.open(run)
            placement = {name: value for name, value in run.parameters.items() if is_placement(name)}
            self.state = replace(self.state, placement=placement)
            self._record()
            self.service = service
        for rows in self._rows.batches():
            self.service.log(rows)
            self.tell(ANSWERS, "")
            self.tell(ASKS, "")
        if self._rows.sent != self.state.sent:
            self._record()
        self.tell(ANSWERS, "")

    def finish(self) -> None:
        """Send the rest and the files, and end the tracked run.

        Raises:
            Exception: any error of the service.
        """
        self.send_new()
        assert self.service is not None
        sent = []
        for path, name in files_of(self.folder, self.state.artifacts):
            self.service.add_file(path, name)
            sent.append(name)
        status = ending_of(self.folder)
        self.service.close(has_finished=status == "finished", status=status)
        self.service = None
        self.state = replace(self.state, files=sent, status=status, not_sent=None, send=None)
        self._record()

    def trouble(self, error: BaseException) -> str:
        """Record an error of the service, which is opened again for the next attempt; return its reason."""
        self.service = None
        reason = mask(f"{type(error).__name__}: {error}".strip().splitlines()[0][:300].rstrip("."))
        with contextlib.suppress(Exception):  # a full disk must not end the attempts
            self.state = with_rest(self.folder, self.state, reason)
            self._record()
        self.tell(TROUBLE, reason)
        return reason

    def _record(self) -> None:
        self.state = replace(self.state, sent=dict(self._rows.sent))
        write_state(self.folder, self.state)


def with_rest(folder: Path, state: TrackingState, reason: str) -> TrackingState:
    """Return a state that names the unsent data, and the command that sends them."""
    return replace(
        state,
        not_sent=f"everything after step {state.last_step}, the files and the end: {reason}",
        send=f"{sys.executable} -m trainkit.tracking {folder}",
    )


@contextmanager
def only_sender(folder: Path, tracker: str) -> Iterator[None]:
    """Wait until no other process sends this run to this tracker, and let others wait during the block.

    Raises:
        UnreadableError: the lock file is not a regular file.
        StorageError: it cannot be created.
    """
    descriptor = open_descriptor(folder / FOLDER / f".{tracker}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Training:
    """The training process at the other end of the standard streams."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self.has_ended = threading.Event()
        self._out = os.dup(1)
        os.set_blocking(self._out, False)
        nowhere = os.open(os.devnull, os.O_RDWR)  # a package may print anything, even its key
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, kind: str, text: str) -> None:
        """Send a line; it is dropped if the training does not read, or has ended."""
        with contextlib.suppress(OSError):
            os.write(self._out, f"{json.dumps([kind, text])}\n".encode())

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == END:
                break
        signal.setitimer(signal.ITIMER_REAL, self._wait_s)  # the kernel ends the process, even while it waits
        self.has_ended.set()


def main() -> int:
    """Send a run during its training, until it has ended; return 0 if everything was sent."""
    request = expect_map(parse_json(sys.stdin.readline()), {"folder": str, "tracker": str, "wait_s": (int, float)})
    folder = Path(request["folder"])
    training = _Training(float(request["wait_s"]))
    os.nice(10)
    with only_sender(folder, request["tracker"]):
        state = read_state(folder, request["tracker"])
        if state is None:
            return 1
        return _send_beside(Sender(folder=folder, state=state, tell=training.tell), training.has_ended)


def _send_beside(sender: Sender, ended: threading.Event) -> int:
    failures, due = 0, 0.0
    while not ended.wait(_POLL_S):
        if time.monotonic() < due:
            continue
        try:
            sender.send_new()
            failures = 0
        except Exception as error:  # noqa: BLE001 - a service may raise anything
            sender.trouble(error)
            due = time.monotonic() + _RETRY_S[min(failures, len(_RETRY_S) - 1)]
            failures += 1
    try:
        sender.finish()
    except Exception as error:  # noqa: BLE001 - the same
        sender.trouble(error)
        return 1
    return 0


def send_later(folder: Path) -> int:
    """Send a run folder to every tracker with a state in it; return 0 if everything was sent.

    Raises:
        UnreadableError: a state cannot be read, or there is none.
    """
    names = sorted(path.stem for path in (folder / FOLDER).glob("[!.]*.json"))
    if not names:
        raise UnreadableError(folder / FOLDER, "the run had no tracker")
    failed = 0
    for name in names:
        with only_sender(folder, name):
            state = read_state(folder, name)
            assert state is not None
            sender = Sender(folder=folder, state=state)
            try:
                sender.finish()
            except Exception as error:  # noqa: BLE001 - the same
                sys.stderr.write(f"{name}: not sent: {sender.trouble(error)}\n")
                failed = 1
            else:
                sys.stdout.write(f"{name}: sent up to step {sender.state.last_step}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
