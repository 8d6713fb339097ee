"""Fork a process that has imported torch and trainkit, which takes most of the time of starting a process.

    client        --- request, with a pipe; signal --->   this process  --- fork --->  the requested process <----------
        its pid; exit -----------

A fork shares only imported modules and preloaded data with the others: no computed state, no thread. It writes into its
own copy of the memory and leads its own session. The client holds the write end of its parent-death pipe: the kernel
ends the fork with the client, whatever happens to this process. Linux only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from trainkit.cluster.host import ProcessId
from trainkit.reading import open_descriptor
from trainkit.run.process.worker_group import arm_kill_on_parent_death
from trainkit.run.signals import stop_signals
from trainkit.trainer import failpoints

HEADER: Final = struct.Struct("!I")
"""The length of a message, which precedes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpawnRequest:
    """The process that a fork is to become."""

    arguments: list[str]
    environ: dict[str, str]
    log: str | None
    """File for its output; None: that of this process."""
    reader: int
    """Read end of its parent-death pipe."""


def send(connection: socket.socket, content: dict[str, Any], *, descriptor: int | None = None) -> None:
    """Send a message, optionally with a file descriptor.

    Raises:
        OSError: the peer has closed the connection.
    """
    body = json.dumps(content).encode()
    head = HEADER.pack(len(body))
    sent = socket.send_fds(connection, [head], [] if descriptor is None else [descriptor])
    connection.sendall(head[sent:] + body)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """Return the next message and its file descriptor; None: the peer has closed the connection."""
    head, descriptors, _, _ = socket.recv_fds(connection, HEADER.size, 1)
    while 0 < len(head) < HEADER.size:
        head += connection.recv(HEADER.size - len(head))
    if not head:
        return None
    body = bytearray()
    (size,) = HEADER.unpack(head)
    while len(body) < size:
        part = connection.recv(size - len(body))
        if not part:
            return None
        body += part
    content: dict[str, Any] = json.loads(body)
    return content, descriptors[0] if descriptors else None


class ForkServer:
    """Starts forks and reports their exits, until the client disconnects; other messages go to `on_message`."""

    def __init__(self, connection: socket.socket, on_message: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._connection = connection
        self._on_message = on_message
        self._running: dict[int, tuple[int, int]] = {}
        """Pid descriptor -> number of the fork at the client, and its pid."""

    def serve(self) -> SpawnRequest | None:
        """Serve requests. In the server: return None once the client is gone. In a fork: return what to become."""
        while True:
            ready, _, _ = select.select([self._connection.fileno(), *self._running], [], [])
            for descriptor in ready:
                if descriptor in self._running:
                    self._reap(descriptor)
            if self._connection.fileno() in ready:
                found = _receive(self._connection)
                if found is None:
                    return None
                content, reader = found
                if reader is not None:
                    if self._fork(content.pop("number"), reader):
                        return SpawnRequest(**content, reader=reader)
                elif "signal" in content:
                    self._signal(content)
                elif self._on_message is not None:
                    self._on_message(content)

    def _fork(self, number: int, reader: int) -> bool:
        """Fork; return whether this is the child."""
        pid = os.fork()
        if pid == 0:
            self._connection.close()
            for descriptor in self._running:
                os.close(descriptor)
            return True
        os.close(reader)
        self._running[os.pidfd_open(pid)] = (number, pid)
        with contextlib.suppress(OSError):  # the client is gone: `serve` finds out
            send(self._connection, {"number": number, **asdict(ProcessId.of(pid))})
        return False

    def _reap(self, descriptor: int) -> None:
        """Report a fork that has ended, and kill the remaining processes of its group."""
        number, pid = self._running.pop(descriptor)
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # not reaped yet: the pid cannot have been reused
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        send(self._connection, {"number": number, "code": code})

    def _signal(self, content: dict[str, Any]) -> None:
        for number, pid in self._running.values():
            if number == content["number"]:
                os.kill(pid, content["signal"])


def enter_child(request: SpawnRequest) -> None:
    """Set up the session, parent-death pipe, output and environment of a fork."""
    os.setsid()
    arm_kill_on_parent_death(request.reader, os.getpid())
    gone = select.poll()
    gone.register(request.reader, select.POLLHUP)
    if gone.poll(0):  # the client closed the pipe before it was armed
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, list(stop_signals()))  # until its `StopFlag` handles them
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if request.log is not None:
        log = open_descriptor(Path(request.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.environ.clear()
    os.environ.update(request.environ)
    failpoints.reload(os.environ)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    _as_if_fresh()


def _as_if_fresh() -> None:
    """Reset process state as in a new interpreter: seed NumPy's global generator and set the number of threads."""
    import numpy as np  # noqa: PLC0415 - imported before
    import torch  # noqa: PLC0415

    np.random.seed()  # noqa: NPY002 - user code may use this generator; `random` reseeds itself
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
    gc.unfreeze()


def preload(modules: Sequence[str]) -> None:
    """Import the modules that forks need, without computing anything, so that no thread exists when they are forked."""
    for name in modules:
        import_module(name)
    import torch  # noqa: PLC0415 - imported by now

    torch.set_num_threads(1)  # loading shared data must not start threads
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page
