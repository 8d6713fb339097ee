"""Fork a process that has imported torch and trainkit, which takes most of the time of starting a process.

    client  --- request, with a pipe; signal --->  this process  --- fork --->  the requested process
    client  <--- its pid; its exit -------------  this process

A fork shares only imported modules and preloaded data with the others: no computed state, no thread. It writes into its
own copy of the memory and leads its own session. The client holds the write end of its parent-death pipe: the kernel
ends the fork with the client, whatever happens to this process. Linux only.

The *template* is such a process that leaves the one that starts a run, before anything is computed:

    import torch and trainkit --> fork the template --> check, plan, begin the run --> request forks of the template

The template has imported all that the ranks import, and computed nothing. It has one thread: the threads of OpenBLAS,
which importing NumPy starts, end at a fork. Its own forks set their numbers of threads. Where another thread exists, or
CUDA is in use, a new interpreter imports everything again (`trainkit.run.fork_server_main`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, Final, Self

from trainkit.cluster.host import ProcessId, num_cores
from trainkit.cluster.tasks import Task
from trainkit.run.process.worker_group import ProcessExit, WorkerGroup, is_ours
from trainkit.run.signals import blocked_at_start

HEADER: Final = struct.Struct("!I")
"""The length of a message, which precedes it."""
_MOST_DESCRIPTORS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SpawnRequest:
    """The description of the process that a fork becomes: `python -m MODULE ARGUMENTS`."""

    module: str
    arguments: list[str]
    environ: dict[str, str]
    log: str | None
    """File for its output; None: the output of this process."""
    reader: int
    """Read end of its parent-death pipe."""


def send(connection: socket.socket, content: dict[str, Any], *, descriptors: Sequence[int] = ()) -> None:
    """Send a message with file descriptors.

    Raises:
        OSError: the peer has closed the connection.
    """
    body = json.dumps(content).encode()
    head = HEADER.pack(len(body))
    sent = socket.send_fds(connection, [head], descriptors)
    connection.sendall(head[sent:] + body)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its file descriptors; None: the peer has closed the connection."""
    head, descriptors, _, _ = socket.recv_fds(connection, HEADER.size, _MOST_DESCRIPTORS)
    if len(head) < HEADER.size:  # a few bytes are sent at once
        return None
    (size,) = HEADER.unpack(head)
    body = connection.recv(size, socket.MSG_WAITALL)
    if len(body) < size:
        return None
    return json.loads(body), descriptors


class ForkServer:
    """Starts forks and reports their exits, until the client disconnects; other messages go to `on_message`."""

    def __init__(
        self, connection: socket.socket, on_message: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        self._connection = connection
        self._on_message = on_message
        self._running: dict[int, tuple[int, int]] = {}
        """Pid descriptor -> number of the fork at the client, and its pid."""

    def serve(self) -> SpawnRequest | None:
        """Serve requests. In the server: return None once the client is gone. In a fork: return its request."""
        while True:
            waiting, requests = select.poll(), self._connection.fileno()  # `select` takes no descriptor above 1,023
            for descriptor in (requests, *self._running):
                waiting.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in waiting.poll()]
            for descriptor in ready:
                if descriptor in self._running:
                    self._reap(descriptor)
            if requests in ready:
                message = _receive(self._connection)
                if message is None:
                    return None
                content, descriptors = message
                if descriptors:
                    if self._fork(content.pop("number"), descriptors):
                        return SpawnRequest(**content, reader=descriptors[0])
                elif "signal" in content:
                    for number, pid in self._running.values():
                        if number == content["number"]:
                            os.kill(pid, content["signal"])
                else:
                    self._on_message(content)

    def _fork(self, number: int, descriptors: Sequence[int]) -> bool:
        """Fork; return whether this is the child, which keeps the descriptors open."""
        pid = os.fork()
        if pid == 0:
            self._connection.close()
            for descriptor in self._running:
                os.close(descriptor)
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        self._running[os.pidfd_open(pid)] = (number, pid)
        with contextlib.suppress(OSError):  # the client is gone: `serve` detects it
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


