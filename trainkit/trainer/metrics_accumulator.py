"""Aggregate the rows of metrics of a training: losses, summed over all ranks together, speed, memory and idle time."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from trainkit.cluster.host import peak_resident_bytes
from trainkit.errors import NonFiniteError, TrainingError, ZeroWeightError, listed
from trainkit.strategies.base import LeftOut, LocalModel, PhaseListener, Status, StepOutcome
from trainkit.trainer.events import REMEDY, Run

PARTS: Final = ("input", "forward", "backward", "exchange", "update")
"""The parts of a step, in their order."""
_PART_OF: Final[Mapping[str, str]] = {
    "data": "input", "forward": "forward", "backward": "backward", "reduce": "exchange", "idle": "exchange",
    "update": "update",
}  # fmt: skip
"""Phase of a rank (`trainkit.trainer.failpoints.Phase`) -> part of a step."""


_MOST_EVENTS: Final = 4096
"""Limit of the stored events, enough for more than five hundred steps."""


class PhaseClock:
    """Measures the time of each part of a step; it is the listener of a rank's phases.

    A part begins where its phase begins, and ends where the next phase begins. The parts add up to the time of the
    rank: where one thread updates while another computes (the chief of a parameter server), the time of an update is
    taken from the part of the other thread, which continues after it. `backward` contains the part of the exchange that
    runs during backward, and `exchange` the rest of it, including the time that a rank waits for others.

    On the CPU a part is measured on the host's clock. On a CUDA device it is measured between events of the current
    stream, without waiting for the device: time in which the host is ahead of the device does not count.

    It measures between `begin` and `stop`; otherwise a phase costs one comparison.

    Example:
        >>> clock = PhaseClock()
        >>> clock.begin(torch.device("cpu"))
        >>> for phase in ("data", "forward", "backward", "reduce", "update"):
        ...     clock(phase, 0)
        >>> clock.end_step()
        >>> sorted(clock.lap()) == sorted(PARTS)
        True
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        """None while it does not measure."""
        self._reset()

    def _reset(self) -> None:
        self._events: list[tuple[str | None, torch.cuda.Event]] = []
        self._seconds: dict[str | None, float] = {}
        self._part: str | None = None
        self._parts: dict[int, str | None] = {}
        """The part of each thread that is within a step."""
        self._since = perf_counter()

    def begin(self, device: torch.device) -> None:
        """Discard all measurements, and measure on a device from now on."""
        self._device = device
        self._reset()

    def stop(self) -> None:
        """Stop measuring."""
        self._device = None

    def __call__(self, phase: str, step: int) -> None:
        """Receive a phase that begins."""
        del step
        if self._device is not None:
            part = self._parts[get_ident()] = _PART_OF.get(phase)
            self._mark(self._device, part)

    def end_step(self) -> None:
        """End the last part of a step: the time until the next phase does not belong to it."""
        if self._device is not None:
            self._parts.pop(get_ident(), None)
            self._mark(self._device, next(iter(self._parts.values()), None))

    def _mark(self, device: torch.device, part: str | None) -> None:
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append((part, event))
            if len(self._events) >= _MOST_EVENTS:
                self._fold(reached=lambda ended: bool(ended.query()))  # type: ignore[no-untyped-call]
            return
        now = perf_counter()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def _fold(self, reached: Callable[[torch.cuda.Event], bool]) -> None:
        """Add up the time between the events so far, up to the first one that the device has not reached."""
        done = 0
        for (part, begun), (_, ended) in pairwise(self._events):
            if not reached(ended):
                break
            self._seconds[part] = self._seconds.get(part, 0.0) + begun.elapsed_time(ended) / 1e3
            done += 1
        self._events = self._events[done:]

    def lap(self) -> dict[str, float]:
        """Return the seconds of each part since `begin` or the last call; on a CUDA device, wait for it."""
        if self._events:
            torch.cuda.synchronize(self._device)
            self._fold(reached=lambda _: True)
        seconds, self._seconds = self._seconds, {}
        return {part: seconds.get(part, 0.0) for part in PARTS}


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has computed everything that was started on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def each_of(*listeners: PhaseListener) -> PhaseListener:
    """Return a listener that passes each phase to all of these, in order."""

    def listen(phase: str, step: int) -> None:
        for listener in listeners:
            listener(phase, step)

    return listen if len(listeners) > 1 else listeners[0]


