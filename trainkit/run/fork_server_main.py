"""The process whose forks are the ranks of a run: it imports torch once for all of them, and for those started again.

`python -m trainkit.run.fork_server_main DESCRIPTOR RUN/resolved.yaml`: its end of a socket, and the run, for who looks
at processes; a fork is then what `python -m trainkit.run.worker_main RUN/resolved.yaml` is.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from trainkit.run import worker_main as worker
from trainkit.run.process import parent_death_pipe as lifeline
from trainkit.run.process.exit import exit_without_teardown
from trainkit.run.process.fork_server import ForkServer, enter_child, preload

__all__ = ["main"]

_IMPORTED: Final = (
    "torch._dynamo",  # creating an optimizer does it
    "trainkit.config.schema", "trainkit.run.planning.plan", "trainkit.run.runner",
)  # fmt: skip
"""What a rank imports, whatever it trains."""


def main(arguments: list[str]) -> int:
    """Fork ranks until whoever asks for them is gone; returns the exit code, in a fork that of the rank."""
    link = socket.socket(fileno=int(arguments[0]))
    preload(_IMPORTED)
    order = ForkServer(link).serve()
    if order is None:
        return 0
    enter_child(order)
    os.environ[lifeline.VARIABLE] = str(order.reader)
    sys.argv = [str(worker.__file__), *order.arguments]
    return worker.main(order.arguments)


if __name__ == "__main__":
    exit_without_teardown(main(sys.argv[1:]))
