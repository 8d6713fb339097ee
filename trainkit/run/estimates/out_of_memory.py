"""Explain an out-of-memory error: the kind of memory, the need of the run, and remedies.

The texts by which an error is recognized are those of torch (CUDA, ROCm, XPU, MPS, CPU), cuBLAS, cuDNN, NCCL, Triton,
XLA and Linux.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from trainkit.cluster.tasks import Task
from trainkit.errors import OutOfMemoryError, TrainingError, TrainkitError
from trainkit.frames import chain_of, first_line
from trainkit.run.estimates.remedies import largest_savings
from trainkit.run.planning.memory import Memory, memory_of, meta_model
from trainkit.run.planning.plan import RunPlan
from trainkit.storage import num_bytes

_OF_KERNEL: Final = (
    "a kernel needs more on-chip memory than {device} has. The device's own memory is not full, and a smaller batch "
    "does not help: use smaller blocks in a kernel of your own, or compile.mode=off. {error}"
)


def explained(error: Exception, plan: RunPlan, task: Task, *, step: int | None) -> TrainkitError | None:
    """Return the error of a failed allocation, with the memory that the run needs and remedies.

    Args:
        error: any error of a task; of a failed allocation, the traceback and the variables of its frames are removed.
        plan: the run.
        task: the task that has failed.
        step: the step of the task; None while the model was placed.

    Returns:
        `OutOfMemoryError`: there was no memory, on the device, on the host or in /dev/shm. `TrainingError`: a kernel
        needs more on-chip memory than the device has. None for any other error.
    """
    kind = memory_kind(error)
    if kind is None or isinstance(error, TrainkitError):
        return None
    _free(error)
    head = f"rank {task.rank}, {'while the model was placed' if step is None else f'step {step}'}:"
    if kind is MemoryKind.on_chip:
        return TrainingError(f"{head} {_OF_KERNEL.format(device=task.device, error=first_line(error))}")
    if kind is MemoryKind.shared:
        return OutOfMemoryError(f"{head} {_shared(plan)}")
    if kind is MemoryKind.host and task.device != "cpu":
        return OutOfMemoryError(f"{head} {_host(plan, task)}")
    return OutOfMemoryError(_with_remedies(plan, f"{head} {task.device} is out of memory.", placing=step is None))


def _free(error: BaseException) -> None:
    """Free the tensors in the frames of an error and of its causes, which fill the memory; `with` statements around
    them hold the traceback, too.
    """
    for one in chain_of(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _shared(plan: RunPlan) -> str:
    workers = plan.cfg.loader.num_processes
    fewer = f"loader.num_workers={workers // 2} (now {workers}), or " if workers else ""
    return (
        "the shared memory of the host (/dev/shm), through which its processes exchange tensors, is full. To "
        f"continue, try {fewer}make it larger (docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm)."
    )


def _host(plan: RunPlan, task: Task) -> str:
    workers = plan.cfg.loader.num_processes
    ways = {
        f"loader.num_workers={workers // 2} (now {workers})": workers > 0,
        "loader.cache=false": plan.cfg.loader.cache is not False,
        "checkpoint.background=false (no copy of the checkpoint on the host)": plan.cfg.checkpoint.background,
    }
    open_ways = ", ".join(way for way, helps in ways.items() if helps)
    tried = f" To need less, try one of: {open_ways}." if open_ways else ""
    return f"the host is out of memory (RAM), not {task.device}.{tried}"


def _with_remedies(plan: RunPlan, head: str, *, placing: bool) -> str:
    try:
        model = meta_model(plan.cfg)
        memory = memory_of(plan, model)
        ways = largest_savings(plan, model, placing=placing)
    except (MemoryError, RuntimeError):  # no memory is left to compute the details
        return head
    needs = f"The run needs {num_bytes(memory.total_bytes)} per device, and activations: {_parts(memory)}."
    if not ways:
        return f"{head} {needs}"
    width = max(len(way.overrides) for way in ways)
    lines = [f"  {way.overrides:<{width}}  {num_bytes(way.saved)} less: {way.price}" for way in ways]
    return "\n".join([f"{head} {needs} To need less, try one of:", *lines])


def _parts(memory: Memory) -> str:
    known = {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes + memory.exchange_bytes,
        "optimizer": memory.optimizer_bytes or 0,
    }
    if memory.staging_bytes and memory.staged_here:
        known["copy for checkpoints"] = memory.staging_bytes
    if memory.frozen_bytes:
        known["frozen models"] = memory.frozen_bytes
    return ", ".join(f"{label} {num_bytes(size)}" for label, size in known.items())


class MemoryKind(Enum):
    """Memory that can run out."""

    device = "device memory"
    """Memory of an accelerator; on the CPU, memory of the host."""
    host = "host memory"
    """RAM, or the number of memory maps of a process."""
    shared = "shared memory of the host"
    """The file system /dev/shm, through which processes of a host exchange tensors."""
    on_chip = "on-chip memory"
    """Memory that a thread block of a kernel may use (CUDA's shared memory, a TPU's vmem): a fixed limit of the
    hardware.
    """


_DEVICE: Final = re.compile(
    r"\b(?:CUDA|HIP|XPU) out of memory|\b(?:CUDA|HIP|XPU)(?: driver)? error: out of memory|MPS backend out of memory"
    r"|\bcuda runtime error \(2\) : out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|Triton Error \[\w+\]: out of memory"
    r"|\b(?:CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    r"|(?:Cuda|CUDA|Hip|HIP) failure(?: \d+)? 'out of memory'|Failed to (?:CUDA|Cuda|HIP|Hip) (?:malloc|calloc|alloc)\b"
    r"|RESOURCE_EXHAUSTED:.*(?:out of memory|Attempting to (?:reserve|allocate)|Failed to allocate)",
    re.DOTALL | re.IGNORECASE,
)
_HOST: Final = re.compile(
    r"can't allocate memory|not enough memory: you tried to allocate|Cannot allocate memory|std::bad_alloc"
    r"|CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED|Failed to (?:CUDA|Cuda|HIP|Hip) host alloc",
    re.IGNORECASE,
)
_SHARED: Final = re.compile(
    r"unable to allocate shared memory|unable to write to file </torch_|workers are out of shared memory"
    r"|insufficient shared memory|creating shared memory segment /dev/shm/",
)
_SHARED_FILES: Final = re.compile(r"^/dev/shm/(?:torch_|psm_|sem\.|nccl-)")
"""Files of torch, multiprocessing and NCCL; a run folder may lie in /dev/shm as well, and fill it."""
_ON_CHIP: Final = re.compile(r"memory in memory space (?:vmem|smem|sflag)\b|out of resources?: shared memory")
_DEVICE_OF_XLA: Final = re.compile(r"RESOURCE_EXHAUSTED.*memory in memory space hbm\b", re.DOTALL)
_PERHAPS: Final = re.compile(
    r"\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_NOT_INITIALIZED|\bCUDNN_STATUS_INTERNAL_ERROR\b"
)
"""Errors of libraries that cannot load their kernels: for lack of memory, or because the versions do not match."""
_SHORT_BYTES: Final = 512 * 1024**2
"""Free device memory below which such an error counts as lack of memory: cuDNN 8 loads up to 500 MB (pytorch issue
81620).
"""


def memory_kind(error: BaseException, *, device_is_short: Callable[[], bool] | None = None) -> MemoryKind | None:
    """Return the memory that an error ran out of; None for other errors. Also inside a collective.

    Args:
        error: an exception; its causes (`raise ... from ...`) are examined too.
        device_is_short: returns whether a device is almost out of memory; by default for the current device.

    Example:
        >>> memory_kind(RuntimeError("CUDA error: out of memory")).value
        'device memory'
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = _kind(current, device_is_short or _device_is_short)
        if kind is not None:
            return kind
        current = current.__cause__
    return None


