"""Start jobs as forks of a preloaded process; the client of `trainkit.sweeps.loop.fork_server_main`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainkit.run.process.fork_client import ForkedGroup, ForkServerClient
from trainkit.sweeps.loop.processes import JobCommand, JobProcess, started_in

_ENTRY: Final = (sys.executable, "-m", "trainkit")


class WarmStarter(ForkServerClient):
    """Starts trainkit jobs as forks of one process that has imported their modules, and other jobs as new processes.

    The preloaded process starts and ends with the block; a job that is started before it is ready waits.

    Args:
        environ: environment variables of every job in addition to those of this process: its number of threads.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        whole = {**os.environ, **environ, "PYTHONUNBUFFERED": "1"}
        super().__init__("trainkit.sweeps.loop.fork_server_main", whole, log=Path(os.devnull))

    def __call__(self, job: JobCommand) -> JobProcess:
        """Start a job."""
        return started_in(ForkedGroup(self, _ENTRY, job.number, job.report), job)

    def keep(self, data: Mapping[str, Any]) -> None:
        """Share a dataset between all later jobs if it can be shared; otherwise each job reads its own."""
        self.broadcast({"data": dict(data)})
