"""One try at a step on one rank of a pipeline: its shards are the microbatches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from trainkit.numerics.batch import Ticket
from trainkit.objectives.base import Supervised
from trainkit.strategies.base import Batch, StepContext
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.pipeline.chunks import Chunk, ChunkStage
from trainkit.strategies.pipeline.replica import PipelineReplica, Traced, shape_key
from trainkit.strategies.pipeline.schedules import ideal_bubble, padded_microbatches
from trainkit.strategies.pipeline.tracing.stage_module import filled
from trainkit.strategies.tensors.layouts import in_layout

__all__ = ["PipelineWork"]


class PipelineWork(ShardStep):
    """One try at a step: forward and backward of its shards through the stages, and what they add up to.

    Args:
        replica: where.
        ticket: the step and its shards.
        batches: one a shard; every rank of a replica has them all.
        training: plan, objective and weighing.
    """

    replica: PipelineReplica

    def __init__(
        self, replica: PipelineReplica, ticket: Ticket, batches: Sequence[Batch], training: StepContext
    ) -> None:
        super().__init__(replica, ticket, batches, training)
        self._now: Sequence[Chunk] = ()
        self._inputs: dict[int, Any] = {}

    def run(self) -> list[Tensor | None]:
        """Return the step's gradients, updated buffers and counted weight, summed over shards and ranks; collective."""
        replica = self.replica
        replica.begin_step(self.ticket.step, self.score)
        if replica.buffers.names:
            replica.buffers.begin_step()
        self._enter("forward")
        self._measured(self._groups())
        self._enter("reduce")
        grads = replica.take_grads()
        if not replica.settled:
            _settle(replica, grads)
        names = list(replica.params)
        parts = [
            _zeros_where_used(grad, used, master)
            for grad, used, master in zip(grads, replica.used, replica.masters.values(), strict=True)
        ]
        parts += replica.buffers.take() if replica.buffers.names else []
        holders = [replica.holders[name] for name in names]
        holders += [(replica.place,)] * (len(parts) - len(names))
        sums = replica.groups.sum(parts, holders)
        return [*sums, *self._counted()]

    def _groups(self) -> list[list[Chunk]]:
        """Microbatches by shape, in the order of the shards: a schedule takes those of one."""
        groups: dict[Any, list[Chunk]] = {}
        objective = self.training.objective
        assert isinstance(objective, Supervised)
        for shard, batch in zip(self.ticket.shards, self.batches, strict=True):
            inputs, targets = objective.split_batch(batch)
            tensors = tuple(leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor))
            self._inputs[shard] = inputs
            chunk = Chunk(shard=shard, inputs=tensors, targets=targets, share=self._shard_fraction(shard))
            groups.setdefault(shape_key(inputs), []).append(chunk)
        return list(groups.values())

    def _measured(self, groups: Sequence[Sequence[Chunk]]) -> None:
        """Compute the groups, and note the share of the time in which this rank waited for others."""
        replica = self.replica
        replica.clock.reset()
        start = time.perf_counter()
        ideal_s = total = 0.0
        for chunks in groups:
            count = self._through_the_stages(chunks)
            bubble = ideal_bubble(
                replica.schedule, count, num_ranks=replica.num_stage_ranks, stages_a_rank=len(replica.blocks)
            )
            total += count / (1 - bubble)
            ideal_s += count / (1 - bubble) * bubble
        if groups and replica.device.type == "cpu":  # elsewhere the host runs ahead of the device
            elapsed = time.perf_counter() - start
            replica.step_metrics["pipeline/bubble"] = max(1.0 - replica.clock.busy_s / elapsed, 0.0)
        if groups:
            replica.step_metrics["pipeline/bubble_ideal"] = ideal_s / total

    def _through_the_stages(self, chunks: Sequence[Chunk]) -> int:
        """Forward and backward of microbatches of one shape; how many there were, with the repeats."""
        replica = self.replica
        traced = replica.trace(self._inputs[chunks[0].shard])
        count = padded_microbatches(replica.schedule, len(chunks), replica.num_stage_ranks)
        schedule, stages = replica.schedule_of(traced, count)
        self._now = [*chunks, *(_repeat(chunks[0]) for _ in range(count - len(chunks)))]
        self._program = traced.program
        for stage in stages:
            stage.take(self._now)
        schedule.step(target=torch.arange(count), return_outputs=False)
        _forget(stages, traced)
        return count

    def score(self, outputs: Sequence[Tensor], number: int) -> Tensor:
        """Return the start value of backward for one microbatch on the last stage: its loss scaled for the step."""
        chunk, replica, objective = self._now[number], self.replica, self.training.objective
        assert isinstance(objective, Supervised)
        leaves = dict(zip(self._program.finals(), outputs, strict=True))
        replica.keys.enter(step=self.ticket.step, shard=chunk.shard, objective=objective, calls=1)
        with replica.clock.running(), replica.precision.autocast(replica.device_types):
            loss = objective.score(filled(self._program.outputs, leaves, {}), chunk.targets)
            total = loss.loss_sum if loss.extra is None else loss.loss_sum + loss.extra * loss.weight
            if not chunk.counts:
                return total * 0.0
            seen = loss.loss_sum.detach()
            self.loss_sum = seen if self.loss_sum is None else self.loss_sum + seen
            self.weight = self.weight + (loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight)
            # The factor is what backward begins with: the bits of dividing the loss, without that kernel.
            return total * (replica.loss_scale.scale / self.divisor.value)

    def _counted(self) -> list[Tensor]:
        """Return the counted weight, which the last stage knows; collective where it is counted."""
        if not self.divisor.counted:
            return []
        replica = self.replica
        dtype = replica.precision.master_dtype
        here = torch.as_tensor(self.weight, dtype=dtype, device=replica.device).reshape(1)
        return [replica.data_ranks.sum(here)]


def _repeat(chunk: Chunk) -> Chunk:
    return Chunk(shard=chunk.shard, inputs=chunk.inputs, targets=chunk.targets, share=0.0, counts=False)


def _forget(stages: Sequence[ChunkStage], traced: Traced) -> None:
    """Let go of the step's batches."""
    for stage in stages:
        stage.take(())
        stage.clear_runtime_states()
    for segment in traced.segments.values():
        segment.set_inputs(())


def _zeros_where_used(grad: Tensor | None, used: bool, master: Tensor) -> Tensor | None:
    if grad is not None and grad.is_sparse:
        grad = grad.to_dense()
    if grad is None:
        return torch.zeros_like(master) if used else None
    return in_layout(grad, master.stride())  # other stages may hold the same parameter


def _settle(replica: PipelineReplica, grads: Sequence[Tensor | None]) -> None:
    """Agree with the other ranks on the parameters that get gradients and the buffers that are updated; collective."""
    places = {name: at for at, name in enumerate(replica.holders)}
    flags = torch.zeros(len(places), dtype=torch.int64)
    for name, grad in zip(replica.params, grads, strict=True):
        flags[places[name]] = int(grad is not None)
    buffers = replica.buffer_names
    for name, changed in zip(buffers, replica.changed, strict=False):
        flags[places[name]] = int(changed)
    found = torch.stack(replica.all_ranks.gather(flags)).amax(0).tolist()
    replica.settle(
        used=[bool(found[places[name]]) for name in replica.params],
        buffers=[float(found[places[name]]) for name in buffers],
    )
