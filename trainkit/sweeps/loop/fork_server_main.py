"""The preloaded process: it has imported torch and trainkit, and each job of a sweep is a fork of it.

The imports take most of the time of a short job. The dataset is read once for all jobs, too.

`python -m trainkit.sweeps.loop.fork_server_main DESCRIPTOR`: the descriptor of its end of a socket.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
from importlib import import_module
from typing import Any, Final

from trainkit.run.process.fork_server import ForkServer, preload
from trainkit.run.process.worker_group import enter_child

_IMPORTED: Final = (
    "torch._dynamo",  # creating an optimizer imports it
    "trainkit.__main__", "trainkit.cli", "trainkit.verbs.running.train", "trainkit.api", "trainkit.config.check",
    "trainkit.config.compose.jobs", "trainkit.run.runner", "trainkit.run.agent.supervisor",
)  # fmt: skip
"""Modules that the command of a job imports; given by name, because they are in higher layers than sweeps."""


def _keep(content: dict[str, Any]) -> None:
    """Read a dataset for all jobs; if it is unreadable, the jobs report the error."""
    from trainkit.data.splits import keep_splits  # noqa: PLC0415 - imports torch, which has been done by now

    with contextlib.suppress(Exception):
        keep_splits(content["data"])
    gc.collect()
    gc.freeze()


def main(arguments: list[str]) -> int:
    """Fork jobs until the sweep ends; return the exit code, in a fork that of its job."""
    link = socket.socket(fileno=int(arguments[0]))
    preload(_IMPORTED)
    order = ForkServer(link, _keep).serve()
    if order is None:
        return 0
    enter_child(order.environ, order.log, order.reader)
    entry, run = import_module("trainkit.__main__"), import_module("trainkit.cli").main
    sys.argv = [str(entry.__file__), *order.arguments]
    code: int = run(order.arguments)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
