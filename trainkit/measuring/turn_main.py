"""Run one turn of a measurement: `python -m trainkit.measuring.turn_main GIVEN/resolved.yaml FOLDER`.

The training runs as `trainkit train` runs it, in this process or in the processes that its strategy needs. Hydra is not
imported.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from trainkit.config.schema import load_resolved
from trainkit.config.targets.allowed import allow_packages, packages_from
from trainkit.config.yaml_files import config_dirs_from, with_config_dirs
from trainkit.errors import ConfigError, TrainkitError, first_line
from trainkit.redaction import mask, masked_output
from trainkit.run.process.worker_group import watch_parent
from trainkit.run.signals import exit_without_teardown


def main(arguments: list[str]) -> int:
    """Train the config of the first argument in the folder of the second; return the exit code."""
    watch_parent(os.environ)
    resolved, folder = map(Path, arguments)
    cfg = load_resolved(resolved)
    from trainkit.run.begin import RunRequest  # noqa: PLC0415 - imports torch; the parent is watched first
    from trainkit.run.runner import train  # noqa: PLC0415 - the same

    packages, dirs = packages_from(os.environ), config_dirs_from(os.environ)
    with masked_output(), allow_packages(packages), with_config_dirs(dirs):
        try:
            train(RunRequest(cfg=cfg, run_dir=folder))
        except TrainkitError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log of the turn
            _report(folder.parent, error)
            return error.exit_code
    return 0


def _report(folder: Path, error: TrainkitError) -> None:
    """Write the error that ended the turn; if the disk cannot be written, only the log has it."""
    from trainkit.files import write_json_atomically  # noqa: PLC0415 - the same
    from trainkit.measuring.bench import ERROR_FILE  # noqa: PLC0415 - imports torch, as the training has by now

    line = str(error.problems[0]) if isinstance(error, ConfigError) else first_line(error)
    with suppress(OSError):
        write_json_atomically(folder / ERROR_FILE, {"error": type(error).__name__, "line": mask(line)})


if __name__ == "__main__":
    exit_without_teardown(main(sys.argv[1:]))