_JOIN_TIMEOUT_S: Final = 1.0


@dataclass(kw_only=True)
class Fork:
    """A forked process; this process holds the write end of its parent-death pipe."""

    number: int
    writer: int
    connection: socket.socket
    report: Callable[[int], None]
    abandon: Callable[[], None]
    """Ends the fork server, and with it all its forks."""
    running: bool = True
    """Whether its exit has not been reported."""
    mark: ProcessId | None = None
    """The pid and start time of the process; None until the fork server has sent them."""
    exited: threading.Event = field(default_factory=threading.Event)
    """Set once the exit of the process has been reported."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its children; ignored if it has ended."""
        with contextlib.suppress(OSError):  # the fork server has ended, and its forks with it
            send(self.connection, {"number": self.number, "signal": int(number)})

    def kill(self) -> None:
        """Close the parent-death pipe: the kernel ends the process and its children."""
        writer, self.writer = self.writer, -1
        if writer >= 0:
            os.close(writer)

    def join(self) -> None:
        """Wait until the exit has been reported; only for a short time if the process was killed."""
        if self.writer < 0 and not self.exited.wait(_JOIN_TIMEOUT_S):  # the fork server still imports, or hangs
            self.abandon()
        self.exited.wait()

    def ended(self, code: int) -> None:
        """Record and report the exit of the process."""
        self.kill()
        self.report(code)
        self.running = False
        self.exited.set()


class ForkServerClient:
    """Client of a process that has imported the modules of its forks; it ends with the block.

    That process is the template of this process, if there is one, else a new interpreter.

    Args:
        modules: the modules that a new interpreter imports.
        environ: the environment of a new interpreter.
        pass_fds: descriptors that the forks inherit.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str], *, pass_fds: Sequence[int] = ()) -> None:
        self._modules, self._environ, self._pass_fds = tuple(modules), dict(environ), tuple(pass_fds)
        self._numbers = count()
        self._forks: dict[int, Fork] = {}
        self._ended = False
        """Whether the forks of a dead server have been reported; later registered forks would not be."""
        self._lock = threading.Lock()

    @staticmethod
    def is_possible() -> bool:
        """Return whether this system supports forks of this kind."""
        return sys.platform == "linux" and hasattr(os, "pidfd_open")

    def __enter__(self) -> Self:
        if (template := take_template()) is not None:
            self.group = WorkerGroup(0, lambda _: None)
            self.group.adopt(0, template, template.writer)
            self._connection = template.connection
        else:
            self._connection, peer = socket.socketpair()
            with peer:
                self.group = WorkerGroup(0, lambda _: None, pass_fds=(peer.fileno(),))
                command = (sys.executable, "-m", _SERVER, str(peer.fileno()), *self._modules)
                self.group.start(0, command, self._environ, None)
        self._reader = threading.Thread(target=self._listen, args=(self._connection,), name="forks", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        forks = list(self._forks.values())
        for fork in forks:
            fork.kill()
        for fork in forks:
            fork.join()
        self.group.kill()
        self._reader.join()
        self._connection.close()

    @property
    def is_alive(self) -> bool:
        """Whether the fork server accepts requests."""
        return self._reader.is_alive()

    def fork(
        self, words: Sequence[str], environ: Mapping[str, str], log: Path | None, report: Callable[[int], None]
    ) -> Fork:
        """Start `python -m WORDS` with a complete environment; its output goes to `log`, or where the server's goes.

        `report` receives its exit code, from another thread; -9 if signal 9 ended it.

        Raises:
            OSError: the server has ended.
        """
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        number, abandon = next(self._numbers), self.group.kill
        fork = Fork(number=number, writer=writer, connection=self._connection, report=report, abandon=abandon)
        process = {"module": words[0], "arguments": list(words[1:]), "environ": dict(environ)}
        request = {"number": number, **process, "log": None if log is None else str(log.absolute())}
        try:
            with self._lock:  # the caller repeats a request that cannot be sent: the listener must not report it
                if self._ended:
                    raise BrokenPipeError
                self._forks[fork.number] = fork
                try:
                    send(self._connection, request, descriptors=(reader, *self._pass_fds))
                except OSError:
                    del self._forks[fork.number]
                    raise
        except OSError:
            fork.kill()
            raise
        finally:
            os.close(reader)
        return fork

    def broadcast(self, content: Mapping[str, Any]) -> None:
        """Send another message to the server; ignored if it has ended."""
        with contextlib.suppress(OSError):
            send(self._connection, dict(content))

    def _listen(self, connection: socket.socket) -> None:
        """Receive the pids and exits of forks; if the server has died, report the end of all forks."""
        # A connection reset if the server leaves requests unread.
        with contextlib.suppress(OSError), connection.dup() as duplicate, duplicate.makefile("rb") as file:
            while len(head := file.read(HEADER.size)) == HEADER.size:
                message = json.loads(file.read(HEADER.unpack(head)[0]))
                if "code" in message:
                    self._forks.pop(message["number"]).ended(message["code"])
                else:
                    self._forks[message["number"]].mark = ProcessId(message["pid"], message["started"])
        with self._lock:
            self._ended = True
            forks = list(self._forks.values())
            self._forks.clear()
        for fork in forks:
            fork.ended(-signal.SIGKILL)


ENTRY: Final = (sys.executable, "-m", "trainkit.run.worker_main")
"""The first words of a worker's command."""
_SERVER: Final = "trainkit.run.fork_server_main"


