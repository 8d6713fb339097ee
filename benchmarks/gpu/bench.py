"""How the parts of a first contact run: their processes, their time, and what their rows say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
OWN: Final = ("--config-dir", "benchmarks/conf", "--allow-package=benchmarks")
"""Two ranks on one device are a strategy of the benchmarks."""
QUIET: Final = (
    "quiet=true", "logger=[]", "eval.every_epochs=null", "eval.every_steps=null", "checkpoint.export=false",
)  # fmt: skip

OVER: Final = 124
"""The exit code of a process that was not done by the deadline."""
TIME_OVER: Final = "the time of the part was over"

_TO_END_S: Final = 10.0
"""Seconds in which ranks see that their parent was killed."""

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
    cache: dict[Any, Any] = field(default_factory=dict)
    """What a part has computed and later ones may use."""
    running: set[subprocess.Popen[str]] = field(default_factory=set)
    """Processes, each in a session of its own: a Ctrl-C does not reach them."""

    @property
    def environ(self) -> dict[str, str]:
        """The environment of the processes: `--small` hides the GPUs."""
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.small else {}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "PYTHONPATH": path, **variables}

    @property
    def left_s(self) -> float:
        """Seconds until the part must end."""
        return self.deadline - time.monotonic()

    def selected(self, choices: Sequence[_Choice]) -> Sequence[_Choice]:
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

    def run(self, *command: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run Python in the root of the project until the deadline; the output of what fails goes to OUT/failed.log.

        A process that is not done by then is killed, with all processes that it has started. It returns what it has
        printed, with exit code 124; after the deadline nothing is started, and the exit code is the same.
        """
        arguments, in_time = [sys.executable, *command], self.left_s > 0
        out, err, code = "", "", OVER
        if in_time:
            with subprocess.Popen(
                arguments, cwd=ROOT, env={**self.environ, **(environ or {})}, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            ) as process:  # fmt: skip
                self.running.add(process)
                try:
                    out, err = process.communicate(timeout=self.left_s)
                    code = process.returncode
                except subprocess.TimeoutExpired:
                    _kill(process)
                    out, err = _printed(process)
                except BaseException:
                    _kill(process)
                    raise
                finally:
                    self.running.discard(process)
        done = subprocess.CompletedProcess(arguments, code, out, err + ("\n" + TIME_OVER if code == OVER else ""))
        if code and in_time:
            with (self.out / "failed.log").open("a") as log:
                log.write(f"$ python {' '.join(command)}\n{done.stdout}{done.stderr}\n")
        return done

    def end(self) -> None:
        """Kill the processes that other threads wait for."""
        for process in tuple(self.running):
            _kill(process)

    def train(
        self, folder: Path, *overrides: str, fail: str = "", environ: Mapping[str, str] | None = None
    ) -> tuple[subprocess.CompletedProcess[str], Any]:
        """Train by the command; return the process, and what result.json holds, None if it failed."""
        callbacks = () if any(override.startswith("callbacks=") for override in overrides) else ("callbacks=[]",)
        done = self.run(
            "-m", "trainkit", *OWN, *QUIET, *callbacks, *overrides, f"hydra.run.dir={folder}",
            environ={**({"TRAINKIT_FAIL": fail} if fail else {}), **(environ or {})},
        )  # fmt: skip
        path = folder / "result.json"
        ended_well = path.is_file() and (bool(fail) or done.returncode == 0)
        return done, json.loads(path.read_text()) if ended_well else None


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the training steps of a run, none if it has written none; the last line of a killed run may
    be cut.
    """
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "train/loss" in row]


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all processes that it has started: they would use the GPU of the next part."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _printed(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a killed process has printed; ranks in sessions of their own may hold its output open a little."""
    try:
        return process.communicate(timeout=_TO_END_S)
    except subprocess.TimeoutExpired as error:
        out, err = (part if isinstance(part, bytes) else b"" for part in (error.stdout, error.stderr))
        return out.decode(errors="replace"), err.decode(errors="replace")


def failed(title: str, done: subprocess.CompletedProcess[str], *, error: str | None = None) -> Row:
    """Return the row of a process that failed, or for which the part had too little time.

    Args:
        title: what was tried.
        done: the process.
        error: its error, if it is known; None: the last lines of its output.
    """
    if error is not None:
        return title, "FAILED", error
    return (title, "not tried", TIME_OVER) if done.returncode == OVER else (title, "FAILED", end_of(done))


def verdict(holds: bool) -> str:
    """Return the result of a check."""
    return "ok" if holds else "FAILED"


def end_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines of a process that failed, in one line."""
    lines = [line.strip() for line in (done.stderr.strip() or done.stdout.strip()).splitlines()]
    return f"exit code {done.returncode}: {' / '.join(lines[-3:])}"[:600].replace("|", "\\|")
