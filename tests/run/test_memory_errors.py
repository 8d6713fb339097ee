"""A full device, host or /dev/shm that is taken for another error is caught here alone.

The texts are quoted from public issues of the projects named.
"""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch
from torch.distributed import DistBackendError

from trainkit.run.estimates.out_of_memory import MemoryKind, memory_kind

DEVICE, HOST, SHARED = MemoryKind.device, MemoryKind.host, MemoryKind.shared
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:340, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
XLA = "Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
PEER = "NCCL error\nLast error:\nsocketProgress: Connection closed by remote peer node-3<51159>"
TEXTS = [
    (DEVICE, "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity)"),
    (DEVICE, "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    (DEVICE, "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorRandom.cu:25"),
    (DEVICE, "HIP out of memory. Tried to allocate 2.00 GiB."),
    (DEVICE, "XPU out of memory. Tried to allocate 16.00 GiB."),
    (DEVICE, "MPS backend out of memory (MPS allocated: 17.80 GB, other allocations: 384.00 KB)"),
    (DEVICE, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (DEVICE, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    (DEVICE, "cuFFT error: CUFFT_ALLOC_FAILED"),
    (DEVICE, f"{NCCL}Failed to CUDA calloc 8388608 bytes"),
    (DEVICE, f"{NCCL}Cuda failure 2 'out of memory'"),
    (DEVICE, "Triton Error [CUDA]: out of memory"),
    (DEVICE, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7406166528 bytes."),
    (DEVICE, f"{XLA} hbm."),
    (HOST, "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"),
    (HOST, "unable to mmap 29764 bytes from file </torch_10182_3020184674_63991>: Cannot allocate memory (12)"),
    (HOST, "std::bad_alloc"),
    (HOST, f"{NCCL}Failed to CUDA host alloc 4096 bytes"),
    (HOST, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    (SHARED, "unable to allocate shared memory(shm) for file </torch_81_2>: Resource temporarily unavailable (11)"),
    (SHARED, "unable to write to file </torch_76_3625483894> at /pytorch/aten/src/TH/THAllocator.c:383"),
    (SHARED, "DataLoader worker (pid 325) is killed by signal: Bus error. workers are out of shared memory."),
    (SHARED, "NCCL error, unhandled system error\nLast error:\nError while creating shared memory segment /dev/shm/n"),
    (MemoryKind.on_chip, "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block"),
    (MemoryKind.on_chip, f"{XLA} vmem."),
]  # fmt: skip
OTHERS = [
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: an illegal memory access was encountered",
    f"{NCCL}Cuda failure 1 'invalid argument'",
    PEER,
    "RESOURCE_EXHAUSTED: Received message larger than max (4194305 vs. 4194304)",
    "out of resource: threads, Required: 2048, Hardware limit: 1024.",
    "unable to open shared memory object </torch_16550_876314950> in read-write mode: Too many open files (24)",
    "unable to mmap 2048 bytes from file <data.bin>: No such device (19)",
    "DataLoader worker (pid 7) is killed by signal: Killed. ",
    "my memory bank is out of memory cells",
]


@pytest.mark.parametrize(("kind", "text"), TEXTS)
def test_an_error_of_memory_is_known_by_its_text(kind: MemoryKind, text: str) -> None:
    assert memory_kind(RuntimeError(text)) is kind
    assert memory_kind(ValueError(text)) is None, "only errors of libraries are read"


@pytest.mark.parametrize("text", OTHERS)
def test_an_error_that_only_resembles_one_is_not(text: str) -> None:
    assert memory_kind(RuntimeError(text)) is None
    short = memory_kind(RuntimeError(text), device_is_short=lambda: True)
    assert short is (DEVICE if text in OTHERS[:3] else None), "a library that does not start on a full device"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (DEVICE, torch.OutOfMemoryError("Allocation on device")),
        (DEVICE, DistBackendError(f"{NCCL}Failed to CUDA calloc 8388608 bytes")),
        (HOST, MemoryError()),
        (HOST, OSError(errno.ENOMEM, "Cannot allocate memory")),
        (SHARED, OSError(errno.ENOSPC, "No space left on device", "/dev/shm/psm_2fd4")),
        (None, OSError(errno.ENOSPC, "No space left on device", "/dev/shm/run/checkpoints/step_00000003")),
        (None, DistBackendError(PEER)),
    ],
)
def test_an_error_of_memory_is_known_by_its_class_and_number(kind: MemoryKind | None, error: BaseException) -> None:
    assert memory_kind(error) is kind


def test_an_array_of_numpy_or_torch_that_does_not_fit_is_one() -> None:
    for allocate in (lambda: np.empty(2**60, dtype=np.uint8), lambda: torch.empty(2**60, dtype=torch.uint8)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            allocate()
        assert memory_kind(caught.value) is HOST


def test_an_error_raised_from_one_of_memory_is_one_and_one_raised_while_it_was_handled_is_not() -> None:
    cause, context = RuntimeError("the step failed"), KeyError("left over")
    cause.__cause__ = context.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert memory_kind(cause) is DEVICE
    assert memory_kind(context) is None
