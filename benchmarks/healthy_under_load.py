"""Train under the load of busy processes, and check that the supervisor does not take a healthy rank for a hanging one.

    python benchmarks/healthy_under_load.py --minutes 20 --busy 8 -- strategy=mirrored strategy.replicas=2

Starts the busy processes and the run, stops the run after the given minutes, and prints one line: how it ended, its
steps, its restarts, the longest pause between two heartbeats of a step that a rank recorded, and the smallest limit
that `supervisor.hang_timeout_s=auto` set meanwhile. `--pause-supervisor 60` stops the supervisor itself for a minute in
the middle.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainkit.run.agent.monitor import TimeLimits
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import read_heartbeat

_BUSY = "while True: pass"


def main() -> int:
    """Run once; return 0 if no rank was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--pause-supervisor", type=float, default=0.0, help="seconds to stop the supervisor for")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(options.busy)]
    try:
        return _train(options)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _train(options: argparse.Namespace) -> int:
    folder = RunFolder(Path(tempfile.mkdtemp()) / "run")
    length = ["epochs=null", "steps=100000000", f"hydra.run.dir={folder.path}", "quiet=true"]
    command = [sys.executable, "-m", "trainkit", *options.overrides, *length]
    with (folder.path.parent / "log").open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log)
        longest_s, least_s = _watch(run, folder, options)
        run.send_signal(signal.SIGINT)
        code = run.wait()
    output = (folder.path.parent / "log").read_text(errors="replace")
    summary = {
        "overrides": options.overrides,
        "minutes": options.minutes,
        "busy": options.busy,
        "paused_s": options.pause_supervisor,
        "exit_code": code,
        "status": (folder.read_result() or {}).get("status"),
        "steps": (folder.read_result() or {}).get("steps"),
        "restarts": len(re.findall("Restarting from", output)),
        "longest_pause_s": round(longest_s, 3),
        "least_limit_s": least_s,
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    if code != 130:
        sys.stdout.write(output[-4000:])
    return int(code != 130 or summary["restarts"] > 0)


def _watch(run: subprocess.Popen[bytes], folder: RunFolder, options: argparse.Namespace) -> tuple[float, float | None]:
    """Poll the heartbeats until the time is over; return the longest pause and the smallest limit of a step."""
    limits, longest_s, least_s = TimeLimits(), 0.0, None
    start = time.monotonic()
    paused = not options.pause_supervisor
    while run.poll() is None and (passed := time.monotonic() - start) < options.minutes * 60:
        if not paused and passed > options.minutes * 30:
            paused = True
            run.send_signal(signal.SIGSTOP)
            time.sleep(options.pause_supervisor)
            run.send_signal(signal.SIGCONT)
        for path in folder.live.glob("rank_?"):
            pulse = read_heartbeat(path)
            limit = limits.limit_of(pulse)
            if pulse is not None and limit is not None and limit.longest_s is not None:
                longest_s = max(longest_s, pulse.longest_s)
                least_s = limit.seconds if least_s is None else min(least_s, limit.seconds)
        time.sleep(0.2)
    return longest_s, least_s


if __name__ == "__main__":
    sys.exit(main())
