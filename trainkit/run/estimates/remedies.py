"""Changes of a config that make a run fit into the memory of its devices, each planned, with its price."""

from __future__ import annotations

import errno
import json
import math
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from trainkit.cluster.tasks import Task
from trainkit.config.schema import RunConfig
from trainkit.config.sections import CheckpointConfig
from trainkit.config.targets.allowed import TARGET
from trainkit.config.targets.build import build
from trainkit.errors import ConfigError, OutOfMemoryError, TrainingError, TrainkitError, chain_of, first_line
from trainkit.files import num_bytes
from trainkit.report.schemas.planning import PlannedRemedy
from trainkit.run.estimates.hardware import Hardware
from trainkit.run.estimates.memory import (
    DeviceMemory,
    HostMemory,
    Verdict,
    device_memory,
    least_memory,
    part_memories,
    verdict_of,
)
from trainkit.run.estimates.passes import evaluated_samples
from trainkit.run.planning.memory import Memory, memory_of
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.strategies.shipped import shipped_strategies
from trainkit.trained.build import meta_model

if TYPE_CHECKING:
    from trainkit.run.estimates.fake_run import ObservedSteps

_MOST_REMEDIES: Final = 3
"""Largest number of remedies that are named."""
_ENOUGH_S: Final = 3.0
"""Time for planning changes after an error: the other ranks wait for its text. Those of later kinds are not named."""
_OF_A_PROCESS: Final = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
"""Limits of the memory of a process; -1 is none."""
_ANOTHER: Final = "another training"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that is legal for a config."""

    overrides: str
    """Arguments to add to the command line."""
    price: str
    """Cost of the change, in words."""
    cfg: RunConfig


_Kind = Callable[[RunPlan], Iterator[Change]]
"""Function that yields the changes of one kind, the cheapest first."""


def remedies_for(plan: RunPlan, model: nn.Module, hardware: Hardware) -> list[PlannedRemedy]:
    """Return the cheapest changes with which a run fits, at most three.

    If only an evaluation does not fit, its batches become smaller. Otherwise each kind of change is tried alone, in the
    order of its price; if fewer than three fit, the kinds are also combined, from the cheapest on. Every change is
    planned like the run itself. If none fits, the closest one is returned.

    Args:
        plan: the plan of a run that does not fit.
        model: the model, with or without data; unchanged.
        hardware: the hardware that it must fit.
    """
    trials = _Trials(model=model, hardware=hardware)
    if trials.verdict(plan, evaluates=False).fits:
        smaller = trials.cheapest(_smaller_evaluations, plan, evaluates=True)
        if smaller is not None and smaller[0].fits:
            return [smaller[0]]
    remedies: list[PlannedRemedy] = []
    for kind in _KINDS:
        alone = trials.cheapest(kind, plan, below=min((remedy.needs for remedy in remedies), default=math.inf))
        if alone is not None:
            remedies.append(trials.with_evaluations(*alone))
    fitting = [remedy for remedy in remedies if remedy.fits]
    if len(fitting) < _MOST_REMEDIES:
        joined = trials.joined(plan)
        overrides = {remedy.overrides for remedy in remedies}
        remedies += [remedy for remedy in joined if remedy.overrides not in overrides]
        fitting = [remedy for remedy in remedies if remedy.fits]
    return fitting[:_MOST_REMEDIES] or sorted(remedies, key=lambda remedy: remedy.needs)[:1]


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """Changes that are planned for one hardware; a step that several of them take is observed once."""

    model: nn.Module
    hardware: Hardware
    steps: dict[str, ObservedSteps] = field(default_factory=dict)
    """What was observed of a rank, by its config."""

    def verdict(self, plan: RunPlan, *, evaluates: bool) -> Verdict:
        """Return whether a run fits, with its evaluations or with its steps alone."""
        parts = part_memories(plan, self.model, observed=self._observed)
        counted = parts if evaluates else [replace(part, evaluation=None) for part in parts]
        return verdict_of(plan, max(counted, key=lambda part: part.most), self.hardware)

    def _observed(self, plan: RunPlan, model: nn.Module, **settings: Any) -> ObservedSteps:
        """Observe a rank, unless it was observed with other settings of its checkpoints, which no step depends on."""
        from trainkit.run.estimates.fake_run import observe  # noqa: PLC0415 - imports torch's compiler: seconds

        cfg = replace(plan.cfg, checkpoint=CheckpointConfig())
        key = json.dumps([cfg.to_dict(), settings["rank"], settings["modules"]], default=str)
        if key not in self.steps:
            self.steps[key] = observe(plan, model, **settings)
        return self.steps[key]

    def cheapest(
        self, kind: _Kind, plan: RunPlan, *, evaluates: bool = False, below: float = math.inf
    ) -> tuple[PlannedRemedy, RunPlan] | None:
        """Return the first change of a kind with which the steps fit, else the one whose steps need the least memory;
        None if there is none. Evaluations count with `evaluates`.

        A change that can neither fit nor need fewer bytes than `below`, because the state alone needs them, is left
        out: more tasks on a host that is too small.
        """
        best: tuple[PlannedRemedy, RunPlan] | None = None
        for change in kind(plan):
            other = _planned_anew(plan, change.cfg)
            if other is None:
                continue
            lower_bound = verdict_of(other, least_memory(other, self.model), self.hardware)
            if lower_bound.needs > lower_bound.has and lower_bound.needs >= below:
                continue
            verdict = self.verdict(other, evaluates=evaluates)
            fits = verdict.fits is True
            remedy = PlannedRemedy(overrides=change.overrides, price=change.price, needs=verdict.needs, fits=fits)
            if best is None or remedy.needs < best[0].needs:
                best = remedy, other
            if fits:
                break
        return best

    def joined(self, plan: RunPlan) -> list[PlannedRemedy]:
        """Return combinations of changes: each kind added to the earlier kinds that help."""
        remedies: list[PlannedRemedy] = []
        overrides, prices, current = "", "", plan
        needs = self.verdict(plan, evaluates=False).needs
        for kind in _KINDS:
            cheapest = self.cheapest(kind, current, below=needs)
            if cheapest is None or cheapest[0].needs >= needs:
                continue
            remedy, current = cheapest
            needs = remedy.needs
            overrides, prices = f"{overrides} {remedy.overrides}".strip(), f"{prices}; {remedy.price}".strip("; ")
            whole = replace(remedy, overrides=_last_of_each(overrides), price=prices)
            remedies.append(self.with_evaluations(whole, current))
            if remedy.fits:
                break
        return remedies

    def with_evaluations(self, remedy: PlannedRemedy, plan: RunPlan) -> PlannedRemedy:
        """Return a change that is planned for steps alone, with the memory of evaluations, and with smaller batches of
        them if they do not fit.
        """
        verdict = self.verdict(plan, evaluates=True)
        whole = replace(remedy, needs=verdict.needs, fits=verdict.fits is True)
        if whole.fits or not remedy.fits:
            return whole
        smaller = self.cheapest(_smaller_evaluations, plan, evaluates=True)
        if smaller is None:
            return whole
        more = smaller[0]
        return replace(more, overrides=f"{remedy.overrides} {more.overrides}", price=f"{remedy.price}; {more.price}")


def largest_savings(plan: RunPlan, model: nn.Module, *, placing: bool) -> list[tuple[Change, int]]:
    """Return the changes that save the most memory of a run that is out of memory, at most three, the largest first,
    each with the bytes that the run then needs less, of the memory that ran out.

    Each change is planned like the run itself; those that it would refuse are left out. Changes that make another
    training come last.

    Args:
        plan: the plan of the run that is out of memory.
        model: the model without data; unchanged.
        placing: whether the memory ran out before the first step, where activations and checkpoints do not count.
    """
    # On the CPU all tasks of a host share its memory, so that a model cut over them needs no less, unless each process
    # has a limit of its own (ulimit -d, -v).
    on_host = plan.tasks[0].device == "cpu" and not any(resource.getrlimit(kind)[0] > 0 for kind in _OF_A_PROCESS)
    hardware = HostMemory(memory_bytes=0, whole_host=on_host)

    def needs(other: RunPlan) -> int:
        memory = device_memory(other, model, evaluates=False)
        if placing:
            memory = DeviceMemory(static=replace(memory.static, staging_bytes=0), part=memory.part)
        return verdict_of(other, memory, hardware).needs

    before, count = needs(plan), plan.context.num_gpus or 4
    savings: list[tuple[Change, int]] = []
    until = time.monotonic() + (_ENOUGH_S if len(plan.tasks) > 1 else math.inf)
    # what can save most comes first, in case that the time is too short for all
    for kind in sorted(_KINDS, key=lambda kind: kind is not _sharded):
        if time.monotonic() > until:
            break
        for change in kind(plan) if kind is not _sharded else _sharded_over(plan, count):
            other = _planned_anew(plan, change.cfg)
            if other is None:
                continue
            savings.append((change, before - needs(other)))
            if kind is not _sharded:
                break
    useful = [saving for saving in savings if saving[1] > 0]
    return sorted(useful, key=lambda saving: (saving[0].price.startswith(_ANOTHER), -saving[1]))[:_MOST_REMEDIES]


def _last_of_each(overrides: str) -> str:
    """Return overrides in which each key occurs once, with its last value."""
    return " ".join({word.partition("=")[0]: word for word in overrides.split()}.values())


def _smaller_evaluations(plan: RunPlan) -> Iterator[Change]:
    size = evaluated_samples(plan)
    while size > 1:
        size = (size + 1) // 2
        cfg = replace(plan.cfg, eval=replace(plan.cfg.eval, batch_size=size))
        yield Change(overrides=f"eval.batch_size={size}", price="more batches in an evaluation", cfg=cfg)


def _smaller_shards(plan: RunPlan) -> Iterator[Change]:
    size = plan.batch.micro_size
    while size > 1:
        size = (size + 1) // 2
        count = -(-plan.batch.global_size // size)
        price = f"{count} shards a step, each of less work for the device"
        overrides, cfg = _with_shards_of(plan, size)
        yield Change(overrides=overrides, price=price, cfg=cfg)


def _without_copy(plan: RunPlan) -> Iterator[Change]:
    if plan.cfg.checkpoint.background:
        cfg = replace(plan.cfg, checkpoint=replace(plan.cfg.checkpoint, background=False))
        yield Change(overrides="checkpoint.background=false", price="steps wait for each checkpoint", cfg=cfg)


def _recomputed(plan: RunPlan) -> Iterator[Change]:
    if plan.cfg.activation_checkpointing != "full":
        cfg = replace(plan.cfg, activation_checkpointing="full")
        price = "each block is computed twice: a third more work"
        yield Change(overrides="activation_checkpointing=full", price=price, cfg=cfg)


def _sharded(plan: RunPlan) -> Iterator[Change]:
    for count in (2, 4, 8, 16, 32, 64):
        if count > max(plan.context.num_gpus, 4):
            return
        yield from _sharded_over(plan, count)


def _sharded_over(plan: RunPlan, count: int) -> Iterator[Change]:
    """Yield the strategies that shard the model over several devices, if it is not sharded already."""
    if count < 2 or plan.components.strategy.facts_in(plan.context).is_sharded:
        return
    price = f"{count} devices, which exchange parameters or activations in every step"
    for name, target, kind in shipped_strategies():
        if keys := kind.sharded_over(count):
            cfg, batch_overrides = _with_shards_for_all(plan, {TARGET: target, **keys})
            overrides = " ".join(f"strategy.{key}={value}" for key, value in keys.items())
            yield Change(overrides=f"strategy={name} {overrides}{batch_overrides}", price=price, cfg=cfg)


def _narrower(plan: RunPlan) -> Iterator[Change]:
    narrower = plan.components.precision.narrower
    if narrower is not None:
        cfg = replace(plan.cfg, precision={**plan.cfg.precision, "value": narrower})
        price = "other rounding: compare the results"
        yield Change(overrides=f"precision={narrower}", price=price, cfg=cfg)


def _leaner_optimizer(plan: RunPlan) -> Iterator[Change]:
    if plan.optimizers or plan.cfg.optimizer.get("momentum") == 0.0:
        return
    node: dict[str, Any] = {
        "_target_": "torch.optim.SGD", "lr": plan.cfg.optimizer["lr"], "momentum": 0.0, "fused": True,
    }  # fmt: skip
    cfg = replace(plan.cfg, optimizer=node)
    price = f"{_ANOTHER}, without momentum: it needs another learning rate"
    yield Change(overrides="optimizer=sgd", price=price, cfg=cfg)


_KINDS: Final[tuple[_Kind, ...]] = (_smaller_shards, _without_copy, _recomputed, _sharded, _narrower, _leaner_optimizer)
"""Kinds of changes from the cheapest on: the same training in other pieces, more work, more devices, other rounding,
another training.
"""


def _with_shards_for_all(plan: RunPlan, node: Mapping[str, Any]) -> tuple[RunConfig, str]:
    """Return the config with another strategy and a shard for each replica, and the override that this needs."""
    cfg = replace(plan.cfg, strategy=dict(node))
    replicas = build(node, "strategy").num_replicas(plan.context)
    if replicas == 1:
        return cfg, ""
    if plan.micro_size_depends_on_replicas:
        return replace(cfg, batch=plan.batch_config), ""
    micro = min(plan.batch.micro_size, max(plan.batch.global_size // replicas, 1))
    if micro == plan.batch.micro_size and plan.batch_config.global_size == plan.batch.global_size:
        return cfg, ""
    overrides, cut = _with_shards_of(plan, micro)
    return replace(cut, strategy=cfg.strategy), f" {overrides}"


def _with_shards_of(plan: RunPlan, size: int) -> tuple[str, RunConfig]:
    """Return the overrides, and the config with them, that cut the steps of a run into shards of this size."""
    cfg = replace(plan.cfg, batch=replace(plan.cfg.batch, micro_size=size))
    return " ".join(plan.batch_config.overrides(global_size=plan.batch.global_size, micro_size=size)), cfg


def _planned_anew(plan: RunPlan, cfg: RunConfig) -> RunPlan | None:
    """Return the plan of another config for the data and devices of a run; None if it would be refused."""
    context = plan.context
    try:
        other = make_plan(cfg, num_gpus=context.num_gpus, launch=context.launch, splits=plan.components.datasets)
        model = meta_model(other.cfg)
        model_notes(other, model)  # raises what the run itself would raise
        return replace(other.resolved(lambda: model), batch_config=plan.batch_config)
    except ConfigError:
        return None


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
    for cause in chain_of(error):
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None


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
    width = max(len(way.overrides) for way, _ in ways)
    lines = [f"  {way.overrides:<{width}}  {num_bytes(saved)} less: {way.price}" for way, saved in ways]
    return "\n".join([f"{head} {needs} To need less, try one of:", *lines])


def _parts(memory: Memory) -> str:
    parts = {
        "parameters": memory.parameter_bytes,
        "gradients": memory.gradient_bytes + memory.exchange_bytes,
        "optimizer": memory.optimizer_bytes or 0,
    }
    if memory.staging_bytes and memory.staged_here:
        parts["copy for checkpoints"] = memory.staging_bytes
    if memory.frozen_bytes:
        parts["frozen models"] = memory.frozen_bytes
    return ", ".join(f"{label} {num_bytes(size)}" for label, size in parts.items())


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
_TEXTS: Final = {
    _ON_CHIP: MemoryKind.on_chip, _DEVICE: MemoryKind.device, _DEVICE_OF_XLA: MemoryKind.device,
    _SHARED: MemoryKind.shared, _HOST: MemoryKind.host,
}  # fmt: skip
"""Text of an error -> the memory that ran out; the first one counts."""
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
        if (kind := _kind(current, device_is_short or _device_is_short)) is not None:
            return kind
        current = current.__cause__
    return None


def _kind(error: BaseException, device_is_short: Callable[[], bool]) -> MemoryKind | None:
    """Return the kind for one exception, without its causes."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if "torch.OutOfMemoryError" in names:
        return MemoryKind.device
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return MemoryKind.host
    if isinstance(error, OSError):
        in_shm = any(_SHARED_FILES.match(str(name)) for name in (error.filename, error.filename2))
        return MemoryKind.shared if error.errno == errno.ENOSPC and in_shm else None
    if not isinstance(error, RuntimeError) and "triton.OutOfResources" not in names:
        return None
    text = str(error)
    kind = next((kind for pattern, kind in _TEXTS.items() if pattern.search(text)), None)
    return MemoryKind.device if kind is None and _PERHAPS.search(text) and device_is_short() else kind


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
