"""Profile a few steps, and name the bottleneck: from the step times of every rank and the kernel times of one rank."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median_low
from time import perf_counter
from typing import Annotated, Any, ClassVar, Final

from torch.profiler import ProfilerActivity, profile

from trainkit.config.schema import RunConfig
from trainkit.data.reading.iterable import Stream
from trainkit.errors import UnreadableError
from trainkit.fields import at_least, cosmetic, unit
from trainkit.files import naming, read_map
from trainkit.report.numbers import share
from trainkit.strategies.base import PhaseListener, StepOutcome
from trainkit.trainer.events import Callback, Run
from trainkit.trainer.metrics_accumulator import PhaseClock, wait_for

KINDS: Final = ("input", "host", "compute", "memory", "exchange", "straggler")
"""Possible bottlenecks."""

_MATRIX: Final = re.compile(
    r"^(?!triton_(?:poi|red|per)_).*"
    r"((^|[^a-z])(add|bad?d?)?b?mm($|[^a-z])|gemm|conv(?!ert)|attention|flash|fmha|cutlass|xmma|nvjet)"
)
"""Names of compute-bound operations and kernels: matrix products, convolutions, attention. Elementwise kernels and
reductions of inductor have the names of the operations around them; cuBLAS calls its products `nvjet` since Hopper.
"""
_COMMUNICATES: Final = re.compile(r"nccl|gloo|c10d|ProcessGroup|Memcpy")
_SHORT_S: Final = 1e-5
"""CPU operations shorter than this mostly consist of the host's call overhead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTimes:
    """Kernel time per step of one rank, in seconds."""

    compute_s: float = 0.0
    """Products of matrices, convolutions, attention: bound by the arithmetic of the device."""
    memory_s: float = 0.0
    """All others: bound by the memory of the device."""

    @classmethod
    def of(cls, events: Iterable[Any], *, steps: int, on_device: bool) -> KernelTimes:
        """Return the times of the events of `torch.profiler.profile.key_averages()`.

        Args:
            events: the averages.
            steps: recorded steps.
            on_device: whether the kernels of a CUDA device count, or the operations of the CPU.
        """
        totals = {True: 0.0, False: 0.0}
        for event in events:
            is_kernel = event.device_type.name != "CPU"
            if is_kernel is not on_device or _COMMUNICATES.search(event.key):
                continue
            if on_device and event.is_user_annotation:  # a range of the host, over kernels that are counted themselves
                continue
            seconds = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
            if not on_device and (not event.key.startswith("aten::") or seconds < _SHORT_S * event.count):
                continue
            totals[_MATRIX.search(event.key) is not None] += seconds
        return cls(compute_s=totals[True] / steps, memory_s=totals[False] / steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """The measured steps of one rank, in seconds."""

    steps: tuple[float, ...]
    """The duration of each step."""
    inputs: tuple[float, ...]
    """Seconds of each step that wait for input."""
    exchanges: tuple[float, ...]
    """Seconds of each step in the exchange, including the wait for other ranks."""

    def busy_s(self, step: int) -> float:
        """Return the time of a step without exchange and waiting."""
        return self.steps[step] - self.exchanges[step]


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The shares of a step, by kind of bottleneck."""

    shares: Mapping[str, float]
    """Kind -> its share of a step; the shares sum to 1."""
    slowest: int
    """The rank with the longest computing and reading time."""

    @property
    def bottleneck(self) -> str:
        """The kind with the largest share."""
        return max(self.shares, key=lambda kind: self.shares[kind])


def breakdown(ranks: Sequence[StepTimes], kernels: KernelTimes) -> Breakdown:
    """Divide the time of a step among the possible bottlenecks.

    In each step, all ranks wait for the slowest one: its time above the median rank is `straggler`, and its time in the
    exchange itself is `exchange`. The rest, without the input, is divided by the kernel times; `host` is the time in
    which no kernel ran.

    Args:
        ranks: the steps of each rank, the same number of them.
        kernels: kernel times of one rank.

    Example:
        >>> first = StepTimes(steps=(1.0,), inputs=(0.1,), exchanges=(0.5,))
        >>> second = StepTimes(steps=(1.0,), inputs=(0.1,), exchanges=(0.0,))
        >>> usage = breakdown([first, second], KernelTimes(compute_s=0.3))
        >>> usage.bottleneck, usage.slowest, round(usage.shares["compute"], 3)
        ('straggler', 1, 0.3)
    """
    count = min(len(rank.steps) for rank in ranks)
    step_s = mean(rank.steps[step] for rank in ranks for step in range(count))
    longest = [max(rank.busy_s(step) for rank in ranks) for step in range(count)]
    usual = [median_low([rank.busy_s(step) for rank in ranks]) for step in range(count)]
    exchange = mean(min(rank.exchanges[step] for rank in ranks) for step in range(count))
    straggler = mean(most - typical for most, typical in zip(longest, usual, strict=True))
    read = mean(median_low([rank.inputs[step] for rank in ranks]) for step in range(count))
    rest = max(step_s - exchange - straggler - read, 0.0)
    busy = kernels.compute_s + kernels.memory_s
    scale = min(rest / busy, 1.0) if busy else 0.0  # recorded operations take longer than others
    seconds = {
        "input": read,
        "host": max(rest - busy, 0.0),
        "compute": kernels.compute_s * scale,
        "memory": kernels.memory_s * scale,
        "exchange": exchange,
        "straggler": straggler,
    }
    total = sum(seconds.values()) or 1.0
    slowest = max(range(len(ranks)), key=lambda rank: sum(ranks[rank].busy_s(step) for step in range(count)))
    return Breakdown(shares={kind: value / total for kind, value in seconds.items()}, slowest=slowest)


def remedy(kind: str, cfg: RunConfig, *, device: str, is_stream: bool) -> str:
    """Return the key that may remove a bottleneck, with a value if one is known.

    Example:
        >>> remedy("input", RunConfig(), device="cpu", is_stream=False)
        'loader.num_workers=auto'
    """
    in_process, not_compiled = cfg.loader.num_processes == 0, cfg.compile.mode == "off"
    in_fp32 = device == "cuda" and cfg.precision.get("value") == "fp32"
    more = "strategy, with more devices"
    ways: dict[str, list[tuple[bool, str]]] = {
        "input": [
            (is_stream, "data: a stream is read by the training process"),
            (in_process, "loader.num_workers=auto"),
            (True, "loader.num_workers, with a larger value"),
        ],
        "exchange": [
            (cfg.strategy.get("compression") == "none", "strategy.compression"),
            (True, "batch.global_size: a larger batch exchanges less often"),
        ],
        "straggler": [(True, "strategy.spare_replicas of parameter_server, which does not wait for the slowest")],
        "compute": [(in_fp32, "precision=bf16_mixed"), (True, more)],
        "memory": [(in_fp32, "precision=bf16_mixed"), (not_compiled, "compile.mode=default"), (True, more)],
        "host": [(not_compiled, "compile.mode=default"), (True, "batch.micro_size, with a larger value")],
    }
    return next(way for applies, way in ways[kind] if applies)


def verdict(usage: Breakdown, cfg: RunConfig, *, device: str, is_stream: bool) -> str:
    """Return the bottleneck, its share and the key that may remove it, in one line."""
    kind = usage.bottleneck
    where = f" (rank {usage.slowest})" if kind == "straggler" else ""
    key = remedy(kind, cfg, device=device, is_stream=is_stream)
    return f"bottleneck: {kind}{where}, {share(usage.shares[kind])} of a step. What may reduce it: {key}"


@dataclass
class _Running:
    first: int = 0
    profile: profile | None = None
    recorded: int = 0
    kernels: KernelTimes = field(default_factory=KernelTimes)
    clock: PhaseClock = field(default_factory=PhaseClock)
    begun: float = 0.0
    laps: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """The steps before the recording, timed without the profiler: the seconds of each step, and those of its parts; on
    a CUDA device one entry, the means.
    """


@dataclass(kw_only=True, eq=False)
class Profiler(Callback):
    """Records some steps of rank 0 with torch's profiler: `profile/trace.json`, for chrome://tracing or Perfetto.

    At the end of the run it prints the bottleneck in one line, and writes it into `profile/bottleneck.json`: from the
    steps before the recorded ones, on every rank, and from the operations of the recorded ones. Recorded steps are
    slower; the others cost one comparison.
    """

    observes: ClassVar[bool] = True

    skip_steps: Annotated[int, cosmetic, at_least(1), unit("steps")] = 10
    """Steps to skip first, counted from the first step of this start: the warm-up is not of interest."""
    num_steps: Annotated[int, cosmetic, at_least(1), unit("steps")] = 5
    """Steps recorded."""
    memory: Annotated[bool, cosmetic] = False
    """Record memory allocations too."""
    stacks: Annotated[bool, cosmetic] = False
    """Record the Python source line of each operation; makes the trace large."""
    _running: _Running = field(default_factory=_Running, init=False, repr=False)

    def phase_listener(self) -> PhaseListener:
        """Return the clock of the parts of a step."""
        return self._running.clock

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
        if run.is_owner and self._running.recorded and self._running.laps:
            self._conclude(run)

    def _time(self, run: Run, index: int, last: int) -> None:
        """Time a step; a CUDA device is synchronised only before the first step and after the last, so that the lap is
        their mean.
        """
        running, on_device = self._running, run.device.type == "cuda"
        running.clock.end_step()
        if index == 0:
            wait_for(run.device)
            running.clock.begin(run.device)
        elif index == last or not on_device:
            wait_for(run.device)
            count = last if on_device else 1
            seconds = perf_counter() - running.begun
            parts = {part: value / count for part, value in running.clock.lap().items()}
            running.laps.append((seconds / count, parts))
        else:
            return
        running.begun = perf_counter()
        if index == last:
            running.clock.stop()
            self._keep(run)

    def _keep(self, run: Run) -> None:
        """Write the measured steps of this rank for rank 0, which reads those of all ranks at the end of the run."""
        laps = self._running.laps
        if not laps or run.is_owner:
            return
        path = _file_of(run, run.collective.rank)
        with naming(path):
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(asdict(_times_in(laps))), encoding="utf-8")

    def _start(self, run: Run) -> None:
        recording = self._running.profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.device.type == "cuda" else [])],
            profile_memory=self.memory,
            with_stack=self.stacks,
            record_shapes=True,
            acc_events=True,  # there is one cycle; without it torch 2.11 warns that earlier ones are lost
        )
        recording.start()

    def _finish(self, run: Run) -> None:
        recording, self._running.profile = self._running.profile, None
        if recording is None:
            return
        recording.stop()
        folder, on_device, averages = run.folder / "profile", run.device.type == "cuda", recording.key_averages()
        order = "cuda_time_total" if on_device else "cpu_time_total"
        self._running.kernels = KernelTimes.of(averages, steps=max(self._running.recorded, 1), on_device=on_device)
        with naming(folder):
            folder.mkdir(exist_ok=True)
            recording.export_chrome_trace(str(folder / "trace.json"))
            (folder / "operations.txt").write_text(averages.table(sort_by=order, row_limit=30), encoding="utf-8")

    def _conclude(self, run: Run) -> None:
        """Print the bottleneck, and write it."""
        ranks = [times for rank in range(run.collective.num_ranks) if (times := self._times_of(run, rank)) is not None]
        usage = breakdown(ranks, self._running.kernels)
        is_stream = isinstance(run.datasets.get("train"), Stream)
        line = verdict(usage, run.cfg, device=run.device.type, is_stream=is_stream)
        path = run.folder / "profile" / "bottleneck.json"
        content = {"bottleneck": usage.bottleneck, "shares": usage.shares, "slowest_rank": usage.slowest, "text": line}
        with naming(path):
            path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        if not run.cfg.quiet:
            print(f"{line}. Trace: {path.with_name('trace.json')}", flush=True)  # noqa: T201 - meant for the terminal

    def _times_of(self, run: Run, rank: int) -> StepTimes | None:
        """Return the measured steps of a rank; None if it has written none, for example into another file system."""
        if rank == run.collective.rank:
            return _times_in(self._running.laps)
        with suppress(UnreadableError, TypeError):
            record = read_map(_file_of(run, rank), {"steps": list, "inputs": list, "exchanges": list})
            times = StepTimes(**{name: tuple(map(float, record[name])) for name in ("steps", "inputs", "exchanges")})
            return times if times.steps and len(times.steps) == len(times.inputs) == len(times.exchanges) else None
        return None


def _times_in(laps: Sequence[tuple[float, Mapping[str, float]]]) -> StepTimes:
    """Return the times of steps from their laps: seconds, and seconds of each part."""
    parts = {name: tuple(of[part] for _, of in laps) for name, part in (("inputs", "input"), ("exchanges", "exchange"))}
    return StepTimes(steps=tuple(seconds for seconds, _ in laps), **parts)


def _file_of(run: Run, rank: int) -> Path:
    return run.folder / "profile" / f"rank_{rank}.json"
