"""The stages of a rank of a pipeline, as torch's schedules run them, and the sums of their gradients over copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_flatten, tree_map

from trainkit.errors import TrainingError
from trainkit.strategies.core.replica import ReplicaParts
from trainkit.strategies.mesh.pipe.forward import CannotCut, Program, StageModule, trace
from trainkit.strategies.mesh.pipe.held import Alike, HeldStages
from trainkit.strategies.mesh.pipe.stages import ScheduleName, blocks_to_cut, make_schedule, run_problems
from trainkit.strategies.mesh.sharding import gathers_anew
from trainkit.strategies.mesh.step import ShardedReplica
from trainkit.strategies.reducers.vector import BackendReducer
from trainkit.strategies.tensors.layouts import FlatBuffer


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


@dataclass(frozen=True, kw_only=True)
class WeightPass:
    """Where a pass for weights starts, and which of them it reaches."""

    edges: tuple[GradientEdge, ...]
    grads: tuple[Tensor | None, ...]
    """The gradient of each edge; None starts from a loss."""
    params: tuple[nn.Parameter, ...]

    @classmethod
    def of_outputs(
        cls, outputs: Sequence[Tensor], grads: Sequence[Tensor] | None, params: Sequence[nn.Parameter]
    ) -> WeightPass:
        """Return the pass from the outputs of a stage, which also computes gradients between its layers again.

        Args:
            outputs: the outputs, or the loss.
            grads: the gradients of the outputs; None for a loss.
            params: the parameters of the stage with gradients.
        """
        pairs = zip(outputs, [None] * len(outputs) if grads is None else grads, strict=True)
        found = [(get_gradient_edge(output), grad) for output, grad in pairs if output.requires_grad]
        edges, starts = zip(*found, strict=True) if found else ((), ())
        return cls(edges=edges, grads=starts, params=tuple(params))

    def run(self) -> None:
        """Add the gradients to those of the parameters; the hooks of the parameters are called."""
        if self.edges and self.params:
            torch.autograd.backward(self.edges, self.grads, inputs=self.params)


def passes_of(groups: Sequence[Mapping[str, Any]], whole: WeightPass) -> Sequence[WeightPass]:
    """Return the passes that give each parameter its gradient once: those of torch, or only the whole one.

    Torch starts at each layer with the gradient of its output. This fails for a weight that is used twice, because the
    pass through the layers in between frees them, or adds its gradient twice; and a weight that no input of the stage
    reaches has no layer to start at.

    Args:
        groups: what `torch.distributed.pipelining` found in the pass for inputs: the layers and their weights.
        whole: the pass from the outputs.
    """
    found = list(_passes_of_layers(groups))
    reached = [id(param) for one in found for param in one.params]
    once = len(reached) == len(set(reached)) and len(reached) == len(whole.params)
    return found if once and all(len(group["intermediates"]) == 1 for group in groups) else [whole]


def _passes_of_layers(groups: Sequence[Mapping[str, Any]]) -> Iterator[WeightPass]:
    for group in groups:
        starts = [
            (GradientEdge(layer, place), grad)
            for layer, grads in zip(group["intermediates"], group.get("grads") or [], strict=False)
            for place, grad in enumerate(grads or ())
            if grad is not None
        ]
        edges, grads = zip(*starts, strict=True) if starts else ((), ())
        yield WeightPass(edges=edges, grads=grads, params=tuple(node.variable for node in group["params"]))


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


def stage_sums_of(
    blocks: Mapping[int, nn.Module],
    params: Mapping[str, nn.Parameter],
    masters: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup | None,
) -> dict[int, StageSums]:
    """Return the sums of each stage of a rank, the last stage first, without parameters shared by two of its stages.

    Args:
        blocks: stage -> its modules.
        params: parameters with gradients that no other rank of the replica holds.
        masters: the parameters that the optimizer updates.
        group: the ranks of the same stages; None with one replica.
    """
    if group is None:
        return {}
    stages: dict[int, list[int]] = {}
    for stage, module in blocks.items():
        for param in module.parameters():
            stages.setdefault(id(param), []).append(stage)
    own = {
        stage: {name: param for name, param in params.items() if stages.get(id(param)) == [stage]} for stage in blocks
    }
    sums: dict[int, StageSums] = {}
    following: StageSums | None = None
    for stage in sorted(own):
        if own[stage]:
            following = StageSums(own[stage], masters, group, next_stage=following)
            sums = {stage: following, **sums}
    return sums


class ChunkStage(PipelineStage):
    """A stage of `torch.distributed.pipelining` for inputs of one shape.

    Shapes are given, so that torch runs no forward pass to infer them: that would change batch statistics.

    Args:
        traced: the computation of the model for these inputs.
        stage: number of the stage.
        around: the replica, called before and after each microbatch.
    """

    def __init__(self, traced: Traced, stage: int, around: PipelineReplica) -> None:
        span, meta = traced.segments[stage].span, torch.device("meta")
        super().__init__(
            traced.segments[stage],
            stage,
            around.held.cut.num_stages,
            around.device,
            input_args=tuple(one.meta.empty(meta) for one in span.received) if stage else traced.inputs,
            output_args=tuple(one.empty(meta) for one in span.made),
            group=around.pipeline,
        )
        self._segment, self._around = traced.segments[stage], around
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
        chunk = self._microbatches[fwd_chunk_id]
        with self._around.computing(), _unwrapped():
            self._around.before_forward(chunk)
            self._segment.set_inputs(chunk.inputs)
            autocast = self._around.precision.autocast(self._around.device_types)
            with autocast, self._around.scoring(fwd_chunk_id, self.stage_index):
                outputs = super().forward_one_chunk(fwd_chunk_id, chunk.tensors, kwargs, save_forward_output=False)
            self._around.after_forward(chunk, self.stage_index)
        return outputs

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
            found = self.bwd_cache.get(bwd_chunk_id, ())
            self.bwd_cache[bwd_chunk_id] = tuple(None if grad is None else grad.contiguous() for grad in found)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Run a backward pass, or one of its two parts; the first returns the passes of the second."""
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            for one in bwd_kwargs["param_groups"]:
                one.run()
            return (), None
        outputs, params = bwd_kwargs["stage_output"], [one for one in self.submod.parameters() if one.requires_grad]
        whole = WeightPass.of_outputs(outputs, bwd_kwargs["output_grads"], params)
        # torch detaches the outputs in place, which views refuse
        copied = tuple(one.clone() if one._is_view() else one for one in outputs)  # noqa: SLF001 - torch's name
        kwargs = bwd_kwargs | {"stage_output": copied}
        found, groups = super().backward_maybe_with_nosync(backward_type, kwargs, last_backward)
        return found, passes_of(groups or (), whole)

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


