"""`trainkit calibrate`: measure this machine for `hardware=this`, in about a minute."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Final

from trainkit.verbs.support.call import Call, Flag

USAGE: Final = ""
FLAGS: Final[Mapping[str, Flag]] = {}


def run(call: Call) -> int:
    """Measure, print each figure, and write them into the cache folder of the user."""
    call.check_arity(arguments=0, overrides=False)
    from trainkit.run.estimates.calibrating import calibrate, write  # noqa: PLC0415 - imports torch

    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        _print(f"note: other processes keep {load:.1f} of {cores} cores busy; repeat it when the machine is idle")
    begun = time.perf_counter()
    machine, found = calibrate(_print)
    path = write(machine, found)
    _print(f"{machine.name}: written to {path} after {time.perf_counter() - begun:.0f} s; hardware=this uses it")
    return 0


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
