"""Assign blocks to stages, by the user's map or balanced by bytes, and validate the map and memory limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, nn

from trainkit.errors import Problem
from trainkit.numerics.precision import Precision
from trainkit.strategies.base import PlanContext
from trainkit.strategies.maps.layout import MemoryLimits, activations_of, balanced, model_bytes, with_activations
from trainkit.strategies.maps.syntax import (
    Block,
    Place,
    assign,
    blocks_of,
    collapsed,
    distinct_tensors,
    uncovered,
    whole_block,
)
from trainkit.strategies.mesh.pipe.forward import CannotCut, Program


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
    position = {unit.name: at for at, unit in enumerate(units)}
    leaders = list(range(len(units)))
    for program in programs:
        places = [position[name] for name in program.blocks]
        for call, (place, found) in enumerate(zip(places, program.crossings, strict=True)):
            furthest = max(places[:call], default=-1)
            if call and (place < furthest or (place > furthest and isinstance(found, CannotCut))):
                for at in range(min(place, furthest), max(place, furthest) + 1):
                    leaders[at] = min(leaders[at], place, furthest)
    for at in range(len(leaders) - 2, -1, -1):  # overlapping ranges are merged
        later = min(leaders[at + 1 :])
        leaders[at] = min(leaders[at], later) if later <= at else leaders[at]
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
        return [unit for unit, one in zip(self.units, self.stages, strict=True) if one == stage]

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
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
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


def cut_blocks(
    model: nn.Module,
    given: Mapping[str, Place] | None,
    *,
    num_stages: int,
    precision: Precision,
    context: PlanContext | None = None,
    programs: Sequence[Program] = (),
) -> StageAssignment | list[Problem]:
    """Assign the blocks of a model, which may be on the meta device, to stages.

    Args:
        model: the model.
        given: the user's map; None: balanced by bytes.
        num_stages: number of stages.
        precision: the precision of the run, which determines the bytes of a tensor.
        context: used for the activations of a shard, which the balance counts; None: not counted.
        programs: the recorded forward passes of the model; empty if unknown: blocks are then assumed to run in the
            order of the model.

    Returns:
        The assignment, with the blocks in the order in which they run, or every problem of the map.
    """
    units = in_forward_order(blocks_to_cut(model), programs)
    if given is None:
        kept = activations_of(model, units, context, precision)
        return _balanced(units, num_stages, model_bytes(precision), kept, leaders_among(units, programs))
    assigned = assign(model, units, given)
    problems = assigned.problems or [
        *_number_problems(given, num_stages),
        *uncovered(units, assigned, noun="stage"),
    ]
    if problems:
        return problems
    stages = _with_parts_moved_on(_filled_in(assigned.places), units, model, assigned.keys)
    cut = StageAssignment(units=units, stages=stages, num_stages=num_stages)
    return _empty_problems(cut) or cut


def _balanced(
    units: Sequence[Block],
    num_stages: int,
    bytes_of: Callable[[Tensor], int],
    kept: Sequence[int] | None,
    leaders: Sequence[int],
) -> StageAssignment | list[Problem]:
    # every stage must contain trained parameters, so untrained blocks count as zero
    counted = [sum(map(bytes_of, distinct_tensors([unit]))) if _is_trained(unit) else 0 for unit in units]
    last = None
    for at, more in enumerate(kept or ()):  # the activations of untrained blocks count in the trained one before
        last = at if counted[at] else last
        if last is not None:
            counted[last] += more
    anywhere = [math.inf] * num_stages
    found = balanced(counted, anywhere, leaders=leaders, fill=True)
    if found is None:  # then the recorded passes determine which blocks must share a stage
        found = balanced(counted, anywhere, leaders=range(len(units)), fill=True)
    if found is None:
        most = sum(size > 0 for size in counted)
        rule = f"the model has {most} blocks with parameters to train. Use {most} stages or fewer in all."
        return [Problem(key="strategy.stages", value=num_stages, rule=rule)]
    return StageAssignment(units=tuple(units), stages=tuple(found), num_stages=num_stages)


def _number_problems(given: Mapping[str, Place], num_stages: int) -> list[Problem]:
    right = range(num_stages)
    problems = [
        Problem(key=f"strategy.map.{word}", value=place, rule=f"no such stage: there are 0 to {num_stages - 1}.")
        for word, place in given.items()
        if isinstance(place, str) or place not in right
    ]
    missing = [str(stage) for stage in right if stage not in given.values()]
    if missing and not problems:
        many = "s" if len(missing) > 1 else ""
        rule = f"puts no block on stage{many} {', '.join(missing)} of {num_stages}. Every stage needs a block."
        problems = [Problem(key="strategy.map", rule=rule)]
    return problems


def _filled_in(places: Sequence[Place | None]) -> tuple[int, ...]:
    """Assign blocks without tensors that no key names to the stage of the previous block, or to the first stage."""
    stages, now = [], 0
    for place in places:
        now = now if place is None else int(place)
        stages.append(now)
    return tuple(stages)


def _empty_problems(cut: StageAssignment) -> list[Problem]:
    return [
        Problem(
            key="strategy.map",
            rule=f"stage {stage} ({', '.join(collapsed([unit.name for unit in cut.members(stage)]))}) has no "
            "parameter to train. Put a block with parameters there.",
        )
        for stage in range(cut.num_stages)
        if not any(_is_trained(unit) for unit in cut.members(stage))
    ]


def _with_parts_moved_on(
    stages: Sequence[int], units: Sequence[Block], model: nn.Module, keys: Sequence[str | None]
) -> tuple[int, ...]:
    """Move parts of a block whose key names it as a whole forward to the stage of the previous blocks.

    `{transformer:0,transformer.h.1:1}` names the embedding and the last norm of a `transformer` at once, because a
    device map cuts between blocks only. A pipeline runs forwards: the norm moves to the stage of the previous layer.
    """
    whole = {unit.name for unit in blocks_of(model)}
    moved, furthest = [], 0
    for stage, unit, key in zip(stages, units, keys, strict=True):
        is_part = key in whole and unit.name not in whole
        moved.append(max(stage, furthest) if is_part else stage)
        furthest = max(furthest, moved[-1])
    return tuple(moved)


def names_parts(model: nn.Module, given: Mapping[str, Place]) -> bool:
    """Return whether a key of a map names a block that a pipeline splits into parts."""
    return any(unit.name in given and len(unit.entries) > 1 for unit in blocks_of(model))


def _is_trained(unit: Block) -> bool:
    return any(tensor.requires_grad for _, tensor in unit.tensors())


def exceeded_limits(
    limits: MemoryLimits, cut: StageAssignment, bytes_of: Callable[[Tensor], int], kept: Sequence[int] | None
) -> list[Problem]:
    """Return a problem for each rank whose stages exceed its limit."""
    sizes, counted = with_activations([sum(map(bytes_of, distinct_tensors([unit]))) for unit in cut.units], kept)
    held = dict.fromkeys(limits.names, 0)
    for size, stage in zip(sizes, cut.stages, strict=True):
        held[limits.names[stage % len(limits.names)]] += size
    rule = (
        f"rank {{name}} takes {{limit}}, and its stages hold {{held}} of {counted}. "
        "Use more stages, or activation_checkpointing=full."
    )
    return limits.exceeded(held, rule)
