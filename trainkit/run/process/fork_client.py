"""Ask `trainkit.run.process.fork_server`, which has imported all that a rank needs, for forks of its process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from trainkit.cluster.host import ProcessId
from trainkit.run.process.fork_server import HEADER, send
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup

__all__ = ["Fork", "ForkServerClient", "ForkedGroup"]

_PATIENCE_S: Final = 1.0


@dataclass(kw_only=True)
class Fork:
    """A process that is a fork: its lifeline is ours."""

    number: int
    writer: int
    link: socket.socket
    report: Callable[[int], None]
    abandon: Callable[[], None]
    """Ends the process that it is a fork of, and so all its forks."""
    running: bool = True
    """Whether it has not ended."""
    mark: ProcessId | None = None
    """Its pid and start time; None until the process that it is a fork of has said them."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set once it has ended and been reported."""

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, and its children none; nothing where it has ended."""
        with contextlib.suppress(OSError):  # the other end is gone, and its forks with it
            send(self.link, {"number": self.number, "signal": int(number)})

    def kill(self) -> None:
        """Drop the lifeline: the kernel ends it and its children."""
        writer, self.writer = self.writer, -1
        if writer >= 0:
            os.close(writer)

    def join(self) -> None:
        """Wait until it has ended, and has been reported; not long where it was killed."""
        if self.writer < 0 and not self.gone.wait(_PATIENCE_S):  # what it is a fork of still imports, or hangs
            self.abandon()
        self.gone.wait()

    def ended(self, code: int) -> None:
        """It has ended."""
        self.kill()
        self.running = False
        self.report(code)
        self.gone.set()


class ForkServerClient:
    """A process that imports what its forks need, and is then forked; started and ended with its block.

    Args:
        module: what `python -m` runs; its first argument is the descriptor of its end of a socket.
        environ: what it finds in its environment.
        arguments: what follows.
        log: takes what it prints, and what forks without a log of their own do; None: the terminal or notebook.
        pass_fds: descriptors that it and its forks inherit.
    """

    def __init__(
        self,
        module: str,
        environ: Mapping[str, str],
        *,
        arguments: Sequence[str] = (),
        log: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._module, self._environ, self._arguments = module, dict(environ), tuple(arguments)
        self._log, self._pass_fds = log, tuple(pass_fds)
        self._numbers = count()
        self._forks: dict[int, Fork] = {}

    @staticmethod
    def is_possible() -> bool:
        """Whether this system has what it takes."""
        return sys.platform == "linux" and hasattr(os, "pidfd_open")

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self.group = WorkerGroup(0, lambda _: None, pass_fds=(descriptor, *self._pass_fds))
            command = (sys.executable, "-m", self._module, str(descriptor), *self._arguments)
            self.group.start(0, command, self._environ, self._log)
        self._link = ours
        self._reader = threading.Thread(target=self._listen, args=(ours,), name="forks", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        forks = list(self._forks.values())
        for fork in forks:
            fork.kill()
        for fork in forks:
            fork.join()
        self.group.kill()
        self._reader.join()
        self._link.close()

    @property
    def is_alive(self) -> bool:
        """Whether it may be asked."""
        return self._reader.is_alive()

    def fork(
        self, arguments: Sequence[str], environ: Mapping[str, str], log: Path | None, report: Callable[[int], None]
    ) -> Fork:
        """Start a process.

        Args:
            arguments: what it is told.
            environ: its environment, whole.
            log: takes what it prints; None: what takes the server's.
            report: is told of its end by its exit code, from another thread; -9 where signal 9 ended it.

        Raises:
            OSError: the server is gone.
        """
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        fork = Fork(number=next(self._numbers), writer=writer, link=self._link, report=report, abandon=self.group.kill)
        order = {
            "number": fork.number,
            "arguments": list(arguments),
            "environ": dict(environ),
            "log": None if log is None else str(log.absolute()),
        }
        self._forks[fork.number] = (
            fork  # before it is asked whether anybody listens: whoever listens last ends them all
        )
        try:
            if not self.is_alive:
                raise BrokenPipeError
            send(self._link, order, descriptor=reader)
        except OSError:
            self._forks.pop(fork.number, None)
            fork.kill()
            raise
        finally:
            os.close(reader)
        return fork

    def broadcast(self, content: Mapping[str, Any]) -> None:
        """Say something else; nothing where nobody listens any more."""
        with contextlib.suppress(OSError):
            send(self._link, dict(content))

    def _listen(self, link: socket.socket) -> None:
        """Take note of the pids of forks, and pass on their ends; where the server has died, theirs with it."""
        # It is a reset where the server leaves orders unread.
        with contextlib.suppress(OSError), link.dup() as own, own.makefile("rb") as file:
            while len(head := file.read(HEADER.size)) == HEADER.size:
                told = json.loads(file.read(HEADER.unpack(head)[0]))
                if "code" in told:
                    self._forks.pop(told["number"]).ended(told["code"])
                else:
                    self._forks[told["number"]].mark = ProcessId(told["pid"], told["started"])
        for number in list(self._forks):
            self._forks.pop(number).ended(-signal.SIGKILL)


class ForkedGroup(WorkerGroup):
    """Workers that are forks where they can be; where the server has died, or for other commands, processes afresh.

    Args:
        server: is forked.
        entry: what begins a command whose arguments a fork takes.
        attempt: as `WorkerGroup` has it.
        report: as `WorkerGroup` has it.
        pass_fds: descriptors that processes started afresh inherit; forks have those of the server.
    """

    def __init__(
        self,
        server: ForkServerClient,
        entry: Sequence[str],
        attempt: int,
        report: Callable[[ProcessExit], None],
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        super().__init__(attempt, report, pass_fds=pass_fds)
        self._server, self._entry = server, tuple(entry)

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path | None,
        *,
        cwd: Path | None = None,
    ) -> None:
        """Start a worker; `log` takes what it prints, None lets it through to the terminal or notebook."""
        length = len(self._entry)
        if cwd is None and tuple(command[:length]) == self._entry:
            with contextlib.suppress(OSError):  # the server has died: without it workers only start later
                self._workers[rank] = self._server.fork(
                    command[length:], environ, log, lambda code: self._report_exit(rank, code)
                )
                return
        super().start(rank, command, environ, log, cwd=cwd)