ShapeKey = tuple[Any, ...]

Score = Callable[[Sequence[Tensor], int], Tensor]
"""(outputs, number of the microbatch) -> the start value of the backward pass."""


Scoring = Callable[[int], AbstractContextManager[None]]
"""Number of a microbatch -> the context of its forward pass on the last stage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """The computation of the model for inputs of one shape, cut into stages."""

    program: Program
    inputs: tuple[Tensor, ...]
    """The tensors among the inputs of the model, on the meta device."""
    segments: dict[int, StageModule]
    """Stage -> its module, for the stages of this rank."""


class PipelineReplica(ShardedReplica):
    """The stages of one rank.

    Args:
        parts: its stages.
        held: the stages of all ranks, and those of this one.
        alike: the ranks that sum gradients.
        schedule: the order in which a rank computes microbatches.
        traced: the model that forward passes without data compute: whole, and without exchanges.
    """

    def __init__(
        self, parts: ReplicaParts, held: HeldStages, *, alike: Alike, schedule: ScheduleName, traced: nn.Module
    ) -> None:
        reload = partial(gathers_anew, parts.held.model)
        super().__init__(replace(parts, join_norms=self._join_norms), cuts=held.cuts, reload=reload)
        self.held, self.alike, self.schedule = held, alike, schedule
        self.pipeline: dist.ProcessGroup = held.mesh.get_group("pipe")
        """The ranks of the replica, in the order of the stages."""
        self.shards = held.group("shard")
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
        self._versions: list[tuple[int, int]] = []
        self._traced: dict[ShapeKey, Traced] = {}
        self._schedules: dict[tuple[Any, ...], tuple[Any, list[ChunkStage]]] = {}
        self._score: Score | None = None
        self._scoring: Scoring | None = None
        self._norms: tuple[tuple[Any, ...], Tensor, Tensor] | None = None
        """Indices of this rank's gradients -> their indices among all of the model, and whether they count here."""
        self._step = 0
        self._stage_sums: dict[int, StageSums] = {}
        """Stage -> the sums over replicas that start in its backward pass; empty until the used parameters are
        known.
        """
        self._is_last_group = False

    def begin_step(self, step: int, score: Score, scoring: Scoring) -> None:
        """Begin a step.

        Args:
            step: number of the step.
            score: maps (outputs of a microbatch, its number) to the start value of backward.
            scoring: the context of the forward pass of a microbatch on the last stage.
        """
        self._step, self._score, self._scoring = step, score, scoring
        for number, sums in enumerate(self._stage_sums.values()):
            sums.begin_step(is_first=number == 0)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measure the time of the block."""
        start = time.perf_counter()
        yield
        self.busy_s += time.perf_counter() - start

    def begin_group(self, *, is_last: bool) -> None:
        """Begin the microbatches of one shape, possibly the last ones of the step."""
        self._is_last_group = is_last

    def scoring(self, number: int, stage: int) -> AbstractContextManager[None]:
        """Return the context of the forward pass of a microbatch: on the last stage its loss may be computed inside."""
        if stage < self.held.cut.num_stages - 1 or self._scoring is None:
            return nullcontext()
        return self._scoring(number)

    def settle(self, *, used: Sequence[bool], buffers: Sequence[float]) -> None:
        """Store the used parameters and updated buffers on which all ranks have agreed."""
        self.used = list(used)
        if self.buffers.names:
            self.buffers.settle(buffers)
        self.settled = True
        here, holders = (self.held.position,), self.held.holders
        named = zip(self.params.items(), used, strict=True)
        summed = {name: param for (name, param), flag in named if flag and holders[name] == here}
        group = None if self.shards is not None else self.alike.get(here)
        self._stage_sums = stage_sums_of(self.held.blocks, summed, self.masters, group)

    def finish_sums(self) -> dict[str, Tensor]:
        """Wait for the sums that have begun in backward passes of this step, and return them by name."""
        found = self._stage_sums.values()
        totals = {name: total for sums in found for name, total in zip(sums.names, sums.finish(), strict=True)}
        return {name: total for name, total in totals.items() if total is not None}

    def owns(self, name: str) -> bool:
        """Return whether this rank writes a tensor that several hold whole."""
        held = self.held
        others = (held.places[axis] for axis in ("replicate", "shard", "tensor"))
        return held.holders[name][0] == held.position and not any(others)

    def trace(self, inputs: Any) -> Traced:
        """Trace the model with inputs of this shape; the result is the same on every rank.

        Raises:
            TrainingError: the model cannot be cut into these stages.
        """
        key, cut = (shape_key(inputs), self.model.training, torch.is_grad_enabled()), self.held.cut
        if key not in self._traced:
            whole = self._model_without_data
            for one, other in zip(whole.modules(), self.model.modules(), strict=True):
                one.training = other.training
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
                for stage, blocks in self.held.blocks.items()
            }
            tensors = (leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor))
            given = tuple(torch.empty_like(one, device="meta", requires_grad=False) for one in tensors)
            self._traced[key] = Traced(program=program, inputs=given, segments=segments)
        return self._traced[key]

    def forward_stage(self, inputs: Any) -> Any:
        """Run the model's own forward pass, of which a stage computes its calls."""
        self.runs_stage = True
        try:
            return self.model(inputs)
        finally:
            self.runs_stage = False

    def schedule_of(self, traced: Traced, count: int) -> tuple[Any, list[ChunkStage]]:
        """Return the schedule for `count` microbatches of one shape, and the stages on this rank; cached."""
        key = id(traced), count
        if key not in self._schedules:
            stages = [ChunkStage(traced, stage, self) for stage in self.held.blocks]
            self._schedules[key] = make_schedule(self.schedule, stages, count, self._scored), stages
        return self._schedules[key]

    def _scored(self, outputs: Any, number: Tensor) -> Tensor:
        assert self._score is not None
        # A view of the numbers from 0 on: its offset encodes the number, and its value is not read.
        return self._score(outputs, int(number.storage_offset()))

    def before_forward(self, chunk: Chunk) -> None:
        """Set the random key of the shard."""
        self.keys.enter(step=self._step, shard=chunk.shard)
        if self.buffers.names and not self.settled:
            self._versions = self.buffers.versions()

    def after_forward(self, chunk: Chunk, stage: int) -> None:
        """Weight the buffers after the shard, and restore them."""
        if not self.buffers.names:
            return
        if not self.settled:
            new = self.buffers.changed_since(self._versions)
            self.changed = [max(pair) for pair in zip(self.changed or new, new, strict=True)]
        if chunk.counts:
            self.buffers.end_forward(chunk.share, within=set(self.held.blocks[stage].modules()))
        self.buffers.reset()

    @contextmanager
    def backward(self, stage: int, *, is_last: bool) -> Iterator[None]:
        """Collect the gradients of a backward pass of a stage: in sums over replicas, or in separate masters.

        Args:
            stage: number of the stage.
            is_last: whether no pass of the stage follows for microbatches of this shape.
        """
        sums, is_last = self._stage_sums.get(stage), is_last and self._is_last_group
        if sums is not None:
            sums.begin_backward(sums.params, is_last=is_last)
        yield
        if sums is not None:
            sums.end_backward()
        if self.masters_apart:
            self.accumulate_in_masters()

    def _join_norms(self, norms: Tensor, held: Sequence[int], order: float) -> Tensor:
        """Return the norms of all gradients of the model, from those that this rank holds, or parts of them; collective
        over all ranks.
        """
        key, axes = (*held, norms.dtype), self.held.axes
        if self._norms is None or self._norms[0] != key:
            trained = [name for name, param in self.owners.items() if param.requires_grad]
            numbers, names = {name: at for at, name in enumerate(trained)}, list(self.params)
            chosen = torch.tensor([numbers[names[at]] for at in held], dtype=torch.int64, device=norms.device)
            counts = torch.tensor([self.cuts[names[at]].is_written for at in held], device=norms.device)
            self._norms = key, chosen, counts
        _, chosen, counts = self._norms
        found = norms.new_zeros(sum(param.requires_grad for param in self.owners.values()))
        if order == float("inf"):
            found[chosen] = torch.where(torch.isfinite(norms), norms, order)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return found
        power = order if axes.shard * axes.tensor > 1 else 1.0  # each whole norm counts on one rank
        found[chosen] = torch.where(counts, norms**power, 0.0)
        dist.all_reduce(found)
        return found ** (1 / power)


def shape_key(inputs: Any) -> ShapeKey:
    """Return the properties of inputs on which the computation of the model depends."""
    leaves, spec = tree_flatten(inputs)
    return str(spec), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
