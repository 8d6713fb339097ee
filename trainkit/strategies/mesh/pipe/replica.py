"""The stages of a rank of a pipeline, their schedules, and the groups of ranks with the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_flatten

from trainkit.errors import TrainingError
from trainkit.strategies.core.replica import ReplicaParts
from trainkit.strategies.mesh.pipe.forward import CannotCut, Program, trace
from trainkit.strategies.mesh.pipe.groups import Groups
from trainkit.strategies.mesh.pipe.microbatch import BusyTimer, Chunk
from trainkit.strategies.mesh.pipe.schedules import ScheduleName, make_schedule
from trainkit.strategies.mesh.pipe.split_backward import WeightPass, passes_of
from trainkit.strategies.mesh.pipe.stage_assignment import StageAssignment, blocks_to_cut
from trainkit.strategies.mesh.pipe.stage_module import Blocks, StageModule
from trainkit.strategies.mesh.pipe.stage_sums import StageSums, stage_sums_of
from trainkit.strategies.mesh.pipe.validation import run_problems
from trainkit.strategies.mesh.sharding import Axes, gathers_anew
from trainkit.strategies.mesh.step import ShardedReplica, ShardSlice


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
            around.cut.num_stages,
            around.device,
            input_args=tuple(one.meta.empty(meta) for one in span.received) if stage else traced.inputs,
            output_args=tuple(one.empty(meta) for one in span.made),
            group=around.groups.replica,
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
        with self._around.clock.running(), _unwrapped():
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
        with around.clock.running(), _unwrapped(), around.backward(self.stage_index, is_last=last_backward):
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
        with around.clock.running(), _unwrapped(), around.backward(self.stage_index, is_last=last_backward):
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


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The ranks of the stages, and the stages of this rank."""

    cut: StageAssignment
    """The assignment of all stages."""
    axes: Axes
    """The axes along which all ranks are arranged."""
    rank: int
    """This rank."""
    schedule: ScheduleName
    """The order in which a rank computes microbatches."""
    groups: Groups
    """The process groups that sum gradients."""
    holders: dict[str, tuple[int, ...]]
    """Parameter or buffer -> the positions in the pipeline that hold it."""
    blocks: dict[int, Blocks]
    """Stage -> its modules, for the stages of this rank."""
    buffer_names: list[str]
    """Canonical names of this rank's buffers, in the order of the step's buffers."""
    shards: dist.ProcessGroup | None
    """The ranks of `shard`; None: this one alone."""
    traced: nn.Module
    """The model that forward passes without data compute: whole, and without exchanges."""


@dataclass(frozen=True, kw_only=True)
class _Homes:
    """Cache: the parameters whose gradient norms each rank of a replica contributes."""

    key: tuple[int, ...]
    """Key of the cache: indices of this rank's parameters that have gradients."""
    own: Tensor
    """int64: indices of the parameters whose norms this rank contributes."""
    sizes: list[int]
    """Number of norms that each rank of the replica contributes."""


