"""Training in stages: those of a rank as torch's schedules run them, the sums of their gradients over copies, and one
try at a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_flatten, tree_map

from trainkit.errors import ConfigError, TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.objectives.base import Loss, Supervised, add_terms
from trainkit.objectives.linear_cross_entropy import output_layer_of, scored_inside
from trainkit.strategies.base import Batch, SetupRequest, StateDict, StepContext
from trainkit.strategies.collectives import RankGroup
from trainkit.strategies.core.buffers import StepBuffers
from trainkit.strategies.core.replica import Replica, ReplicaParts, joined_norms
from trainkit.strategies.core.step import ShardStep, added, cloned_batch, weight_on
from trainkit.strategies.core.synchronous import SynchronousExecutor, build_parts, no_reducer
from trainkit.strategies.mesh.context import SequenceCut
from trainkit.strategies.mesh.layout import Layout, MeshPlace
from trainkit.strategies.mesh.pipe.forward import CannotCut, Program, StageModule, is_fake, trace
from trainkit.strategies.mesh.pipe.rank_stages import Alike, RankStages, groups_alike, sum_alike, without_data
from trainkit.strategies.mesh.pipe.stages import (
    ScheduleName,
    StageAssignment,
    Stages,
    blocks_to_cut,
    ideal_bubble,
    make_schedule,
    padded_microbatches,
    run_problems,
)
from trainkit.strategies.mesh.pipe.weights import SplitStage
from trainkit.strategies.mesh.sharding import gathers_anew
from trainkit.strategies.mesh.step import provide_stand_in
from trainkit.strategies.reducers.vector import BackendReducer
from trainkit.strategies.tensor_shards import name_in, select
from trainkit.strategies.tensors.layouts import FlatBuffer, in_layout

ShapeKey = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A microbatch: a shard of the step, or a repetition of one that only fills the schedule."""

    shard: int
    inputs: Any
    """The inputs of the model."""
    targets: Any
    share: float
    """Fraction of the samples of the step."""
    counts: bool = True
    """False for a repetition, which has no effect on the result."""
    rows: int | None = None
    """Samples that count: later rows only fill a shape; None: all."""
    length: int = 0
    """Positions of the sequences of which these are parts; 0: they are whole."""

    @property
    def shape(self) -> ShapeKey:
        """What all microbatches of a schedule share."""
        return self.length, shape_key(self.inputs)

    def with_rows(self, count: int) -> Chunk:
        """Return the microbatch with so many rows; the last one is repeated, and counts once."""
        rows = self.tensors[0].shape[0]
        if rows == count:
            return self

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.cat([leaf, leaf[-1:].expand(count - rows, *leaf.shape[1:])]) if rows < count else leaf[:count]

        return replace(self, inputs=tree_map(filled, self.inputs), rows=min(rows, count))

    def repeated(self) -> Chunk:
        """Return a repetition."""
        return replace(self, share=0.0, counts=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the inputs of the model."""
        return tuple(leaf for leaf in tree_flatten(self.inputs)[0] if isinstance(leaf, Tensor))


BUCKET_BYTES: int = 25 * 2**20
"""A bucket with this many bytes of gradients is full."""


class StageSums(BackendReducer):
    """Sums the gradients of one stage over the replicas, in buckets, while this rank and others still compute.

    A bucket is exchanged as soon as the last backward pass of a step has produced its gradients, the others when that
    pass ends. Ranks match exchanges only by their order, and replicas may have different numbers of microbatches, so
    the order is fixed: the buckets of the last stage first. A rank without a microbatch sends zeros.

    Args:
        params: parameters of only this stage, by canonical name; each gets a gradient.
        masters: the parameters that the optimizer updates, whose dtype and strides the sums have.
        group: the ranks with this stage, one of each replica.
        next_stage: the sums of the stage of this rank whose buckets follow; None: no stage follows.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        next_stage: StageSums | None = None,
    ) -> None:
        super().__init__(bucket_bytes=BUCKET_BYTES, group=group)
        self.names, self.params = tuple(params), list(params.values())
        like = [masters[name] for name in self.names]
        self._stage_packing = FlatBuffer.like(like, like[0].dtype, like[0].device)
        self._next, self._has_turn = next_stage, False

    def begin_step(self, *, is_first: bool) -> None:
        """Begin a new sum.

        Args:
            is_first: whether no stage of this rank is exchanged before this one.
        """
        self.begin(self._stage_packing, num_shards=0)
        self._has_turn = is_first

    def take_turn(self) -> None:
        """Exchange full buckets from now on, because those of all previous stages have been started."""
        self._has_turn = True
        self.advance()

    def end_backward(self) -> None:
        """Collect gradients that filled no bucket, and after the last pass exchange the remaining ones."""
        self.collect(leaves_new=False)
        if self._is_last:
            self.fill_rest()
            self.full.update(range(len(self.buckets)))
            self.advance()

    def advance(self) -> None:
        """Exchange full buckets whose predecessors, of previous stages too, have been started."""
        if self._has_turn:
            super().advance()
        if len(self.waits) == len(self.buckets) and self._next is not None:
            self._next.take_turn()


