"""A process that an engine started: started.py CARGO PLACE ATTEMPT, each as JSON."""

import json
import sys
from pathlib import Path

from tests.run import fake_worker
from trainkit.run.backends import worker as rank

if __name__ == "__main__":
    setattr(rank, "_WORKER", (sys.executable, str(Path(fake_worker.__file__))))  # noqa: B010 - it is Final
    cargo, place, attempt = map(json.loads, sys.argv[1:])
    rank.run_rank(cargo, rank.WorkerInfo(**place), attempt)
