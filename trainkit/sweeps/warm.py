"""A warm process: it has imported torch and trainkit, and each job of a sweep is a fork of it.

Importing them is most of what a short job costs. What a fork shares with the others is modules that were imported and
the tensors of the dataset, and nothing else that was computed: no run, no thread. It writes into its own copy.

    the sweep  --- dataset; start, with a lifeline; signal --->  this process  --- fork --->  job
               <-------------------- ended --------------------

A job leads a session of its own, and its lifeline is held by the sweep: it ends with the sweep, by the kernel, whatever
becomes of this process. Linux only; elsewhere jobs start afresh.

`python -m trainkit.sweeps.warm DESCRIPTOR`, that of its end of a socket.
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
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from trainkit.run import lifeline
from trainkit.run.stopping import stop_signals

__all__ = ["HEADER", "main", "send"]

_IMPORTED: Final = (
    "torch._dynamo",  # creating an optimizer does it
    "trainkit.__main__", "trainkit.cli", "trainkit.verbs.train", "trainkit.api", "trainkit.config.check",
    "trainkit.config.compose.jobs", "trainkit.run.runner", "trainkit.run.supervisor",
)  # fmt: skip
"""What the command of a job imports; by name, since it is what stands above sweeps that a job runs."""

HEADER: Final = struct.Struct("!I")
"""The length of a message, before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """What a fork is to become."""

    content: dict[str, Any]
    reader: int


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


class _Forks:
    """Starts jobs and reports their ends, until the sweep is gone."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._jobs: dict[int, tuple[int, int]] = {}
        """Its pid descriptor -> the sweep's number of the job, and its pid."""

    def serve(self) -> _Order | None:
        """In the warm process: None, once the sweep is gone. In a fork: what to become."""
        while True:
            ready, _, _ = select.select([self._link.fileno(), *self._jobs], [], [])
            for descriptor in ready:
                if descriptor in self._jobs:
                    self._bury(descriptor)
            if self._link.fileno() in ready:
                found = _receive(self._link)
                if found is None:
                    return None
                content, reader = found
                if "data" in content:
                    _keep(content["data"])
                elif reader is None:
                    self._signal(content)
                elif self._fork(content["number"], reader):
                    return _Order(content=content, reader=reader)

    def _fork(self, number: int, reader: int) -> bool:
        """Whether this is the fork."""
        pid = os.fork()
        if pid == 0:
            self._link.close()
            for descriptor in self._jobs:
                os.close(descriptor)
            return True
        os.close(reader)
        self._jobs[os.pidfd_open(pid)] = (number, pid)
        return False

    def _bury(self, descriptor: int) -> None:
        """Report a job that has ended; what it left behind in its group ends with it."""
        number, pid = self._jobs.pop(descriptor)
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # not reaped yet: the number is still its own
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        send(self._link, {"number": number, "code": code})

    def _signal(self, content: dict[str, Any]) -> None:
        for number, pid in self._jobs.values():
            if number == content["number"]:
                os.kill(pid, content["signal"])


def _become(order: _Order) -> int:
    """Turn a fork into the job: its session, output, environment and arguments; returns its exit code."""
    os.setsid()
    lifeline.arm(order.reader, os.getpid())
    gone = select.poll()
    gone.register(order.reader, select.POLLHUP)
    if gone.poll(0):  # it broke before it was armed
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, list(stop_signals()))  # until its `StopFlag` is there to take them
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order.content["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(order.content["environ"])
    _as_if_fresh()
    entry, run = import_module("trainkit.__main__"), import_module("trainkit.cli").main
    sys.argv = [str(entry.__file__), *order.content["arguments"]]
    code: int = run(order.content["arguments"])
    return code


def _as_if_fresh() -> None:
    """Give the fork what an interpreter of its own would have: numbers nobody else draws, and its own threads."""
    import numpy as np  # noqa: PLC0415 - imported long ago
    import torch  # noqa: PLC0415

    np.random.seed()  # noqa: NPY002 - the generator that somebody's own code may use; `random` sees to itself
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
    gc.unfreeze()


def _keep(node: dict[str, Any]) -> None:
    """Read a dataset for all jobs; one that cannot be read is theirs to tell of."""
    from trainkit.data.splits import keep_splits  # noqa: PLC0415 - imports torch, which has been done by now

    with contextlib.suppress(Exception):
        keep_splits(node)
    gc.collect()
    gc.freeze()


def _warm_up() -> None:
    """Import what a training imports; nothing is computed, so that no thread is there when it forks."""
    for name in _IMPORTED:
        import_module(name)
    import torch  # noqa: PLC0415 - by now it is

    torch.set_num_threads(1)  # a dataset is read here: no thread may come of it
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page of it


def main(arguments: list[str]) -> int:
    """Fork jobs until the sweep is gone; returns the exit code, in a fork that of the job."""
    link = socket.socket(fileno=int(arguments[0]))
    _warm_up()
    order = _Forks(link).serve()
    return 0 if order is None else _become(order)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
