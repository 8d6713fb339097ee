"""Explain an out-of-memory error: the kind of memory, the need of the run, and remedies.

The texts by which an error is recognized are those of torch (CUDA, ROCm, XPU, MPS, CPU), cuBLAS, cuDNN, NCCL, Triton,
XLA and Linux.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import build
from trainkit.errors import ConfigError, OutOfMemoryError, TrainingError, TrainkitError
from trainkit.frames import chain_of, first_line
from trainkit.run.planning.memory import Memory, memory_of, meta_model
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.storage import num_bytes
from trainkit.strategies.memory_capabilities import ShardsModel
from trainkit.strategies.shipped import shipped_strategies

_FEWEST: Final = 3
"""Number of remedies to name, if there are that many."""
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
        memory = memory_of(plan, meta_model(plan))
        ways = _remedies(plan, placing=placing)
    except (MemoryError, RuntimeError):  # no memory is left to compute the details
        return head
    needs = f"The run needs {num_bytes(memory.total_bytes)} per device, and activations: {_parts(memory)}."
    if not ways:
        return f"{head} {needs}"
    width = max(len(way.overrides) for way in ways)
    lines = [f"  {way.overrides:<{width}}  {way.effect}" for way in ways]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Remedy:
    overrides: str
    """The overrides to add to the command line."""
    effect: str
    """The effect on the memory of a device."""


def _remedies(plan: RunPlan, *, placing: bool) -> list[_Remedy]:
    """Return remedies that are not applied yet; while the model is placed, remedies that make the model smaller come
    first.
    """
    lasting = [*_spread(plan), *_reduced_precision(plan)]
    passing = [*_recomputed(plan), *_smaller_shards(plan)]
    # sharding the model comes first in any case
    first, second = (lasting, passing) if placing else ([*lasting[:1], *passing], lasting[1:])
    return [*first, *second][:_FEWEST]


def _spread(plan: RunPlan) -> Iterator[_Remedy]:
    """Yield the ways to shard the model over several devices."""
    count = plan.facts.num_gpus or 4
    effect = f"about 1/{count} of the model per device, on {count} of them"
    for overrides, cfg in sharding_choices(plan, count):
        if _can_go(plan, cfg):
            yield _Remedy(overrides=overrides, effect=effect)


def sharding_choices(plan: RunPlan, count: int) -> Iterator[tuple[str, RunConfig]]:
    """Yield the strategies that shard the model over several devices: overrides, and the config with them.

    Args:
        plan: a run; if its model is sharded already, there are none.
        count: number of devices.
    """
    if count < 2 or plan.components.strategy.traits.is_sharded:
        return
    for name, target, kind in shipped_strategies():
        if not issubclass(kind, ShardsModel):
            continue
        keys = kind.sharded_over(count)
        cfg, more = _with_shards_for_all(plan, {TARGET: target, **keys})
        given = " ".join(f"strategy.{key}={value}" for key, value in keys.items())
        yield f"strategy={name} {given}{more}", cfg


def _with_shards_for_all(plan: RunPlan, node: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """Return the config with another strategy and a shard for each replica, and the override that this needs."""
    cfg = replace(plan.cfg, strategy=dict(node))
    replicas = build(node, "strategy").num_replicas(plan.facts)
    if replicas == 1:
        return cfg, ""
    if plan.micro_size_depends_on_replicas:
        return replace(cfg, batch=plan.given), ""
    micro = min(plan.batch.micro_size, max(plan.batch.global_size // replicas, 1))
    if micro == plan.batch.micro_size and plan.given.global_size == plan.batch.global_size:
        return cfg, ""
    overrides, cut = with_shards_of(plan, micro)
    return replace(cut, strategy=cfg.strategy), f" {overrides}"


def with_shards_of(plan: RunPlan, size: int) -> tuple[str, RunConfig]:
    """Return the overrides, and the config with them, that cut the steps of a run into shards of this size."""
    cfg = replace(plan.cfg, batch=replace(plan.cfg.batch, micro_size=size))
    return " ".join(plan.given.overrides(global_size=plan.batch.global_size, micro_size=size)), cfg


def _reduced_precision(plan: RunPlan) -> Iterator[_Remedy]:
    narrower = plan.components.precision.narrower
    if narrower is not None:
        cfg = replace(plan.cfg, precision={**plan.cfg.precision, "value": narrower.value})
        if _can_go(plan, cfg):
            yield _Remedy(overrides=f"precision={narrower.value}", effect=narrower.saves)


def _can_go(plan: RunPlan, cfg: RunConfig) -> bool:
    """Return whether this model could be trained with a config on this host."""
    return planned_anew(plan, cfg) is not None


def planned_anew(plan: RunPlan, cfg: RunConfig, *, launch: LaunchEnvironment | None = None) -> RunPlan | None:
    """Return the plan of another config on the same devices; None if a run refuses it.

    Args:
        plan: a run.
        cfg: another config for its data.
        launch: the external launch of its processes.
    """
    try:
        other = make_plan(cfg, num_gpus=plan.facts.num_gpus, launch=launch, splits=plan.components.datasets)
        model = meta_model(other)
        model_notes(other, model)  # raises what the run itself would raise
        return replace(other.resolved(lambda: model), given=plan.given)
    except ConfigError:
        return None


def _recomputed(plan: RunPlan) -> Iterator[_Remedy]:
    cfg = replace(plan.cfg, activation_checkpointing="full")
    if plan.cfg.activation_checkpointing != "full" and _can_go(plan, cfg):
        yield _Remedy(overrides="activation_checkpointing=full", effect="keeps the inputs of each block alone")


def _smaller_shards(plan: RunPlan) -> Iterator[_Remedy]:
    half = (plan.batch.micro_size + 1) // 2
    overrides, cfg = with_shards_of(plan, half)
    if half < plan.batch.micro_size and _can_go(plan, cfg):
        yield _Remedy(overrides=overrides, effect="half of the activations, in more shards")


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