@contextmanager
def worker_group_factory(
    command: Sequence[str], tasks: Sequence[Task], *, pass_fds: Sequence[int] = ()
) -> Iterator[Callable[[int, Callable[[ProcessExit], None]], WorkerGroup]]:
    """Yield the factory of worker groups for the attempts of a run: forks if possible and worthwhile, else new
    interpreters.
    """
    can_fork = ForkServerClient.is_possible() and all(task.device == "cpu" for task in tasks)  # no driver survives it
    if not is_ours(command) or len(tasks) < 2 or not can_fork:
        yield partial(WorkerGroup, pass_fds=pass_fds)
        return
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores() // len(tasks)))}  # read when libraries are loaded
    server: ForkServerClient | None = None
    with ExitStack() as stack:

        def group(attempt: int, report: Callable[[ProcessExit], None]) -> WorkerGroup:
            nonlocal server
            if server is None or not server.is_alive:  # not started yet, or killed
                stack.close()
                environ = {**threads, **os.environ}
                server = stack.enter_context(ForkServerClient(RANK_IMPORTS, environ, pass_fds=pass_fds))
            return WorkerGroup(attempt, report, pass_fds=pass_fds, fork=server.fork)

        yield group


RANK_IMPORTS: Final = (
    "torch._dynamo",  # creating an optimizer imports it
    "trainkit.config.schema", "trainkit.run.planning.plan", "trainkit.run.runner", "trainkit.run.task",
)  # fmt: skip
"""Modules that every rank imports."""
JOB_IMPORTS: Final = (
    "torch._dynamo", "trainkit.__main__", "trainkit.cli", "trainkit.verbs.running.train", "trainkit.api",
    "trainkit.config.check", "trainkit.config.compose.jobs", "trainkit.run.runner",
    "trainkit.run.agent.supervisor", "trainkit.report.plots",
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
    child = _fork(modules)
    if child is not None:
        _free.append(child)
    try:
        yield
    finally:
        if child in _free:
            take_template()
            child.kill()


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
    connection, peer = socket.socketpair()
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked_at_start())  # not for the template
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about threads, which are counted below
        pid = os.fork()
    if pid == 0:
        connection.close()
        os.close(writer)
        os.setpgid(0, 0)
        end_with(reader)
        raise Forked(peer)
    with suppress(OSError):  # it has exited
        os.setpgid(pid, pid)  # by whichever of the two is first
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    peer.close()
    os.close(reader)
    child = Template(pid, connection, writer)
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - a thread that was lost, perhaps with a lock
        child.kill()
        return None
    return child
