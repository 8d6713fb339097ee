"""Forks of a process that has imported torch and trainkit, which is most of what starting a process costs.

    whoever asks  --- order, with a lifeline; signal --->  this process  --- fork --->  what was ordered
                  <---------- its pid; ended -----------

What a fork shares with the others is modules that were imported, and what was read for all of them; nothing that was
computed, no thread. It writes into its own copy, leads a session of its own, and its lifeline is held by whoever asked
for it: it ends with that process, by the kernel, whatever becomes of this one. Linux only.
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
from trainkit.run.process import parent_death_pipe as lifeline
from trainkit.run.process.signals import stop_signals
from trainkit.trainer import failpoints

__all__ = ["HEADER", "ForkServer", "SpawnRequest", "enter_child", "preload", "send"]

HEADER: Final = struct.Struct("!I")
"""The length of a message, before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpawnRequest:
    """What a fork is to become."""

    arguments: list[str]
    environ: dict[str, str]
    log: str | None
    """What takes its output; None: where that of this process goes."""
    reader: int
    """Its end of the lifeline."""


def send(link: socket.socket, content: dict[str, Any], *, descriptor: int | None = None) -> None:
    """Send a message, perhaps with a descriptor.

    Raises:
        OSError: the other end is gone.
    """
    body = json.dumps(content).encode()
    head = HEADER.pack(len(body))
    sent = socket.send_fds(link, [head], [] if descriptor is None else [descriptor])
    link.sendall(head[sent:] + body)


def _receive(link: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """The next message and its descriptor; None: the other end is gone."""
    head, descriptors, _, _ = socket.recv_fds(link, HEADER.size, 1)
    while 0 < len(head) < HEADER.size:
        head += link.recv(HEADER.size - len(head))
    if not head:
        return None
    body = bytearray()
    (size,) = HEADER.unpack(head)
    while len(body) < size:
        part = link.recv(size - len(body))
        if not part:
            return None
        body += part
    content: dict[str, Any] = json.loads(body)
    return content, descriptors[0] if descriptors else None


class ForkServer:
    """Starts forks and reports their ends, until whoever asks is gone.

    Args:
        link: to whoever asks.
        told: takes what is no order and no signal.
    """

    def __init__(self, link: socket.socket, on_message: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._link = link
        self._on_message = on_message
        self._running: dict[int, tuple[int, int]] = {}
        """Its pid descriptor -> its number at the other end, and its pid."""

    def serve(self) -> SpawnRequest | None:
        """In the process itself: None, once the other end is gone. In a fork: what to become."""
        while True:
            ready, _, _ = select.select([self._link.fileno(), *self._running], [], [])
            for descriptor in ready:
                if descriptor in self._running:
                    self._reap(descriptor)
            if self._link.fileno() in ready:
                found = _receive(self._link)
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
        """Whether this is the fork."""
        pid = os.fork()
        if pid == 0:
            self._link.close()
            for descriptor in self._running:
                os.close(descriptor)
            return True
        os.close(reader)
        self._running[os.pidfd_open(pid)] = (number, pid)
        with contextlib.suppress(OSError):  # nobody listens any more: `serve` finds out
            send(self._link, {"number": number, **asdict(ProcessId.of(pid))})
        return False

    def _reap(self, descriptor: int) -> None:
        """Report a fork that has ended; what it left behind in its group ends with it."""
        number, pid = self._running.pop(descriptor)
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # not reaped yet: the number is still its own
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        send(self._link, {"number": number, "code": code})

    def _signal(self, content: dict[str, Any]) -> None:
        for number, pid in self._running.values():
            if number == content["number"]:
                os.kill(pid, content["signal"])


def enter_child(order: SpawnRequest) -> None:
    """Give a fork what is its own: its session, lifeline, output and environment."""
    os.setsid()
    lifeline.arm_kill_on_parent_death(order.reader, os.getpid())
    gone = select.poll()
    gone.register(order.reader, select.POLLHUP)
    if gone.poll(0):  # it broke before it was armed
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, list(stop_signals()))  # until its `StopFlag` is there to take them
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if order.log is not None:
        log = open_descriptor(Path(order.log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.environ.clear()
    os.environ.update(order.environ)
    failpoints.reload(os.environ)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    _as_if_fresh()


def _as_if_fresh() -> None:
    """Give the fork what an interpreter of its own would have: numbers nobody else draws, and its own threads."""
    import numpy as np  # noqa: PLC0415 - imported long ago
    import torch  # noqa: PLC0415

    np.random.seed()  # noqa: NPY002 - the generator that somebody's own code may use; `random` sees to itself
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
    gc.unfreeze()


def preload(modules: Sequence[str]) -> None:
    """Import what forks need; nothing is computed, so that no thread is there when they are made."""
    for name in modules:
        import_module(name)
    import torch  # noqa: PLC0415 - by now it is

    torch.set_num_threads(1)  # what is read here for all of them must not start any
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page of it