_MEMORY_S: Final = 0.1
"""Seconds until the memory of a process is read again: reading takes 0.1 ms, a quarter of a step of a small model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedWork:
    """Work of a full step, counted without data."""

    flops_a_sample: float
    """Floating-point operations of forward, recomputation and backward, divided by the samples of the step."""
    peak_flops: float | None
    """Operations per second of all devices of the run; None: unknown."""
    launches: int | None
    """Operations that the host of the busiest rank starts in a step; None: a compiled step starts fewer."""


class Instruments:
    """Measures one rank between two rows of metrics; rank 0 logs the figures.

    On a CUDA device, time is measured between events of the current stream: the host runs ahead of the device, so its
    clock shows neither the time of a phase nor whether the device waited for data. On the CPU, the loader's clock is
    exact, and phases are not timed.

    Args:
        device: the device of the rank.
        counts_targets: whether a sample may have more or fewer targets than one, like a sequence of tokens.

    Example:
        >>> instruments = Instruments(torch.device("cpu"), counts_targets=True)
        >>> found = instruments.figures(seconds=2.0, samples=10, targets=640.0, waited_s=0.5)
        >>> found["samples_per_s"], found["targets_per_s"], found["data_wait"]
        (5.0, 320.0, 0.25)
    """

    def __init__(self, device: torch.device, *, counts_targets: bool = False) -> None:
        self._device, self._counts_targets = device, counts_targets
        self._clock: PhaseClock | None = None
        if device.type == "cuda":
            self._clock = PhaseClock()
            self._clock.begin(device)
        self._work: CountedWork | None = None
        self._memory, self._memory_read = dict[str, float](), -math.inf
        self._rows = 0
        self._totals = [0.0] * 4
        """Seconds, samples, targets and seconds of waiting of all rows except the first one."""

    def timed(self, on_phase: PhaseListener) -> PhaseListener:
        """Return a listener that passes each phase to the clock of the device, if there is one, and to `on_phase`."""
        return on_phase if self._clock is None else each_of(self._clock, on_phase)

    def set_work(self, work: CountedWork) -> None:
        """Store the work of a step, from which MFU and launches are computed."""
        self._work = work

    def figures(self, *, seconds: float, samples: int, targets: float, waited_s: float) -> dict[str, float]:
        """Return the figures of the steps since the last call; waits for the device.

        Args:
            seconds: seconds of training.
            samples: number of samples of all ranks.
            targets: number of targets of all ranks.
            waited_s: seconds that this rank has waited for data, by the host's clock.
        """
        parts = None if self._clock is None else self._clock.lap()
        waited_s = waited_s if parts is None else parts["input"]
        row = (seconds, float(samples), targets, waited_s)
        if self._rows == 1:  # the first row includes startup time: buffers, connections, kernels, compiling
            self._totals = [0.0] * 4
        self._totals = [before + more for before, more in zip(self._totals, row, strict=True)]
        self._rows += 1
        shares = {} if parts is None else {f"phase/{part}": min(parts[part] / seconds, 1.0) for part in PARTS}
        return {**self._rates(*row), **shares}

    def overall(self) -> dict[str, float]:
        """Return the figures of all rows except the first one; empty without a row."""
        return self._rates(*self._totals) if self._totals[0] else {}

    def _rates(self, seconds: float, samples: float, targets: float, waited_s: float) -> dict[str, float]:
        speed, work = samples / seconds, self._work
        rates = {"samples_per_s": speed, "data_wait": min(waited_s / seconds, 1.0)}
        if self._counts_targets:
            rates["targets_per_s"] = targets / seconds
        if work is not None and work.peak_flops is not None:
            rates["mfu"] = speed * work.flops_a_sample / work.peak_flops
        if work is not None and work.launches is not None:
            rates["launches"] = float(work.launches)
        if self._clock is not None or time.monotonic() - self._memory_read >= _MEMORY_S:
            self._memory, self._memory_read = memory_of(self._device), time.monotonic()
        return {**rates, **self._memory}


def memory_of(device: torch.device) -> dict[str, float]:
    """Return the allocated bytes now and at the peak: of torch's allocator on a CUDA device, else of this process.

    Source: proc(5), /proc/pid/statm.

    Example:
        >>> sorted(memory_of(torch.device("cpu")))
        ['memory', 'memory_peak']
    """
    if device.type == "cuda":
        allocated, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return {"memory": float(allocated), "memory_peak": float(most)}
    current = peak = float(peak_resident_bytes())
    with suppress(OSError):  # not every system has the file
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        current = min(float(int(pages) * resource.getpagesize()), peak)
    return {"memory": current, "memory_peak": peak}


class MetricsAccumulator:
    """Collects the outcomes of steps and aggregates them into rows; `terms` are the names of the terms of the loss."""

    def __init__(
        self,
        run: Run,
        local: LocalModel,
        waited: Callable[[], float],
        instruments: Instruments,
        *,
        terms: Sequence[str] = (),
    ) -> None:
        self._run, self._local, self._waited, self._terms = run, local, waited, tuple(terms)
        self._instruments = instruments
        self._outcomes: list[StepOutcome] = []
        self._samples = run.state.samples
        self._seconds = run.state.seconds
        self._wait = waited()
        self._mark = time.perf_counter()
        self.is_paused = False
        """Whether the clock of the training is stopped."""

    def note(self, outcome: StepOutcome) -> None:
        """Store an outcome, without reading the device."""
        self._outcomes.append(outcome)

    def pause(self) -> None:
        """Stop the clock of the training, because an evaluation or a save begins."""
        if not self.is_paused:
            self._run.state.seconds += time.perf_counter() - self._mark
        self.is_paused = True

    def proceed(self) -> None:
        """Start the clock of the training again."""
        self._mark, self.is_paused = time.perf_counter(), False

    @property
    def training_s(self) -> float:
        """Seconds of training so far, without the compilation of torch.compile."""
        state = self._run.state
        return state.seconds - state.compile_s + (0.0 if self.is_paused else time.perf_counter() - self._mark)

    def is_sound(self) -> bool:
        """Return whether this rank has no step since the last row that `flush` would refuse; waits for the device."""
        applied = [outcome for outcome in self._outcomes if outcome.status is not Status.skipped]
        finite = all(outcome.loss_sum is None or bool(torch.isfinite(outcome.loss_sum).all()) for outcome in applied)
        return finite and (self._local.num_ranks > 1 or all(float(outcome.weight) > 0 for outcome in applied))

    def flush(self) -> dict[str, float] | None:
        """Aggregate the steps since the last row; None if there are none. Collective, waits for the device.

        `train/loss` is the mean over all targets of these steps, over all shards and ranks.

        Raises:
            NonFiniteError: a step's loss is NaN or infinite; names the first such step.
            ZeroWeightError: a step had no target; names it.
        """
        outcomes, self._outcomes = self._outcomes, []
        if not outcomes:
            return None
        names = ["loss", *self._terms, *dict.fromkeys(name for outcome in outcomes for name in outcome.phases)]
        by_rank = [measured.cpu() for measured in self._local.data_ranks.gather(self._measured(outcomes, names))]
        # Added in the order of the ranks, so that all ranks compute the same bits.
        norms, skips, *pairs = reduce(torch.add, by_rank).tolist()
        losses, weights = pairs[:2]
        for index, (norm, skipped, loss, weight) in enumerate(zip(norms, skips, losses, weights, strict=True)):
            if (weight or not skipped) and not (weight and math.isfinite(loss) and math.isfinite(norm)):
                ranks = [rank for rank, measured in enumerate(by_rank) if not math.isfinite(measured[2, index])]
                raise self._refusal(outcomes[index], loss, weight, norm, ranks, later=len(outcomes) - 1 - index)
        sums = zip(names, map(sum, pairs[::2]), map(sum, pairs[1::2]), strict=True)
        means = {f"train/{name}": total / count if count else math.nan for name, total, count in sums}
        return self._row(outcomes[-1], means, targets=sum(weights))

    def _measured(self, outcomes: list[StepOutcome], names: Sequence[str]) -> Tensor:
        """Return (2 + 2 names, steps) numbers of this rank: gradient norm, skips, and the sum and weight of each name;
        those of a skipped step and of a phase that did not run are zero.
        """
        rows: list[list[float | Tensor]] = [
            [0.0 if outcome.grad_norm is None else outcome.grad_norm for outcome in outcomes],
            [float(outcome.status is Status.skipped) for outcome in outcomes],
        ]
        sums: list[dict[str, tuple[Tensor | None, float | Tensor]]] = []
        for outcome in outcomes:
            terms = {"loss": outcome.loss_sum, **{name: outcome.terms.get(name) for name in self._terms}}
            parts = {} if outcome.status is Status.skipped else {name: (terms[name], outcome.weight) for name in terms}
            sums.append({**parts, **outcome.phases})
        for name in names:
            pairs = [entry.get(name, (None, 0.0)) for entry in sums]
            rows += [[0.0 if total is None else total for total, _ in pairs], [weight for _, weight in pairs]]
        return torch.stack([self._placed(row) for row in rows])

    def _placed(self, row: Sequence[float | Tensor]) -> Tensor:
        """Return (steps,) float64 on the device."""
        placed = partial(torch.as_tensor, dtype=torch.float64, device=self._local.device)
        if not any(isinstance(value, Tensor) for value in row):
            return placed(row)
        return torch.stack([value if isinstance(value, Tensor) else placed(value) for value in row]).double()

    def _refusal(
        self, outcome: StepOutcome, loss_sum: float, weight: float, norm: float, ranks: list[int], *, later: int
    ) -> TrainingError:
        """Return the error of a step; `later` more steps were computed before it was read."""
        step = outcome.step
        if weight == 0:
            return ZeroWeightError(
                f"step {step}: no sample of the global batch has a target: the loss is 0 / 0. Are all labels ignored?"
            )
        fault = f"loss is {loss_sum}" if not math.isfinite(loss_sum) else f"norm of the gradient is {norm}"
        if ranks and self._local.num_ranks > 1:
            fault += f" on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        left_out = self._run.state.left_out
        samples, count = left_out.samples_of(outcome.tickets or LeftOut.whole(self._run.plan, step).tickets)
        origin = f", of the samples {listed(samples, 8, count)}" if samples else ""
        steps = f"{later} more step{'' if later == 1 else 's'}"
        late = f" It was read after {steps}: log_every_steps=1 reads each step at once." if later else ""
        remedy = f"{REMEDY}, or leave such steps out with numerics.on_nonfinite=skip."
        return NonFiniteError(f"step {step}: the {fault}{origin}. {remedy}{late}")

    def _row(self, last: StepOutcome, means: Mapping[str, float], *, targets: float) -> dict[str, float]:
        run, state, local = self._run, self._run.state, self._local
        self.pause()
        self.proceed()
        waited = self._waited()
        row: dict[str, float] = {
            "step": state.step,
            "epoch": state.epoch,
            "samples": state.samples,
            "seconds": state.seconds,
            "train/loss": means["train/loss"],
            "lr": run.rate(last.step),
            **{f"lr/{name}": rate(last.step) for name, rate in run.rates.items()},
            **self._instruments.figures(
                seconds=max(state.seconds - self._seconds, 1e-9),
                samples=state.samples - self._samples,
                targets=targets,
                waited_s=waited - self._wait,
            ),
            **means,
        }
        if last.grad_norm is not None:
            row["grad_norm"] = float(last.grad_norm)
        if local.loss_scale.moves:
            row["loss_scale"] = local.loss_scale.scale
        if run.cfg.elastic.min_replicas is not None:
            row["replicas"] = local.num_ranks
        row.update(local.step_metrics)
        if state.skipped:
            row["skipped_steps"] = state.skipped
        self._seconds, self._samples, self._wait = state.seconds, state.samples, waited
        return row


@dataclass
class LoggedFigures:
    """The figures of this rank since the last row, with the newest value of each name."""

    _figures: dict[str, float | Tensor] = field(default_factory=dict)

    def add(self, figures: Mapping[str, float | Tensor]) -> None:
        """Store figures for the next row; a tensor with one number is not read before the row.

        Raises:
            TrainingError: one is not a number.
        """
        for name, figure in figures.items():
            if not isinstance(figure, int | float) and not (isinstance(figure, Tensor) and figure.numel() == 1):
                raise TrainingError(f"session.log: {name} is a {type(figure).__name__}. Give a number for each name.")
            self._figures[name] = figure.detach() if isinstance(figure, Tensor) else figure

    def added_to(self, row: dict[str, float] | None, *, end_of: Run | None = None) -> dict[str, float] | None:
        """Return a row with the figures, and clear them; None without a row.

        Args:
            row: a row of metrics; None if no step was made since the last one.
            end_of: the run, if it ends: figures without a row get an additional row.

        Raises:
            TrainingError: the row already has one of the names.
        """
        if row is None and end_of is not None and self._figures:
            row = {"step": end_of.state.step, "epoch": end_of.state.epoch}
        if row is not None:
            if both := sorted(row.keys() & self._figures.keys()):
                raise TrainingError(f"session.log: {', '.join(both)} is a figure of the trainer. Use another name.")
            row |= {name: float(figure) for name, figure in self._figures.items()}
            self._figures.clear()
        return row
