"""Find which memory an error ran out of, by its class and text: of the device, the host, /dev/shm or the chip.

The texts are those of torch (CUDA, ROCm, XPU, MPS, CPU), cuBLAS, cuDNN, NCCL, Triton, XLA and Linux. torch is not
imported: a process that reports an error may not have it.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from trainkit.errors import OutOfMemoryError

__all__ = ["MemoryKind", "is_out_of_memory", "memory_kind"]


class MemoryKind(Enum):
    """Memory that can run out."""

    device = "device memory"
    """Memory of an accelerator; on the CPU that of the host."""
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


def is_out_of_memory(error: BaseException, *, device_is_short: Callable[[], bool] | None = None) -> bool:
    """Return whether an allocation failed: on a device, on the host, or in /dev/shm. Also inside a collective.

    Args:
        error: an exception; its causes (`raise ... from ...`) are examined too.
        device_is_short: returns whether a device is almost out of memory; by default for the current device.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, OutOfMemoryError):
        return True
    kind = memory_kind(error, device_is_short=device_is_short)
    return kind is not None and kind is not MemoryKind.on_chip


def memory_kind(error: BaseException, *, device_is_short: Callable[[], bool] | None = None) -> MemoryKind | None:
    """Return the memory that an error ran out of; None for other errors. Arguments as above.

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
