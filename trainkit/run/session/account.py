"""Compare a run with its plan: after its first steps and at its end, memory, time and bytes are compared with the
planned ones.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from trainkit.cluster.host import peak_resident_bytes
from trainkit.cluster.tasks import Identity
from trainkit.errors import StorageError, TrainingError
from trainkit.files import naming, num_bytes, write_json_atomically
from trainkit.run.planning.plan import RunPlan, imagined_launch
from trainkit.run.session.evaluation import EvalRunner
from trainkit.strategies.base import LocalModel, PhaseListener
from trainkit.trained.build import build_without_data
from trainkit.trainer.events import Run
from trainkit.trainer.loop import Trigger
from trainkit.trainer.metrics_accumulator import CountedWork, Instruments, MetricsAccumulator, wait_for

if TYPE_CHECKING:
    from trainkit.run.estimates.hardware import Hardware
    from trainkit.run.estimates.memory import DeviceMemory
    from trainkit.run.estimates.outlook import RankWork

FILE: Final = "plan.json"
"""The file of the plan, in the run folder."""
_FIRST, _LAST = 5, 20
"""The first and last measured step after a start; earlier steps allocate buffers and open connections."""
_NEVER: Final = 1 << 62
_ACKED, _RECEIVED = 120, 128
"""Offsets of two counters in `struct tcp_info` of Linux: bytes sent and acknowledged, bytes received."""
_COUNTERS: Final = struct.Struct("=Q")
_LEAST_BYTES: Final = 2**28
"""Smallest planned memory on the CPU that is compared: a process also grows by its libraries and threads."""
_log = logging.getLogger(__name__)


class Account:
    """The figures of one run, planned and measured; on rank 0.

    Planning traces a step without data, which takes from 0.03 s to some seconds: it is done after `_LAST` steps, with
    the clock of the training stopped, and not at all in a shorter run. Steps in between cost nothing.
    """

    def __init__(self, plan: RunPlan, identity: Identity) -> None:
        self._plan, self._num_ranks, self._before = plan, identity.num_ranks, peak_resident_bytes()
        weighing = plan.components.weighing
        counts_targets = weighing.per_sample != 1.0 and weighing.planned != 1.0
        self._instruments = Instruments(torch.device(identity.task.device), counts_targets=counts_targets)
        self._marks: list[Mark] = []
        self._planned = Figures()
        self._memory: DeviceMemory
        self._documents: dict[str, Any] = {}

    def heard(self, on_phase: PhaseListener) -> PhaseListener:
        """Return a listener that times the phases on a GPU, and passes them to `on_phase`."""
        return self._instruments.timed(on_phase)

    def journal(
        self, run: Run, local: LocalModel, waited: Callable[[], float], *, terms: Sequence[str]
    ) -> MetricsAccumulator:
        """Return the accumulator that makes rows of metrics from the steps; `waited` gives the seconds of waiting for
        data so far.
        """
        return MetricsAccumulator(run, local, waited, self._instruments, terms=terms)

    def triggers(self, run: Run, journal: MetricsAccumulator, scorer: EvalRunner) -> list[Trigger]:
        """Return the triggers that measure the steps; empty on a rank above 0, or after the first measurement."""
        self._run, self._journal, self._scorer = run, journal, scorer
        if not run.is_owner or self._documents:
            return []
        self._marks.clear()  # after a rollback
        first, last = run.state.step + _FIRST, run.state.step + _LAST
        return [
            Trigger(act=self._mark, next_after=lambda step: first if step < first else _NEVER),
            Trigger(act=self._compare, next_after=lambda step: last if step < last else _NEVER),
        ]

    def result(self) -> dict[str, Any]:
        """Return the entries of result.json; none of a run that ended before it was measured."""
        if self._documents.get("measured") is None:
            return self._documents
        first, at_end = self._marks[-1], self._now(with_bytes=False)
        step_s, _ = between(first, at_end)
        end = Figures(memory=self._peak(), step_s=step_s)
        speed = self._instruments.overall()
        planned = replace(self._planned, memory=self._planned_memory())
        totals = {"steps": at_end.step, **speed, **asdict(end), "per_cent": differences(planned, end)}
        return {**self._documents, "measured": {**self._documents["measured"], "at_end": totals}}

    def _mark(self) -> None:
        """Store the counters of this moment."""
        wait_for(self._run.device)
        self._journal.pause()
        self._marks.append(self._now())
        self._journal.proceed()

    def _now(self, *, with_bytes: bool = True) -> Mark:
        state = self._run.state
        counts = with_bytes and self._run.device.type == "cpu"  # GPUs have links of their own
        return Mark(step=state.step, seconds=state.seconds, tcp_bytes=tcp_bytes() if counts else None)

    def _compare(self) -> None:
        """Plan the run, write the plan, and print the differences."""
        self._mark()
        self._scorer.enter("callback")
        self._journal.pause()
        try:
            self._compare_with_plan(*self._marks)
        except (StorageError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - the training does not depend on its plan
            self._documents = {"plan": None, "measured": None, "plan_error": f"{type(error).__name__}: {error}"}
            _log.warning("the run is not compared with its plan: %s: %s", type(error).__name__, error)
        finally:
            self._journal.proceed()

    def _compare_with_plan(self, first: Mark, last: Mark) -> None:
        from trainkit.run.estimates.hardware import hardware_under  # noqa: PLC0415 - a short run plans nothing
        from trainkit.run.estimates.outlook import outlook_of  # noqa: PLC0415 - a short run plans nothing

        plan, run = of_ranks(self._plan, self._num_ranks), self._run
        model = build_without_data(plan.cfg)
        if model is None:  # a second model with data may not fit in addition to the trained one
            raise TrainingError("the model cannot be built without data")
        outlook = outlook_of(plan, model)
        self._memory = outlook.memory
        document = {"version": 1, "memory": outlook.memory.document(), **outlook.document()}
        with naming(run.folder / FILE):
            write_json_atomically(run.folder / FILE, document)
        sent = None if outlook.traffic is None else outlook.traffic.mean_bytes(first.step, last.step, rank=0)
        time, work = outlook.time, outlook.work
        gpu = hardware_under(run.device)
        if gpu is not None and (note := evaluation_misfit(plan, model, outlook.memory, gpu)) is not None:
            run.add_note(note)
            _log.warning("%s", note)
        if run.device.type == "cpu" and outlook.hardware is not None and not outlook.hardware.whole_host:
            time = work = None  # the plan is for a GPU, and this is a trial of it
        if work is not None:
            self._instruments.set_work(counted_work(work, outlook.hardware or hardware_under(run.device), plan))
        self._planned = Figures(
            memory=self._planned_memory(), step_s=None if time is None else time.step_s, bytes_a_step=sent or None
        )
        step_s, bytes_a_step = between(first, last)
        actual = Figures(memory=self._peak(), step_s=step_s, bytes_a_step=bytes_a_step)
        band = {} if time is None else {"low_s": time.band.low, "high_s": time.band.high}
        measured = {"steps": last.step, **asdict(actual), "per_cent": differences(self._planned, actual)}
        self._documents = {"plan": {**asdict(self._planned), **band}, "measured": measured}
        line = line_of(self._planned, actual, last.step)
        if line is not None and not plan.cfg.quiet:
            print(line, flush=True)  # noqa: T201 - the screen of the user

    def _planned_memory(self) -> int | None:
        """Return the planned peak of the phases that the run has had."""
        return self._memory.peak if self._scorer.has_evaluated else self._memory.step

    def _peak(self) -> int | None:
        return peak_bytes(self._run.device, before=self._before, planned=self._planned.memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The counters of a process at one moment of a training."""

    step: int
    """Updates so far."""
    seconds: float
    """Seconds of training so far, without evaluation and checkpoints."""
    tcp_bytes: int | None
    """Bytes that its open TCP connections have sent and received; None if the system has no counters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Planned or measured figures of a run; None if unknown."""

    memory: int | None = None
    """Peak bytes of a device."""
    step_s: float | None = None
    """Seconds of a step."""
    bytes_a_step: float | None = None
    """Bytes that rank 0 sends and receives in a step."""