def _kind(error: BaseException, device_is_short: Callable[[], bool]) -> MemoryKind | None:
    """Return the kind for one exception, without its causes."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if "torch.OutOfMemoryError" in names:
        return MemoryKind.device
    if isinstance(error, MemoryError):
        return MemoryKind.host
    if isinstance(error, OSError):
        return _kind_of_system(error)
    if isinstance(error, RuntimeError) or "triton.OutOfResources" in names:
        return _kind_of_text(str(error), device_is_short)
    return None


def _kind_of_system(error: OSError) -> MemoryKind | None:
    if error.errno == errno.ENOMEM:
        return MemoryKind.host
    in_shm = any(_SHARED_FILES.match(str(name)) for name in (error.filename, error.filename2))
    return MemoryKind.shared if error.errno == errno.ENOSPC and in_shm else None


def _kind_of_text(text: str, device_is_short: Callable[[], bool]) -> MemoryKind | None:
    texts = {
        MemoryKind.on_chip: (_ON_CHIP,),
        MemoryKind.device: (_DEVICE, _DEVICE_OF_XLA),
        MemoryKind.shared: (_SHARED,),
        MemoryKind.host: (_HOST,),
    }
    for kind, patterns in texts.items():
        if any(pattern.search(text) for pattern in patterns):
            return kind
    return MemoryKind.device if _PERHAPS.search(text) and device_is_short() else None


def _device_is_short() -> bool:
    """Return whether the current CUDA device is almost out of memory; False if it cannot be queried."""
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return False
        free, _ = torch.cuda.mem_get_info()
    except Exception:  # noqa: BLE001 - a device in error raises any exception
        return False
    return int(free) < _SHORT_BYTES
