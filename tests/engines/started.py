"""The processes of an engine: started.py CARGO NUM_RANKS ATTEMPT, each as JSON; all end when one fails.

They are forked, so that torch is imported once.
"""

import json
import os
import signal
import sys
from pathlib import Path

from tests.run import fake_worker
from trainkit.run.backends import engine as rank

if __name__ == "__main__":
    setattr(rank, "ENTRY", (sys.executable, str(Path(fake_worker.__file__))))  # noqa: B010 - it is Final
    cargo, num_ranks, attempt = map(json.loads, sys.argv[1:])
    started, code = set[int](), 0
    for number in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            info = rank.WorkerInfo(rank=number, num_ranks=num_ranks, local_rank=number, num_local=num_ranks)
            rank.run_rank(cargo, info, attempt)
            sys.exit(0)
        started.add(pid)
    while started and code == 0:
        pid, code = os.wait()
        started.remove(pid)
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.exit(code != 0)
