"""The executor of a pipeline: a rank with its stages, and one try at a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from trainkit.errors import ConfigError, TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.objectives.base import Loss, Supervised, add_terms
from trainkit.objectives.linear_cross_entropy import output_layer_of, scored_inside
from trainkit.strategies.base import Batch, SetupRequest, StateDict, StepContext
from trainkit.strategies.collectives import RankGroup
from trainkit.strategies.core.buffers import StepBuffers
from trainkit.strategies.core.step import ShardStep, added, cloned_batch, weight_on
from trainkit.strategies.core.synchronous import build_parts, no_reducer
from trainkit.strategies.mesh.layout import Layout, OnMesh
from trainkit.strategies.mesh.pipe.forward import is_fake
from trainkit.strategies.mesh.pipe.held import HeldStages, groups_alike, sum_alike, without_data
from trainkit.strategies.mesh.pipe.replica import Chunk, PipelineReplica, shape_key
from trainkit.strategies.mesh.pipe.stages import StageAssignment, Stages, ideal_bubble, padded_microbatches
from trainkit.strategies.mesh.step import ShardedExecutor
from trainkit.strategies.tensor_shards import name_in, select
from trainkit.strategies.tensors.layouts import in_layout


class StagedForward:
    """The forward pass of a staged model, which replaces its own: `model.forward = StagedForward(replica)`.

    For evaluation and sampling: one batch at a time, without gradients. Collective over the ranks of a replica; all
    pass the same inputs, and receive the outputs. During tracing, with tensors without data, it runs the model's own
    forward.
    """

    runs_once: ClassVar[bool] = True
    """Whether a forward pass is computed once: a loss may be computed inside."""

    def __init__(self, replica: PipelineReplica) -> None:
        self._replica, self._whole = replica, replica.model.forward

    def __call__(self, inputs: Any) -> Any:
        """Run the model on its inputs."""
        replica = self._replica
        if replica.runs_stage or any(map(is_fake, tree_flatten(inputs)[0])):
            return self._whole(inputs)
        group, ranks, last = replica.pipeline, replica.held.axes.pipe, replica.held.cut.num_stages - 1
        outputs: tuple[Tensor, ...] = ()
        with torch.no_grad(), replica.keys.at(replica.keys.beginning):
            traced = replica.trace(inputs)
            for stage, segment in traced.segments.items():
                received = [one.meta.empty(replica.device) for one in segment.span.received]
                for tensor in received:
                    dist.recv(tensor, group=group, group_src=(stage - 1) % ranks)
                segment.set_inputs(inputs)
                outputs = segment(*received)
                for tensor in outputs if stage < last else ():
                    dist.send(tensor, group=group, group_dst=(stage + 1) % ranks)
            if replica.held.position != last % ranks:
                outputs = tuple(one.empty(replica.device) for one in traced.program.finals)
            for tensor in outputs:
                dist.broadcast(tensor, group=group, group_src=last % ranks)
        return traced.program.filled(outputs)


def stage_executor(
    request: SetupRequest, ranks: RankGroup, stages: Stages, layout: Layout, place: OnMesh, *, timeout_s: float
) -> PipelineExecutor:
    """Keep the stages of this rank, and let a call of its model run all stages; collective.

    Args:
        request: the model and the settings of the run.
        ranks: the ranks, which have joined.
        stages: the settings of the stages.
        layout: the way in which a stage is cut.
        place: the place of this rank.
        timeout_s: seconds that a rank waits for others.

    Raises:
        ConfigError: the map does not fit the model.
    """
    model, precision, axes = request.model, request.precision, layout.axes
    cut = stages.assigned(model, precision)
    if not isinstance(cut, StageAssignment):
        raise ConfigError(cut)
    held = HeldStages(**vars(place), layout=layout, cut=cut, holders=cut.holders(model, stages.pipe))
    is_cut = axes.shard * axes.tensor > 1
    traced = precision.adapt(without_data(model)) if is_cut else model
    parts = build_parts(request, ranks=ranks, placement=held, make_reducer=no_reducer, move=held.keep)
    buffers = StepBuffers(nn.ModuleList(held.blocks.values()), parts.precision.master_dtype)
    alike = groups_alike([*held.holders.values()], axes, rank=place.rank, timeout_s=timeout_s)
    schedule = stages.schedule
    replica = PipelineReplica(replace(parts, buffers=buffers), held, alike=alike, schedule=schedule, traced=traced)
    model.forward = StagedForward(replica)
    return PipelineExecutor(replica, request.training, ranks=ranks, make_step=PipelineWork)


class PipelineWork(ShardStep):
    """One try at a step: forward and backward of its shards through the stages, and their sums.

    Args:
        batches: one per shard; every rank of a replica has all of them.
    """

    replica: PipelineReplica

    def __init__(
        self, replica: PipelineReplica, ticket: Ticket, batches: Sequence[Batch], training: StepContext
    ) -> None:
        super().__init__(replica, ticket, batches, training)
        self._now: Sequence[Chunk] = ()
        self._scored: dict[int, Loss] = {}
        """Losses that the last stage has computed in its output layer, by microbatch number."""

    def run(self) -> list[Tensor | None]:
        """Return the step's gradients, updated buffers and counted weight, summed over shards and ranks; collective."""
        replica = self.replica
        replica.begin_step(self.ticket.step, self.score, self.scoring)
        if replica.buffers.names:
            replica.buffers.begin_step()
        self._enter("forward")
        self._measured(self._groups())
        self._enter("reduce")
        grads, summed = replica.take_grads(), replica.finish_sums()
        if not replica.settled:
            _settle(replica, grads)
        names, held = list(replica.params), replica.held
        parts = [
            None if name in summed else _zeros_where_used(grad, used, master)
            for (name, master), grad, used in zip(replica.masters.items(), grads, replica.used, strict=True)
        ]
        buffers = replica.buffers.take() if replica.buffers.names else []
        for one in buffers if replica.shards is not None else ():
            dist.all_reduce(one, group=replica.shards)
        holders = [held.holders[name] for name in names] + [(held.position,)] * len(buffers)
        sums = sum_alike([*parts, *buffers], holders, replica.alike)
        sums[: len(names)] = [summed.get(name, total) for name, total in zip(names, sums, strict=False)]
        if not self.divisor.counted:
            return sums
        here = weight_on(self.weight, replica.precision.master_dtype, replica.device)
        return [*sums, replica.data_ranks.sum(here)]  # the last stage has it

    def _groups(self) -> list[list[Chunk]]:
        """Return the microbatches by shape, in the order of the shards: a schedule supports one shape.

        Where parameters are gathered to compute, all ranks have as many, of one shape: rows and microbatches that are
        missing are filled up with real ones that count nothing.
        """
        groups: dict[Any, list[Chunk]] = {}
        objective = self.training.objective
        assert isinstance(objective, Supervised)
        for shard, batch in zip(self.ticket.shards, self.batches, strict=True):
            inputs, targets = objective.split_batch(batch)
            chunk = Chunk(shard=shard, inputs=inputs, targets=targets, share=self._shard_fraction(shard))
            groups.setdefault(shape_key(inputs), []).append(chunk)
        gathers = self.replica.shards is not None
        return [self._filled([*chain(*groups.values())])] if gathers else list(groups.values())

    def _filled(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return microbatches of equal shapes, as many as on every other rank; collective if one has none."""
        plan, replica, step = self.training.plan, self.replica, self.ticket.step
        count, ranks = plan.num_shards(step), replica.num_ranks
        replica.provide_stand_in(plan, step, self.batches)
        objective = self.training.objective
        assert isinstance(objective, Supervised)
        if not chunks:
            inputs, targets = objective.split_batch(cloned_batch(replica.stand_in))
            chunks = [Chunk(shard=0, inputs=inputs, targets=targets, share=0.0, counts=False)]
        size = plan.shard_size(step, 0)  # the largest
        chunks = [one.with_rows(size) for one in chunks]
        if len({shape_key(one.inputs) for one in chunks}) > 1:
            raise TrainingError(
                "microbatches of a step have inputs of several shapes, and the ranks along shard need one. Use samples "
                "of one shape, or strategy.shard=1."
            )
        return [*chunks, *(chunks[0].repeated() for _ in range(-(-count // ranks) - len(chunks)))]

    def _measured(self, groups: Sequence[Sequence[Chunk]]) -> None:
        """Compute the groups, and record the fraction of the time in which this rank waited for others."""
        replica = self.replica
        replica.busy_s = 0.0
        start = time.perf_counter()
        ideal_s = total = 0.0
        for number, chunks in enumerate(groups, start=1):
            replica.begin_group(is_last=number == len(groups))
            count = self._through_the_stages(chunks)
            bubble = ideal_bubble(
                replica.schedule, count, num_ranks=replica.held.axes.pipe, stages_a_rank=len(replica.held.blocks)
            )
            total += count / (1 - bubble)
            ideal_s += count / (1 - bubble) * bubble
        if groups and replica.device.type == "cpu":  # elsewhere the host runs ahead of the device
            elapsed = time.perf_counter() - start
            replica.step_metrics["pipeline/bubble"] = max(1.0 - replica.busy_s / elapsed, 0.0)
        if groups:
            replica.step_metrics["pipeline/bubble_ideal"] = ideal_s / total

    def _through_the_stages(self, chunks: Sequence[Chunk]) -> int:
        """Run forward and backward of microbatches of one shape; return their number, with repetitions."""
        replica = self.replica
        traced = replica.trace(chunks[0].inputs)
        count = padded_microbatches(replica.schedule, len(chunks), replica.held.axes.pipe)
        schedule, stages = replica.schedule_of(traced, count)
        self._now = [*chunks, *(chunks[0].repeated() for _ in range(count - len(chunks)))]
        self._program = traced.program
        for stage in stages:
            stage.take(self._now)
        schedule.step(target=torch.arange(count), return_outputs=False)
        for stage in stages:  # release the batches of the step
            stage.take(())
            stage.clear_runtime_states()
        for segment in traced.segments.values():
            segment.set_inputs(None)
        return count

    def scoring(self, number: int) -> AbstractContextManager[None]:
        """Return the context in which the last stage computes the loss of a microbatch in its output layer, if it can.

        A zero-bubble schedule runs the backward pass of the layer in two parts, which the chunked loss does not
        support.
        """
        chunk, replica, objective = self._now[number], self.replica, self.training.objective
        assert isinstance(objective, Supervised)
        offered = output_layer_of(replica.model) if objective.takes_hidden else None
        if offered is None or replica.schedule == "zero_bubble":
            return nullcontext()
        last = self._program.last_block
        blocks = (module for unit in replica.held.cut.units if unit.name == last for module in unit.entries)
        if all(one is not offered.layer for block in blocks for one in block.modules()):
            return nullcontext()

        def keep(hidden: Tensor) -> Loss:
            hidden = hidden if chunk.rows is None else hidden[: chunk.rows]
            self._scored[number] = found = objective.loss_from_hidden(hidden, offered, chunk.targets)
            return found

        return scored_inside(offered.layer, keep)

    def score(self, outputs: Sequence[Tensor], number: int) -> Tensor:
        """Return the start value of backward for one microbatch on the last stage: its loss scaled for the step."""
        chunk, replica, objective = self._now[number], self.replica, self.training.objective
        assert isinstance(objective, Supervised)
        replica.keys.enter(step=self.ticket.step, shard=chunk.shard, objective=objective, calls=1)
        with replica.computing(), replica.precision.autocast(replica.device_types):
            loss = self._scored.pop(number, None)
            if loss is None:
                found = tuple(one[: chunk.rows] for one in outputs) if chunk.rows is not None else outputs
                loss = objective.score(self._program.filled(found), chunk.targets)
            total = loss.loss_sum if loss.extra is None else loss.loss_sum + loss.extra * loss.weight
            if not chunk.counts:
                return total * 0.0
            seen = loss.loss_sum.detach()
            self.loss_sum = seen if self.loss_sum is None else self.loss_sum + seen
            add_terms(self.terms, objective, loss)
            self.weight = added(self.weight, loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight)
            # Backward begins with this factor: the same bits as dividing the loss, without that kernel.
            return total * (replica.loss_scale.scale / self.divisor.value)


def _zeros_where_used(grad: Tensor | None, used: bool, master: Tensor) -> Tensor | None:
    if grad is not None and grad.is_sparse:
        grad = grad.to_dense()
    if grad is None:
        return torch.zeros_like(master) if used else None
    return in_layout(grad, master.stride())  # other stages may hold the same parameter


def _settle(replica: PipelineReplica, grads: Sequence[Tensor | None]) -> None:
    """Agree with the other ranks on the parameters with gradients and the updated buffers; collective."""
    places = {name: at for at, name in enumerate(replica.held.holders)}
    flags = torch.zeros(len(places), dtype=torch.int64)
    for name, grad in zip(replica.params, grads, strict=True):
        flags[places[name]] = int(grad is not None)
    names = {id(buffer): name for name, buffer in replica.model.named_buffers()}
    here = nn.ModuleList(replica.held.blocks.values()).named_buffers()
    buffers = [names[id(buffer)] for _, buffer in here]
    for name, changed in zip(buffers, replica.changed, strict=False):
        flags[places[name]] = int(changed)
    found = torch.stack(replica.all_ranks.gather(flags)).amax(0).tolist()
    replica.settle(
        used=[bool(found[places[name]]) for name in replica.params],
        buffers=[float(found[places[name]]) for name in buffers],
    )


class PipelineExecutor(ShardedExecutor[PipelineReplica]):
    """A rank that sends the shards of its replica through its stages."""

    def load_state_dict(self, state: StateDict) -> None:
        """Restore this rank's tensors of a checkpoint of any strategy."""
        model = self._replica.model
        foreign = {name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_meta}
        super().load_state_dict(select(state, lambda key: name_in(key) not in foreign))
