"""Be the process that ranks and jobs are forked from: a fork of the process that starts them, or a new interpreter.

`python -m trainkit.run.fork_server_main DESCRIPTOR MODULE...`: the file descriptor of its socket, and what it imports.
A fork behaves like `python -m MODULE ARGUMENTS` of the request.
"""

from __future__ import annotations

import gc
import os
import runpy
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from trainkit.run.process.fork_server import Forked, catching_forks
from trainkit.run.signals import exit_without_teardown, open_standard_streams


def main(arguments: list[str]) -> int:
    """Import the modules, and fork until the client closes the socket; return the exit code."""
    link = socket.socket(fileno=int(arguments[0]))
    for name in arguments[1:]:
        import_module(name)
    return _serve(link)


def run_command(command: Callable[[], int]) -> int:
    """Return the exit code of the command of a whole process; the template that it may fork serves until its end."""
    open_standard_streams()
    ended = catching_forks(command)
    if isinstance(ended, Forked):
        exit_without_teardown(_serve(ended.connection))
    return ended


def _serve(link: socket.socket) -> int:
    """Fork until the client is gone; return the exit code. A fork runs its module, and ends as that does."""
    import torch  # noqa: PLC0415 - imported by now

    from trainkit.run.process.fork_server import ForkServer  # noqa: PLC0415 - most commands serve no forks
    from trainkit.run.process.worker_group import LIFELINE, enter_child  # noqa: PLC0415

    torch.set_num_threads(1)  # loading shared data must not start threads
    _freeze()
    request = ForkServer(link, _keep).serve()
    if request is None:
        return 0
    enter_child(request.environ, request.log, request.reader)
    os.environ[LIFELINE] = str(request.reader)
    sys.argv = [request.module, *request.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd())
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # the module has been imported
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    return 0


def _keep(content: dict[str, Any]) -> None:
    """Read a dataset for all forks; if it is unreadable, the forks report the error."""
    from trainkit.data.splits import keep_splits  # noqa: PLC0415 - imports torch, which has been done by now

    with suppress(Exception):
        keep_splits(content["data"])
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page


if __name__ == "__main__":
    exit_without_teardown(main(sys.argv[1:]))
