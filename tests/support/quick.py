"""Commands that are quick to start: forks of a process that has imported what they import.

Importing torch takes three seconds of a core, most of what a short command costs. A script hands its arguments, folder,
environment and open files to a process of the session, which forks; what the fork runs, prints and ends with is what
`python -m trainkit` does, or `python -m pytest`. Signals but SIGKILL do not reach it: a test that sends one starts the
command as it is.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

if sys.platform != "win32":
    import fcntl

ROOT: Final = Path(__file__).resolve().parents[2]
SCRIPT: Final = """#!{python} -SE
import json, os, socket, struct, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
body = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
reader, writer = os.pipe()  # held open here: when this script is killed, what it stands for is
socket.send_fds(link, [struct.pack("!I", len(body))], [0, 1, 2, reader])
os.close(reader)
link.sendall(body)
answer = link.recv(1)
sys.exit(answer[0] if answer else 139)
"""


class _Quick:
    """The process that is forked, and the folder of the script."""

    def __init__(self, module: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.script = self.folder / module
        address = str(self.folder / "socket")
        self.script.write_text(SCRIPT.format(python=sys.executable, address=address))
        self.script.chmod(0o755)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.quick", module, address],
            cwd=ROOT,
            env=environ,
            start_new_session=True,
        )
        while not Path(address).exists():
            assert self._process.poll() is None
            time.sleep(0.02)

    def end(self) -> None:
        """Leave nothing."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.folder)


_started: dict[str, _Quick] = {}


def _quick(module: str) -> _Quick:
    if module not in _started:
        _started[module] = _Quick(module)
    return _started[module]


def command(*arguments: str, module: str = "trainkit") -> list[str]:
    """`python -m MODULE` with these arguments, of trainkit or pytest; killed, it ends what it stands for."""
    if sys.platform != "linux":
        return [sys.executable, "-m", module, *arguments]
    return [str(_quick(module).script), *arguments]


def path() -> str:
    """PATH with that command, and the others of this environment, first."""
    first = [str(_quick("trainkit").folder)] if sys.platform == "linux" else []
    return os.pathsep.join([*first, str(Path(sys.executable).parent), os.environ["PATH"]])


def end() -> None:
    """The session is over."""
    while _started:
        _started.popitem()[1].end()


def serve(module: str, address: str) -> int:
    """In the process: forks for ever. In a fork: run the command; returns its exit code."""
    for name in _IMPORTED[module]:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks: each tells its own end
    while True:
        link, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            return _answer(link, _RUN[module])
        link.close()


def _answer(link: socket.socket, run: Callable[[list[str]], int]) -> int:
    head, (*files, reader), _, _ = socket.recv_fds(link, 4, 4)
    _end_with(reader)
    (left,) = struct.unpack("!I", head)
    body = bytearray()
    while len(body) < left:
        body += link.recv(left - len(body))
    arguments, folder, environ = json.loads(body)
    for source, target in zip(files, (0, 1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environ
    try:
        code = run(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        link.sendall(bytes([code]))
    return code


def _end_with(reader: int) -> None:
    """Let the kernel end this process and its children when the script is gone, which holds the other end."""
    fcntl.fcntl(reader, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(reader, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)


def _run_trainkit(arguments: list[str]) -> int:
    from trainkit import __main__, cli
    from trainkit.trainer import failpoints

    failpoints.reload(os.environ)
    sys.argv = [str(__main__.__file__), *arguments]
    return cli.main(arguments)


def _run_pytest(arguments: list[str]) -> int:
    """Tests of the folder, which may be a copy: of this project nothing has been imported."""
    import pytest

    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(Path.cwd()), *(place for place in sys.path if place not in ("", str(ROOT)))]
    return int(pytest.main(arguments))


_IMPORTED: Final = {
    "trainkit": (
        "torch._dynamo", "trainkit.verbs.running.train", "trainkit.api", "trainkit.run.runner",
        "trainkit.run.supervisor.supervisor",
    ),
    "pytest": ("torch._dynamo", "torch.distributed", "pytest"),
}  # fmt: skip
"""What most commands import; of torch, creating an optimizer imports the first."""
_RUN: Final = {"trainkit": _run_trainkit, "pytest": _run_pytest}


def _end(code: int) -> NoReturn:
    """As a rank ends, whose torch may have threads that still run."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(serve(*sys.argv[1:]))
