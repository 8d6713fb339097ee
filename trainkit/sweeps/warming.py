"""Starting jobs as forks of a warm process; the sweep's side of `trainkit.sweeps.warm`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainkit.run.forking import ForkServer
from trainkit.run.group import Exited
from trainkit.sweeps.processes import JobProcess, Start, start_fresh

__all__ = ["WarmStarter"]

_ENTRY: Final = (sys.executable, "-m", "trainkit")


class WarmStarter(ForkServer):
    """Starts jobs of trainkit as forks of one process that has imported all they need, others afresh.

    The process is started with the block and ended with it; a job that is asked for before it is ready waits for it.

    Args:
        environ: what every job finds in its environment besides that of this process: its threads.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        whole = {**os.environ, **environ, "PYTHONUNBUFFERED": "1"}
        super().__init__("trainkit.sweeps.warm", whole, log=Path(os.devnull))

    def __call__(self, job: Start) -> JobProcess:
        """Start a job."""
        if tuple(job.command[: len(_ENTRY)]) != _ENTRY:
            return start_fresh(job)

        def report(code: int) -> None:
            job.report(Exited(attempt=job.number, rank=0, code=code, moment=time.time()))

        try:
            return self.fork(job.command[len(_ENTRY) :], job.whole_environ, job.log, report)
        except OSError:  # the warm process died: without it jobs only start later
            return start_fresh(job)

    def keep(self, data: Mapping[str, Any]) -> None:
        """Let all jobs that come share a dataset, where it is one that can be shared; else each reads its own."""
        self.tell({"data": dict(data)})
