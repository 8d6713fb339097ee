"""`hardware=this`: the memory, cores and GPUs of this machine, and the figures that are measured here once.

These are matrix products by number format, memory, single operations, a link, and the input. They are a file of the
user, `~/.cache/trainkit/calibration-MACHINE.json`, one for each machine: several machines may share a home folder.

Each figure is the best of several rounds, since other work on the machine only makes a round longer. That of the link
is the median, because two processes wait for each other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

from trainkit.cluster.host import num_cores, use_device
from trainkit.data.reading.collate import collate
from trainkit.errors import AbsentFileError, ConfigError, Problem, StorageError, UnreadableError
from trainkit.fields import at_least, cosmetic, unit
from trainkit.files import Kind, cache_folder, num_bytes, read_map, write_json_atomically
from trainkit.run.estimates.hardware import Band, Hardware, HardwareChoice, Link, Say, recognised
from trainkit.run.estimates.memory import DeviceMemory, HostMemory, verdict_of
from trainkit.run.planning.memory import memory_of
from trainkit.run.planning.plan import RunPlan
from trainkit.trainer.metrics_accumulator import wait_for

_GUESSED: Final = Band(low=0.1, high=1.0)
_MEASURED: Final = Band(low=0.6, high=1.1)
"""Shares of the rates of single matrix products and copies that a training reaches."""
_ROUND_S: Final = 0.3
"""Seconds of a round, at least."""
_ROUNDS: Final = 5
_SAMPLES: Final = 64
"""Samples of a collated batch."""
_PRODUCTS: Final = 30
"""Products of 256 x 256 matrices between two exchanges: some milliseconds, as a step of a small training takes."""
VERSION: Final = 1
"""The version of the file of the figures."""
_KINDS: Final[Mapping[str, Kind]] = {
    "version": int, "date": str, "tflops": dict, "memory_gb_s": float, "operation_us": float, "within_host": dict,
    "input_mb_s": float,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Identity of a machine for its figures."""

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
        gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        processor = cpu_fact("model name") or "unknown processor"
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
    """Return the file of a machine's figures, in the cache folder of the user."""
    return cache_folder() / f"calibration-{machine.mark}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The figures that were measured on a machine; its file also holds the version and the machine."""

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


def calibration_of(machine: Machine, say: Say | None) -> Calibration | None:
    """Return the figures of this machine: the kept ones, else measured ones, which are kept for the next use.

    Args:
        machine: this machine.
        say: receives a line for each figure that is measured; None: nothing is measured.

    Returns:
        None if nothing is kept and nothing may be measured.

    Raises:
        ConfigError: the file is damaged.
    """
    path: Path | None = None
    try:
        path = calibration_file(machine)
        content = read_map(path, _KINDS)
        if content["version"] == VERSION:
            figures = {name: content[name] for name in _KINDS if name not in ("version", "within_host")}
            return Calibration(**figures, within_host=Link(**content["within_host"]))
        reason = f"its version is {content['version']!r}"
    except (AbsentFileError, RuntimeError):  # a user without a home folder has no caches
        reason = ""
    except (TypeError, UnreadableError) as error:
        reason = str(error)
    if reason:
        rule = f"{path} holds no figures of this machine ({reason}). Remove it: they are measured again."
        raise ConfigError([Problem(key="hardware", value="this", rule=rule)])
    if say is None:
        return None
    say(f"hardware=this: {machine.name} is measured once, in about a minute")
    load = os.getloadavg()[0]
    if load > machine.cores / 2:
        say(f"note: other processes keep {load:.1f} of {machine.cores} cores busy: the figures will be too low")
    calibration = _measured(machine, say)
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomically(path, {"version": VERSION, "machine": asdict(machine), **asdict(calibration)})
            say(f"kept in {path}: remove it to measure again")
    except (OSError, StorageError) as error:
        say(f"not kept: {error}")
    return calibration


