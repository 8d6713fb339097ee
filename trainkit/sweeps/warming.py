"""Starting jobs as forks of a warm process; the sweep's side of `trainkit.sweeps.warm`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from trainkit.run.group import Exited, WorkerGroup
from trainkit.sweeps.processes import JobProcess, Start, start_fresh
from trainkit.sweeps.warm import HEADER, send

__all__ = ["WarmStarter"]

_ENTRY: Final = (sys.executable, "-m", "trainkit")
_PATIENCE_S: Final = 1.0


@dataclass(kw_only=True)
class _Fork:
    """A job that is a fork: its lifeline is ours."""

    number: int
    writer: int
    link: socket.socket
    report: Callable[[Exited], None]
    abandon: Callable[[], None]
    """Ends the warm process, and so all its forks."""
    gone: threading.Event = field(default_factory=threading.Event)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # the warm process is gone, and its forks with it
            send(self.link, {"number": self.number, "signal": int(number)})

    def kill(self) -> None:
        """Let go of the lifeline: the kernel ends the job and its children."""
        self._let_go()
        if not self.gone.wait(_PATIENCE_S):  # the warm process still imports, or hangs
            self.abandon()
            self.gone.wait()

    def end(self, code: int) -> None:
        self._let_go()
        self.gone.set()
        self.report(Exited(attempt=self.number, rank=0, code=code, moment=time.time()))

    def _let_go(self) -> None:
        writer, self.writer = self.writer, -1
        if writer >= 0:
            os.close(writer)


class WarmStarter:
    """Starts jobs of trainkit as forks of one process that has imported all they need, others afresh.

    The process is started with the block and ended with it; a job that is asked for before it is ready waits for it.

    Args:
        environ: what every job finds in its environment besides that of this process: its threads.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._forks: dict[int, _Fork] = {}
        self._group: WorkerGroup | None = None
        self._link: socket.socket | None = None

    @staticmethod
    def is_possible() -> bool:
        """Whether this system has what it takes."""
        return sys.platform == "linux" and hasattr(os, "pidfd_open")

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._group = WorkerGroup(0, lambda _: None, pass_fds=(descriptor,))
            command = (sys.executable, "-m", "trainkit.sweeps.warm", str(descriptor))
            environ = {**os.environ, **self._environ, "PYTHONUNBUFFERED": "1"}
            self._group.start(0, command, environ, Path(os.devnull))
        self._link = ours
        self._reader = threading.Thread(target=self._listen, args=(ours,), name="warm process", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fork in list(self._forks.values()):
            fork.kill()
        if self._group is not None and self._link is not None:
            self._group.kill()
            self._reader.join()
            self._link.close()

    def __call__(self, job: Start) -> JobProcess:
        """Start a job."""
        if self._link is None or self._group is None or tuple(job.command[: len(_ENTRY)]) != _ENTRY:
            return start_fresh(job)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        fork = _Fork(number=job.number, writer=writer, link=self._link, report=job.report, abandon=self._group.kill)
        order = {
            "number": job.number,
            "arguments": list(job.command[len(_ENTRY) :]),
            "environ": job.whole_environ,
            "log": str(job.log.absolute()),
        }
        self._forks[job.number] = fork  # before it is asked whether anybody listens: whoever listens last ends them all
        try:
            if not self._reader.is_alive():
                raise BrokenPipeError
            send(self._link, order, descriptor=reader)
        except OSError:  # the warm process died: without it jobs only start later
            self._forks.pop(job.number)
            os.close(writer)
            return start_fresh(job)
        finally:
            os.close(reader)
        return fork

    def keep(self, data: Mapping[str, Any]) -> None:
        """Let all jobs that come share a dataset, where it is one that can be shared."""
        if self._link is not None:
            with contextlib.suppress(OSError):  # it died: each job reads its own
                send(self._link, {"data": dict(data)})

    def _listen(self, link: socket.socket) -> None:
        """Pass on the ends of forks; where the warm process has died, theirs with it."""
        # It is a reset where the warm process leaves orders unread.
        with contextlib.suppress(OSError), link.dup() as own, own.makefile("rb") as file:
            while len(head := file.read(HEADER.size)) == HEADER.size:
                told = json.loads(file.read(HEADER.unpack(head)[0]))
                self._forks.pop(told["number"]).end(told["code"])
        for number in list(self._forks):
            self._forks.pop(number).end(-signal.SIGKILL)
