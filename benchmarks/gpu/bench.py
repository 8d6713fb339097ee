"""How the parts of a first contact run: their processes, their time, and what their rows say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

ROOT: Final = Path(__file__).resolve().parents[2]
ALONE: Final = ("strategy.replicas=1", "strategy.process_group=always")
"""A single rank with a process group of its own: over NCCL on a GPU."""
QUIET: Final = (
    "quiet=true", "logger=[]", "eval.every_epochs=null", "eval.every_steps=null", "checkpoint.export=false",
)  # fmt: skip

Row = Sequence[str]
"""What was tried, the result, and a figure. Results are ok, FAILED, missed (a target), not tried, and - (nothing is
judged).
"""
_Choice = TypeVar("_Choice")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How the parts run."""

    small: bool
    deadline: float
    """On the clock of `time.monotonic`: a part ends its processes then."""
    rounds: int = 1
    """Turns with a hand-written loop, at most."""
    out: Path = ROOT
    """The folder of the results."""
    at_once: int = 1
    """Trainings that run at the same time where no time is measured."""
    device_name: str = "CPU"
    """What the driver calls the device."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What a part has computed and later ones may use."""

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the processes: `--small` hides the GPUs."""
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.small else {}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "PYTHONPATH": path, **own}

    @property
    def left_s(self) -> float:
        """Seconds until the part must end."""
        return self.deadline - time.monotonic()

    def tried(self, choices: Sequence[_Choice]) -> Sequence[_Choice]:
        """Return the choices of a part that run: with `--small` the first."""
        return choices[:1] if self.small else choices

    def compiled(self, mode: str) -> tuple[str, ...]:
        """Return the arguments of a compile mode, or of `captured`: steps as CUDA graphs.

        With `--small` no code is made of the graphs, and none is captured.
        """
        backend = ("compile.backend=aot_eager",) if self.small and mode != "off" else ()
        if mode == "captured":
            return ("compile.mode=step", *(backend or ("compile.cuda_graphs=true",)))
        return (f"compile.mode={mode}", *backend)

    def judged(self, value: float, *, least: float | None = None, most: float | None = None) -> tuple[str, str]:
        """Return ok or missed, and the target in words; on the CPU nothing is judged."""
        target = f"target >= {least:g}" if least is not None else f"target <= {most:g}"
        reached = (least is None or value >= least) and (most is None or value <= most)
        return ("-" if self.small else "ok" if reached else "missed"), target

    def run(
        self, *command: str, environ: Mapping[str, str] | None = None, keeps_partial: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in the root of the project until the deadline; the output of what fails goes to OUT/failed.log.

        Args:
            command: arguments of Python.
            environ: variables to set.
            keeps_partial: whether a process that is not done by then returns what it has printed, with exit code 124.

        Raises:
            TimeoutExpired: it was not done by the deadline, without `keeps_partial`.
        """
        arguments, environment = [sys.executable, *command], {**self.environ, **(environ or {})}
        try:
            done = subprocess.run(
                arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
                timeout=max(self.left_s, 1.0),
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            if not keeps_partial:
                raise
            said = [part if isinstance(part, bytes) else b"" for part in (error.stdout, error.stderr)]
            out, err = (part.decode(errors="replace") for part in said)
            done = subprocess.CompletedProcess(arguments, 124, out, f"{err}\nthe time of the part was over")
        if done.returncode:
            with (self.out / "failed.log").open("a") as log:
                log.write(f"$ python {' '.join(command)}\n{done.stdout}{done.stderr}\n")
        return done

    def train(self, folder: Path, *overrides: str, fail: str = "") -> tuple[subprocess.CompletedProcess[str], Any]:
        """Train by the command; return the process, and what result.json holds, None if it failed."""
        own = ("--config-dir", "benchmarks/conf", "--allow-package=benchmarks")
        callbacks = () if any(one.startswith("callbacks=") for one in overrides) else ("callbacks=[]",)
        done = self.run(
            "-m", "trainkit", *own, *QUIET, *callbacks, *overrides, f"hydra.run.dir={folder}",
            environ={"TRAINKIT_FAIL": fail} if fail else {},
        )  # fmt: skip
        path = folder / "result.json"
        ended_well = path.is_file() and (bool(fail) or done.returncode == 0)
        return done, json.loads(path.read_text()) if ended_well else None


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the training steps of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def verdict(holds: bool) -> str:
    """Return the result of a check."""
    return "ok" if holds else "FAILED"


def end_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines of a process that failed, in one line."""
    lines = [line.strip() for line in (done.stderr.strip() or done.stdout.strip()).splitlines()]
    return f"exit code {done.returncode}: {' / '.join(lines[-3:])}"[:600].replace("|", "\\|")
