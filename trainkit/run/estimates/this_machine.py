"""`hardware=this`: the memory, cores and GPUs of this machine, and the figures that were measured here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
from torch import nn

from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, cosmetic
from trainkit.run.estimates.calibrating import Machine, calibration_of, cpu_fact
from trainkit.run.estimates.hardware import Band, Hardware, HardwareChoice, Link, Say, recognised
from trainkit.run.estimates.memory import DeviceMemory
from trainkit.run.estimates.verdict import HostMemory, verdict_of
from trainkit.run.planning.memory import memory_of
from trainkit.run.planning.plan import RunPlan
from trainkit.storage import num_bytes

_GUESSED: Final = Band(low=0.1, high=1.0)
_MEASURED: Final = Band(low=0.6, high=1.1)
"""Shares of the rates of single matrix products and copies that a training reaches."""


@dataclass(frozen=True, kw_only=True)
class ThisMachine(HardwareChoice):
    """The machine of this process, calibrated or not."""

    price_usd_h: Annotated[float | None, at_least(0), cosmetic] = None
    """US dollars for an hour of one device; null: unknown."""

    def here(self, say: Say | None = None) -> Hardware:
        """Return the figures of this machine: measured ones, else estimates from the data of the processor.

        Raises:
            ConfigError: there is a GPU whose rates are not measured, or the file of the figures is damaged.
        """
        machine = Machine.here()
        found = calibration_of(machine, say)
        if found is None:
            return self._not_measured(machine)
        known = recognised(machine.gpus[0]) if machine.gpus else None
        measured = ("tflops", "memory_gb_s", "operation_us", "within_host", "between_hosts", "input_mb_s")
        return Hardware(
            name=machine.name,
            memory_gib=_memory_bytes() / 2**30,
            workspace_mib=None if known is None else known.workspace_mib,
            memory_gb_s=found.memory_gb_s,
            tflops=found.tflops,
            within_host=found.within_host,
            between_hosts=found.within_host,
            reached=_MEASURED,
            operation_us=found.operation_us,
            input_mb_s=found.input_mb_s,
            price_usd_h=self.price_usd_h,
            whole_host=not machine.gpus,
            source=dict.fromkeys(measured, "measured here"),
            date=dict.fromkeys(measured, found.date),
        )

    def _not_measured(self, machine: Machine) -> Hardware:
        if machine.gpus:
            rule = f"the rates of {machine.gpus[0]} are not measured yet. Measure them: trainkit plan hardware=this"
            raise ConfigError([Problem(key="hardware", value="this", rule=rule)])
        rate = _cpu_tflops(machine.cores)
        text = f"{machine.cores} cores x operations a cycle x MHz of /proc/cpuinfo"
        return Hardware(
            name=f"{machine.name}, not measured",
            memory_gib=_memory_bytes() / 2**30,
            memory_gb_s=20.0,
            tflops={"fp32": rate, "fp64": rate / 2},
            within_host=Link(gb_s=2.0, latency_us=50.0),
            between_hosts=Link(gb_s=0.125, latency_us=200.0),
            reached=_GUESSED,
            price_usd_h=self.price_usd_h,
            whole_host=True,
            source={"tflops": text, "memory_gb_s": "assumption", "within_host": "assumption"},
        )


def _memory_bytes() -> int:
    """Return the memory of the first GPU, else that of this machine, or of the container that limits it."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return host_bytes()


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory of this host that processes may take without swapping, within the limit of the container.

    Source: proc(5), MemAvailable; if the system does not report it, the whole memory.
    """
    try:
        lines = meminfo.read_text(encoding="ascii", errors="replace").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return host_bytes()
    return _within_container(kib * 1024)


def host_bytes() -> int:
    """Return the memory of this host, or of the container that limits it."""
    return _within_container(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _within_container(whole: int) -> int:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return whole
    return min(whole, int(limit)) if limit.isdigit() else whole


def _cpu_tflops(cores: int) -> float:
    """Return the peak of fp32: two vector units that multiply and add, at the current frequency."""
    flags = (cpu_fact("flags") or "").split()
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    mhz = float(cpu_fact("cpu MHz") or 2500.0)
    return cores * 2 * 2 * lanes * mhz * 1e6 / 1e12


def crowding_problems(
    plan: RunPlan, model: nn.Module, *, jobs: int, jobs_per_device: int, host_bytes: int
) -> list[Problem]:
    """Return the problem of jobs of a sweep that run at once and need more memory than they share.

    Counted are parameters, gradients, the optimizer and the processes, without activations: what is refused cannot fit.

    Args:
        plan: the plan of each job.
        model: its model, with or without data.
        jobs: number of jobs that share the memory of this host, on the CPU.
        jobs_per_device: number of jobs that share a GPU.
        host_bytes: the memory of this host that they may take.
    """
    on_cpu = all(task.device == "cpu" for task in plan.tasks)
    has = host_bytes if on_cpu else min(map(_gpu_bytes, {task.device for task in plan.tasks} - {"cpu"}))
    memory = HostMemory(memory_bytes=has, whole_host=on_cpu)
    needs = verdict_of(plan, DeviceMemory(held=memory_of(plan, model)), memory).needs
    count, key = (jobs, "sweep.slots") if on_cpu else (jobs_per_device, "sweep.jobs_per_device")
    if needs * count <= has:
        return []
    name = "this host has" if on_cpu else "the GPU has"
    most = int(has // needs)
    rule = f"{count} jobs at once need at least {num_bytes(needs * count)}, without activations, and {name} "
    rule += f"{num_bytes(has)}. " + (
        f"Use {most} or less." if most else "Not even one fits: trainkit plan shows its memory."
    )
    return [Problem(key=key, value=count, rule=rule)]


def _gpu_bytes(device: str) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