class PipelineReplica(ShardedReplica):
    """The stages of one rank.

    Args:
        parts: its stages.
        layout: the stages of all ranks.
        cuts: the slice of each parameter of these stages; empty if they are whole.
    """

    def __init__(self, parts: ReplicaParts, layout: StageLayout, cuts: Mapping[str, ShardSlice]) -> None:
        reload = partial(gathers_anew, parts.held.model)
        join = self.join_parts if cuts else self.join_all_norms
        super().__init__(replace(parts, join_norms=join), cuts=cuts, reload=reload)
        self.cut, self.num_stage_ranks = layout.cut, layout.axes.pipe
        self.places = layout.axes.coordinates(layout.rank)
        self.place = self.places["pipe"]
        """Position of this rank among those with the stages of a replica; stage i is on i modulo their number."""
        self.shards, self.traced = layout.shards, layout.traced
        self.gathers = layout.shards is not None
        """Whether parameters are gathered to compute, so that the ranks of `shard` need equal microbatches."""
        self.schedule, self.groups, self.holders = layout.schedule, layout.groups, layout.holders
        self.blocks, self.buffer_names = layout.blocks, layout.buffer_names
        self.clock = BusyTimer()
        self.runs_stage = False
        """Whether a call of the model is the pass of one stage."""
        self.settled = False
        """Whether the updated buffers and used parameters are known."""
        self.changed: list[float] = []
        """A flag per buffer of this rank: whether a forward pass of the first step has updated it."""
        self._versions: list[tuple[int, int]] = []
        self._traced: dict[ShapeKey, Traced] = {}
        self._schedules: dict[tuple[Any, ...], tuple[Any, list[ChunkStage]]] = {}
        self._score: Score | None = None
        self._homes: _Homes | None = None
        self._scoring: Scoring | None = None
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

    def begin_group(self, *, is_last: bool) -> None:
        """Begin the microbatches of one shape, possibly the last ones of the step."""
        self._is_last_group = is_last

    def scoring(self, number: int, stage: int) -> AbstractContextManager[None]:
        """Return the context of the forward pass of a microbatch: on the last stage its loss may be computed inside."""
        if stage < self.cut.num_stages - 1 or self._scoring is None:
            return nullcontext()
        return self._scoring(number)

    def settle(self, *, used: Sequence[bool], buffers: Sequence[float]) -> None:
        """Store the used parameters and updated buffers on which all ranks have agreed."""
        self.used = list(used)
        if self.buffers.names:
            self.buffers.settle(buffers)
        self.settled = True
        here = (self.place,)
        named = zip(self.params.items(), used, strict=True)
        summed = {name: param for (name, param), flag in named if flag and self.holders[name] == here}
        group = None if self.gathers else self.groups.alike.get(here)
        self._stage_sums = stage_sums_of(self.blocks, summed, self.masters, group)

    def finish_sums(self) -> dict[str, Tensor]:
        """Wait for the sums that have begun in backward passes of this step, and return them by name."""
        found = self._stage_sums.values()
        totals = {name: total for sums in found for name, total in zip(sums.names, sums.finish(), strict=True)}
        return {name: total for name, total in totals.items() if total is not None}

    @property
    def stages_here(self) -> list[int]:
        """The numbers of this rank's stages."""
        return sorted(self.blocks)

    def is_home(self, name: str) -> bool:
        """Return whether this is the first rank of its replica that holds a tensor."""
        return self.holders[name][0] == self.place

    def owns(self, name: str) -> bool:
        """Return whether this rank writes a tensor that several hold whole."""
        others = (self.places[axis] for axis in ("replicate", "shard", "tensor"))
        return self.is_home(name) and not any(others)

    def trace(self, inputs: Any) -> Traced:
        """Trace the model with inputs of this shape; the result is the same on every rank.

        Raises:
            TrainingError: the model cannot be cut into these stages.
        """
        key = (shape_key(inputs), self.model.training, torch.is_grad_enabled())
        if key not in self._traced:
            for one, other in zip(self.traced.modules(), self.model.modules(), strict=True):
                one.training = other.training
            try:
                program = trace(
                    self.traced,
                    blocks_to_cut(self.traced),
                    inputs,
                    device=self.device,
                    autocast=self.precision.autocast(self.device_types),
                    grad=torch.is_grad_enabled(),
                )
            except CannotCut as error:
                raise TrainingError(f"the model cannot be cut into stages: {error}. {error.remedy}") from error
            if problems := run_problems(self.cut, program):
                raise TrainingError("; ".join(map(str, problems)))
            starts = program.starts(self.cut.stage_of, self.cut.num_stages)
            segments = {
                stage: StageModule(
                    self.blocks[stage],
                    program.span(starts[stage], starts[stage + 1]),
                    self.cut,
                    self.forward_stage,
                    self.device,
                )
                for stage in self.stages_here
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
            stages = [ChunkStage(traced, stage, self) for stage in self.stages_here]
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
            self.buffers.end_forward(chunk.share, within=set(self.blocks[stage].modules()))
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

    def join_all_norms(self, norms: Tensor, held: Sequence[int], order: float) -> Tensor:
        """Return the norms of all gradients of the model, each once; collective; synchronises with the device only
        once.
        """
        del order
        key = tuple(held)
        if self._homes is None or self._homes.key != key:
            names = list(self.params)
            own = [at for at, place in enumerate(held) if self.is_home(names[place])]
            sizes = self.all_ranks.gather(torch.tensor([len(own)]))[: self.num_stage_ranks]
            self._homes = _Homes(
                key=key, own=torch.tensor(own, device=norms.device), sizes=[int(size) for size in sizes]
            )
        homes = self._homes
        return self.groups.gather_in_replica(norms.index_select(0, homes.own), homes.sizes)

    def join_parts(self, norms: Tensor, held: Sequence[int], order: float) -> Tensor:
        """Return the norms of all gradients of the model, from those of parts; collective over all ranks."""
        names, numbers = list(self.params), {name: at for at, name in enumerate(self.owners)}
        every = torch.tensor([numbers[names[at]] for at in held], device=self.device)
        found = torch.zeros(len(numbers), dtype=norms.dtype, device=self.device)
        if order == float("inf"):
            found[every] = torch.where(torch.isfinite(norms), norms, order)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return found
        written = [float(self.cuts[names[at]].is_written) for at in held]
        found[every] = norms**order * torch.tensor(written, dtype=norms.dtype, device=self.device)
        dist.all_reduce(found)
        return found ** (1 / order)


def shape_key(inputs: Any) -> ShapeKey:
    """Return the properties of inputs on which the computation of the model depends."""
    leaves, spec = tree_flatten(inputs)
    return str(spec), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
