"""The memory of a run on its fullest device, with the activations, and the moment at which it is largest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from trainkit.errors import TrainingError, named_first_line
from trainkit.files import num_bytes
from trainkit.run.estimates.hardware import Hardware, hardware_of, hardware_under
from trainkit.run.estimates.passes import NoSampleError, batch_bytes, dry_pass, example_batch
from trainkit.run.planning.memory import Memory, memory_of
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.base import CollectiveCall, ReplicaPart

if TYPE_CHECKING:
    from trainkit.run.estimates.fake_run import ObservedSteps

Moment = Literal["forward", "backward", "exchange", "optimizer step", "evaluation"]
"""The part of a step, or an evaluation, at which a device holds the most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes on the device of a run with the largest memory use."""

    static: Memory
    """The parts that depend on the model, the optimizer and the strategy."""
    activations: int | None = None
    """Batches, tensors saved for backward, and temporary tensors, at the peak; None if they could not be found."""
    step: int | None = None
    """Peak bytes of a step; None if the activations could not be found."""
    evaluation: int | None = None
    """Peak bytes of an evaluation; None if the run has none, or if they could not be found."""
    moment: Moment | None = None
    """The part of a step with the peak, or the evaluation if its peak is higher."""
    checkpoint: int = 0
    """Bytes while a checkpoint is copied: on the CPU with `checkpoint.background`, the state and its copy."""
    collectives: Mapping[int, Sequence[CollectiveCall]] | None = None
    """The collectives of each observed rank in a step; None if they are not known."""
    part: int = 0
    """Number of the device within a replica, if several compute one replica."""
    unknown_because: str | None = None
    """Reason why the activations, or those of an evaluation alone, are unknown."""

    @property
    def peak(self) -> int | None:
        """Peak bytes of a step or an evaluation; None if those of a step are unknown."""
        return None if self.step is None else max(self.step, self.evaluation or 0)

    @property
    def most(self) -> int:
        """The largest known number of bytes, of a step, an evaluation or a checkpoint."""
        return max(self.static.total_bytes if self.peak is None else self.peak, self.checkpoint)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of `trainkit plan`: label, text."""
        static = self.static
        optimizer = "unknown" if static.optimizer_bytes is None else num_bytes(static.optimizer_bytes)
        parts = (
            f"parameters {num_bytes(static.parameter_bytes)}, buffers {num_bytes(static.buffer_bytes)}, gradients "
            f"{num_bytes(static.gradient_bytes)} and copies {num_bytes(static.exchange_bytes)}, optimizer {optimizer}"
        )
        if static.gathered_bytes:
            parts += f", gathered temporarily {num_bytes(static.gathered_bytes)}"
        if static.frozen_bytes:
            parts += f", frozen models {num_bytes(static.frozen_bytes)}"
        if static.workspace_bytes:
            parts += f", workspaces of cuBLAS {num_bytes(static.workspace_bytes)}"
        if static.staging_bytes and static.staged_here:
            parts += f", copy for checkpoints {num_bytes(static.staging_bytes)}"
        yield "memory a device", f"{num_bytes(static.total_bytes)} and activations: {parts}"
        if self.activations is not None and self.peak is not None:
            yield "activations", f"at most {num_bytes(self.activations)}, of batches, outputs and temporary tensors"
            article = "an" if self.moment == "evaluation" else "the"
            yield "peak a device", f"{num_bytes(self.peak)}, in {article} {self.moment}"
        if static.staging_bytes and not static.staged_here:
            yield "on the host", f"{num_bytes(static.staging_bytes)} of pinned memory, the copy for checkpoints"

    def notes(self) -> list[str]:
        """Return a note about the reason why something is not known."""
        if self.unknown_because is None:
            return []
        which = "activations" if self.step is None else "activations of an evaluation"
        return [f"{which} are not known: {self.unknown_because}"]

    def document(self) -> dict[str, object]:
        """Return the object `memory` of `trainkit plan --json`: bytes per device."""
        static = self.static
        return {
            "parameters": static.parameter_bytes,
            "buffers": static.buffer_bytes,
            "gradients": static.gradient_bytes,
            "exchange": static.exchange_bytes,
            "gathered": static.gathered_bytes,
            "optimizer": static.optimizer_bytes,
            "frozen": static.frozen_bytes,
            "workspaces": static.workspace_bytes,
            "staging": static.staging_bytes,
            "activations": self.activations,
            "peak": self.peak,
            "step": self.step,
            "evaluation": self.evaluation,
            "moment": self.moment,
            "checkpoint": self.checkpoint,
        }