def of_ranks(plan: RunPlan, num_ranks: int) -> RunPlan:
    """Return the plan of the ranks that run: after a loss, an elastic run continues with fewer than planned."""
    if num_ranks >= len(plan.training_tasks):
        return plan
    context = replace(plan.context, launch=imagined_launch(1, num_ranks))
    num_replicas = plan.components.strategy.num_replicas(context)
    return replace(plan, tasks=plan.tasks[:num_ranks], num_replicas=num_replicas, context=context)


def evaluation_misfit(plan: RunPlan, model: nn.Module, memory: DeviceMemory, hardware: Hardware) -> str | None:
    """Return that the evaluations of a run, whose steps fit, do not fit, with the remedy; None if they do.

    Args:
        plan: the run, with the choices of its strategy resolved.
        model: the model, with or without data; unchanged.
        memory: the planned memory of its device with the largest use.
        hardware: that device.
    """
    from trainkit.run.estimates.memory import verdict_of  # noqa: PLC0415 - a short run plans nothing
    from trainkit.run.estimates.remedies import remedies_for  # noqa: PLC0415 - a short run plans nothing

    verdict = verdict_of(plan, memory, hardware)
    if memory.moment != "evaluation" or verdict.fits is not False:
        return None
    remedies = ", ".join(remedy.overrides for remedy in remedies_for(plan, model, hardware))
    needs, has = num_bytes(verdict.needs), num_bytes(verdict.has)
    return f"an evaluation will run out of memory: it needs {needs}, {verdict.name} has {has}. Resume with {remedies}."