class ChunkStage(PipelineStage):
    """A stage of `torch.distributed.pipelining` for inputs of one shape.

    Shapes are given, so that torch runs no forward pass to infer them: that would change batch statistics.

    Args:
        traced: the computation of the model for these inputs.
        stage: number of the stage.
        around: the replica, called before and after each microbatch.
    """

    def __init__(self, traced: Traced, stage: int, around: PipelineReplica) -> None:
        segment, meta = traced.segments[stage], torch.device("meta")
        span, split = segment.span, SplitStage(segment) if around.schedule == "zero_bubble" else None
        super().__init__(
            split or segment,
            stage,
            around.stages.cut.num_stages,
            around.device,
            input_args=tuple(crossing.meta.empty(meta) for crossing in span.received) if stage else traced.inputs,
            output_args=tuple(kind.empty(meta) for kind in span.outputs),
            group=around.pipeline,
            dw_builder=split and split.weights,
        )
        self._segment, self._around = segment, around
        self._microbatches: Sequence[Chunk] = ()

    def take(self, microbatches: Sequence[Chunk]) -> None:
        """Compute these microbatches in the next step."""
        self._microbatches = microbatches

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],  # noqa: ARG002 - every rank has the inputs itself
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,  # noqa: ARG002 - torch's signature; no output is merged
    ) -> Any:
        """Run the forward pass of one microbatch."""
        around, chunk = self._around, self._microbatches[fwd_chunk_id]
        work = around.work
        with around.computing(), _unwrapped(), around.buffers_of(chunk, self.stage_index):
            around.keys.enter(step=work.ticket.step, shard=chunk.shard)
            self._segment.set_inputs(chunk.inputs)
            autocast = around.precision.autocast(around.device_types)
            with autocast, work.scoring(fwd_chunk_id) if self.is_last else nullcontext():
                return super().forward_one_chunk(fwd_chunk_id, chunk.tensors, kwargs, save_forward_output=False)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward pass of one microbatch, or only the part for its inputs."""
        around = self._around
        with around.computing(), _unwrapped(), around.backward(self.stage_index, is_last=last_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward=full_backward, last_backward=last_backward)
            # Tensors are sent in their memory layout, and received as contiguous ones.
            grads = self.bwd_cache.get(bwd_chunk_id, ())
            self.bwd_cache[bwd_chunk_id] = tuple(None if grad is None else grad.contiguous() for grad in grads)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the rest of a split backward pass."""
        around = self._around
        with around.computing(), _unwrapped(), around.backward(self.stage_index, is_last=last_backward):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the exception of the model instead of torch's wrapper."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """The computation of the model for inputs of one shape, cut into stages."""

    program: Program
    inputs: tuple[Tensor, ...]
    """The tensors among the inputs of the model, on the meta device."""
    segments: dict[int, StageModule]
    """Stage -> its module, for the stages of this rank."""
    schedules: dict[int, tuple[Any, list[ChunkStage]]] = field(default_factory=dict)
    """Number of microbatches -> the schedule, and its stages on this rank."""


