"""Fork the process that ranks and jobs are forked from, out of the process that starts them.

import torch and trainkit --> fork the template --> check, plan, begin the run --> request forks of the template

The template has imported all that the ranks import, and computed nothing. It has one thread: the threads of OpenBLAS,
which importing NumPy starts, end at a fork. Its own forks set their numbers of threads. Where another thread exists, or
CUDA is in use, a new interpreter imports everything again (`trainkit.run.fork_server_main`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Final

from trainkit.run.signals import blocked_at_start

RANK_IMPORTS: Final = (
    "torch._dynamo",  # creating an optimizer imports it
    "trainkit.config.schema", "trainkit.run.planning.plan", "trainkit.run.runner", "trainkit.run.task",
)  # fmt: skip
"""Modules that every rank imports."""
JOB_IMPORTS: Final = (
    "torch._dynamo", "trainkit.__main__", "trainkit.cli", "trainkit.verbs.running.train", "trainkit.api",
    "trainkit.config.check", "trainkit.config.compose.jobs", "trainkit.run.runner",
    "trainkit.run.agent.supervisor",
)  # fmt: skip
"""Modules that the command of a job of a sweep imports."""


class Forked(BaseException):
    """Raised in the template where it was forked: it leaves all blocks of the process that it is a copy of."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self.connection = connection
        """The socket for requests."""


class Template:
    """The template, as a process that `WorkerGroup` watches."""

    stdout: Final = None

    def __init__(self, pid: int, connection: socket.socket, writer: int) -> None:
        self.pid = pid
        self.connection = connection
        self.writer = writer
        """Write end of its parent-death pipe."""

    def wait(self) -> int:
        """Wait until it has exited; return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End it, and wait until it has exited."""
        self.connection.close()
        os.close(self.writer)
        self.wait()


_free: list[Template] = []
"""The template that no client has taken yet."""
_catches = False
"""Whether the first frame of this process catches `Forked`."""


def catching_forks(main: Callable[[], int]) -> int | Forked:
    """Return the result of a whole command line, which may fork templates; in a template, what left it."""
    global _catches  # noqa: PLW0603 - a property of the process
    _catches = True
    try:
        return main()
    except Forked as forked:
        return forked
    finally:
        _catches = False


@contextmanager
def template(modules: Sequence[str] = RANK_IMPORTS) -> Iterator[None]:
    """Fork a template with some modules, if it is possible, for the first fork server of the block.

    Raises:
        Forked: this process is the template.
    """
    made = _fork(modules)
    if made is not None:
        _free.append(made)
    try:
        yield
    finally:
        if made in _free:
            take_template()
            made.kill()


def take_template() -> Template | None:
    """Return the template, to use and end it."""
    return _free.pop() if _free else None


def _fork(modules: Sequence[str]) -> Template | None:
    if not _catches or sys.platform != "linux" or threading.active_count() > 1:
        return None
    for name in modules:
        import_module(name)
    import torch  # noqa: PLC0415 - imported by now

    from trainkit.run.process.worker_group import end_with, prints_to_the_terminal  # noqa: PLC0415 - the same

    if not prints_to_the_terminal():  # a fork would print elsewhere
        return None
    if torch.cuda.is_initialized() or torch.cuda.device_count():  # type: ignore[no-untyped-call]
        return None
    own, peer = socket.socketpair()
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked_at_start())  # not for the template
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about threads, which are counted below
        pid = os.fork()
    if pid == 0:
        own.close()
        os.close(writer)
        os.setpgid(0, 0)
        end_with(reader)
        raise Forked(peer)
    with suppress(OSError):  # it has exited
        os.setpgid(pid, pid)  # by whichever of the two is first
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    peer.close()
    os.close(reader)
    made = Template(pid, own, writer)
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - a thread that was lost, perhaps with a lock
        made.kill()
        return None
    return made
