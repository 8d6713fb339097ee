"""Starting jobs as forks of a warm process; the sweep's side of `trainkit.sweeps.warm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainkit.run.forking import ForkedGroup, ForkServer
from trainkit.sweeps.processes import JobProcess, Start, started_in

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
        return started_in(ForkedGroup(self, _ENTRY, job.number, job.report), job)

    def keep(self, data: Mapping[str, Any]) -> None:
        """Let all jobs that come share a dataset, where it is one that can be shared; else each reads its own."""
        self.tell({"data": dict(data)})
