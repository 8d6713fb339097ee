"""Commands that are quick to start: forks of a process that has imported what they import.

Importing torch takes two to three seconds of a core, most of what a short command costs. A script hands its arguments,
folder, environment and open files to a process of the session, which forks; what the fork runs, prints and ends with is
what `python -m MODULE` or `python FILE` does. Signals but SIGKILL do not reach it: a test that sends one starts the
command as it is. The processes that a command starts and that import torch are started in the same way
(`quicken_launches`).

There is a process to fork for each interpreter (this one, or that of an environment with the wheel) and for each of two
sets of imports: `trainkit`, or only `torch`, for commands of a copy of this project.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final, NoReturn

ROOT: Final = Path(__file__).resolve().parents[2]
FORK_SERVER: Final = "trainkit.run.fork_server_main"
COMPUTING: Final = ("trainkit.measuring.turn_main",)
NOTE: Final = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir()), "quick")
"""The file in the session's cache that names the folder of the scripts."""
SCRIPT: Final = """#!{python} -SE
import json, os, socket, struct, sys
numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2]  # one of them is that of the list
passed = [number for number in numbers if os.path.exists(f"/proc/self/fd/{{number}}") and os.get_inheritable(number)]
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
body = json.dumps([{module!r}, sys.argv[1:], os.getcwd(), dict(os.environ), passed]).encode()
reader, writer = os.pipe()  # held open here: when this script is killed, what it stands for is
socket.send_fds(link, [struct.pack("!I", len(body))], [0, 1, 2, *passed, reader])
os.close(reader)
link.sendall(body)
answer = link.recv(1)
sys.exit(answer[0] if answer else 139)
"""


