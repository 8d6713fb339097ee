"""The stages of a model along `pipe`: the schedule of their microbatches, and the blocks of each, by the user's map or
balanced by bytes; what is refused before a run starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from trainkit.cluster.host import mig_instances
from trainkit.errors import ConfigError, Problem
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Supervised
from trainkit.strategies.base import ModelMemory, PlanContext, ReplicaPart, StagePart, StepCut
from trainkit.strategies.core.refusals import counted_statistics_problems
from trainkit.strategies.core.step import sparse_problems
from trainkit.strategies.maps.layout import (
    MemoryLimits,
    activations_of,
    balanced,
    model_bytes,
    part_of,
    with_activations,
)
from trainkit.strategies.maps.syntax import (
    Block,
    assign,
    blocks_of,
    collapsed,
    distinct_tensors,
    names_of,
    uncovered,
    whole_block,
)
from trainkit.strategies.mesh.layout import Layout
from trainkit.strategies.mesh.pipe.forward import CannotCut, Program, programs_of

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


_SEVERAL = ("interleaved", "zero_bubble")
"""The schedules under which a rank may have several stages."""


def padded_microbatches(schedule: ScheduleName, count: int, num_ranks: int) -> int:
    """Return the number of microbatches for a schedule: `count` or a few more, which are repetitions without effect.

    Interleaved and zero-bubble schedules process their microbatches in equal rounds of at least one per rank.

    Example:
        >>> [padded_microbatches("interleaved", count, 2) for count in (1, 2, 3, 5)]
        [1, 2, 3, 6]
    """
    if schedule not in _SEVERAL:
        return count
    while count % max(1, count // num_ranks):
        count += 1
    return count


def ideal_bubble(schedule: ScheduleName, count: int, *, num_ranks: int, stages_a_rank: int) -> float:
    """Return the fraction of a step that each rank waits, for equal stages and no communication time.

    With p ranks, m microbatches and v stages per rank: (p - 1) / (v m + p - 1). A zero-bubble schedule computes weight
    gradients, a third of the work, during the gaps: (p - 1) / (3 v m + p - 1).

    Example:
        >>> ideal_bubble("1f1b", 9, num_ranks=4, stages_a_rank=1)
        0.25

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2023, arXiv:2401.10241, section 3.
    """
    work = stages_a_rank * count * (3 if schedule == "zero_bubble" else 1)
    return (num_ranks - 1) / (work + num_ranks - 1)


def make_schedule(
    schedule: ScheduleName, stages: Sequence[PipelineStage], count: int, loss: Callable[[Any, Any], Any]
) -> Any:
    """Create torch's schedule for a number of microbatches; it does not scale gradients.

    1F1B with fewer microbatches than stages is GPipe: all forward passes come before the first backward pass.
    """
    from torch.distributed import pipelining  # noqa: PLC0415 - slow to import, and needed only by ranks with stages

    if schedule == "interleaved":
        return pipelining.ScheduleInterleaved1F1B(list(stages), count, loss_fn=loss, scale_grads=False)
    if schedule == "zero_bubble":
        return pipelining.ScheduleInterleavedZeroBubble(list(stages), count, loss_fn=loss, scale_grads=False)
    (stage,) = stages
    if schedule == "1f1b" and count >= stage.num_stages:
        return pipelining.Schedule1F1B(stage, count, loss_fn=loss, scale_grads=False)
    return pipelining.ScheduleGPipe(stage, count, loss_fn=loss, scale_grads=False)


def in_forward_order(units: Sequence[Block], programs: Sequence[Program]) -> tuple[Block, ...]:
    """Return blocks in the order in which a model calls them first.

    A block that is not called follows the previous block.

    Args:
        units: the blocks, in the order in which the model names them.
        programs: the recorded passes of the model; the first one gives the order. Empty: the order is unchanged.
    """
    if not programs:
        return tuple(units)
    first: dict[str, int] = {}
    for name in programs[0].blocks:
        first.setdefault(name, len(first))
    keys, last = [], -1
    for unit in units:
        last = first.get(unit.name, last)
        keys.append(last)
    return tuple(unit for _, unit in sorted(zip(keys, units, strict=True), key=lambda pair: pair[0]))


def leaders_among(units: Sequence[Block], programs: Sequence[Program]) -> list[int]:
    """Return for each block the position of the first block whose stage it must share; its own position if it is free.

    Blocks must share a stage between two calls of a block, and where no tensor can be sent that later code uses.
    """
    index_of = {unit.name: index for index, unit in enumerate(units)}
    leaders = list(range(len(units)))
    for program in programs:
        indices = [index_of[name] for name in program.blocks]
        for call, (current, crossing) in enumerate(zip(indices, program.crossings, strict=True)):
            furthest = max(indices[:call], default=-1)
            if call and (current < furthest or (current > furthest and isinstance(crossing, CannotCut))):
                for index in range(min(current, furthest), max(current, furthest) + 1):
                    leaders[index] = min(leaders[index], current, furthest)
    for index in range(len(leaders) - 2, -1, -1):  # overlapping ranges are merged
        later = min(leaders[index + 1 :])
        leaders[index] = min(leaders[index], later) if later <= index else leaders[index]
    return leaders


@dataclass(frozen=True, kw_only=True)
class StageAssignment:
    """The blocks of a model with the stage of each."""

    units: tuple[Block, ...]
    stages: tuple[int, ...]
    """The stage of each block."""
    num_stages: int

    @property
    def stage_of(self) -> dict[str, int]:
        """Block -> stage."""
        return {unit.name: stage for unit, stage in zip(self.units, self.stages, strict=True)}

    def members(self, stage: int) -> list[Block]:
        """Return the blocks of a stage, in the order in which the model names them."""
        return [unit for unit, unit_stage in zip(self.units, self.stages, strict=True) if unit_stage == stage]

    def holders(self, model: nn.Module, num_ranks: int) -> dict[str, tuple[int, ...]]:
        """Return parameter or buffer, by canonical name -> the positions along `pipe` whose stages hold it.

        Most tensors are on one position. A tied one is on each stage that has one of its names; tensors that the model
        owns itself are on all.
        """
        positions_of: dict[int, set[int]] = {}
        for unit, stage in zip(self.units, self.stages, strict=True):
            for _, tensor in unit.tensors():
                positions_of.setdefault(id(tensor), set()).add(stage % num_ranks)
        everywhere = set(range(num_ranks))
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: tuple(sorted(positions_of.get(id(tensor), everywhere))) for name, tensor in named}

    def words(self) -> str:
        """Return the assignment as a map, for messages: `embed:0,blocks.0-5:0,rest:1`."""
        runs = groupby(zip(self.units, self.stages, strict=True), key=lambda pair: pair[1])
        named = [(stage, collapsed([unit.name for unit, _ in members])) for stage, members in runs]
        return "{" + ",".join(f"{word}:{stage}" for stage, words in named for word in words) + "}"


def blocks_to_cut(model: nn.Module) -> tuple[Block, ...]:
    """Return the blocks between which a pipeline may cut, each consisting of one callable module.

    A block that consists of the rest around a list of others (a `transformer` around its `h`) is split into its parts,
    which may be on different stages. A tensor that the model owns itself belongs to the code that uses it.

    Example:
        >>> [unit.name for unit in blocks_to_cut(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
        ['0', '1']
    """
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(_single(model), key=lambda unit: order[unit.name]))


def _single(model: nn.Module) -> Iterator[Block]:
    names = {id(module): name for name, module in model.named_modules()}
    units = blocks_of(model)
    called = {id(entry) for unit in units for entry in unit.entries}
    for unit in units:
        for entry in unit.entries:
            inner = {id(module) for module in entry.modules()} - {id(entry)}
            if not inner & called:
                yield whole_block(names[id(entry)], entry)


def _balanced(
    units: Sequence[Block],
    num_stages: int,
    bytes_of: Callable[[Tensor], int],
    activations: Sequence[int] | None,
    leaders: Sequence[int],
    *,
    key: str,
) -> StageAssignment | list[Problem]:
    # every stage must contain trained parameters, so untrained blocks count as zero
    counted = [sum(map(bytes_of, distinct_tensors([unit]))) if _is_trained(unit) else 0 for unit in units]
    last = None
    for index, more in enumerate(activations or ()):
        # the activations of untrained blocks count in the trained one before
        last = index if counted[index] else last
        if last is not None:
            counted[last] += more
    anywhere = [math.inf] * num_stages
    stages = balanced(counted, anywhere, leaders=leaders, fill=True)
    if stages is None:  # then the recorded passes determine which blocks must share a stage
        stages = balanced(counted, anywhere, leaders=range(len(units)), fill=True)
    if stages is None:
        most = sum(size > 0 for size in counted)
        rule = f"the model has {most} blocks with parameters to train. Use {most} stages or fewer in all."
        return [Problem(key=key, value=num_stages, rule=rule)]
    return StageAssignment(units=tuple(units), stages=tuple(stages), num_stages=num_stages)


def _is_trained(unit: Block) -> bool:
    return any(tensor.requires_grad for _, tensor in unit.tensors())


def misfits(
    cut: StageAssignment, programs: Sequence[Program], *, better: StageAssignment | None = None
) -> list[Problem]:
    """Return problems of a stage assignment; `better` is named as the remedy. Without programs, those of the order of
    blocks only.
    """
    if not programs:
        return _order_problems(cut, [unit.name for unit in cut.units], better)
    problems = [problem for program in programs for problem in run_problems(cut, program, better=better)]
    return list(dict.fromkeys(problems))


def _order_problems(cut: StageAssignment, ran: Sequence[str], better: StageAssignment | None) -> list[Problem]:
    """Return a problem if the stages are not in the order of the blocks."""
    stages = [cut.stage_of[name] for name in ran]
    index = next((i for i, (before, after) in enumerate(pairwise(stages)) if before > after), None)
    if index is None:
        return []
    text = f"goes back from stage {stages[index]} ({ran[index]}) to stage {stages[index + 1]} ({ran[index + 1]})"
    twice = next((name for name in ran if ran.count(name) > 1), None)
    use = "" if better is None else f" Use {better.words()}."
    if twice is not None:
        rule = f"{text}, and the model runs {twice} more than once. Put all blocks between its calls on its stage.{use}"
        return [Problem(key="strategy.map", rule=rule)]
    changes = sum(before != after for before, after in pairwise(stages))
    rule = (
        f"{text}; activations change their stage {changes} time{'' if changes == 1 else 's'}, and "
        f"{cut.num_stages - 1} would suffice. "
        f"A pipeline runs forwards{'.' if better is None else f': use {better.words()}.'}"
    )
    return [Problem(key="strategy.map", rule=rule)]


def run_problems(cut: StageAssignment, program: Program, *, better: StageAssignment | None = None) -> list[Problem]:
    """Return problems of one recorded pass: the order of its blocks, and tensors that are used on other stages."""
    if problems := _order_problems(cut, program.blocks, better):
        return problems
    for call in program.starts(cut.stage_of, cut.num_stages)[1:-1]:
        if call < len(program.blocks) and isinstance(error := program.crossings[call], CannotCut):
            return [Problem(key="model", rule=f"cannot be cut before {program.blocks[call]}: {error}. {error.remedy}")]
    for name, block in program.used.items():
        rule = f"its own code uses {name} after {block}, and every stage runs that code. Move it into a block, "
        return [Problem(key="model", rule=f"cannot be cut into stages: {rule}or use strategy=fsdp.")]
    return []


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The settings of the axis `pipe`, whose ranks hold the stages of a model."""

    pipe: int
    """Number of ranks with the stages of a replica."""
    schedule: ScheduleName = "1f1b"
    virtual_stages: int | None = None
    """Stages of each rank; None: 2 if the schedule is interleaved, else 1."""
    map: Mapping[str, int | str] | Literal["auto"] = "auto"
    max_memory: float | Mapping[str, float] | None = None
    """GiB that a rank takes."""
    key: str = "strategy.pipe"
    """The key that sets `pipe`."""

    @property
    def a_rank(self) -> int:
        """Number of stages of each rank."""
        if self.virtual_stages is not None:
            return self.virtual_stages
        return 2 if self.schedule == "interleaved" else 1

    @property
    def _limits(self) -> MemoryLimits:
        return MemoryLimits(limits=self.max_memory, names=[str(rank) for rank in range(self.pipe)], noun="rank")

    def problems(self, context: PlanContext) -> list[Problem]:
        """Return the problems of the keys in a context."""
        problems, several = list[Problem](), self.schedule in _SEVERAL
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):  # its schedules need a microbatch per stage
            rule = f"needs torch 2.11 or newer, and this is {torch.__version__}."
            problems.append(Problem(key=self.key, value=self.pipe, rule=rule))
        if context.num_gpus and mig_instances(os.environ):
            rule = "sends tensors between GPUs, which MIG instances cannot: NCCL does not support them, and gloo sends "
            rule += "memory of the host alone. Use whole GPUs, or another strategy."
            problems.append(Problem(key=self.key, value=self.pipe, rule=rule))
        if not several and self.a_rank > 1:
            rule = f"schedule={self.schedule} has one stage per rank. Use interleaved, or leave it out."
            problems.append(Problem(key="strategy.virtual_stages", value=self.virtual_stages, rule=rule))
        if self.schedule == "interleaved" and self.a_rank == 1:
            rule = "interleaves nothing. Use 2 or more, or schedule=1f1b."
            problems.append(Problem(key="strategy.virtual_stages", value=self.virtual_stages, rule=rule))
        if context.numerics.reproducible:
            rule = "does not work with a pipeline, which sums in its own order. Leave it out."
            problems.append(Problem(key="numerics.reproducible", value=True, rule=rule))
        if isinstance(context.objective, Supervised) and isinstance(context.objective.input, list | tuple):
            rule = "names several fields, and a pipeline passes its model one. Name one, or use another strategy."
            problems.append(Problem(key="objective.input", value=context.objective.input, rule=rule))
        if self.map == {}:
            rule = "places nothing. Name modules and their stages, {embed:0,rest:1}, or use auto."
            problems.append(Problem(key="strategy.map", value="{}", rule=rule))
        return problems + self._limits.problems()

    def assigned(
        self, model: nn.Module, precision: Precision, context: PlanContext | None = None
    ) -> StageAssignment | list[Problem]:
        """Assign the blocks of a model, which may be on the meta device, to stages.

        Args:
            model: the model.
            precision: the precision of the run, which determines the bytes of a tensor.
            context: used for the recorded forward passes of the model and the activations of a shard, which the balance
                counts; None: blocks are assumed to run in the order of the model.

        Returns:
            The assignment, with the blocks in the order in which they run, or every problem of the map.
        """
        stage_map, num_stages = self.map if isinstance(self.map, Mapping) else None, self.pipe * self.a_rank
        recorded = () if context is None else programs_of(model, blocks_to_cut(model), context)
        programs = () if isinstance(recorded, list) else recorded
        units = in_forward_order(blocks_to_cut(model), programs)
        if stage_map is None:
            activations = activations_of(model, units, context, precision)
            return _balanced(
                units, num_stages, model_bytes(precision), activations, leaders_among(units, programs), key=self.key
            )
        assigned, valid = assign(model, units, stage_map), range(num_stages)
        problems = assigned.problems or [
            Problem(key=f"strategy.map.{word}", value=place, rule=f"no such stage: there are 0 to {num_stages - 1}.")
            for word, place in stage_map.items()
            if isinstance(place, str) or place not in valid
        ]
        if not problems and (missing := [str(stage) for stage in valid if stage not in stage_map.values()]):
            many = "s" if len(missing) > 1 else ""
            rule = f"puts no block on stage{many} {', '.join(missing)} of {num_stages}. Every stage needs a block."
            problems = [Problem(key="strategy.map", rule=rule)]
        if not assigned.problems:
            problems += uncovered(units, assigned, noun="stage")
        if problems:
            return problems
        # A key of a whole block, as `transformer` in {transformer:0,transformer.h.1:1}, names its first parts and its
        # last norm at once, because a device map cuts between blocks only. A pipeline runs forwards: the norm moves to
        # the stage of the previous layer. So do blocks without tensors that no key names.
        blocks, stages, furthest = {unit.name for unit in blocks_of(model)}, list[int](), 0
        for unit, place, key in zip(units, assigned.places, assigned.keys, strict=True):
            stage = (stages[-1] if stages else 0) if place is None else int(place)
            stages.append(max(stage, furthest) if key in blocks and unit.name not in blocks else stage)
            furthest = max(furthest, stages[-1])
        cut = StageAssignment(units=units, stages=tuple(stages), num_stages=num_stages)
        return [
            Problem(
                key="strategy.map",
                rule=f"stage {stage} ({', '.join(collapsed([unit.name for unit in cut.members(stage)]))}) has no "
                "parameter to train. Put a block with parameters there.",
            )
            for stage in valid
            if not any(_is_trained(unit) for unit in cut.members(stage))
        ] or cut

    def model_problems(self, model: nn.Module, layout: Layout, context: PlanContext) -> list[Problem]:
        """Return the problems of the map for a model, and of the model for stages in a layout."""
        precision = context.formats
        cut = self.assigned(model, precision, context)
        if not isinstance(cut, StageAssignment):
            return cut
        if self.max_memory is not None and (problems := self._exceeded(model, cut, precision, context)):
            return problems
        problems = sparse_problems(model, "which are not summed")
        problems += counted_statistics_problems(
            model, context, because="a rank of a pipeline has those of its stages only"
        )
        programs = programs_of(model, cut.units, context)
        if isinstance(programs, list):
            return problems or programs
        if not problems and (problems := misfits(cut, programs)):
            better = replace(self, map="auto").assigned(model, precision, context)
            if isinstance(better, StageAssignment) and not misfits(better, programs):
                problems = misfits(cut, programs, better=better)
        return problems or self._cut_problems(model, cut, layout)

    def _exceeded(
        self, model: nn.Module, cut: StageAssignment, precision: Precision, context: PlanContext
    ) -> list[Problem]:
        """Return a problem for each rank whose stages exceed its limit."""
        limits, activations = self._limits, activations_of(model, cut.units, context, precision)
        block_bytes = [sum(map(model_bytes(precision), distinct_tensors([unit]))) for unit in cut.units]
        sizes, counted = with_activations(block_bytes, activations)
        loads = dict.fromkeys(limits.names, 0)
        for size, stage in zip(sizes, cut.stages, strict=True):
            loads[limits.names[stage % self.pipe]] += size
        rule = f"rank {{name}} takes {{limit}}, and its stages hold {{held}} of {counted}. "
        return limits.exceeded(loads, rule + "Use more stages, or activation_checkpointing=full.")

    def _cut_problems(self, model: nn.Module, cut: StageAssignment, layout: Layout) -> list[Problem]:
        """Return problems of stages that are cut: activations between them are whole, and parameters in blocks."""
        names = {unit.name for unit in cut.units}
        for match in layout.fitted(model).chosen:
            if match.name in names and {match.style.takes, match.style.gives} != {"whole"}:
                rule = f"{match.style.name} cuts activations between {match.name} and other blocks, which may be on "
                rule += "other stages. Use styles whose activations are whole between blocks."
                return [Problem(key=f"strategy.plan.{match.pattern}", value=match.style.name, rule=rule)]
        for name, param in model.named_parameters() if layout.gathers else ():
            uses = [any(tensor is param for _, tensor in unit.tensors()) for unit in cut.units]
            stages = {stage for stage, holds in zip(cut.stages, uses, strict=True) if holds}
            if not stages:
                rule = f"{name} is in no block, and shard gathers the parameters of blocks. Put it into one."
                return [Problem(key="model", rule=rule)]
            if len({stage % self.pipe for stage in stages}) < len(stages):
                rule = f"{name} is shared by two stages of one rank, each of which would shard it. Use another map."
                return [Problem(key="strategy.map", rule=rule)]
        return []

    def described(self, model: nn.Module, context: PlanContext, devices: Sequence[str]) -> tuple[StagePart, ...]:
        """Return the stages of a replica, with the device of each rank; none if the map does not fit."""
        cut = self.assigned(model, context.formats, context)
        if not isinstance(cut, StageAssignment):
            return ()
        bytes_of = model_bytes(context.formats)
        return tuple(
            part_of(stage, cut.members(stage), bytes_of, devices[stage % self.pipe]) for stage in range(cut.num_stages)
        )

    def parts(self, model: nn.Module, context: PlanContext, memory: ModelMemory) -> tuple[ReplicaPart, ...]:
        """Return the stages of each rank; none if the map does not fit.

        Args:
            model: the model.
            context: the context of the plan.
            memory: of a rank that would hold all stages.
        """
        cut = self.assigned(model, context.formats, context)
        if not isinstance(cut, StageAssignment):
            return ()
        holders, parts = cut.holders(model, self.pipe), list[ReplicaPart]()
        for position in range(self.pipe):
            units = [unit for unit, stage in zip(cut.units, cut.stages, strict=True) if stage % self.pipe == position]
            resident = {name: size for name, size in memory.resident.items() if position in holders[name]}
            modules = names_of(model, [entry for unit in units for entry in unit.entries])
            parts.append(ReplicaPart(modules=modules, memory=replace(memory, resident=resident)))
        return tuple(parts)

    def bubble(self, cut: StepCut) -> float:
        """Return the ideal bubble of the schedule."""
        count = padded_microbatches(self.schedule, cut.shards_a_replica, self.pipe)
        return ideal_bubble(self.schedule, count, num_ranks=self.pipe, stages_a_rank=self.a_rank)

    def operations(self, cut: StepCut) -> float:
        """Return the share of a rank in the operations of a replica, for equal stages, with the ideal bubble."""
        count = padded_microbatches(self.schedule, cut.shards_a_replica, self.pipe)
        return count / cut.shards_a_replica / self.pipe / (1 - self.bubble(cut))

    def settled(self, model: nn.Module, context: PlanContext) -> Mapping[str, int | str]:
        """Return the map with a stage for each block: activations and the order of blocks are known only here.

        Raises:
            ConfigError: the map does not fit the model.
        """
        split = {unit.name for unit in blocks_of(model) if len(unit.entries) > 1}
        if isinstance(self.map, Mapping) and not split & self.map.keys():
            return self.map
        cut = self.assigned(model, context.formats, context)
        if not isinstance(cut, StageAssignment):
            raise ConfigError(cut)
        return {unit.name: stage for unit, stage in zip(cut.units, cut.stages, strict=True)}
