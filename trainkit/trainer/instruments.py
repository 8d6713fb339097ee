"""Speed, memory and idle time of a training, for its rows of metrics and its result."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from trainkit.cluster.host import peak_resident_bytes
from trainkit.strategies.base import PhaseListener
from trainkit.trainer.phase_clock import PARTS, PhaseClock

_RSS_FIELD: Final = 1
"""The place of the resident pages in /proc/self/statm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedWork:
    """The work of a full step, counted without data."""

    flops_a_sample: float
    """Floating-point operations of forward, recomputation and backward by the samples of the step."""
    peak_flops: float | None
    """Operations a second of all devices of the run; None: not known."""
    launches: int
    """Operations that the host of the busiest rank starts in a step, in eager mode."""


@dataclass(kw_only=True)
class _Totals:
    seconds: float = 0.0
    samples: int = 0
    targets: float = 0.0
    waited_s: float = 0.0


class Instruments:
    """Measures one rank between two rows of metrics; rank 0 shows what it finds.

    On a CUDA device the time is taken between events of the current stream: the host runs ahead of the device, so that
    its own clock knows neither how long a phase took nor whether the device waited for data. On the CPU the loader's
    clock is right, and phases are not timed.

    Args:
        device: of the rank.
        counts_targets: whether a sample has more or fewer targets than one, as a sequence of tokens has.

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
        self._rows = 0
        self._totals = _Totals()

    def heard(self, on_phase: PhaseListener) -> PhaseListener:
        """Return a listener that passes each phase to the clock of the device, if there is one, and to `on_phase`."""
        clock = self._clock
        if clock is None:
            return on_phase

        def listen(phase: str, step: int) -> None:
            clock(phase, step)
            on_phase(phase, step)

        return listen

    def know(self, work: CountedWork) -> None:
        """Keep the work of a step, from which MFU and launches follow."""
        self._work = work

    def figures(self, *, seconds: float, samples: int, targets: float, waited_s: float) -> dict[str, float]:
        """Return the figures of the steps since the last call; waits for the device.

        Args:
            seconds: of training.
            samples: of all ranks.
            targets: of all ranks.
            waited_s: how long this rank has waited for data on the host's clock.
        """
        parts = None if self._clock is None else self._clock.lap()
        waited_s = waited_s if parts is None else parts["input"]
        if self._rows == 1:  # the first row has what a start takes: buffers, connections, kernels, compiling
            self._totals = _Totals()
        self._rows += 1
        totals = self._totals
        totals.seconds, totals.samples = totals.seconds + seconds, totals.samples + samples
        totals.targets, totals.waited_s = totals.targets + targets, totals.waited_s + waited_s
        shares = {} if parts is None else {f"phase/{part}": min(parts[part] / seconds, 1.0) for part in PARTS}
        return {**self._rates(_Totals(seconds=seconds, samples=samples, targets=targets, waited_s=waited_s)), **shares}

    def overall(self) -> dict[str, float]:
        """Return the figures of all rows but the first one; empty without a row."""
        return self._rates(self._totals) if self._totals.seconds else {}

    def _rates(self, of: _Totals) -> dict[str, float]:
        speed = of.samples / of.seconds
        found = {"samples_per_s": speed, "data_wait": min(of.waited_s / of.seconds, 1.0)}
        if self._counts_targets:
            found["targets_per_s"] = of.targets / of.seconds
        work = self._work
        if work is not None and work.peak_flops is not None:
            found["mfu"] = speed * work.flops_a_sample / work.peak_flops
        if work is not None:
            found["launches"] = float(work.launches)
        return {**found, **memory_of(self._device)}


def memory_of(device: torch.device) -> dict[str, float]:
    """Return the bytes held now and at the peak: by torch's allocator on a CUDA device, else by this process.

    Source: proc(5), /proc/pid/statm.

    Example:
        >>> sorted(memory_of(torch.device("cpu")))
        ['memory', 'memory_peak']
    """
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return {"memory": float(now), "memory_peak": float(peak)}
    peak = peak_resident_bytes()
    return {"memory": float(min(resident() or peak, peak)), "memory_peak": float(peak)}


def resident(statm: Callable[[], str] = lambda: Path("/proc/self/statm").read_text(encoding="ascii")) -> int | None:
    """Return the bytes of memory that this process has now; None where the system does not say.

    Example:
        >>> resident(lambda: "100 25 7 1 0 30 0") == 25 * resource.getpagesize()
        True
    """
    try:
        return int(statm().split()[_RSS_FIELD]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None