class _Quick:
    """The process that is forked, and the folder of its scripts."""

    def __init__(self, imports: str, python: str, within: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self._address = str(self.folder / "socket")
        for name in ("trainkit", *_QUICKENED[imports]):
            self.script(name)
        environ, itself = dict(os.environ), ["-m", "tests.support.quick"]
        if python == sys.executable:
            environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        else:  # an environment that has no tests, and must not see this checkout
            environ.pop("PYTHONPATH", None)
            itself = [__file__]
        reader, self._writer = os.pipe()  # closed with this process, also when it is killed
        self._process = subprocess.Popen(
            [*within, python, *itself, imports, self._address, str(reader)],
            cwd=ROOT if python == sys.executable else self.folder,
            env=environ,
            pass_fds=[reader],
            start_new_session=True,
        )
        os.close(reader)
        self._is_noted = (imports, python, *within) == ("trainkit", sys.executable) and "XDG_CACHE_HOME" in os.environ

    def wait(self) -> None:
        """Return when it can be forked."""
        while not Path(self._address).exists():
            assert self._process.poll() is None
            time.sleep(0.02)
        if self._is_noted:
            NOTE.write_text(str(self.folder))

    def script(self, module: str) -> Path:
        """Return the script that stands for `python -m MODULE`, which this process forks."""
        script = self.folder / module
        if not script.exists():
            script.write_text(SCRIPT.format(python=sys.executable, address=self._address, module=module))
            script.chmod(0o755)
        return script

    def end(self) -> None:
        """Leave nothing."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._writer)
        shutil.rmtree(self.folder)


_started: dict[tuple[str, ...], _Quick] = {}


def _quick(imports: str, python: str = sys.executable, within: Sequence[str] = ()) -> _Quick:
    key = (imports, python, *within)
    if key not in _started:
        _started[key] = _Quick(imports, python, within)
        _started[key].wait()
    return _started[key]


def command(
    *arguments: str,
    module: str = "trainkit",
    imports: str = "trainkit",
    python: str | Path = sys.executable,
    within: Sequence[str] = (),
) -> list[str]:
    """Return the command that stands for `python -m MODULE` with these arguments; killed, it ends that, too.

    Args:
        *arguments: those of the module.
        module: what is run.
        imports: what has been imported already: `trainkit`, or only `torch`.
        python: the interpreter.
        within: a command that runs the one behind it, as `nice` does: it starts the process that is forked.
    """
    if sys.platform != "linux":
        return [*within, str(python), "-m", module, *arguments]
    return [str(_quick(imports, str(python), within).script(module)), *arguments]


def path() -> str:
    """PATH with that command, and the others of this environment, first."""
    first = [str(_quick("trainkit").folder)] if sys.platform == "linux" else []
    return os.pathsep.join([*first, str(Path(sys.executable).parent), os.environ["PATH"]])


def quicken_launches(
    folder: Callable[[], Path | None] = lambda: _quick("trainkit").folder,
    modules: Sequence[str] = (FORK_SERVER, *COMPUTING),
) -> None:
    """Let a process that forks ranks, trains a turn, predicts or draws, where this one launches it, be a fork, too.

    Args:
        folder: where the scripts are; None: what is launched starts as it is.
        modules: what is launched so; a test of the process that forks jobs sends it signals.
    """
    if sys.platform != "linux":
        return
    start = subprocess.Popen.__init__

    def init(self: subprocess.Popen[bytes], args: Any, *rest: Any, **options: Any) -> None:
        launched = isinstance(args, list | tuple) and tuple(args[:2]) == (sys.executable, "-m") and args[2] in modules
        if launched:
            scripts = folder()
            args = args if scripts is None else (str(scripts / args[2]), *args[3:])
        start(self, args, *rest, **options)

    subprocess.Popen.__init__ = init  # type: ignore[method-assign, assignment]


def scripts_of_the_session() -> Path | None:
    """Return the folder of the scripts that the session of this process has made by now."""
    folder = Path(NOTE.read_text()) if NOTE.exists() else None
    return folder if folder is not None and folder.exists() else None


def end() -> None:
    """The session is over."""
    while _started:
        _started.popitem()[1].end()


def serve(imports: str, address: str, reader: str) -> int:
    """In the process: forks until the session ends. In a fork: run the command; returns its exit code."""
    _end_with(int(reader))
    for name in _IMPORTED[imports]:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    if imports == "trainkit":  # parses the shipped files once, without an operation of torch, whose threads do not fork
        importlib.import_module("trainkit").compose(["recipe=digits"])
        figure = importlib.import_module("matplotlib.figure").Figure()
        figure.text(0, 0, "1")
        figure.savefig(io.BytesIO())  # imports what draws, and reads the fonts
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # no public name
        finalizer.atexit = False  # torch's operators: a process that ends takes a twentieth of a second to forget them
    gc.collect()
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    quicken_launches(lambda: Path(address).parent, _QUICKENED[imports])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks: each tells its own end
    while True:
        link, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            os.close(int(reader))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            return _answer(link, imports)
        link.close()


def _answer(link: socket.socket, imports: str) -> int:
    head, (*files, reader), _, _ = socket.recv_fds(link, 4, 250)
    _end_with(reader)
    (size,) = struct.unpack("!I", head)
    body = bytearray()
    while len(body) < size:
        body += link.recv(size - len(body))
    module, arguments, folder, environ, passed = json.loads(body)
    first_free = max([63, link.fileno(), reader, *files, *passed]) + 1
    link, before = socket.socket(fileno=fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, first_free)), link
    before.close()
    fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, first_free)
    os.close(reader)
    high = [fcntl.fcntl(source, fcntl.F_DUPFD, first_free) for source in files]
    for source in files:
        os.close(source)
    for source, target in zip(high, (0, 1, 2, *passed), strict=True):
        os.dup2(source, target)
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environ
    failpoints: Any = sys.modules.get("trainkit.trainer.failpoints")
    if failpoints is not None:  # it has read the environment of the process that is forked
        failpoints.reload(os.environ)
    os._exit = partial(_answering, os._exit, link, os.getpid())
    try:
        if imports == "trainkit" and module in (FORK_SERVER, *COMPUTING):
            code = _run_main(module, arguments)
        elif imports == "trainkit" and module == "trainkit":
            code = _run_trainkit(arguments)
        else:
            code = _run_as_it_is(module, arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _answering(leave: Callable[[int], NoReturn], link: socket.socket, process: int, code: int) -> NoReturn:
    """End a process with a code, which is told if it is that process, and not a fork of its own."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            link.sendall(bytes([code]))
    leave(code)


def _end_with(reader: int) -> None:
    """Let the kernel end this process and its children when the process that holds the other end is gone."""
    fcntl.fcntl(reader, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(reader, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([reader], 0):  # it was gone before: no signal comes
        os.killpg(0, signal.SIGKILL)


def _run_trainkit(arguments: list[str]) -> int:
    from trainkit import __main__, cli

    sys.argv = [str(__main__.__file__), *arguments]
    return cli.main(arguments)


def _run_main(module: str, arguments: list[str]) -> int:
    sys.path[0] = str(Path.cwd())
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[1:1] = paths
    return int(importlib.import_module(module).main(arguments))


def _run_as_it_is(module: str, arguments: list[str]) -> int:
    """Do what `python -m MODULE` does in a process that has imported only what is imported here already."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    last = [str(ROOT)] if str(ROOT) in sys.path else []  # an editable installation has it behind all others
    rest = [path for path in sys.path if path not in ("", str(ROOT), *paths)]
    sys.path[:] = [str(Path.cwd()), *paths, *rest, *last]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - Python prints it and ends with 1
        traceback.print_exc()
        return 1
    return 0


_IMPORTED: Final = {
    "trainkit": (
        "torch._dynamo", "trainkit.verbs.running.train", "trainkit.api", "trainkit.run.runner",
        "trainkit.run.agent.supervisor", "trainkit.config.compose.jobs", "trainkit.callbacks.figures",
        "trainkit.callbacks.progress", "trainkit.callbacks.tensorboard", "trainkit.report.events",
        "trainkit.report.web.run_document", "trainkit.objectives.classification", "trainkit.models.mlp",
        "trainkit.data.sets.images", "trainkit.strategies.data_parallel.strategy", "trainkit.strategies.mesh.strategy",
        "trainkit.verbs.looking.plan", "trainkit.report.plots",
    ),
    "torch": ("torch._dynamo", "torch.distributed", "pytest"),
}  # fmt: skip
"""What most commands import; of torch, creating an optimizer imports the first."""
_QUICKENED: Final = {
    "trainkit": (FORK_SERVER, *COMPUTING),
    "torch": (FORK_SERVER, "tests.support.pool_worker", "tests.support.quick"),
}
"""What a command starts that is a fork, too."""


def _end(code: int) -> NoReturn:
    """As a rank ends, whose torch may have threads that still run."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if not __package__:  # run as a file: the folder of the file holds modules that are not meant to be found
        sys.path[0] = ""
    _end(serve(*sys.argv[1:]))
