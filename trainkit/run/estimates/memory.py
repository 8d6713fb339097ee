"""The memory of a run on its fullest device, with the activations, and the moment at which it is largest."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_iter

from trainkit.frames import named_first_line
from trainkit.numerics.generators import Untouched
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Loss, Model, Objective
from trainkit.run.estimates.activations import LiveStorages, Moment, Peak, Timeline, TracedPass
from trainkit.run.planning.build import frozen_models, model_transforms_of
from trainkit.run.planning.memory import Memory, memory_of, stepped_optimizers
from trainkit.run.planning.optimizers import assigned_parameters
from trainkit.run.planning.plan import RunPlan
from trainkit.storage import num_bytes
from trainkit.strategies.memory_capabilities import PlannedShard, ReplicaPart, rank_passes, replica_parts
from trainkit.strategies.model_transforms import recomputed_modules


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes on the device of a run with the largest memory use."""

    held: Memory
    """The parts that depend on the model, the optimizer and the strategy."""
    activations: int | None = None
    """Batches, tensors saved for backward, and temporary tensors, at the peak; None if they could not be found."""
    peak: int | None = None
    """Peak bytes of a step; None if the activations could not be found."""
    moment: Moment | None = None
    """The part of a step with the peak."""
    checkpoint: int = 0
    """Bytes while a checkpoint is copied: on the CPU with `checkpoint.background`, the state and its copy."""
    part: int = 0
    """Number of the device within a replica, if several compute one replica."""
    unknown_because: str | None = None
    """Reason why the activations are unknown."""

    @property
    def most(self) -> int:
        """The largest known number of bytes, of a step or of a checkpoint."""
        return max(self.held.total_bytes if self.peak is None else self.peak, self.checkpoint)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of `trainkit plan`: label, text."""
        held = self.held
        optimizer = "unknown" if held.optimizer_bytes is None else num_bytes(held.optimizer_bytes)
        parts = (
            f"parameters {num_bytes(held.parameter_bytes)}, buffers {num_bytes(held.buffer_bytes)}, gradients "
            f"{num_bytes(held.gradient_bytes)} and copies {num_bytes(held.exchange_bytes)}, optimizer {optimizer}"
        )
        if held.gathered_bytes:
            parts += f", gathered temporarily {num_bytes(held.gathered_bytes)}"
        if held.frozen_bytes:
            parts += f", frozen models {num_bytes(held.frozen_bytes)}"
        if held.staging_bytes and held.staged_here:
            parts += f", copy for checkpoints {num_bytes(held.staging_bytes)}"
        yield "memory a device", f"{num_bytes(held.total_bytes)} and activations: {parts}"
        if self.activations is not None and self.peak is not None:
            yield "activations", f"at most {num_bytes(self.activations)}, of batches, outputs and temporary tensors"
            yield "peak a device", f"{num_bytes(self.peak)}, in the {self.moment}"
        if held.staging_bytes and not held.staged_here:
            yield "on the host", f"{num_bytes(held.staging_bytes)} of pinned memory, the copy for checkpoints"

    def notes(self) -> list[str]:
        """Return a note about the reason why something is not known."""
        if self.unknown_because is None:
            return []
        return [f"activations are not known: {self.unknown_because}"]

    def document(self) -> dict[str, object]:
        """Return the object `memory` of `trainkit plan --json`: bytes per device."""
        held = self.held
        return {
            "parameters": held.parameter_bytes,
            "buffers": held.buffer_bytes,
            "gradients": held.gradient_bytes,
            "exchange": held.exchange_bytes,
            "gathered": held.gathered_bytes,
            "optimizer": held.optimizer_bytes,
            "frozen": held.frozen_bytes,
            "staging": held.staging_bytes,
            "activations": self.activations,
            "peak": self.peak,
            "moment": self.moment,
            "checkpoint": self.checkpoint,
        }


def device_memory(
    plan: RunPlan, model: nn.Module, counter: AbstractContextManager[object] | None = None
) -> DeviceMemory:
    """Return the memory of the device of a run with the largest use.

    Args:
        plan: the run, with the choices of its strategy resolved.
        model: the model, with or without data; unchanged.
        counter: context manager around forward and backward of a shard.
    """
    return max(part_memories(plan, model, counter), key=lambda one: one.most)


def part_memories(
    plan: RunPlan, model: nn.Module, counter: AbstractContextManager[object] | None = None
) -> list[DeviceMemory]:
    """Return the memory of each device of a replica, in the order of its parts (for a pipeline, its ranks).

    Args:
        plan: the run, with the choices of its strategy resolved.
        model: the model, with or without data; unchanged.
        counter: context manager around forward and backward of a shard.
    """
    shards = -(-plan.batch.num_shards(0) // plan.num_replicas)  # of the replica with the most
    parts = replica_parts(plan.components.strategy, model, plan.facts, num_shards=shards)
    try:
        found = _Shard(plan=plan, model=model, parts=parts, shards=shards, beside=counter or nullcontext()).lines()
    except Exception as error:  # noqa: BLE001 - the user's model and objective may fail in any way without data
        held = memory_of(plan, model)
        return [DeviceMemory(held=held, checkpoint=_checkpoint_bytes(held), unknown_because=_reason(error))]
    step = _Step(plan=plan, model=model, lines=found, shards=shards)
    return [step.on_device(place, part) for place, part in enumerate(parts)]


class NoSampleError(Exception):
    """No sample of the data is known."""


def example_batch(plan: RunPlan) -> Any:
    """Return the batch of the largest shard, made of one repeated sample.

    Raises:
        NoSampleError: no sample of the training data is known.
    """
    sample = plan.components.sample
    if sample is None:
        raise NoSampleError("no sample of the data is known")
    size = plan.batch.shard_size(0, 0)
    with Untouched(seed=0):
        return plan.components.hooks.collate_function([sample] * size, list(range(size)))


def _reason(error: Exception) -> str:
    if isinstance(error, NoSampleError):
        return f"{error}."
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return "the model or the objective reads the values of a tensor (.item(), float(), if, a mask)."
    return f"the model or the objective cannot run without data ({named_first_line(error)})."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """The timeline of forward and backward of a shard."""

    timeline: Timeline
    share: float = 1.0
    """The share of the parameters that get gradients."""
    place: int | None = None
    """The place of a device in the timeline; None: one device has all of it."""
    of_rank: bool = False
    """Whether it has exactly the tensors of one rank: gathered parameters, and shards of gradients."""


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """A shard of a step."""

    plan: RunPlan
    model: nn.Module
    parts: Sequence[ReplicaPart]
    shards: int
    """The shards that the replica computes."""
    beside: AbstractContextManager[object]
    """Context manager around forward and backward."""

    def lines(self) -> list[list[_Line]]:
        """Return the lines of each part: one for each phase of the objective."""
        plan, batch = self.plan, example_batch(self.plan)
        objective = own_copy(plan.components.objective)
        traced = self._traced(batch, objective.loss)
        if not objective.phases:
            return self._of_parts([(1.0, traced)])
        sizes = {name: param.numel() for name, param in self.model.named_parameters() if param.requires_grad}
        phases = []
        for phase, names in assigned_parameters(self.model, plan.optimizers).items():
            share = sum(sizes[name] for name in names) / sum(sizes.values())
            loss = _phase_loss(objective.phase_loss, phase)
            phases.append((share, replace(traced, loss=loss, updated=frozenset(names))))
        return self._of_parts(phases)

    def _traced(self, batch: Any, loss: Callable[[Model, Any], Loss]) -> TracedPass:
        """Return the traced pass of a whole replica."""
        model, precision = self.model, self.plan.components.precision
        return TracedPass(
            model=model,
            batch=batch,
            loss=loss,
            precision=precision,
            recomputed=recomputed_names(self.plan, model),
            selective=self.plan.cfg.activation_checkpointing == "selective",
            places={name: place for place, part in enumerate(self.parts) for name in part.modules},
            accumulates=self.shards > 1 and precision.model_dtype is precision.master_dtype and not self._has_vector,
            beside=self.beside,
        )

    @property
    def _has_vector(self) -> bool:
        """Whether gradients outlive a step: then the backward pass of the first shard has the peak."""
        return any(part.memory.bucket is not None for part in self.parts)

    def _of_parts(self, phases: Sequence[tuple[float, TracedPass]]) -> list[list[_Line]]:
        found: list[list[_Line]] = [[] for _ in self.parts]
        strategy = self.plan.components.strategy
        for share, whole in phases:
            passes = rank_passes(
                strategy, self.model, self.plan.facts, PlannedShard(batch=whole.batch, count=self.shards)
            )
            if any(one.cuts_operations for one in passes):
                whole.run()  # counts the operations of a whole replica
            beside = nullcontext() if any(one.cuts_operations for one in passes) else self.beside
            for lines, one in zip(found, passes, strict=False):
                accumulates = self.shards > 1 if one.sums_in_master_dtype else whole.accumulates
                timeline = replace(whole, rank=one, places={}, accumulates=accumulates, beside=beside).run()
                lines.append(_Line(timeline=timeline, share=share, of_rank=True))
            if not passes:
                timeline, several = whole.run(), len(self.parts) > 1
                for place, lines in enumerate(found):
                    lines.append(_Line(timeline=timeline, share=share, place=place if several else None))
        return found


def own_copy(objective: Objective) -> Objective:
    """Return a copy whose state a pass without data may change; frozen models are shared."""
    return copy.deepcopy(objective, {id(model): model for _, model in frozen_models(objective)})


def recomputed_names(plan: RunPlan, model: nn.Module) -> list[str]:
    """Return the names of the modules that backward recomputes."""
    chosen = {id(module) for module in recomputed_modules(model, model_transforms_of(plan.cfg))}
    return [name for name, module in model.named_modules() if id(module) in chosen]


def _phase_loss(loss: Callable[[str, Model, Any], Loss], phase: str) -> Callable[[Model, Any], Loss]:
    return lambda model, batch: loss(phase, model, batch)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step of a replica."""

    plan: RunPlan
    model: nn.Module
    lines: Sequence[Sequence[_Line]]
    """Timelines of each part."""
    shards: int
    """The shards that the replica computes."""

    def on_device(self, place: int, part: ReplicaPart) -> DeviceMemory:
        """Return the memory of the device of a part."""
        precision = self.plan.components.precision
        held = memory_of(self.plan, self.model, part.memory)
        bucket = held.bucket_bytes
        lasting = held.total_bytes - (held.gradient_bytes if bucket is None else 0)
        in_backward = held.gradient_bytes if bucket is None else bucket
        in_model_dtype = in_backward * precision.model_dtype.itemsize // precision.master_dtype.itemsize
        # the batches of the other shards of the step, and of the first step: a run keeps one, and they are views of one
        # batch
        waiting = (2 * self.shards - 1) * _batch_bytes(self.plan)
        peaks = []
        for line in self.lines[place]:
            timeline, where = line.timeline, line.place
            own = line.share * in_model_dtype / max(timeline.gradient_bytes(where), 1)
            peak = timeline.peak(gradient_share=1.0 if line.of_rank else min(1.0, own), place=where)
            more = waiting + (part.in_flight - 1) * (timeline.stored(where) - timeline.once)
            buffers = part.received * _buffered_shards(self.plan) / self.shards
            more += int(max(buffers - part.in_flight, 0) * timeline.received)
            before = int(line.share * held.gradient_bytes) if self.shards > 1 and bucket is None else 0
            gathered = held.gathered_bytes if line.of_rank else 0
            most = lasting - gathered + before + peak.num_bytes + more
            peaks.append(replace(peak, num_bytes=most, activations=peak.activations + more))
        if bucket is None and not any(line.of_rank for line in self.lines[place]):
            held_sizes, params = part.memory.resident, self.model.named_parameters()
            trained = [held_sizes.get(name, 0) for name, param in params if param.requires_grad]
            cast = lasting + _cast_bytes(trained, precision, several=self.shards > 1)
            peaks.append(Peak(num_bytes=cast, moment="backward", activations=0))
        share = max(line.share for line in self.lines[place])
        update = lasting - held.gathered_bytes + (int(share * held.gradient_bytes) if bucket is None else 0)
        update += _update_bytes(self.plan, self.model, part.memory.resident)
        peaks.append(Peak(num_bytes=update, moment="optimizer step", activations=0))
        best = max(peaks, key=lambda one: one.num_bytes)
        activations = max(one.activations for one in peaks)
        return DeviceMemory(
            held=held,
            activations=activations,
            peak=best.num_bytes,
            moment=best.moment,
            checkpoint=_checkpoint_bytes(held),
            part=place,
        )


