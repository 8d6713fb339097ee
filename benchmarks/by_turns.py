"""Measure the cost of averaging: replicas average in every other window of steps.

    python benchmarks/by_turns.py [--rounds 3] [--num-steps 400]

Two whole runs, with and without averaging, are minutes apart, and the load of a shared machine changes meanwhile. Here
the same two processes, started by trainkit's command with the strategy below, alternate: ten steps with the reducer and
ten without, repeatedly. A window's time is that of the slower replica, and a pair of windows gives one ratio.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, ClassVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from benchmarks.pair import WORKLOADS, Workload
from trainkit.fields import placement
from trainkit.strategies.base import StepContext, StepOutcome, Ticket
from trainkit.strategies.core.replica import PlacedModel, Replica
from trainkit.strategies.data_parallel import Mirrored
from trainkit.strategies.reducers import LocalReducer, Reducer

REDUCERS = ("shared_memory", "backend")
_SETTLING = 3
"""Steps of a window before its clock starts: replicas that ran without waiting must synchronize first."""


@dataclass(kw_only=True)
class TurningReplica(Replica):
    """A replica with two reducers."""

    averaging: Reducer
    apart: Reducer = field(default_factory=LocalReducer)
    since: float | None = None
    """The start time of the window."""
    times: list[float] = field(default_factory=list)
    """Seconds per step, window after window."""

    def turn(self, *, averages: bool, num_steps: int) -> None:
        """Begin a window."""
        if self.since is not None:
            self.times.append((perf_counter() - self.since) / num_steps)
        self.reducer = self.averaging if averages else self.apart
        self.__dict__.pop("overlapping", None)  # it is cached from the reducer


@dataclass(frozen=True, kw_only=True)
class ByTurns(Mirrored):
    """The mirrored strategy, averaging in every other window of steps."""

    changes_maths: ClassVar[bool] = True

    window: Annotated[int, placement] = 10
    """Steps of a window."""
    times: Annotated[str, placement] = "times"
    """Each rank writes the seconds per step of its windows to this path with a dot and its rank appended."""

    def make_replica(self, held: PlacedModel, **rest: Any) -> TurningReplica:
        """Return a mirrored replica with a second reducer that leaves sums unchanged."""
        kept = {"model": held.model, "params": held.params, "masters": held.masters, "averaging": rest["reducer"]}
        return TurningReplica(**kept, **rest)

    def step(self, placed: Any, ticket: Ticket, batches: Sequence[Any], training: StepContext) -> StepOutcome:
        """Run a mirrored step with the reducer of its window."""
        turn, place = divmod(ticket.step, self.window)
        if place == 0:
            placed.turn(averages=turn % 2 == 0, num_steps=self.window - _SETTLING)
        if place == _SETTLING:
            placed.since = perf_counter()
        return super().step(placed, ticket, batches, training)

    def leave(self, placed: Any) -> None:
        """Write the times to the file."""
        placed.reducer = placed.averaging
        Path(f"{self.times}.{placed.rank}").write_text(json.dumps(placed.times))
        super().leave(placed)


def ratios(workload: Workload, reducer: str, num_steps: int) -> tuple[list[float], list[float]]:
    """Return seconds per step with averaging and without, window after window."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "trainkit", f"--config-dir={ROOT / 'benchmarks' / 'conf'}",
            "--allow-package=benchmarks", "recipe=null", "optimizer.lr=0.001", "optimizer.groups={}",
            "schedule=constant", "eval.every_epochs=null", "checkpoint.keep_best=0", "checkpoint.every_s=null",
            *workload.overrides, "strategy=by_turns", "strategy.replicas=2", f"strategy.reduce={reducer}",
            f"strategy.times={folder}/times", f"steps={num_steps}", f"batch.global_size={workload.batch}",
            f"hydra.run.dir={folder}/run",
        ]  # fmt: skip
        subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        ranks = [json.loads(Path(f"{folder}/times.{rank}").read_text()) for rank in range(2)]
    slower = [max(pair) for pair in zip(*ranks, strict=True)][2:]  # the first pair warms up
    return slower[::2], slower[1::2]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=400)
    options = parser.parse_args()
    rows = []
    for workload in WORKLOADS.values():
        for reducer in REDUCERS:
            found: list[tuple[list[float], list[float]]] = []
            for _ in range(options.rounds):
                found.append(ratios(workload, reducer, options.num_steps))
                print(workload.key, reducer, _share(found[-1:]), file=sys.stderr, flush=True)
            with_it, without = (list(chain.from_iterable(pair[place] for pair in found)) for place in (0, 1))
            medians = [f"{statistics.median(times) * 1e3:.1f}" for times in (without, with_it)]
            rows.append([workload.title, reducer, *medians, f"**{_share(found):.2f}**"])
    head = ["", "reducer", "ms a step, not averaging", "averaging", "of the limit: median of pairs of windows"]
    command = f"python benchmarks/by_turns.py --rounds {options.rounds} --num-steps {options.num_steps}"
    body = report.table(head, rows) + "\n\nTarget: at least 0.90 of the limit on both."
    report.write("by_turns", "Two replicas that average by turns", command, body)


def _share(found: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    return statistics.median(
        without / with_it for averaging, apart in found for with_it, without in zip(averaging, apart, strict=False)
    )


if __name__ == "__main__":
    main()