class PipelineReplica(Replica):
    """The stages of one rank.

    Args:
        parts: its stages.
        stages: the stages of all ranks, and those of this one.
        alike: the ranks that sum gradients.
        schedule: the order in which a rank computes microbatches.
        traced: the model that forward passes without data compute: whole, and without exchanges.
    """

    def __init__(
        self, parts: ReplicaParts, stages: RankStages, *, alike: Alike, schedule: ScheduleName, traced: nn.Module
    ) -> None:
        model, axes = parts.placed.model, stages.axes
        join = joined_norms(
            {name: stages.cuts[name].is_written for name in parts.placed.params},
            parts.device,
            among=[name for name, param in model.named_parameters() if param.requires_grad],
            are_whole=axes.shard * axes.tensor == 1,
        )
        reload = partial(gathers_anew, model)
        super().__init__(replace(parts, join_norms=join, cuts=stages.cuts, reload=reload))
        self.stages, self.alike, self.schedule = stages, alike, schedule
        self.pipeline: dist.ProcessGroup = stages.mesh.get_group("pipe")
        """The ranks of the replica, in the order of the stages."""
        self.shards = stages.group("shard")
        """The ranks that gather parameters to compute, and so need equal microbatches; None: this one alone."""
        self.busy_s = 0.0
        """Computing time of this rank; meaningless on devices that compute asynchronously."""
        self.runs_stage = False
        """Whether a call of the model is the pass of one stage."""
        self.settled = False
        """Whether the updated buffers and used parameters are known."""
        self.changed: list[float] = []
        """A flag per buffer of this rank: whether a forward pass of the first step has updated it."""
        self._model_without_data = traced
        self._traced: dict[ShapeKey, Traced] = {}
        self.work: PipelineWork
        """The step that is computed."""
        self._stage_sums: dict[int, StageSums] = {}
        """Stage -> the sums over replicas that start in its backward pass; empty until the used parameters are
        known.
        """

    def begin_step(self, work: PipelineWork) -> None:
        """Begin a step."""
        self.work = work
        for number, sums in enumerate(self._stage_sums.values()):
            sums.begin_step(is_first=number == 0)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measure the time of the block."""
        start = time.perf_counter()
        yield
        self.busy_s += time.perf_counter() - start

    def settle(self, *, used: Sequence[bool], buffers: Sequence[float]) -> None:
        """Store the used parameters and updated buffers on which all ranks have agreed."""
        self.used = list(used)
        if self.buffers.names:
            self.buffers.settle(buffers)
        self.settled = True
        positions, holders = (self.stages.position,), self.stages.holders
        group = None if self.shards is not None else self.alike.get(positions)
        if group is None:
            return
        stages_of: dict[int, list[int]] = {}
        for stage, module in self.stages.blocks.items():
            for param in module.parameters():
                stages_of.setdefault(id(param), []).append(stage)
        following: StageSums | None = None
        for stage in sorted(self.stages.blocks):  # the last stage comes first in the sums
            named = zip(self.params.items(), used, strict=True)
            params = {name: param for (name, param), flag in named if flag and holders[name] == positions}
            params = {name: param for name, param in params.items() if stages_of.get(id(param)) == [stage]}
            if params:
                following = StageSums(params, self.masters, group, next_stage=following)
                self._stage_sums = {stage: following, **self._stage_sums}

    def finish_sums(self) -> dict[str, Tensor]:
        """Wait for the sums that have begun in backward passes of this step, and return them by name."""
        stage_sums = self._stage_sums.values()
        totals = {name: total for sums in stage_sums for name, total in zip(sums.names, sums.finish(), strict=True)}
        return {name: total for name, total in totals.items() if total is not None}

    def owns(self, name: str) -> bool:
        """Return whether this rank writes a tensor that several hold whole."""
        stages = self.stages
        others = (coordinate for axis, coordinate in stages.coordinates.items() if axis != "pipe")
        return stages.holders[name][0] == stages.position and not any(others)

    def trace(self, inputs: Any) -> Traced:
        """Trace the model with inputs of this shape; the result is the same on every rank.

        Raises:
            TrainingError: the model cannot be cut into these stages.
        """
        key, cut = (shape_key(inputs), self.model.training, torch.is_grad_enabled()), self.stages.cut
        if key not in self._traced:
            whole = self._model_without_data
            for module, original in zip(whole.modules(), self.model.modules(), strict=True):
                module.training = original.training
            try:
                program = trace(
                    whole,
                    blocks_to_cut(whole),
                    inputs,
                    device=self.device,
                    autocast=self.precision.autocast(self.device_types),
                    grad=torch.is_grad_enabled(),
                )
            except CannotCut as error:
                raise TrainingError(f"the model cannot be cut into stages: {error}. {error.remedy}") from error
            if problems := run_problems(cut, program):
                raise TrainingError("; ".join(map(str, problems)))
            spans = program.spans(cut.stage_of, cut.num_stages)
            segments = {
                stage: StageModule(blocks, spans[stage], cut.units, self.forward_stage, self.device)
                for stage, blocks in self.stages.blocks.items()
            }
            tensors = (leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor))
            metas = tuple(torch.empty_like(tensor, device="meta", requires_grad=False) for tensor in tensors)
            self._traced[key] = Traced(program=program, inputs=metas, segments=segments)
        return self._traced[key]

    def forward_stage(self, inputs: Any) -> Any:
        """Run the model's own forward pass, of which a stage computes its calls."""
        self.runs_stage = True
        try:
            return self.model(inputs)
        finally:
            self.runs_stage = False

    def score(self, outputs: Any, number: Tensor) -> Tensor:
        """Return the start value of backward for a microbatch."""
        # A view of the numbers from 0 on: its offset encodes the number, and its value is not read.
        return self.work.score(outputs, int(number.storage_offset()))

    @contextmanager
    def buffers_of(self, chunk: Chunk, stage: int) -> Iterator[None]:
        """Weight the buffers after the forward pass of a microbatch, and restore them."""
        buffers = self.buffers
        before = buffers.versions() if buffers.names and not self.settled else []
        yield
        if buffers.names:
            if not self.settled:
                new = buffers.changed_since(before)
                self.changed = [max(pair) for pair in zip(self.changed or new, new, strict=True)]
            if chunk.counts:
                buffers.end_forward(chunk.share, within=set(self.stages.blocks[stage].modules()))
            buffers.reset()

    @contextmanager
    def backward(self, stage: int, *, is_last: bool) -> Iterator[None]:
        """Collect the gradients of a backward pass of a stage: in sums over replicas, or in separate masters.

        Args:
            stage: number of the stage.
            is_last: whether no pass of the stage follows for microbatches of this shape.
        """
        sums, is_last = self._stage_sums.get(stage), is_last and self.work.is_last_group
        if sums is not None:
            sums.begin_backward(sums.params, is_last=is_last)
        yield
        if sums is not None:
            sums.end_backward()
        if self.masters_apart:
            self.accumulate_in_masters()


