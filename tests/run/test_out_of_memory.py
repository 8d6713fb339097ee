"""A remedy that the run would refuse, or that needs as much memory as before, is caught here alone.
A full device, host or /dev/shm that is taken for another error is caught here alone.

The texts are quoted from public issues of the projects named.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DistBackendError

from tests.support.results import result_of
from trainkit.cli import main
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.errors import OutOfMemoryError, TrainingError
from trainkit.run.estimates import remedies
from trainkit.run.estimates.remedies import Change, MemoryKind, largest_savings, memory_kind
from trainkit.run.planning import convolutions
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.session.session import TaskSession
from trainkit.run.task import explain_oom
from trainkit.trained.build import meta_model

GPT = (
    "recipe=null", "model=gpt", "model.vocab_size=64", "model.context=16", "model.num_layers=2", "model.num_heads=2",
    "model.width=32", "data=synthetic_tokens", "data.vocab_size=64", "data.context=16", "objective=language_modelling",
    "batch.global_size=16",
)  # fmt: skip
ALLOCATOR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4096 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(autouse=True)
def time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine would name fewer remedies."""
    monkeypatch.setattr(remedies, "_ENOUGH_S", 600.0)


def message_lines(*arguments: str, error: Exception = ALLOCATOR, step: int | None = 3, num_gpus: int = 0) -> list[str]:
    error = torch.OutOfMemoryError("CUDA out of memory.") if num_gpus else error
    plan = make_plan(compose([*GPT, *arguments]).cfg, num_gpus=num_gpus)
    with pytest.raises(OutOfMemoryError) as caught, explain_oom(plan, plan.tasks[0], lambda: step):
        raise error
    assert caught.value.exit_code == 1
    assert caught.value.__cause__ is error
    return str(caught.value).splitlines()


def savings(plan: RunPlan) -> list[Change]:
    return [change for change, _ in largest_savings(plan, meta_model(plan.cfg), placing=False)]


@pytest.mark.slow
def test_it_says_what_the_run_needs_and_three_ways_to_need_less() -> None:
    assert message_lines() == [
        (
            "rank 0, step 3: cpu is out of memory. The run needs 746 KiB per device, and activations: parameters "
            "107 KiB, gradients 107 KiB, optimizer 213 KiB, copy for checkpoints 320 KiB. To need less, try one of:"
        ),
        "  activation_checkpointing=full  544 KiB less: each block is computed twice: a third more work",
        "  batch.micro_size=8             540 KiB less: 2 shards a step, each of less work for the device",
        "  checkpoint.background=false    320 KiB less: steps wait for each checkpoint",
    ]


@pytest.mark.slow
def test_shards_come_first_while_the_model_is_placed_on_gpus_and_are_no_help_on_one_host_without_them() -> None:
    lines = message_lines("precision=fp64", step=None, num_gpus=4)
    assert lines[0].startswith("rank 0, while the model was placed: cuda:0 is out of memory. The run needs ")
    shown = [line.split("  ")[1] for line in lines[1:]]
    assert {"strategy=fsdp strategy.replicas=4", "strategy=pipeline strategy.stages=4"} <= {*shown}
    assert not any("strategy=" in line for line in message_lines("precision=fp64", step=None))


@pytest.mark.slow
def test_a_remedy_that_the_run_would_refuse_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "has_the_kernel", lambda: True)
    layers = "model={_target_: torch.nn.Conv2d, in_channels: 1, out_channels: 1, kernel_size: 3, padding: 1, stride: 2}"
    images = ("data=synthetic", "data.shape=[1,1,1]", "objective=regression", layers, "recipe=null", "steps=1")
    statistics = ("model.batch_norm=true", "recipe=null", "steps=1", "batch.global_size=4", "batch.micro_size=2")
    for keys, refused in ((images, "precision=bf16_mixed"), (statistics, "batch.micro_size=1")):
        plan = make_plan(checked(compose(keys)).cfg, num_gpus=0)
        assert [saving for saving in savings(plan) if refused in saving.overrides] == []


@pytest.mark.parametrize("size", ["batch.global_size=16", "batch.micro_size=8"])
@pytest.mark.slow
def test_a_remedy_beside_a_given_accumulation_keeps_the_samples_of_a_step(size: str) -> None:
    sizes = (size, "batch.accumulation=2")
    plan = make_plan(compose([*GPT[:-1], *sizes]).cfg, num_gpus=0)
    changes = [saving.overrides.split() for saving in savings(plan)]
    assert any("batch.accumulation=null" in saving for saving in changes)
    for change in changes:
        keys = {text.partition("=")[0]: text for text in (*GPT[:-1], *sizes, *change)}
        assert make_plan(compose([*keys.values()]).cfg, num_gpus=0).batch.global_size == 16


