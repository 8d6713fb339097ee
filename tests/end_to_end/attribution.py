"""Run a training with a planted fault, and judge what it says: the rank, and one cause on screen, in file and code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.faulty import FAULT, PLACE
from tests.support import quick
from tests.support.settings import latest
from tests.support.verdicts import plain

ROOT = Path(__file__).parents[2]
STEP = 3
HANGS = ("stopped", "GIL held", "sleep", "loader hang")
KINDS = (
    "stopped", "exited 0", "sys.exit", "killed", "raised 'peer'", "raised", "extra collective", "missing collective",
    "GIL held", "sleep", "loader hang",
)  # fmt: skip
SAID: Mapping[str, str] = {
    "stopped": r"it is stopped by a signal \(state T\). To let it continue: kill -CONT \d+",
    "exited 0": r"exited with code 0 in step 3 \(forward\) before the training was done",
    "sys.exit": r"exited with code 0 in step 3 \(forward\) before the training was done",
    "killed": r"was ended by SIGKILL in step 3 \(forward\)",
    "out of memory": r"was ended by SIGKILL in step 3 \(forward\). Its cgroup ran out of memory: oom_kill in \S+ rose",
    "raised 'peer'": r"failed in step 3 \(forward\): RuntimeError: the peer table is broken",
    "raised": r"failed in step 3 \(forward\): ValueError: bad batch 17",
    "extra collective": r"the ranks call different collectives: .*all_reduce of \(5,\) float32 at \S+faulty.py:\d+",
    "missing collective": r"the ranks call different collectives: .*all_reduce of \(5,\) float32 at \S+faulty.py:\d+",
    "GIL held": r"has made no progress for \d+ s in step 3 \(forward\)",
    "sleep": r"has made no progress for \d+ s in step 3 \(forward\)",
    "loader hang": r"has made no progress for \d+ s in step \d \(data\)",
}
PLACES = {
    "GIL held": "keeps_the_interpreter",
    "sleep": "waits_for_ever",
    "loader hang": "waits_for_ever",
}
"""What a rank does while it hangs: its stack is on the screen."""
LIMIT = "The limit is supervisor.hang_timeout_s=5: raise it if the rank was healthy."
FILES = {
    "model/net.yaml": "_target_: tests.end_to_end.faulty.Net\n",
    "callbacks/fault.yaml": "_target_: tests.end_to_end.faulty.Fault\n",
    "data/faulty.yaml": "_target_: tests.end_to_end.faulty.Points\n",
}
OVERRIDES = (
    "recipe=null", "--allow-package=tests", "data=faulty", "batch.global_size=8", "batch.micro_size=null",
    "steps=8", "log_every_steps=100", "callbacks=[fault]", "logger=[]", "loader.num_workers=0", "hydra.run.dir=run",
    "eval.every_epochs=null", "checkpoint.every_epochs=null",
)  # fmt: skip

MLP = ("model=mlp", "model.in_features=5", "model.out_features=2", "model.hidden=[8,8]")
"""A model that strategies can cut; its fault is in the callback."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left."""

    code: int
    screen: str
    reason: str
    status: str

    def problems(self, kind: str, rank: int) -> list[str]:
        """Return what is wrong with it: another rank or cause, a cause that differs between screen, file and code."""
        first = self.reason.splitlines()[0] if self.reason else ""
        mismatch = "collective" in kind
        wrong = []
        if not re.search(SAID[kind].replace("step 3 \\(forward", "step \\d \\(\\w+"), first):
            wrong.append(f"cause: {first}")
        if not mismatch and not plain(first).startswith(f"rank {rank} "):
            wrong.append(f"not rank {rank}: {first}")
        if not re.search(r"rank \d+ \(pid \d+ on [^)]+\)", first):
            wrong.append("no pid and host")
        if first not in self.screen:
            wrong.append(f"the screen says something else:\n{self.screen}")
        if self.code != (5 if kind in HANGS else 1) or self.status != "failed":
            wrong.append(f"exit code {self.code}, status {self.status}")
        if kind in PLACES and (PLACES[kind] not in self.screen or LIMIT not in self.screen):
            wrong.append(f"neither place nor limit:\n{self.screen}")
        wrong += [f"an after-effect on the screen: {line}" for line in re.findall(_AFTER_EFFECTS, self.screen)]
        return wrong


_AFTER_EFFECTS = r".*(?:gloo/transport|terminate called|Fatal Python error|ended while rank).*"


def launch(
    folder: Path, fault: str, *overrides: str, quickly: bool = True, within: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start a training in a folder with a planted fault, `KIND:RANK:STEP`.

    Args:
        folder: where it runs.
        fault: what happens.
        *overrides: more settings.
        quickly: whether the command is forked; such a one gets no signals.
        within: a command that runs the one behind it.
    """
    for name, text in FILES.items():
        path = folder / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    several = ["supervisor.max_restarts=0"] if any(override.startswith("strategy=") for override in overrides) else []
    arguments = ["--config-dir", str(folder / "conf"), *latest(*OVERRIDES, *several, *overrides)]
    command = quick.command(*arguments) if quickly else [sys.executable, "-m", "trainkit", *arguments]
    extra = {PLACE: "callback"} if "model=net" not in overrides else {}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), FAULT: fault, **extra}
    return subprocess.Popen(
        [*within, *command], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def outcome(folder: Path, process: subprocess.Popen[str]) -> Outcome:
    """Wait for the end of a training, and read what it left."""
    with process:
        try:
            screen, _ = process.communicate(timeout=240)
        finally:
            process.kill()
    path = folder / "run/result.json"
    result = json.loads(path.read_text()) if path.is_file() else {}
    fields = {"reason": result.get("reason", ""), "status": result.get("status", "")}
    return Outcome(code=process.returncode, screen=screen, **fields)


def train(folder: Path, fault: str, *overrides: str) -> Outcome:
    """Train in a folder with a planted fault."""
    return outcome(folder, launch(folder, fault, *overrides))


def mirrored(ranks: int, *, hang_timeout_s: float = 5.0) -> Sequence[str]:
    """Return the overrides of a mirrored run that finds a hang soon, also in the first step."""
    limits = (
        f"supervisor.hang_timeout_s={hang_timeout_s:g}",
        f"supervisor.first_step_timeout_s={4 * hang_timeout_s:g}",
    )
    return ("model=net", "strategy=mirrored", f"strategy.replicas={ranks}", *limits)
