"""Texts of errors that are, and are not, about memory. They are quoted from public issues of the projects named."""

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
WORKER = (
    "DataLoader worker (pid 325) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
TRITON = (
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` "
    "may help."
)
XLA = "Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
PEER = "NCCL error\nLast error:\nsocketProgress: Connection closed by remote peer node-3<51159>"
TEXTS = [
    (DEVICE, "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity)"),
    (DEVICE, "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    (DEVICE, "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/"),
    (DEVICE, "CUDA driver error: out of memory"),
    (DEVICE, "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorRandom.cu:25"),
    (DEVICE, "HIP out of memory. Tried to allocate 2.00 GiB."),
    (DEVICE, "HIP error: out of memory"),
    (DEVICE, "XPU out of memory. Tried to allocate 16.00 GiB."),
    (
        DEVICE,
        "MPS backend out of memory (MPS allocated: 17.80 GB, other allocations: 384.00 KB, max allowed: 18.13 GB)",
    ),
    (DEVICE, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (DEVICE, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (DEVICE, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    (DEVICE, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    (DEVICE, "cuFFT error: CUFFT_ALLOC_FAILED"),
    (DEVICE, f"{NCCL}Failed to CUDA calloc 8388608 bytes"),
    (DEVICE, f"{NCCL}Failed to CUDA malloc 6291456 bytes"),
    (DEVICE, f"{NCCL}Cuda failure 2 'out of memory'"),
    (DEVICE, f"{NCCL}Cuda failure 'out of memory'"),
    (DEVICE, "Triton Error [CUDA]: out of memory"),
    (DEVICE, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7406166528 bytes."),
    (DEVICE, "RESOURCE_EXHAUSTED: Attempting to reserve 6.48G at the bottom of memory. That was not possible."),
    (DEVICE, f"{XLA} hbm."),
    (HOST, "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"),
    (HOST, "DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes."),
    (HOST, "unable to mmap 29764 bytes from file </torch_10182_3020184674_63991>: Cannot allocate memory (12)"),
    (HOST, "std::bad_alloc"),
    (HOST, f"{NCCL}Failed to CUDA host alloc 4096 bytes"),
    (HOST, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    (SHARED, "unable to allocate shared memory(shm) for file </torch_81_2>: Resource temporarily unavailable (11)"),
    (SHARED, "unable to write to file </torch_76_3625483894> at /pytorch/aten/src/TH/THAllocator.c:383"),
    (SHARED, WORKER),
    (
        SHARED,
        "NCCL error, unhandled system error\nLast error:\nError while creating shared memory segment /dev/shm/nccl-a",
    ),
    (MemoryKind.on_chip, TRITON),
    (MemoryKind.on_chip, f"{XLA} vmem."),
]
OTHERS = [
    "shapes differ",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    f"{NCCL}Cuda failure 1 'invalid argument'",
    PEER,
    "Triton Error [CUDA]: device kernel image is invalid",
    "RESOURCE_EXHAUSTED: Received message larger than max (4194305 vs. 4194304)",
    "out of resource: threads, Required: 2048, Hardware limit: 1024.",
    "unable to open shared memory object </torch_16550_876314950> in read-write mode: Too many open files (24)",
    "unable to mmap 2048 bytes from file <data.bin>: No such device (19)",
    "DataLoader worker (pid 7) is killed by signal: Killed. ",
    "the replay memory has run out of memory slots",
    "my memory bank is out of memory cells",
]


@pytest.mark.parametrize(("kind", "text"), TEXTS)
def test_an_error_of_memory_is_known_by_its_text(kind: MemoryKind | None, text: str) -> None:
    assert memory_kind(RuntimeError(text)) is kind


@pytest.mark.parametrize("text", OTHERS)
def test_an_error_that_only_resembles_one_is_not(text: str) -> None:
    assert memory_kind(RuntimeError(text)) is None


@pytest.mark.parametrize(("kind", "text"), TEXTS[:2])
def test_only_errors_of_libraries_are_read(kind: MemoryKind | None, text: str) -> None:
    assert memory_kind(ValueError(text)) is None


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (DEVICE, torch.OutOfMemoryError("Allocation on device")),
        (DEVICE, torch.AcceleratorError("CUDA error: out of memory")),
        (DEVICE, DistBackendError(f"{NCCL}Failed to CUDA calloc 8388608 bytes")),
        (HOST, MemoryError()),
        (HOST, OSError(errno.ENOMEM, "Cannot allocate memory")),
        (SHARED, OSError(errno.ENOSPC, "No space left on device", "/dev/shm/psm_2fd4")),
        (None, OSError(errno.ENOSPC, "No space left on device", "/dev/shm/run/checkpoints/step_00000003")),
        (None, OSError(errno.ENOSPC, "No space left on device")),
        (None, DistBackendError(PEER)),
    ],
)
def test_an_error_of_memory_is_known_by_its_class_and_number(kind: MemoryKind | None, error: BaseException) -> None:
    assert memory_kind(error) is kind


def test_an_array_of_numpy_that_does_not_fit_is_one() -> None:
    with pytest.raises(MemoryError) as caught:
        np.empty(2**60, dtype=np.uint8)
    assert memory_kind(caught.value) is HOST


def test_an_error_of_torch_on_the_cpu_is_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory_kind(caught.value) is HOST


def test_an_error_raised_from_one_of_memory_is_one() -> None:
    error = RuntimeError("the step failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert memory_kind(error) is DEVICE


def test_an_error_raised_while_one_of_memory_was_handled_is_another() -> None:
    error = KeyError("left over")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert memory_kind(error) is None


@pytest.mark.parametrize("text", OTHERS[4:7])
def test_a_library_that_does_not_start_is_out_of_memory_where_the_device_is_full(text: str) -> None:
    assert memory_kind(RuntimeError(text), device_is_short=lambda: True) is DEVICE
    assert memory_kind(RuntimeError(text), device_is_short=lambda: False) is None