@dataclass(frozen=True, kw_only=True)
class ThisMachine(HardwareChoice):
    """The machine of this process, calibrated or not."""

    price_usd_h: Annotated[float | None, at_least(0), cosmetic, unit("US dollars an hour")] = None
    """US dollars for an hour of one device; null: unknown."""

    def here(self, say: Say | None = None) -> Hardware:
        """Return the figures of this machine: measured ones, else estimates from the data of the processor.

        Raises:
            ConfigError: there is a GPU whose rates are not measured, or the file of the figures is damaged.
        """
        machine = Machine.here()
        calibration = calibration_of(machine, say)
        if calibration is None:
            return self._not_measured(machine)
        gpu = recognised(machine.gpus[0]) if machine.gpus else None
        measured = ("tflops", "memory_gb_s", "operation_us", "within_host", "between_hosts", "input_mb_s")
        return Hardware(
            name=machine.name,
            memory_gib=_memory_bytes() / 2**30,
            workspace_mib=None if gpu is None else gpu.workspace_mib,
            memory_gb_s=calibration.memory_gb_s,
            tflops=calibration.tflops,
            within_host=calibration.within_host,
            between_hosts=calibration.within_host,
            reached=_MEASURED,
            operation_us=calibration.operation_us,
            input_mb_s=calibration.input_mb_s,
            price_usd_h=self.price_usd_h,
            whole_host=not machine.gpus,
            source=dict.fromkeys(measured, "measured here"),
            date=dict.fromkeys(measured, calibration.date),
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
    hardware = HostMemory(memory_bytes=has, whole_host=on_cpu)
    needs = verdict_of(plan, DeviceMemory(static=memory_of(plan, model)), hardware).needs
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


def _measured(machine: Machine, say: Say) -> Calibration:
    device = torch.device("cuda" if machine.gpus else "cpu")
    tflops = dict(_matmul_rates(device, say))
    memory_gb_s = _copy_rate(device)
    say(f"memory: {memory_gb_s:.1f} GB/s read and written by a copy")
    operation_us = _operation_us(device)
    say(f"one operation: {operation_us:.1f} us")
    input_mb_s = _input_rate()
    say(f"input: {input_mb_s:,.0f} MB/s collated by one process")
    within_host = measured_link(num_gpus=len(machine.gpus))
    say(f"link: {within_host.gb_s:.2f} GB/s, {within_host.latency_us:.0f} us between two processes")
    return Calibration(
        date=datetime.now(UTC).date().isoformat(),
        tflops=tflops,
        memory_gb_s=memory_gb_s,
        operation_us=operation_us,
        within_host=within_host,
        input_mb_s=input_mb_s,
    )


def cpu_fact(name: str) -> str | None:
    """Return a fact of /proc/cpuinfo; None if the system has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, in the fastest round."""
    work()
    repeats = 1
    while (seconds := _seconds(work, repeats, device)) < _ROUND_S / 3 and repeats < 10**6:
        repeats *= 4
    repeats = max(1, round(repeats * _ROUND_S / seconds))
    return min(_seconds(work, repeats, device) / repeats for _ in range(_ROUNDS))


def _seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    wait_for(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(device)
    return time.perf_counter() - begun


def _matmul_rates(device: torch.device, say: Say) -> Iterator[tuple[str, float]]:
    """Yield number format -> 10^12 operations a second of square matrix products."""
    formats = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":
        formats |= {"tf32": torch.float32, "fp16": torch.float16}
    size = 8192 if device.type == "cuda" else 1024
    before = torch.get_float32_matmul_precision()
    for name, dtype in formats.items():
        # a GPU takes less power, and is faster, if all numbers are equal
        left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        rate = 2 * size**3 / _best_s(lambda a=left, b=right: a @ b, device) / 1e12  # type: ignore[misc]
        torch.set_float32_matmul_precision(before)
        say(f"{name}: {rate:.3g} TFLOP/s of a product of {size} x {size}")
        yield name, rate


def _copy_rate(device: torch.device) -> float:
    """Return 10^9 bytes a second, read and written, of a copy that no cache holds."""
    numel = 2**28 if device.type == "cuda" else 2**25
    source, target = (torch.ones(numel, device=device) for _ in range(2))
    return 2 * numel * 4 / _best_s(lambda: target.copy_(source), device) / 1e9


def _operation_us(device: torch.device) -> float:
    """Return microseconds of an operation on few numbers, with autograd as in a training."""
    numbers = torch.ones(16, device=device, requires_grad=True)
    return _best_s(lambda: numbers * 2.0, device) * 1e6


def _input_rate() -> float:
    """Return 10^6 bytes a second of samples that are taken one by one and collated."""
    data, turn = torch.ones(1024, 3, 32, 32), itertools.cycle(range(0, 1024, _SAMPLES))

    def read() -> Tensor:
        chosen = range(first := next(turn), first + _SAMPLES)
        batch: Tensor = collate([data[index] for index in chosen], chosen)
        return batch

    return _SAMPLES * data[0].numel() * 4 / _best_s(read, torch.device("cpu")) / 1e6


def measured_link(*, num_gpus: int) -> Link:
    """Measure an all-reduce between two processes: NCCL between two GPUs, else gloo over the loopback device.

    Processes on CPUs compute for some milliseconds between two exchanges, as a training does: waking a waiting process
    then takes the system many times longer than between two consecutive exchanges.
    """
    from torch.multiprocessing.spawn import spawn  # noqa: PLC0415 - for this figure alone

    backend = "nccl" if num_gpus > 1 else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        spawn(_one_end, args=(backend, folder), nprocs=2)  # type: ignore[no-untyped-call]
        values = json.loads((Path(folder) / "found").read_text(encoding="utf-8"))
    return Link(gb_s=values["gb_s"], latency_us=values["latency_us"])


def _one_end(rank: int, backend: str, folder: str) -> None:
    """Sum vectors with the other process; rank 0 writes its measurement."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(f"cuda:{rank}" if backend == "nccl" else "cpu")
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), 2)
    use_device(device)
    bound = device if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, device_id=bound)
    large, small = torch.ones(2**22, device=device), torch.ones(1024, device=device)
    matrix = torch.ones(256, 256)

    def compute() -> None:
        for _ in range(_PRODUCTS if backend == "gloo" else 0):
            torch.mm(matrix, matrix)

    def summed_s(tensor: Tensor, repeats: int) -> float:
        def step() -> None:
            compute()
            dist.all_reduce(tensor)

        rounds = []
        for _ in range(_ROUNDS):
            dist.barrier()
            alone_s = _seconds(compute, repeats, device) if rank == 0 else 0.0
            dist.barrier()
            rounds.append((_seconds(step, repeats, device) / repeats) - alone_s / repeats)
        return median(rounds)

    try:
        summed_s(large, 1)
        small_s, large_s = max(summed_s(small, 50), 1e-6), summed_s(large, 10)
        if rank == 0:
            num_bytes = (large.numel() - small.numel()) * large.element_size()
            # Two messages follow each other in the sum of a small vector.
            values = {"gb_s": num_bytes / max(large_s - small_s, 1e-9) / 1e9, "latency_us": small_s / 2 * 1e6}
            (Path(folder) / "found").write_text(json.dumps(values), encoding="utf-8")
    finally:
        dist.destroy_process_group()
