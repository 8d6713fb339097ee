"""Measure this machine once, for `hardware=this`: matrix products by number format, memory, single operations, a link,
and the input.

The figures are a file of the user, `~/.cache/trainkit/calibration-MACHINE.json`, one for each machine: several machines
may share a home folder.

Each figure is the best of several rounds, since other work on the machine only makes a round longer. That of the link
is the median, because two processes wait for each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from trainkit.cluster.host import num_cores, use_device
from trainkit.data.reading.collate import collate
from trainkit.errors import AbsentFileError, ConfigError, Problem, StorageError, UnreadableError
from trainkit.files import cache_folder, read_json, write_json_atomically
from trainkit.run.estimates.hardware import Link, Say
from trainkit.trainer.metrics_accumulator import wait_for

_ROUND_S: Final = 0.3
"""Seconds of a round, at least."""
_ROUNDS: Final = 5
_SAMPLES: Final = 64
"""Samples of a collated batch."""
_PRODUCTS: Final = 30
"""Products of 256 x 256 matrices between two exchanges: some milliseconds, as a step of a small training takes."""

VERSION: Final = 1
"""The version of the file of the figures."""


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
        gpus = tuple(torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count()))
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
    """The figures that were measured on a machine."""

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
        """Return the figures that a file holds.

        Raises:
            ValueError, KeyError, TypeError: the file does not hold them.
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
    try:
        path = calibration_file(machine)
        return Calibration.of(read_json(path))
    except AbsentFileError:
        path_to_keep: Path | None = path
    except RuntimeError:  # a user without a home folder has no caches
        path_to_keep = None
    except (ValueError, KeyError, TypeError, AttributeError, UnreadableError) as error:
        rule = f"{path} holds no figures of this machine ({error}). Remove it: they are measured again."
        raise ConfigError([Problem(key="hardware", value="this", rule=rule)]) from None
    if say is None:
        return None
    say(f"hardware=this: {machine.name} is measured once, in about a minute")
    load = os.getloadavg()[0]
    if load > machine.cores / 2:
        say(f"note: other processes keep {load:.1f} of {machine.cores} cores busy: the figures will be too low")
    found = _measured(machine, say)
    try:
        if path_to_keep is not None:
            path_to_keep.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomically(path_to_keep, found.document(machine))
            say(f"kept in {path_to_keep}: remove it to measure again")
    except (OSError, StorageError) as error:
        say(f"not kept: {error}")
    return found


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
    repeats, found = 1, float("inf")
    while True:
        seconds = _seconds(work, repeats, device)
        if seconds >= _ROUND_S / 3 or repeats >= 10**6:
            break
        repeats *= 4
    repeats = max(1, round(repeats * _ROUND_S / seconds))
    for _ in range(_ROUNDS):
        found = min(found, _seconds(work, repeats, device) / repeats)
    return found


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
    for name, dtype in formats.items():
        # a GPU takes less power, and is faster, if all numbers are equal
        left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        with _matmul_precision("high" if name == "tf32" else "highest"):
            rate = 2 * size**3 / _best_s(lambda a=left, b=right: a @ b, device) / 1e12  # type: ignore[misc]
        say(f"{name}: {rate:.3g} TFLOP/s of a product of {size} x {size}")
        yield name, rate


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _copy_rate(device: torch.device) -> float:
    """Return 10^9 bytes a second, read and written, of a copy that no cache holds."""
    numel = 2**28 if device.type == "cuda" else 2**25
    source, target = (torch.ones(numel, device=device) for _ in range(2))
    return 2 * numel * 4 / _best_s(lambda: target.copy_(source), device) / 1e9


def _operation_us(device: torch.device) -> float:
    """Return microseconds of an operation on few numbers, with autograd as in a training."""
    few = torch.ones(16, device=device, requires_grad=True)
    return _best_s(lambda: few * 2.0, device) * 1e6


def _input_rate() -> float:
    """Return 10^6 bytes a second of samples that are taken one by one and collated."""
    data = torch.ones(1024, 3, 32, 32)
    places = [list(range(first, first + _SAMPLES)) for first in range(0, len(data), _SAMPLES)]
    turn = iter(range(10**9))

    def read() -> Tensor:
        chosen: Sequence[int] = places[next(turn) % len(places)]
        found: Tensor = collate([data[place] for place in chosen], chosen)
        return found

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