Beside = AbstractContextManager[object]
"""Context manager around forward and backward of a shard."""


def device_memory(
    plan: RunPlan, model: nn.Module, counter: Beside | None = None, *, evaluates: bool = True
) -> DeviceMemory:
    """Return the memory of the device of a run with the largest use: the largest of its `part_memories`."""
    return max(part_memories(plan, model, counter, evaluates=evaluates), key=lambda memory: memory.most)


def least_memory(plan: RunPlan, model: nn.Module) -> DeviceMemory:
    """Return what a device of a run needs at least, without observing a step: for its state, and to copy it."""
    static = memory_of(plan, model)
    state = static.parameter_bytes + static.buffer_bytes + (static.optimizer_bytes or 0)
    return DeviceMemory(static=static, step=state, checkpoint=_checkpoint_bytes(static))


def part_memories(
    plan: RunPlan,
    model: nn.Module,
    counter: Beside | None = None,
    *,
    evaluates: bool = True,
    observed: Callable[..., ObservedSteps] | None = None,
) -> list[DeviceMemory]:
    """Return the memory of each device of a replica, in the order of its parts (for a pipeline, its ranks).

    Args:
        plan: the run, with the choices of its strategy resolved.
        model: the model, with or without data; unchanged.
        counter: context manager around forward and backward of a shard.
        evaluates: whether evaluations count; otherwise the steps alone.
        observed: replaces `fake_run.observe`.
    """
    from trainkit.run.estimates.fake_run import observe  # noqa: PLC0415 - imports torch's compiler: seconds

    strategy, shards = plan.components.strategy, -(-plan.batch.num_shards(0) // plan.num_replicas)
    parts = strategy.replica_parts(model, plan.context)
    ranks = strategy.observed_ranks(plan.context)
    parts = parts if len(parts) == len(ranks) or not ranks else (parts[0],) * len(ranks)
    workspaces = _workspace_bytes(plan)
    memories = [replace(memory_of(plan, model, part.memory), workspace_bytes=workspaces) for part in parts]
    try:
        if counter is not None:
            dry_pass(plan, model, beside=counter)
        batch_of = cache(partial(example_batch, plan))
        devices, calls = list[DeviceMemory](), dict[int, Sequence[CollectiveCall]]()
        for index, part in enumerate(parts):
            rank = ranks[index] if ranks else 0
            modules = part.modules if len(parts) > 1 and not ranks else ()
            steps = (observed or observe)(
                plan, model, rank=rank, modules=modules, evaluates=evaluates, batch_of=batch_of
            )
            calls[rank] = steps.collectives
            devices.append(_of_device(plan, model, memories[index], part, steps, shards=shards))
        return [replace(device, part=index, collectives=calls) for index, device in enumerate(devices)]
    except Exception as error:  # noqa: BLE001 - the user's model and objective may fail in any way without data
        fullest = max(memories, key=lambda memory: memory.total_bytes)
        return [DeviceMemory(static=fullest, checkpoint=_checkpoint_bytes(fullest), unknown_because=_reason(error))]


def _of_device(
    plan: RunPlan, model: nn.Module, static: Memory, part: ReplicaPart, steps: ObservedSteps, *, shards: int
) -> DeviceMemory:
    """Return the memory of a device whose steps were observed."""
    strategy, batch = plan.components.strategy, batch_bytes(plan)
    beside = static.frozen_bytes + static.workspace_bytes + (static.staging_bytes if static.staged_here else 0)
    # copies of a reducer that was not observed, or of a strategy for which one device was observed
    copies, kept = part.memory.gradient_copies, part.memory.kept_copies
    if is_observed := bool(strategy.observed_ranks(plan.context)):
        observed = strategy.as_observed().estimate_memory(model, plan.context)
        copies, kept = max(copies - observed.gradient_copies, 0), max(kept - observed.kept_copies, 0)
    # the batches of the other shards, and of the first step: a run keeps one, and they are views of one batch
    waiting = (2 * shards - steps.num_batches) * batch
    peaks = {
        phase: steps.peaks.get(phase, 0) + round(static.gradient_bytes * (copies if phase == "reduce" else kept))
        for phase in _MOMENTS
    }
    phase = max(peaks, key=peaks.__getitem__)
    batches = steps.num_batches * batch
    active = max(steps.first_forward, steps.most - static.gradient_bytes) - steps.start + batches
    step = peaks[phase] + waiting + beside
    memory = DeviceMemory(
        static=static, activations=active + waiting, step=step, moment=_MOMENTS[phase],
        checkpoint=_checkpoint_bytes(static),
        unknown_because=None if steps.evaluation_error is None else _reason(steps.evaluation_error),
    )  # fmt: skip
    if steps.evaluation is None:
        return memory
    beside += round(static.gradient_bytes * (kept if is_observed else copies))
    size = steps.evaluation + 2 * shards * batch + beside
    return replace(
        memory, evaluation=size, moment="evaluation" if size > step else memory.moment,
        activations=max(active + waiting, steps.evaluation - steps.start + batches + 2 * shards * batch),
    )  # fmt: skip


_MOMENTS: Final[Mapping[str, Moment]] = {
    "forward": "forward", "backward": "backward", "reduce": "exchange", "update": "optimizer step",
}  # fmt: skip
"""Phase of a step -> the moment of a peak."""


def _workspace_bytes(plan: RunPlan) -> int:
    """Return the bytes of the workspaces of cuBLAS on the planned hardware, else on the GPU of this process."""
    hardware = hardware_of(plan.cfg)
    if hardware is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # a plan alone uses no GPU
        hardware = hardware_under(torch.device(plan.tasks[0].device))
    reproducible = plan.components.numerics.reproducible
    return 0 if hardware is None else hardware.workspace_bytes(reproducible=reproducible)


def _reason(error: Exception) -> str:
    if isinstance(error, NoSampleError | TrainingError):
        return f"{str(error).rstrip('.')}."
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return "the model or the objective reads the values of a tensor (.item(), float(), if, a mask)."
    return f"the model or the objective cannot run without data ({named_first_line(error)})."


def _checkpoint_bytes(static: Memory) -> int:
    """Return the bytes of a device while the state is copied for a checkpoint; gradients are freed if possible."""
    freed = static.gradient_bytes if static.bucket_bytes is None else 0
    return static.total_bytes - freed - static.gathered_bytes


PROCESS_BYTES: Final = 320 * 2**20
"""Bytes of a process of trainkit without tensors, on the host. Source: benchmarks/results/memory.md, 2026-11."""
CONTEXT_BYTES: Final = 768 * 2**20
"""Bytes that a process takes of a GPU before its first tensor: the CUDA context and kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The memory of this host that processes may take now."""

    memory_bytes: int
    """Number of bytes."""
    name: str = "this machine"
    """Name for the user."""
    whole_host: bool = True
    """Whether all tasks of a host share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the run fits into the memory of the device with the largest use.

    Example:
        >>> Verdict(needs=3 * 2**30, has=2 * 2**30, name="laptop", is_complete=True).fits
        False
    """

    needs: int
    """Bytes at the peak of a step or an evaluation, of all processes that share the memory."""
    has: int
    """Bytes of memory."""
    name: str
    """The device, for the user."""
    is_complete: bool
    """Whether `needs` contains the activations."""

    @property
    def fits(self) -> bool | None:
        """Whether there is enough memory; None if there is for the rest, and the activations are unknown."""
        if self.needs > self.has:
            return False
        return True if self.is_complete else None

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the line of `trainkit plan`: label, text."""
        words = {True: "yes", False: "no", None: "unknown, because the activations are unknown"}
        more = "" if self.is_complete else " and activations"
        yield "fits", f"{words[self.fits]}: needs {num_bytes(self.needs)}{more}, {self.name} has {num_bytes(self.has)}"


def verdict_of(plan: RunPlan, memory: DeviceMemory, hardware: Hardware | HostMemory) -> Verdict:
    """Return whether a run fits.

    The memory of a host is shared by all tasks on it, and that of a device by the tasks on that device.
    """
    launch, static = plan.context.launch, memory.static
    if hardware.whole_host:
        sharers = -(-len(plan.tasks) // (1 if launch is None else launch.num_hosts))
        needs = (memory.most + PROCESS_BYTES) * sharers
        if static.staged_here and not plan.components.strategy.facts_in(plan.context).is_sharded:
            needs -= static.staging_bytes * (sharers - 1)  # of tasks that hold the whole state, one copies it
    else:
        counts = Counter(task.device for task in plan.tasks if task.device != "cpu")
        sharers = max(counts.values(), default=1) if launch is None else 1
        needs = ((memory.peak or static.total_bytes) + CONTEXT_BYTES) * sharers
    return Verdict(needs=needs, has=hardware.memory_bytes, name=hardware.name, is_complete=memory.peak is not None)
