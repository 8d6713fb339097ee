"""The worker processes of one attempt: started together, each watched by a thread, ended together.

A worker ends with the process that started it: the supervisor holds the write end of a pipe; when it closes, a worker
and its children end. On Linux the kernel does this: the pipe sends SIGKILL to the worker's process group when its last
writer has closed it, which also ends a worker that is stopped, hangs in C code, or has not yet started Python.
PR_SET_PDEATHSIG would kill only the worker, not its data loading processes. On other systems (untested) a thread of the
worker waits for the pipe to close.

A worker and its data loading processes write the stacks of their threads to one file, which the data loading processes
inherit, and faulthandler writes letter by letter: two processes that write at once would mix their words. So they are
asked one after the other.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final, Protocol, Self

from trainkit.cluster.host import ProcessId, children_of, num_cores, rank_environ
from trainkit.cluster.tasks import Identity
from trainkit.config.targets.allowed import package_environ
from trainkit.config.yaml_files import config_dir_environ
from trainkit.errors import UnreadableError
from trainkit.files import open_descriptor, open_regular, read_tail
from trainkit.report.train_log import unrecorded
from trainkit.run.signals import STACKS_SIGNAL, blocked_at_start
from trainkit.trainer import failpoints

_ANSWER_S: Final = 1.0
"""Seconds that a process has to write its stacks."""
_ANSWERS_S: Final = 3.0
"""Seconds that all of them have together."""
_POLL_S: Final = 0.03
_BYTES: Final = 1 << 16
"""The end of the file that is read."""


def stacks_from(file: Path, asks: Iterable[Callable[[], object]]) -> str:
    """Return the stacks that processes write to a file; empty if none of them can write.

    Args:
        file: the file that they share.
        asks: sends a process the signal on which it writes; one for each of them.
    """
    end = time.monotonic() + _ANSWERS_S
    for ask in asks:
        before = size = _size(file)
        with contextlib.suppress(OSError):  # it has ended
            ask()
            until = min(end, time.monotonic() + _ANSWER_S)
            while time.monotonic() < until:  # until the file has grown and grows no more
                time.sleep(_POLL_S)
                earlier, size = size, _size(file)
                if size == earlier != before:
                    break
    try:
        return read_tail(file, _BYTES)[0].decode(errors="replace").strip()
    except UnreadableError:
        return ""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessExit:
    """The exit of a worker."""

    attempt: int
    rank: int
    code: int
    """Exit code of the worker; -9 if signal 9 ended it."""


class Process(Protocol):
    """The interface of a worker process."""

    @property
    def running(self) -> bool:
        """Whether the exit of the process has not been reported."""

    @property
    def mark(self) -> ProcessId | None:
        """The pid and start time of the process; None while they are unknown."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its children; ignored if it has ended."""

    def kill(self) -> None:
        """End the process and all its children now."""

    def join(self) -> None:
        """Wait until the exit has been reported."""


Fork = Callable[[Sequence[str], Mapping[str, str], Path | None, Callable[[int], None]], Process]
"""(module and arguments, environment, log, callback for the exit code) -> a forked worker."""


def is_ours(command: Sequence[str]) -> bool:
    """Return whether a command runs a module of trainkit in this interpreter."""
    return tuple(command[:2]) == (sys.executable, "-m") and command[2].partition(".")[0] == "trainkit"


