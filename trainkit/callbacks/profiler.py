"""Profile a few steps, and name the bottleneck."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, ClassVar

from torch.profiler import ProfilerActivity, profile

from trainkit.callbacks.bottleneck import KernelTimes, StepTimes, breakdown, verdict
from trainkit.data.reading.iterable import Stream
from trainkit.errors import UnreadableError
from trainkit.fields import at_least, cosmetic
from trainkit.files import read_map
from trainkit.storage import naming
from trainkit.strategies.base import PhaseListener, StepOutcome
from trainkit.trainer.events import Callback, Run
from trainkit.trainer.phase_clock import PhaseClock, wait_for


@dataclass
class _Timed:
    """The steps before the recording, which are timed without the profiler."""

    clock: PhaseClock = field(default_factory=PhaseClock)
    begun: float = 0.0
    laps: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """The seconds of each step, and those of its parts; on a CUDA device one entry, the means."""


@dataclass
class _Running:
    first: int = 0
    profile: profile | None = None
    recorded: int = 0
    kernels: KernelTimes = field(default_factory=KernelTimes)
    timed: _Timed = field(default_factory=_Timed)


@dataclass(frozen=True, kw_only=True)
class Profiler(Callback):
    """Records some steps of rank 0 with torch's profiler: `profile/trace.json`, for chrome://tracing or Perfetto.

    At the end of the run it prints the bottleneck in one line, and writes it into `profile/bottleneck.json`: from the
    steps before the recorded ones, on every rank, and from the operations of the recorded ones. Recorded steps are
    slower; the others cost one comparison.
    """

    observes: ClassVar[bool] = True

    skip_steps: Annotated[int, cosmetic, at_least(1)] = 10
    """Steps to skip first, counted from the first step of this start: the warm-up is not of interest."""
    num_steps: Annotated[int, cosmetic, at_least(1)] = 5
    """Steps recorded."""
    memory: Annotated[bool, cosmetic] = False
    """Record memory allocations too."""
    stacks: Annotated[bool, cosmetic] = False
    """Record the Python source line of each operation; makes the trace large."""
    _running: _Running = field(default_factory=_Running, init=False, repr=False, compare=False)

    def phase_listener(self) -> PhaseListener:
        """Return the clock of the parts of a step."""
        return self._running.timed.clock

    def run_start(self, run: Run) -> None:
        """Determine which steps to record."""
        self._running.first = run.state.step + self.skip_steps

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Measure the steps before those to record, start after the steps to skip, end after those to record."""
        step, first = run.state.step, self._running.first
        timed = min(self.num_steps, self.skip_steps - 1) or self.num_steps
        begin = first - timed if self.skip_steps > 1 else first
        if begin <= step <= begin + timed:
            self._time(run, step - begin, timed)
        if step < first or not run.is_owner:
            return
        if step == first:
            self._start(run)
        elif self._running.profile is not None:
            self._running.recorded += 1
            if step >= first + self.num_steps:
                self._finish(run)

    def train_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """End the measurement of a run that ends within it."""
        self._keep(run)

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the recording of a run that ended earlier, and print the bottleneck."""
        self._finish(run)
        if run.is_owner and self._running.recorded and self._running.timed.laps:
            self._conclude(run)

    def _time(self, run: Run, place: int, last: int) -> None:
        """Time a step; a CUDA device is synchronised only before the first step and after the last, which gives the
        means of them all.
        """
        timed, on_device = self._running.timed, run.device.type == "cuda"
        timed.clock.end_step()
        if place == 0:
            wait_for(run.device)
            timed.clock.begin(run.device)
        elif place == last or not on_device:
            wait_for(run.device)
            count = last if on_device else 1
            seconds = perf_counter() - timed.begun
            parts = {part: value / count for part, value in timed.clock.lap().items()}
            timed.laps.append((seconds / count, parts))
        else:
            return
        timed.begun = perf_counter()
        if place == last:
            timed.clock.stop()
            self._keep(run)

    def _keep(self, run: Run) -> None:
        """Write the measured steps of this rank for rank 0, which reads those of all ranks at the end of the run."""
        laps = self._running.timed.laps
        if not laps or run.is_owner:
            return
        path = _file_of(run, run.collective.rank)
        content = {
            "steps": [seconds for seconds, _ in laps],
            "inputs": [parts["input"] for _, parts in laps],
            "exchanges": [parts["exchange"] for _, parts in laps],
        }
        with naming(path):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content), encoding="utf-8")

    def _start(self, run: Run) -> None:
        activities = [ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        recording = profile(
            activities=activities,
            profile_memory=self.memory,
            with_stack=self.stacks,
            record_shapes=True,
            acc_events=True,  # there is one cycle; without it torch 2.11 warns that earlier ones are lost
        )
        recording.start()
        self._running.profile = recording

    def _finish(self, run: Run) -> None:
        recording, self._running.profile = self._running.profile, None
        if recording is None:
            return
        recording.stop()
        folder = run.folder / "profile"
        on_device = run.device.type == "cuda"
        order = "cuda_time_total" if on_device else "cpu_time_total"
        averages = recording.key_averages()
        self._running.kernels = KernelTimes.of(averages, steps=max(self._running.recorded, 1), on_device=on_device)
        with naming(folder):
            folder.mkdir(exist_ok=True)
            recording.export_chrome_trace(str(folder / "trace.json"))
            (folder / "operations.txt").write_text(averages.table(sort_by=order, row_limit=30), encoding="utf-8")

    def _conclude(self, run: Run) -> None:
        """Print the bottleneck, and write it."""
        ranks = [one for rank in range(run.collective.num_ranks) if (one := self._times_of(run, rank)) is not None]
        shortest = min(len(one.steps) for one in ranks)
        found = breakdown([_first_steps(one, shortest) for one in ranks], self._running.kernels)
        is_stream = isinstance(run.datasets.get("train"), Stream)
        line = verdict(found, run.cfg, device=run.device.type, is_stream=is_stream)
        path = run.folder / "profile" / "bottleneck.json"
        content = {"bottleneck": found.bottleneck, "shares": found.shares, "slowest_rank": found.slowest, "text": line}
        with naming(path):
            path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        if not run.cfg.quiet:
            print(f"{line}. Trace: {path.with_name('trace.json')}", flush=True)  # noqa: T201 - meant for the terminal

    def _times_of(self, run: Run, rank: int) -> StepTimes | None:
        """Return the measured steps of a rank; None if it has written none, for example into another file system."""
        if rank == run.collective.rank:
            laps = self._running.timed.laps
            return StepTimes(
                steps=tuple(seconds for seconds, _ in laps),
                inputs=tuple(parts["input"] for _, parts in laps),
                exchanges=tuple(parts["exchange"] for _, parts in laps),
            )
        with suppress(UnreadableError, TypeError):
            found = read_map(_file_of(run, rank), {"steps": list, "inputs": list, "exchanges": list})
            times = StepTimes(**{name: tuple(map(float, found[name])) for name in ("steps", "inputs", "exchanges")})
            return times if times.steps and len(times.steps) == len(times.inputs) == len(times.exchanges) else None
        return None


def _first_steps(times: StepTimes, count: int) -> StepTimes:
    return StepTimes(steps=times.steps[:count], inputs=times.inputs[:count], exchanges=times.exchanges[:count])


def _file_of(run: Run, rank: int) -> Path:
    return run.folder / "profile" / f"rank_{rank}.json"
