"""Starting jobs as forks of a warm process; the sweep's side of `trainkit.sweeps.loop.fork_server_main`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainkit.run.process.fork_client import ForkedGroup, ForkServerClient
from trainkit.sweeps.loop.processes import JobCommand, JobProcess, started_in

__all__ = ["WarmStarter"]

_ENTRY: Final = (sys.executable, "-m", "trainkit")


class WarmStarter(ForkServerClient):
    """Starts jobs of trainkit as forks of one process that has imported all they need, others afresh.

    The process is started with the block and ended with it; a job that is asked for before it is ready waits for it.

    Args:
        environ: what every job finds in its environment besides that of this process: its threads.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        whole = {**os.environ, **environ, "PYTHONUNBUFFERED": "1"}
        super().__init__("trainkit.sweeps.loop.fork_server_main", whole, log=Path(os.devnull))

    def __call__(self, job: JobCommand) -> JobProcess:
        """Start a job."""
        return started_in(ForkedGroup(self, _ENTRY, job.number, job.report), job)

    def keep(self, data: Mapping[str, Any]) -> None:
        """Let all jobs that come share a dataset, where it is one that can be shared; else each reads its own."""
        self.broadcast({"data": dict(data)})
