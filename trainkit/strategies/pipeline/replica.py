"""What a rank of a pipeline works on: its stages, their schedules, and what it shares with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from trainkit.errors import TrainingError
from trainkit.strategies.core.object_snapshot import ObjectSnapshot
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.pipeline.chunks import BusyTimer, Chunk, ChunkStage, MicrobatchHooks
from trainkit.strategies.pipeline.groups import Groups
from trainkit.strategies.pipeline.schedules import ScheduleName, make_schedule
from trainkit.strategies.pipeline.stage_assignment import StageAssignment
from trainkit.strategies.pipeline.tracing.program import Program, StageProgram
from trainkit.strategies.pipeline.tracing.python_state import contents_outside
from trainkit.strategies.pipeline.tracing.stage_module import Blocks, StageModule
from trainkit.strategies.pipeline.tracing.trace import CannotCut, trace
from trainkit.strategies.pipeline.validation import run_problems

__all__ = ["PipelineReplica", "Traced", "shape_key"]

ShapeKey = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """What the model does with inputs of one shape, cut into stages."""

    program: Program
    stretches: tuple[StageProgram, ...]
    segments: dict[int, StageModule]
    """Stage -> what computes it, for the stages of this rank."""


@dataclass(kw_only=True)
class PipelineReplica(Replica, MicrobatchHooks):
    """The stages of one rank."""

    cut: StageAssignment
    """All stages."""
    num_stage_ranks: int
    """Ranks of the replica; stage i is on rank i modulo this."""
    place: int
    """Of this rank among them."""
    schedule: ScheduleName
    groups: Groups
    """Whom gradients are added up with."""
    holders: dict[str, tuple[int, ...]]
    """Parameter or buffer -> the places in the pipeline that hold it."""
    blocks: dict[int, Blocks]
    """Stage -> its modules, for the stages of this rank."""
    buffer_names: list[str]
    """Canonical names of this rank's buffers, in the order of `buffers.names`."""
    whole_forward: Any
    """The forward pass of the model as a whole; calling the model goes through the stages instead."""
    score: Callable[[Sequence[Tensor], int], Tensor] | None = None
    """What the last stage scores a microbatch with in this step: (outputs, its number) -> where backward begins."""
    clock: BusyTimer = field(default_factory=BusyTimer)
    settled: bool = False
    """Whether the first step has shown which buffers are updated and which parameters are used."""
    changed: list[float] = field(default_factory=list)
    """A flag a buffer of this rank: whether a forward pass of the first step has updated it."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    traced: dict[ShapeKey, Traced] = field(default_factory=dict)
    schedules: dict[tuple[Any, ...], tuple[Any, list[ChunkStage]]] = field(default_factory=dict)
    own_code: ObjectSnapshot | None = None
    """What the attributes of the model's own code held when the traces were made."""
    step_now: int = 0
    """The step whose microbatches are computed."""

    @property
    def stages_here(self) -> list[int]:
        """The numbers of this rank's stages."""
        return sorted(self.blocks)

    def is_home(self, name: str) -> bool:
        """Whether this is the rank of its replica that answers for a tensor which several hold."""
        return self.holders[name][0] == self.place

    def trace(self, inputs: Any) -> Traced:
        """What the model does with inputs of this shape; the same on every rank.

        Raises:
            TrainingError: it cannot be cut into these stages.
        """
        self._forget_outdated()
        grad = torch.is_grad_enabled()
        key = (shape_key(inputs), self.model.training, grad)
        if key not in self.traced:
            program = self._program(inputs, grad=grad)
            problems = run_problems(self.cut, program)
            if problems:
                raise TrainingError("; ".join(map(str, problems)))
            stretches = program.cut(self.cut.stage_of, self.cut.num_stages)
            segments = {
                stage: StageModule(self.blocks[stage], stretches[stage], program.shapes) for stage in self.stages_here
            }
            self.traced[key] = Traced(program=program, stretches=tuple(stretches), segments=segments)
        return self.traced[key]

    def _forget_outdated(self) -> None:
        """Forget all traces where an attribute between blocks was changed, by a callback for instance.

        A trace holds the values that attributes had when it was made. The mode of a module is part of a trace's key.
        """
        changed = [] if self.own_code is None else [name for name, _ in self.own_code.changed()]
        if self.own_code is None or any(name.rpartition(".")[2] != "training" for name in changed):
            self.traced.clear()
            self.schedules.clear()
            self.own_code = contents_outside(self.model, self.cut.units)

    def _program(self, inputs: Any, *, grad: bool) -> Program:
        with self.as_a_whole():
            try:
                return trace(
                    self.model,
                    self.cut.units,
                    inputs,
                    device=self.device,
                    autocast=self.precision.autocast(self.device_types),
                    grad=grad,
                )
            except CannotCut as error:
                raise TrainingError(f"the model cannot be cut into stages: {error}. {error.remedy}") from error

    @contextmanager
    def as_a_whole(self) -> Iterator[None]:
        """Let a call of the model be its own forward pass."""
        staged, self.model.forward = self.model.forward, self.whole_forward
        try:
            yield
        finally:
            self.model.forward = staged

    def schedule_of(self, traced: Traced, count: int) -> tuple[Any, list[ChunkStage]]:
        """The schedule of so many microbatches of one shape, and its stages here; made once."""
        key = id(traced), count
        if key not in self.schedules:
            stages = [
                ChunkStage(
                    traced.segments[stage],
                    traced.stretches[stage],
                    traced.program,
                    stage=stage,
                    num_stages=self.cut.num_stages,
                    device=self.device,
                    group=self.groups.replica,
                    around=self,
                    autocast=lambda: self.precision.autocast(self.device_types),
                )
                for stage in self.stages_here
            ]
            self.schedules[key] = make_schedule(self.schedule, stages, count, self._scored), stages
        return self.schedules[key]

    def _scored(self, outputs: Any, number: Tensor) -> Tensor:
        assert self.score is not None
        return self.score(outputs, int(number))

    def before_forward(self, chunk: Chunk) -> None:
        """Key the shard's random numbers; the model's own code is keyed by calls of its program."""
        self.keys.enter(step=self.step_now, shard=chunk.shard)
        if self.buffers.names and not self.settled:
            self.versions = self.buffers.versions()

    def after_forward(self, chunk: Chunk, stage: int) -> None:
        """Weight the buffers that the shard has left, and put them back."""
        if not self.buffers.names:
            return
        if not self.settled:
            new = self.buffers.changed_since(self.versions)
            self.changed = [max(pair) for pair in zip(self.changed or new, new, strict=True)]
        if chunk.counts:
            self.buffers.end_forward(chunk.share, within=set(self.blocks[stage].modules()))
        self.buffers.reset()

    def after_backward(self) -> None:
        """Add up gradients in the masters' numbers, where those are apart."""
        if self.masters_apart:
            self.accumulate_in_masters()

    def join_all_norms(self, norms: Tensor, held: Sequence[int], order: float) -> Tensor:
        """The norms of all gradients of the model, each once; collective."""
        del order
        names = list(self.params)
        own = [at for at, place in enumerate(held) if self.is_home(names[place])]
        rows = self.all_ranks.gather(norms[own])
        return torch.cat(rows[: self.num_stage_ranks])


def shape_key(inputs: Any) -> ShapeKey:
    """What of some inputs decides what a model does with them."""
    leaves, spec = tree_flatten(inputs)
    return str(spec), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