@pytest.mark.slow
def test_what_is_done_already_is_not_named_and_the_largest_part_comes_first() -> None:
    lines = message_lines("activation_checkpointing=full", "batch.micro_size=1", "precision=bf16_mixed")
    assert lines[1].split()[0] == "checkpoint.background=false"
    assert not any("activation_checkpointing" in line or "micro" in line or "precision" in line for line in lines[1:])


class Full(nn.Linear):
    """A layer on a device with room for the activations of 256 samples."""

    def forward(self, inputs: Tensor) -> Tensor:
        has_data = type(inputs) is Tensor  # a plan takes the step without any
        if has_data and self.training and len(inputs) > 256 and Full.counts:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(inputs.flatten(1))

    counts: ClassVar[bool] = False
    draws_nothing: ClassVar[bool] = True


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_in_its_first_step_and_its_remedy_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason_of(*more: str) -> str:
        run = tmp_path / str(len([*tmp_path.iterdir()]))
        monkeypatch.setattr(TaskSession, "train", counting_train)
        code = main([*FULL, *more, f"hydra.run.dir={run}"])
        result = result_of(run)
        assert code == (result["status"] == "failed")
        return str(result["reason"])

    train = TaskSession.train

    def counting_train(session: TaskSession) -> dict[str, object]:
        monkeypatch.setattr(Full, "counts", True)  # what comes before the steps has fewer samples
        return train(session)

    lines = reason_of().splitlines()
    assert lines[0].startswith("rank 0, step 0: ")
    (smaller,) = (line.split()[0] for line in lines[1:] if line.startswith("  batch.micro_size="))
    monkeypatch.setattr(Full, "counts", False)
    assert reason_of(smaller) == "all steps done"


FULL = (
    "--allow-package", "tests", "recipe=digits", "steps=2", "batch.global_size=512", "callbacks=[]", "logger=[]",
    "quiet=true", "checkpoint.export=false",
    "model={_target_: tests.run.test_out_of_memory.Full, in_features: 64, out_features: 4096}",
)  # fmt: skip


@pytest.mark.slow
def test_the_tensors_of_the_failed_step_are_freed_before_the_state_is_saved() -> None:
    plan, refs, alive = make_plan(compose(GPT).cfg, num_gpus=0), list[ref[torch.Tensor]](), list[bool]()

    def step() -> None:
        activations = torch.ones(4)
        refs.append(ref(activations))
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except RuntimeError as error:
            raise TypeError("in the backward of a block") from error

    @contextmanager
    def saving() -> Iterator[None]:
        try:
            yield
        finally:
            alive.append(refs[0]() is not None)

    with pytest.raises(OutOfMemoryError), saving(), explain_oom(plan, plan.tasks[0], lambda: 3):
        step()
    assert alive == [False]


def test_any_other_error_stays_what_it_is_also_without_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    plan = make_plan(compose(GPT).cfg, num_gpus=0)
    monkeypatch.setattr("mmap.mmap", refused)
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), explain_oom(plan, plan.tasks[0], lambda: 0):
        raise RuntimeError("shapes differ")


def message_on_cuda(error: Exception, *arguments: str, raises: type[Exception] = OutOfMemoryError) -> str:
    plan = make_plan(compose([*GPT, *arguments]).cfg, num_gpus=0)
    with pytest.raises(raises) as caught, explain_oom(plan, replace(plan.tasks[0], device="cuda:0"), lambda: 3):
        raise error
    return str(caught.value)


def test_the_memory_of_the_host_is_not_called_that_of_the_device() -> None:
    assert message_on_cuda(MemoryError(), "loader.num_workers=4") == (
        "rank 0, step 3: the host is out of memory (RAM), not cuda:0. To need less, try one of: "
        "loader.num_workers=2 (now 4), loader.cache=false, checkpoint.background=false (no copy of the checkpoint on "
        "the host)."
    )


def test_a_full_dev_shm_is_named_with_its_remedy() -> None:
    error = RuntimeError("unable to allocate shared memory(shm) for file </torch_7_1_2>: No space left on device (28)")
    assert message_on_cuda(error, "loader.num_workers=4") == (
        "rank 0, step 3: the shared memory of the host (/dev/shm), through which its processes exchange tensors, is "
        "full. To continue, try loader.num_workers=2 (now 4), or make it larger (docker run --shm-size=8g, or mount -o "
        "remount,size=8g /dev/shm)."
    )


def test_on_chip_memory_is_not_called_device_memory() -> None:
    error = RuntimeError(
        "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or "
        "`num_stages` may help."
    )
    message = message_on_cuda(error, raises=TrainingError)
    assert message.startswith("rank 0, step 3: a kernel needs more on-chip memory than cuda:0 has. The device's own ")
    assert message.endswith("compile.mode=off. " + str(error))


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