def shape_key(inputs: Any) -> ShapeKey:
    """Return the properties of inputs on which the computation of the model depends."""
    leaves, spec = tree_flatten(inputs)
    return str(spec), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


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

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Run the model on its inputs; `kwargs` are what hooks add for a part of a sequence."""
        replica = self._replica
        if replica.runs_stage or any(map(is_fake, tree_flatten(inputs)[0])):
            return self._whole(inputs, **kwargs)
        group, ranks, last = replica.pipeline, replica.stages.axes.pipe, replica.stages.cut.num_stages - 1
        outputs: tuple[Tensor, ...] = ()
        with torch.no_grad(), replica.keys.at(replica.keys.beginning):
            traced = replica.trace(inputs)
            for stage, segment in traced.segments.items():
                received = [crossing.meta.empty(replica.device) for crossing in segment.span.received]
                for tensor in received:
                    dist.recv(tensor, group=group, group_src=(stage - 1) % ranks)
                segment.set_inputs(inputs)
                outputs = segment(*received)
                for tensor in outputs if stage < last else ():
                    dist.send(tensor, group=group, group_dst=(stage + 1) % ranks)
            if replica.stages.position != last % ranks:
                outputs = tuple(kind.empty(replica.device) for kind in traced.program.finals)
            for tensor in outputs:
                dist.broadcast(tensor, group=group, group_src=last % ranks)
        return traced.program.filled(outputs)


def stage_executor(
    request: SetupRequest, ranks: RankGroup, settings: Stages, layout: Layout, place: MeshPlace, *, timeout_s: float
) -> PipelineExecutor:
    """Keep the stages of this rank, and let a call of its model run all stages; collective.

    Args:
        request: the model and the settings of the run.
        ranks: the ranks, which have joined.
        settings: the settings of the stages.
        layout: the way in which a stage is cut.
        place: the place of this rank.
        timeout_s: seconds that a rank waits for others.

    Raises:
        ConfigError: the map does not fit the model.
    """
    model, precision, axes = request.model, request.precision, layout.axes
    cut = settings.assigned(model, precision)
    if not isinstance(cut, StageAssignment):
        raise ConfigError(cut)
    holders, sequences = cut.holders(model, settings.pipe), SequenceCut.of(place)
    stages = RankStages(**vars(place), layout=layout, cut=cut, holders=holders, sequences=sequences)
    is_cut = axes.shard * axes.context * axes.tensor > 1
    traced = precision.adapt(without_data(model)) if is_cut else model
    parts = build_parts(request, ranks=ranks, placement=stages, make_reducer=no_reducer, move=stages.keep)
    buffers = StepBuffers(nn.ModuleList(stages.blocks.values()), parts.precision.master_dtype)
    alike = groups_alike([*stages.holders.values()], axes, rank=place.rank, timeout_s=timeout_s)
    schedule = settings.schedule
    replica = PipelineReplica(replace(parts, buffers=buffers), stages, alike=alike, schedule=schedule, traced=traced)
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
        self.is_last_group = False
        """Whether no microbatches of another shape follow in this step."""
        self._chunks: Sequence[Chunk] = ()
        self._scored: dict[int, Loss] = {}
        """Losses that the last stage has computed in its output layer, by microbatch number."""

    def run(self) -> list[Tensor | None]:
        """Return the step's gradients, updated buffers and counted weight, summed over shards and ranks; collective."""
        replica, sequences = self.replica, self.replica.stages.sequences
        replica.begin_step(self)
        if replica.buffers.names:
            replica.buffers.begin_step()
        self._enter("forward")
        with nullcontext() if sequences is None else sequences.in_step():
            self._measured(self._groups())
        self._enter("reduce")
        grads, summed = replica.take_grads(), replica.finish_sums()
        if not replica.settled:
            _settle(replica, grads)
        if sequences is not None:
            sequences.summed(self)
        names, stages = list(replica.params), replica.stages
        parts = [
            None if name in summed else _zeros_where_used(grad, used, master)
            for (name, master), grad, used in zip(replica.masters.items(), grads, replica.used, strict=True)
        ]
        buffers = replica.buffers.take() if replica.buffers.names else []
        for buffer in buffers if replica.shards is not None else ():
            dist.all_reduce(buffer, group=replica.shards)
        holders = [stages.holders[name] for name in names] + [(stages.position,)] * len(buffers)
        sums = sum_alike([*parts, *buffers], holders, replica.alike)
        sums[: len(names)] = [summed.get(name, total) for name, total in zip(names, sums, strict=False)]
        if not self.divisor.counted:
            return sums
        weight = weight_on(self.weight, replica.precision.master_dtype, replica.device)
        return [*sums, replica.data_ranks.sum(weight)]  # the last stage has it

    def _groups(self) -> list[list[Chunk]]:
        """Return the microbatches by shape, in the order of the shards: a schedule supports one shape.

        Where parameters are gathered to compute, all ranks have as many, of one shape: rows and microbatches that are
        missing are filled up with real ones that count nothing.
        """
        groups: dict[ShapeKey, list[Chunk]] = {}
        for shard, batch in zip(self.ticket.shards, self.batches, strict=True):
            chunk = self._chunk(shard, batch, self._shard_fraction(shard))
            groups.setdefault(chunk.shape, []).append(chunk)
        gathers = self.replica.shards is not None
        return [self._filled([*chain(*groups.values())])] if gathers else list(groups.values())

    def _chunk(self, shard: int, batch: Batch, share: float) -> Chunk:
        """Return the microbatch of a shard, of this rank's positions."""
        objective, sequences = self.training.objective, self.replica.stages.sequences
        assert isinstance(objective, Supervised)
        if sequences is not None:
            batch = sequences.part_of(batch, objective)
        inputs, targets = objective.split_batch(batch)
        length = 0 if sequences is None else sequences.length
        return Chunk(shard=shard, inputs=inputs, targets=targets, share=share, length=length)

    def _filled(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return microbatches of equal shapes, as many as on every other rank; collective if one has none."""
        plan, replica, step = self.training.plan, self.replica, self.ticket.step
        count, ranks = plan.num_shards(step), replica.num_ranks
        provide_stand_in(replica, plan, step, self.batches)
        if not chunks:
            chunks = [self._chunk(0, cloned_batch(replica.stand_in), 0.0).repeated()]
        size = plan.shard_size(step, 0)  # the largest
        chunks = [chunk.with_rows(size) for chunk in chunks]
        if len({chunk.shape for chunk in chunks}) > 1:
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
            self.is_last_group = number == len(groups)
            count = self._through_the_stages(chunks)
            bubble = ideal_bubble(
                replica.schedule, count, num_ranks=replica.stages.axes.pipe, stages_a_rank=len(replica.stages.blocks)
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
        if replica.stages.sequences is not None:
            replica.stages.sequences.length = chunks[0].length
        traced = replica.trace(chunks[0].inputs)
        count = padded_microbatches(replica.schedule, len(chunks), replica.stages.axes.pipe)
        if count not in traced.schedules:
            new_stages = [ChunkStage(traced, stage, replica) for stage in replica.stages.blocks]
            traced.schedules[count] = make_schedule(replica.schedule, new_stages, count, replica.score), new_stages
        schedule, stages = traced.schedules[count]
        self._chunks = [*chunks, *(chunks[0].repeated() for _ in range(count - len(chunks)))]
        self._program = traced.program
        for stage in stages:
            stage.take(self._chunks)
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
        chunk, replica, objective = self._chunks[number], self.replica, self.training.objective
        assert isinstance(objective, Supervised)
        offered = output_layer_of(replica.model) if objective.takes_hidden else None
        if offered is None or replica.schedule == "zero_bubble":
            return nullcontext()
        last = self._program.last_block
        blocks = (module for unit in replica.stages.cut.units if unit.name == last for module in unit.entries)
        if all(module is not offered.layer for block in blocks for module in block.modules()):
            return nullcontext()

        def keep(hidden: Tensor) -> Loss:
            hidden = hidden if chunk.rows is None else hidden[: chunk.rows]
            self._scored[number] = loss = objective.loss_from_hidden(hidden, offered, chunk.targets)
            return loss

        return scored_inside(offered.layer, keep)

    def score(self, outputs: Sequence[Tensor], number: int) -> Tensor:
        """Return the start value of backward for one microbatch on the last stage: its loss scaled for the step."""
        chunk, replica, objective = self._chunks[number], self.replica, self.training.objective
        assert isinstance(objective, Supervised)
        replica.keys.enter(step=self.ticket.step, shard=chunk.shard, objective=objective, calls=1)
        with replica.computing(), replica.precision.autocast(replica.device_types):
            loss = self._scored.pop(number, None)
            if loss is None:
                tensors = tuple(output[: chunk.rows] for output in outputs) if chunk.rows is not None else outputs
                loss = objective.score(self._program.filled(tensors), chunk.targets)
            if replica.stages.sequences is not None:
                replica.stages.sequences.scored(loss)
            total = loss.total
            if not chunk.counts:
                return total * 0.0
            loss_sum = loss.loss_sum.detach()
            self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum
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
    index_of = {name: index for index, name in enumerate(replica.stages.holders)}
    flags = torch.zeros(len(index_of), dtype=torch.int64)
    for name, grad in zip(replica.params, grads, strict=True):
        flags[index_of[name]] = int(grad is not None)
    names = {id(buffer): name for name, buffer in replica.model.named_buffers()}
    named = nn.ModuleList(replica.stages.blocks.values()).named_buffers()
    buffers = [names[id(buffer)] for _, buffer in named]
    for name, changed in zip(buffers, replica.changed, strict=False):
        flags[index_of[name]] = int(changed)
    agreed = torch.stack(replica.all_ranks.gather(flags)).amax(0).tolist()
    replica.settle(
        used=[bool(agreed[index_of[name]]) for name in replica.params],
        buffers=[float(agreed[index_of[name]]) for name in buffers],
    )


class PipelineExecutor(SynchronousExecutor[PipelineReplica]):
    """A rank that sends the shards of its replica through its stages."""

    def load_state_dict(self, state: StateDict) -> None:
        """Restore this rank's tensors of a checkpoint of any strategy."""
        model = self._replica.model
        foreign = {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta}
        super().load_state_dict(select(state, lambda key: name_in(key) not in foreign))
