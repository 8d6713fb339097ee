"""Run one task of a job in its own process: `python -m trainkit.run.inference.worker_main FOLDER/resolved.yaml`.

The environment holds the identity of the process, as for `trainkit.run.worker_main`; the folder holds everything else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cluster.tasks import Identity
from trainkit.config.targets.allowed import allow_packages, packages_from
from trainkit.config.yaml_files import config_dirs_from, with_config_dirs
from trainkit.run import worker_main as worker
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import Reporter
from trainkit.run.signals import StopFlag, exit_without_teardown
from trainkit.trainer.ownership import print_notice

if TYPE_CHECKING:
    from typing import Any


def run_task_of_job(
    resolved: Path, identity: Identity, folder: RunFolder, stop: StopFlag, report: Reporter
) -> dict[str, Any] | None:
    """Run the task of this process; rank 0 writes the result."""
    from trainkit.config.schema import load_resolved  # noqa: PLC0415 - slow; the stop flag must be set first
    from trainkit.run.inference.job import prepare  # noqa: PLC0415 - imports torch
    from trainkit.run.inference.request import JobRequest  # noqa: PLC0415
    from trainkit.run.inference.task import JobTask  # noqa: PLC0415
    from trainkit.run.process.heartbeat import beats_of  # noqa: PLC0415
    from trainkit.strategies.base import ignore_phase  # noqa: PLC0415

    cfg = load_resolved(resolved)
    with allow_packages(packages_from(os.environ)), with_config_dirs(config_dirs_from(os.environ)):
        task = JobTask(
            job=prepare(cfg, JobRequest.read(folder.path)),
            identity=identity,
            requested=lambda: stop.requested,
            on_phase=beats_of(identity, folder) or ignore_phase,
            log=print_notice,
            report=report,
        )
        result = task.run()
    if result is not None:
        folder.write_result(result)
    return result


def main(arguments: list[str]) -> int:
    """Run the task of this process; return the exit code."""
    return worker.main(arguments, work=run_task_of_job)


if __name__ == "__main__":
    exit_without_teardown(main(sys.argv[1:]))