def _cast_bytes(sizes: Sequence[int], precision: Precision, *, several: bool) -> int:
    """Return the most bytes of gradients while they are cast to the dtype of separate masters, one parameter after the
    other.

    Args:
        sizes: elements of the trained parameters, in their order.
        precision: the number formats; without separate masters nothing is cast.
        several: whether they are added to sums of earlier shards.
    """
    model, master = precision.model_dtype.itemsize, precision.master_dtype.itemsize
    if precision.model_dtype is precision.master_dtype:
        return 0
    left, sums, before, most = sum(sizes) * model, sum(sizes) * master if several else 0, 0, 0
    for size in sizes:
        most = max(most, left + sums + size * master + before)
        left -= size * model
        if several:
            before = size * master  # freed when the next one has been cast
        else:
            sums += size * master
    return most


def _checkpoint_bytes(held: Memory) -> int:
    """Return the bytes of a device while the state is copied for a checkpoint; gradients are freed if possible."""
    freed = held.gradient_bytes if held.bucket_bytes is None else 0
    return held.total_bytes - freed - held.gathered_bytes


def _buffered_shards(plan: RunPlan) -> float:
    """Return the number of shards for which a rank keeps receive buffers, in units of the largest shard.

    The buffers for each size and number of shards are kept: those of a full step, and of the last step of an epoch.
    """
    batch, kinds = plan.batch, set[tuple[int, int]]()
    for step in {0, batch.steps_per_epoch - 1}:
        shards = range(0, batch.num_shards(step), plan.num_replicas)
        kinds.update(Counter(batch.shard_size(step, shard) for shard in shards).items())
    return sum(size * count for size, count in kinds) / batch.shard_size(0, 0)


def _batch_bytes(plan: RunPlan) -> int:
    leaves = tree_iter(example_batch(plan))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


def _update_bytes(plan: RunPlan, model: nn.Module, resident: Mapping[str, int]) -> int:
    """Return the bytes of the temporary tensors of an update; fused kernels need none."""
    nodes = [one.node for one in plan.optimizers] or [plan.cfg.optimizer]
    if all(node.get("fused") for node in nodes):
        return 0
    together = any(task.device.startswith("cuda") for task in plan.tasks)
    settings = {"fused": False, "foreach": together} if plan.cfg.optimizer.get("foreach") is None else {}
    optimizers = stepped_optimizers(plan, model, resident, **settings)
    if optimizers is None:
        return 0
    live = LiveStorages()
    with live:
        for optimizer in optimizers:
            optimizer.step()
    return Timeline(events=live.events, backward_at=0, gradients=frozenset()).peak().num_bytes