class ChildProcess(Protocol):
    """What this module needs of a `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """The output of the process, if this process has to print it."""

    def wait(self) -> int:
        """Wait until the process has exited; return its exit code."""


class WorkerGroup:
    """Owns processes; leaving its block always ends them and everything they started.

    Each worker leads its own session and process group: a Ctrl-C at the terminal reaches only the supervisor.

    Args:
        attempt: the attempt of the run.
        report: receives the exits, from other threads.
        pass_fds: descriptors that the workers inherit.
        fork: forks a worker (`ForkServerClient.fork`) if its command is of trainkit, in the folder of this process;
            None, or an OSError because the server has died: a new interpreter, which only starts later.
    """

    def __init__(
        self,
        attempt: int,
        report: Callable[[ProcessExit], None],
        *,
        pass_fds: Sequence[int] = (),
        fork: Fork | None = None,
    ) -> None:
        self._attempt, self._report, self._fork = attempt, report, fork
        self._pass_fds = tuple(pass_fds)
        self._workers: dict[int, Process] = {}

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path | None,
        *,
        cwd: Path | None = None,
    ) -> None:
        """Start a worker; its output goes to `log`, None: to the terminal or notebook."""
        exits = partial(self._report_exit, rank)
        if self._fork is not None and cwd is None and is_ours(command):
            with contextlib.suppress(OSError):
                self._workers[rank] = self._fork(command[2:], environ, log, exits)
                return
        reader, writer = os.pipe()
        try:
            with contextlib.ExitStack() as stack:
                output: IO[bytes] | int | None = None if prints_to_the_terminal() else subprocess.PIPE
                if log is not None:
                    log.parent.mkdir(parents=True, exist_ok=True)
                    output = stack.enter_context(open_regular(log, "ab"))
                stack.enter_context(_signals_blocked())
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    command,
                    cwd=cwd,
                    env={**environ, LIFELINE: str(reader)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT if output is not None else None,
                    pass_fds=(reader, *self._pass_fds),
                    start_new_session=True,
                )
                arm_kill_on_parent_death(reader, process.pid)
                worker = self._workers[rank] = _Worker(process, writer)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        worker.watch(exits)

    def adopt(self, rank: int, process: ChildProcess, writer: int) -> None:
        """Own a child process that leads a process group; `writer` is the write end of its parent-death pipe."""
        worker = self._workers[rank] = _Worker(process, writer)
        worker.watch(partial(self._report_exit, rank))

    def _report_exit(self, rank: int, code: int) -> None:
        self._report(ProcessExit(attempt=self._attempt, rank=rank, code=code))

    @property
    def running(self) -> list[int]:
        """The ranks whose exit has not been reported."""
        return [rank for rank, worker in self._workers.items() if worker.running]

    @property
    def marks(self) -> dict[int, ProcessId]:
        """Pid and start time of the workers by rank, including workers that have ended."""
        return {rank: mark for rank, worker in self._workers.items() if (mark := worker.mark) is not None}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every running worker, not to its children."""
        for worker in self._workers.values():
            worker.signal(number)

    def stacks(self, rank: int, file: Path) -> str:
        """Return the stacks of a worker's threads and of its data loading processes; empty if it cannot write them.

        The other workers also write their stacks, into their own files; one that is just starting writes them later. A
        stopped process cannot write. The signal kills child processes of the user that do not handle it, shortly before
        they are killed with their worker.

        Args:
            rank: the worker.
            file: the file that it writes them to.
        """
        mark = self.marks.get(rank)
        children = children_of(None if mark is None else mark.pid)
        asking = [partial(self.signal, STACKS_SIGNAL), *(partial(os.kill, pid, STACKS_SIGNAL) for pid in children)]
        stacks = stacks_from(file, asking)
        return f"Stacks of its threads:\n{stacks}" if stacks else ""

    def end(self, rank: int) -> None:
        """End one worker and all its children now, and wait until they have ended."""
        self._workers[rank].kill()
        self._workers[rank].join()

    def kill(self) -> None:
        """End every worker and all its children now, and wait until they have ended."""
        for worker in self._workers.values():
            worker.kill()
        self.join()

    def join(self) -> None:
        """Wait until the exit of every worker has been reported."""
        for worker in self._workers.values():
            worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class _Worker:
    def __init__(self, process: ChildProcess, pipe_writer: int) -> None:
        self._process = process
        self.mark = ProcessId.of(process.pid)
        self._writer = pipe_writer
        self._lock = threading.Lock()  # between sending a signal and reaping: a reaped pid may be reused
        self._reaped = False
        self._reported = False
        self._thread: threading.Thread | None = None
        self._pump: threading.Thread | None = None
        if process.stdout is not None:
            self._pump = threading.Thread(
                target=_relay_output, args=(process.stdout,), name="worker output", daemon=True
            )
            self._pump.start()

    @property
    def running(self) -> bool:
        return not self._reported

    def watch(self, report: Callable[[int], None]) -> None:
        """Report the exit code once the process has ended, from a waiting thread."""
        self._thread = threading.Thread(target=self._wait, args=(report,), name="worker exit", daemon=True)
        self._thread.start()

    def _wait(self, report: Callable[[int], None]) -> None:
        if hasattr(os, "waitid"):  # ended, but not reaped: its pid still identifies its group
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._lock:
            self._kill_group()  # children it left behind
            code = self._process.wait()
            self._reaped = True
        os.close(self._writer)
        report(code)
        self._reported = True

    def signal(self, number: signal.Signals) -> None:
        with self._lock:
            if not self._reaped:  # not send_signal of Popen, which may reap
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        with self._lock:
            if not self._reaped:
                self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
            os.killpg(self._process.pid, signal.SIGKILL)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._pump is not None:
            self._pump.join(timeout=1.0)  # a grandchild in its own session may keep it open


