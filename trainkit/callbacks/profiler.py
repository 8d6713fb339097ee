"""Profile a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch.profiler import ProfilerActivity, profile

from trainkit.config.values import at_least
from trainkit.fields import cosmetic
from trainkit.storage import naming
from trainkit.strategies.base import StepOutcome
from trainkit.trainer.events import Callback, Run


@dataclass
class _Running:
    first: int = 0
    profile: profile | None = None


@dataclass(frozen=True, kw_only=True)
class Profiler(Callback):
    """Records some steps of rank 0 with torch's profiler: `profile/trace.json`, for chrome://tracing or Perfetto.

    Recorded steps are slower; the others cost one comparison.
    """

    observes: ClassVar[bool] = True

    skip_steps: Annotated[int, cosmetic, at_least(1)] = 10
    """Steps to skip first, from where this start of the run begins: the warm-up is not of interest."""
    num_steps: Annotated[int, cosmetic, at_least(1)] = 5
    """Steps recorded."""
    memory: Annotated[bool, cosmetic] = False
    """Record memory allocations too."""
    stacks: Annotated[bool, cosmetic] = False
    """Record the Python source line of each operation; makes the trace large."""
    _running: _Running = field(default_factory=_Running, init=False, repr=False, compare=False)

    def run_start(self, run: Run) -> None:
        """Determine which steps to record."""
        self._running.first = run.state.step + self.skip_steps

    def step_end(self, run: Run, outcome: StepOutcome) -> None:
        """Start after the steps to skip, end after those to record."""
        if run.state.step < self._running.first or not run.is_owner:
            return
        if run.state.step == self._running.first:
            self._start(run)
        elif run.state.step >= self._running.first + self.num_steps:
            self._finish(run)

    def run_end(self, run: Run, result: Mapping[str, Any]) -> None:
        """Write the recording of a run that ended earlier."""
        self._finish(run)

    def _start(self, run: Run) -> None:
        activities = [ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        recording = profile(
            activities=activities, profile_memory=self.memory, with_stack=self.stacks, record_shapes=True
        )
        recording.start()
        self._running.profile = recording

    def _finish(self, run: Run) -> None:
        recording, self._running.profile = self._running.profile, None
        if recording is None:
            return
        recording.stop()
        folder = run.folder / "profile"
        order = "cuda_time_total" if run.device.type == "cuda" else "cpu_time_total"
        table = recording.key_averages().table(sort_by=order, row_limit=30)
        with naming(folder):
            folder.mkdir(exist_ok=True)
            recording.export_chrome_trace(str(folder / "trace.json"))
            (folder / "operations.txt").write_text(table, encoding="utf-8")
