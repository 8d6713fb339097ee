"""A supervisor of fake workers in a process of its own, for tests that send it signals: fake_launch.py RUN RANKS."""

import json
import sys
from pathlib import Path

from tests.run.faking import run_fakes
from trainkit.errors import TrainkitError
from trainkit.run.folder.run_folder import RunFolder

if __name__ == "__main__":
    try:
        result = run_fakes(RunFolder(Path(sys.argv[1])), int(sys.argv[2]))
        sys.stdout.write(f"{json.dumps(result)}\n")
    except TrainkitError as error:
        sys.stdout.write(f"{type(error).__name__} {error}\n")
        sys.exit(error.exit_code)