def prints_to_the_terminal() -> bool:
    """Return whether print() and descriptor 1 of a child write to the same place: not so in a notebook."""
    try:
        return sys.stdout.fileno() == 1
    except (OSError, AttributeError, ValueError):
        return False


def _relay_output(source: IO[bytes]) -> None:
    """Print the output of a child here, as it arrives."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with source:
        while content := os.read(source.fileno(), 1 << 16):
            shown = unrecorded(sys.stdout)  # the child records its own output
            shown.write(decoder.decode(content))
            shown.flush()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals while a process is started: they stay pending until that process handles them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked_at_start())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


JOB: Final = "TRAINKIT_JOB"
"""The environment variable that makes a worker read the request of a job, instead of training."""
LIFELINE: Final = "TRAINKIT_LIFELINE"
"""The environment variable with the file descriptor of the read end."""

_F_SETSIG: Final = 10  # a Linux constant without a name in Python


def arm_kill_on_parent_death(reader: int, group: int) -> None:
    """Let the closing of the pipe kill a process group; called by the supervisor.

    The read end is still open here; the setting belongs to the pipe, not to the process.
    """
    if sys.platform == "linux":
        fcntl.fcntl(reader, fcntl.F_SETOWN, -group)
        fcntl.fcntl(reader, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)


def end_with(reader: int) -> None:
    """Let the kernel end the process group that this process leads when the pipe closes; end at once if it has."""
    arm_kill_on_parent_death(reader, os.getpid())
    poll = select.poll()
    poll.register(reader, select.POLLHUP)
    if poll.poll(0):  # closed before it was armed
        os._exit(1)


def watch_parent(environ: MutableMapping[str, str]) -> bool:
    """End this process with the supervisor; called by the worker before anything else.

    The thread covers what the kernel does not: other systems than Linux, and a supervisor that died before it could arm
    the pipe.

    Returns:
        Whether there is a supervisor.
    """
    reader = environ.pop(LIFELINE, "")  # not for child processes: the descriptor is not open there
    if not reader:
        return False
    threading.Thread(target=_wait_for_break, args=(int(reader),), name="lifeline", daemon=True).start()
    return True


def _wait_for_break(reader: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(reader, 1):
            pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def enter_child(environ: Mapping[str, str], log: str | None, reader: int) -> None:
    """Set up a fork: its session, parent-death pipe, output and environment.

    Args:
        environ: its whole environment.
        log: file for its output; None: that of the forked process.
        reader: read end of its parent-death pipe.
    """
    os.setsid()
    end_with(reader)
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked_at_start())  # until they are handled
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if log is not None:
        output = open_descriptor(Path(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    os.environ.clear()
    os.environ.update(environ)
    if failpoints.VARIABLE in environ:
        failpoints.reload(environ)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    _as_if_fresh()


_SET_THREADS: Final = (
    "scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads",
)  # fmt: skip


def _as_if_fresh() -> None:
    """Reset process state as in a new interpreter: seed NumPy's global generator and set the number of threads."""
    import numpy as np  # noqa: PLC0415 - imported before
    import torch  # noqa: PLC0415

    np.random.seed()  # noqa: NPY002 - user code may use this generator; `random` reseeds itself
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal():
        if int(threads) != torch.get_num_threads():
            torch.set_num_threads(int(threads))
        # Each loaded OpenBLAS has read the variable in the process it is forked from. Source of the names: the wheels
        # of NumPy and SciPy.
        lines = Path("/proc/self/maps").read_text().splitlines()
        for library in map(ctypes.CDLL, {line.split()[-1] for line in lines if "openblas" in line}):
            for name in _SET_THREADS:
                if (set_threads := getattr(library, name, None)) is not None:
                    set_threads(int(threads))
    gc.unfreeze()


def worker_environ(environ: Mapping[str, str], identity: Identity) -> dict[str, str]:
    """Return the environment of a worker: its identity, device, packages allowed for targets, threads, network.

    Example:
        >>> worker_environ({"OMP_NUM_THREADS": "3"}, Identity.solo())["OMP_NUM_THREADS"]
        '3'
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // identity.num_ranks)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    if identity.task.rank > 0:
        defaults["PYTHONUNBUFFERED"] = "1"  # a rank that is killed keeps its log
    of_rank = {**identity.to_environ(), **rank_environ(identity.task.device, environ)}
    return {**defaults, **environ, **package_environ(), **config_dir_environ(), **of_rank}
