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
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Annotated, ClassVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report
from benchmarks.pair import WORKLOADS, Workload
from trainkit.fields import placement
from trainkit.numerics.batch import Ticket
from trainkit.strategies.base import Batch, Facts, SetupRequest, StepContext, StepOutcome
from trainkit.strategies.collectives import RankGroup
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import MakeStep
from trainkit.strategies.core.synchronous import SynchronousExecutor, broadcast_initial, build_parts
from trainkit.strategies.data_parallel.strategy import Mirrored
from trainkit.strategies.reducers.vector import LocalReducer

REDUCERS = ("shared_memory", "backend")
_SETTLING = 3
"""Steps of a window before its clock starts: replicas that ran without waiting must synchronize first."""


class TurningExecutor(SynchronousExecutor[Replica]):
    """A rank that sums gradients over the ranks in every other window of steps, and leaves them alone in the others.

    Args:
        averaging: the replica, with a reducer that sums over the ranks.
        apart: the same model and optimizer, with a reducer of its own.
        window: steps of a window.
        times: where the seconds are written.
    """

    def __init__(
        self,
        averaging: Replica,
        training: StepContext,
        *,
        apart: Replica,
        ranks: RankGroup,
        make_step: MakeStep[Replica],
        window: int,
        times: str,
    ) -> None:
        super().__init__(averaging, training, ranks=ranks, make_step=make_step)
        self._apart = SynchronousExecutor(apart, training, ranks=ranks, make_step=make_step)
        self._window, self._path = window, times
        self._since: float | None = None
        self._times: list[float] = []

    def step(self, ticket: Ticket, batches: Sequence[Batch]) -> StepOutcome:
        """Take the step as mirrored does, with the reducer of the window that the step is in."""
        turn, turn_step = divmod(ticket.step, self._window)
        if turn_step == 0 and self._since is not None:
            self._times.append((perf_counter() - self._since) / (self._window - _SETTLING))
        if turn_step == _SETTLING:
            self._since = perf_counter()
        if turn % 2 == 0:
            return super().step(ticket, batches)
        if self._apart.local.packing is None:
            self._apart.local.adopt_layout(self.local)
        return self._apart.step(ticket, batches)

    def close(self, *, failed: bool = False) -> None:
        """Write the times down, and leave the other ranks."""
        Path(f"{self._path}.{self.local.rank}").write_text(json.dumps(self._times))
        super().close(failed=failed)


@dataclass(frozen=True, kw_only=True)
class ByTurns(Mirrored):
    """The mirrored strategy, averaging in every other window of steps."""

    facts: ClassVar[Facts] = replace(Mirrored.facts, changes_maths=True)

    window: Annotated[int, placement] = 10
    """Steps of a window."""
    times: Annotated[str, placement] = "times"
    """Each rank writes the seconds per step of its windows to this path with a dot and its rank appended."""

    def setup(self, request: SetupRequest) -> TurningExecutor:
        """Join the other ranks; make a replica that sums gradients over them, and the same one without an exchange."""
        ranks = self.join(request.identity)
        parts = build_parts(request, ranks=ranks, make_reducer=self.make_reducer)
        replica = Replica(parts)
        broadcast_initial(replica)
        return TurningExecutor(
            replica,
            request.training,
            apart=Replica(replace(parts, reducer=LocalReducer())),
            ranks=ranks,
            make_step=self.shard_step,
            window=self.window,
            times=self.times,
        )


def ratios(workload: Workload, reducer: str, num_steps: int) -> tuple[list[float], list[float]]:
    """Return seconds per step with averaging and without, window after window."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "trainkit", f"--config-dir={ROOT / 'benchmarks' / 'conf'}",
            "--allow-package=benchmarks", "recipe=null", "optimizer.lr=0.001", "optimizer.groups={}",
            "schedule=constant", "eval.every_epochs=null", "checkpoint.keep_best=0", "checkpoint.every_s=null",
            *workload.overrides, "strategy=by_turns", "strategy.replicas=2", f"strategy.reduce={reducer}",
            f"strategy.times={folder}/times", f"steps={num_steps}", f"hydra.run.dir={folder}/run",
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
            pairs: list[tuple[list[float], list[float]]] = []
            for _ in range(options.rounds):
                pairs.append(ratios(workload, reducer, options.num_steps))
                print(workload.key, reducer, _share(pairs[-1:]), file=sys.stderr, flush=True)
            with_it, without = (list(chain.from_iterable(pair[side] for pair in pairs)) for side in (0, 1))
            medians = [f"{statistics.median(times) * 1e3:.1f}" for times in (without, with_it)]
            rows.append([workload.title, reducer, *medians, f"**{_share(pairs):.2f}**"])
    head = ["", "reducer", "ms a step, not averaging", "averaging", "of the limit: median of pairs of windows"]
    command = f"python benchmarks/by_turns.py --rounds {options.rounds} --num-steps {options.num_steps}"
    body = report.table(head, rows) + "\n\nTarget: at least 0.90 of the limit on both."
    report.write("by_turns", "Two replicas that average by turns", command, body)


def _share(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    return statistics.median(
        without / with_it for averaging, apart in pairs for with_it, without in zip(averaging, apart, strict=False)
    )


if __name__ == "__main__":
    main()