def counted_work(work: RankWork, hardware: Hardware | None, plan: RunPlan) -> CountedWork:
    """Return the work of a step in the form that the run's instruments use."""
    peak = None if hardware is None else hardware.peak_flops(plan.components.precision.value)
    if peak is not None and hardware is not None:
        peak *= work.num_devices / (work.tasks_a_host if hardware.whole_host else 1)
    launches = None
    if plan.cfg.compile.mode == "off":  # a compiled kernel does several operations, a CUDA graph all of them
        launches = round(work.shard.num_operations * work.shards + work.update.num_operations)
    return CountedWork(flops_a_sample=work.flops / plan.batch.global_size, peak_flops=peak, launches=launches)


def tcp_bytes() -> int | None:
    """Return the bytes that the open TCP connections of this process have sent and received; a few us per connection.

    Source: tcp(7), TCP_INFO; include/uapi/linux/tcp.h, tcpi_bytes_acked and tcpi_bytes_received.
    """
    if not sys.platform.startswith("linux"):
        return None
    connections: dict[str, int] = {}  # by the name of the socket: a duplicated descriptor is the same connection
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError, ValueError):
            if (name := str(entry.readlink())).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        connections[name] = sum(_COUNTERS.unpack_from(info, start)[0] for start in (_ACKED, _RECEIVED))
    return sum(connections.values())


def peak_bytes(device: torch.device, *, before: int, planned: int | None) -> int | None:
    """Return the peak of a device: of the allocator of a GPU, else the growth of the process.

    Args:
        device: the device of this rank.
        before: `peak_resident_bytes` before the model was placed.
        planned: the planned peak; on the CPU, a small one is not compared.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes() - before if planned is not None and planned >= _LEAST_BYTES else None


def between(first: Mark, last: Mark) -> tuple[float | None, float | None]:
    """Return seconds and bytes of a step between two moments.

    Example:
        >>> between(Mark(step=5, seconds=1.0, tcp_bytes=0), Mark(step=20, seconds=4.0, tcp_bytes=1500))
        (0.2, 100.0)
    """
    steps = last.step - first.step
    if steps < 1:
        return None, None
    counted = first.tcp_bytes is not None and last.tcp_bytes is not None
    return (last.seconds - first.seconds) / steps, (last.tcp_bytes - first.tcp_bytes) / steps if counted else None  # type: ignore[operator]


def differences(planned: Figures, measured: Figures) -> dict[str, float | None]:
    """Return the difference of each measured figure from the planned one in per cent; None if one is unknown.

    Example:
        >>> differences(Figures(memory=100, step_s=2.0), Figures(memory=110, bytes_a_step=7.0))
        {'memory': 10.0, 'step_s': None, 'bytes_a_step': None}
    """
    pairs = zip(asdict(planned).items(), asdict(measured).values(), strict=True)
    return {
        name: round(100 * (actual / expected - 1), 1) if expected and actual is not None else None
        for (name, expected), actual in pairs
    }


def line_of(planned: Figures, measured: Figures, steps: int) -> str | None:
    """Return the line for the screen; None if no figure is both planned and measured.

    Example:
        >>> line_of(Figures(step_s=0.010), Figures(step_s=0.012, bytes_a_step=2e6), 20)
        'plan: after 20 steps 12 ms a step (planned 10 ms, +20 %)'
    """
    labels = {"memory": "of memory at the peak", "step_s": "a step", "bytes_a_step": "sent and received per step"}
    of_plan, of_run, parts = asdict(planned), asdict(measured), list[str]()
    for name, per_cent in differences(planned, measured).items():
        if per_cent is not None:
            actual, expected = (_text(figures[name], name) for figures in (of_run, of_plan))
            percent = f"{round(per_cent):+d}" if round(per_cent) else "0"
            parts.append(f"{actual} {labels[name]} (planned {expected}, {percent} %)")
    return f"plan: after {steps} steps {'; '.join(parts)}" if parts else None


def _text(value: float, name: str) -> str:
    if name != "step_s":
        return num_bytes(round(value))
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
