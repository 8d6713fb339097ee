"""Run the process that ranks are forked from: it imports torch once for all ranks and for their restarts.

`python -m trainkit.run.fork_server_main DESCRIPTOR RUN/resolved.yaml`: DESCRIPTOR is the file descriptor of its socket;
the path of the run only makes the process recognizable in `ps`. A fork behaves like `python -m trainkit.run.worker_main
RUN/resolved.yaml`.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from trainkit.run import worker_main as worker
from trainkit.run.process.fork_server import ForkServer, preload
from trainkit.run.process.worker_group import LIFELINE, enter_child
from trainkit.run.signals import exit_without_teardown

_IMPORTED: Final = (
    "torch._dynamo",  # creating an optimizer does it
    "trainkit.config.schema", "trainkit.run.planning.plan", "trainkit.run.runner",
)  # fmt: skip
"""Modules that every rank imports."""


def main(arguments: list[str]) -> int:
    """Fork ranks until the client closes the socket. Return the exit code; in a fork, the exit code of the rank."""
    link = socket.socket(fileno=int(arguments[0]))
    preload(_IMPORTED)
    request = ForkServer(link).serve()
    if request is None:
        return 0
    enter_child(request.environ, request.log, request.reader)
    os.environ[LIFELINE] = str(request.reader)
    sys.argv = [str(worker.__file__), *request.arguments]
    return worker.main(request.arguments)


if __name__ == "__main__":
    exit_without_teardown(main(sys.argv[1:]))
