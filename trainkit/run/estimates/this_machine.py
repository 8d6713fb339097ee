"""`hardware=this`: the memory, cores and GPUs of this machine, and the figures that `trainkit calibrate` measured here.

A calibration is a file of the user, `~/.cache/trainkit/calibration-MACHINE.json`, one for each machine: several
machines may share a home folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from torch import nn

from trainkit.cluster.host import num_cores
from trainkit.errors import AbsentFileError, ConfigError, Problem, UnreadableError
from trainkit.fields import at_least, cosmetic
from trainkit.files import cache_folder, read_json
from trainkit.run.estimates.hardware import Band, Hardware, HardwareChoice, Link, recognised
from trainkit.run.estimates.memory import DeviceMemory
from trainkit.run.estimates.verdict import HostMemory, verdict_of
from trainkit.run.planning.memory import memory_of
from trainkit.run.planning.plan import RunPlan
from trainkit.storage import num_bytes

VERSION: Final = 1
"""The version of a calibration's file."""
_UNCALIBRATED: Final = Band(low=0.1, high=1.0)
_CALIBRATED: Final = Band(low=0.6, high=1.1)
"""Shares of the rates of single matrix products and copies that a training reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Identity of a machine for a calibration."""

    cpu: str
    """The model of the processor."""
    cores: int
    """Cores that this process may use."""
    gpus: tuple[str, ...]
    """The names of its GPUs."""
    torch: str
    """The version of torch."""

    @classmethod
    def here(cls) -> Machine:
        """Return this machine."""
        gpus = tuple(torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count()))
        processor = _cpu_fact("model name") or "unknown processor"
        return cls(cpu=processor, cores=num_cores(), gpus=gpus, torch=torch.__version__)

    @property
    def mark(self) -> str:
        """Eight characters of a hash of the machine."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """Description of the machine.

        Example:
            >>> Machine(cpu="AMD EPYC", cores=2, gpus=(), torch="2.13.0").name
            'AMD EPYC, 2 cores'
        """
        return f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else f"{self.cpu}, {self.cores} cores"


def calibration_file(machine: Machine) -> Path:
    """Return the file of a machine's calibration, in the cache folder of the user."""
    return cache_folder() / f"calibration-{machine.mark}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Measurements of `trainkit calibrate` on a machine."""

    date: str
    """The day, `2026-11-23`."""
    tflops: Mapping[str, float]
    """10^12 operations a second of matrix products, by number format."""
    memory_gb_s: float
    """10^9 bytes a second, read and written, of a copy."""
    operation_us: float
    """Microseconds of an operation on few numbers."""
    within_host: Link
    """The link between two processes of this machine."""
    input_mb_s: float
    """10^6 bytes a second that one process reads and collates."""

    def document(self, machine: Machine) -> dict[str, Any]:
        """Return the content of the file."""
        return {"version": VERSION, "machine": asdict(machine), **asdict(self)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Calibration:
        """Return the calibration that a file holds.

        Raises:
            ValueError, KeyError, TypeError: the file does not hold a calibration.
        """
        if values["version"] != VERSION:
            raise ValueError(f"its version is {values['version']!r}")
        numbers = {name: _positive(values[name]) for name in ("memory_gb_s", "operation_us", "input_mb_s")}
        link = values["within_host"]
        return cls(
            date=str(values["date"]),
            tflops={str(name): _positive(rate) for name, rate in values["tflops"].items()},
            within_host=Link(gb_s=_positive(link["gb_s"]), latency_us=_positive(link["latency_us"])),
            **numbers,
        )


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"{value!r} is not a rate")
    return number


def calibration_of(machine: Machine) -> Calibration | None:
    """Return the calibration of a machine; None if there is none.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        path = calibration_file(machine)
    except RuntimeError:  # a user without a home folder has no caches
        return None
    try:
        return Calibration.of(read_json(path))
    except AbsentFileError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, UnreadableError) as error:
        rule = f"{path} holds no calibration ({error}). Measure again: trainkit calibrate"
        raise ConfigError([Problem(key="hardware", value="this", rule=rule)]) from None


@dataclass(frozen=True, kw_only=True)
class ThisMachine(HardwareChoice):
    """The machine of this process, calibrated or not."""

    price_usd_h: Annotated[float | None, at_least(0), cosmetic] = None
    """US dollars for an hour of one device; null: unknown."""

    def here(self) -> Hardware:
        """Return the figures of this machine: measured ones, else estimates from the data of the processor.

        Raises:
            ConfigError: there is a GPU without a calibration, or the calibration file is damaged.
        """
        machine = Machine.here()
        found = calibration_of(machine)
        if found is None:
            return self._uncalibrated(machine)
        known = recognised(machine.gpus[0]) if machine.gpus else None
        text = "trainkit calibrate"
        measured = ("tflops", "memory_gb_s", "operation_us", "within_host", "between_hosts", "input_mb_s")
        return Hardware(
            name=f"{machine.name}, calibrated",
            memory_gib=_memory_bytes() / 2**30,
            workspace_mib=None if known is None else known.workspace_mib,
            memory_gb_s=found.memory_gb_s,
            tflops=found.tflops,
            within_host=found.within_host,
            between_hosts=found.within_host,
            reached=_CALIBRATED,
            operation_us=found.operation_us,
            input_mb_s=found.input_mb_s,
            price_usd_h=self.price_usd_h,
            whole_host=not machine.gpus,
            source=dict.fromkeys(measured, text),
            date=dict.fromkeys(measured, found.date),
        )

    def _uncalibrated(self, machine: Machine) -> Hardware:
        if machine.gpus:
            rule = f"the rates of {machine.gpus[0]} are not measured yet. Measure them: trainkit calibrate"
            raise ConfigError([Problem(key="hardware", value="this", rule=rule)])
        rate = _cpu_tflops(machine.cores)
        text = f"{machine.cores} cores x operations a cycle x MHz of /proc/cpuinfo; not calibrated: trainkit calibrate"
        return Hardware(
            name=f"{machine.name}, not calibrated",
            memory_gib=_memory_bytes() / 2**30,
            memory_gb_s=20.0,
            tflops={"fp32": rate, "fp64": rate / 2},
            within_host=Link(gb_s=2.0, latency_us=50.0),
            between_hosts=Link(gb_s=0.125, latency_us=200.0),
            reached=_UNCALIBRATED,
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
    flags = (_cpu_fact("flags") or "").split()
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    mhz = float(_cpu_fact("cpu MHz") or 2500.0)
    return cores * 2 * 2 * lanes * mhz * 1e6 / 1e12


def _cpu_fact(name: str) -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


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
