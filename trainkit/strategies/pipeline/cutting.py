"""Which block is on which stage: by the user's map or balanced by bytes, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from torch import Tensor, nn

from trainkit.errors import Problem
from trainkit.strategies.maps.balance import balanced
from trainkit.strategies.maps.judging import uncovered
from trainkit.strategies.maps.syntax import Place, assign, collapsed
from trainkit.strategies.maps.units import Unit, units_of

__all__ = ["Cut", "blocks_to_cut", "cut_blocks", "order_problem"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The blocks of a model with the stage of each."""

    units: tuple[Unit, ...]
    stages: tuple[int, ...]
    """One a unit."""
    num_stages: int

    @property
    def stage_of(self) -> dict[str, int]:
        """Block -> stage."""
        return {unit.name: stage for unit, stage in zip(self.units, self.stages, strict=True)}

    def members(self, stage: int) -> list[Unit]:
        """The blocks of a stage, in the order in which the model names them."""
        return [unit for unit, one in zip(self.units, self.stages, strict=True) if one == stage]

    def words(self) -> str:
        """The cut as a map, for messages: `embed:0,blocks.0-5:0,rest:1`."""
        runs = groupby(zip(self.units, self.stages, strict=True), key=lambda pair: pair[1])
        named = [(stage, collapsed([unit.name for unit, _ in members])) for stage, members in runs]
        return "{" + ",".join(f"{word}:{stage}" for stage, words in named for word in words) + "}"


def blocks_to_cut(model: nn.Module) -> tuple[Unit, ...]:
    """The blocks between which a pipeline may cut: those of maps, each with one module that is called.

    A block of what is left around a list of others (a `transformer` around its `h`) comes as its parts, which may be on
    different stages. A tensor that the model owns itself is where its code uses it.

    Example:
        >>> [unit.name for unit in blocks_to_cut(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
        ['0', '1']
    """
    return tuple(_single(model))


def _single(model: nn.Module) -> Iterator[Unit]:
    names = {id(module): name for name, module in model.named_modules()}
    units = units_of(model)
    called = {id(entry) for unit in units for entry in unit.entries}
    for unit in units:
        for entry in unit.entries:
            inner = {id(module) for module in entry.modules()} - {id(entry)}
            if not inner & called:
                yield _whole(names[id(entry)], entry)


def _whole(name: str, module: nn.Module) -> Unit:
    owners = tuple((f"{name}.{inner}" if inner else name, owner) for inner, owner in module.named_modules())
    return Unit(name=name, owners=owners, entries=(module,))


def cut_blocks(
    model: nn.Module,
    given: Mapping[str, Place] | None,
    *,
    num_stages: int,
    bytes_of: Callable[[Tensor], int],
) -> Cut | list[Problem]:
    """Cut a model, which may be on the meta device.

    Args:
        model: the model.
        given: the user's map; None: balanced by bytes.
        num_stages: stages that there are.
        bytes_of: what a tensor costs.

    Returns:
        The cut, or every problem of the map.
    """
    units = blocks_to_cut(model)
    if given is None:
        return _balanced(units, num_stages, bytes_of)
    assigned = assign(model, units, given, key="strategy.map")
    problems = assigned.problems or [
        *_number_problems(given, num_stages),
        *uncovered(units, assigned, key="strategy.map", noun="stage"),
    ]
    if problems:
        return problems
    stages = _filled_in(assigned.places)
    cut = Cut(units=units, stages=stages, num_stages=num_stages)
    return _direction_problems(cut) or _empty_problems(cut) or cut


def _balanced(units: Sequence[Unit], num_stages: int, bytes_of: Callable[[Tensor], int]) -> Cut | list[Problem]:
    sizes = [sum(bytes_of(tensor) for tensor in _distinct(unit)) for unit in units]
    counted = [size if _is_trained(unit) else 0 for unit, size in zip(units, sizes, strict=True)]
    found = balanced(counted, [math.inf] * num_stages, leaders=range(len(units)), fill=True)
    if found is None:
        most = sum(size > 0 for size in counted)
        rule = f"more stages than the model has blocks with parameters to train ({most}). Use {most} or fewer in all."
        return [Problem(key="strategy.stages", value=num_stages, rule=rule)]
    return Cut(units=tuple(units), stages=tuple(found), num_stages=num_stages)


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
        rule = f"puts nothing on stage{many} {', '.join(missing)} of {num_stages}. Every stage needs a block."
        problems = [Problem(key="strategy.map", rule=rule)]
    return problems


def _filled_in(places: Sequence[Place | None]) -> tuple[int, ...]:
    """Blocks without tensors that no key names go with the block before them, the first ones with the first stage."""
    stages, now = [], 0
    for place in places:
        now = now if place is None else int(place)
        stages.append(now)
    return tuple(stages)


def _direction_problems(cut: Cut) -> list[Problem]:
    changes = sum(one != other for one, other in pairwise(cut.stages))
    if list(cut.stages) == sorted(cut.stages):
        return []
    better = Cut(units=cut.units, stages=tuple(sorted(cut.stages)), num_stages=cut.num_stages)
    at = next(place for place, (one, other) in enumerate(pairwise(cut.stages)) if one > other)
    rule = (
        f"goes back from stage {cut.stages[at]} ({cut.units[at].name}) to stage {cut.stages[at + 1]} "
        f"({cut.units[at + 1].name}), with {changes} changes of stage where {cut.num_stages - 1} would do. A pipeline "
        f"runs forwards: use {better.words()}."
    )
    return [Problem(key="strategy.map", rule=rule)]


def _empty_problems(cut: Cut) -> list[Problem]:
    return [
        Problem(
            key="strategy.map",
            rule=f"stage {stage} ({', '.join(collapsed([unit.name for unit in cut.members(stage)]))}) has no parameter "
            "to train. Put a block with some there.",
        )
        for stage in range(cut.num_stages)
        if not any(_is_trained(unit) for unit in cut.members(stage))
    ]


def order_problem(cut: Cut, ran: Sequence[str], *, given: bool) -> Problem | None:
    """Whether the model runs its blocks in another order than that of the stages.

    Args:
        cut: the stages.
        ran: blocks in the order of their calls.
        given: whether the map is the user's.
    """
    stages = [cut.stage_of[name] for name in ran]
    at = next((place for place, (one, other) in enumerate(pairwise(stages)) if one > other), None)
    if at is None:
        return None
    said = f"the model runs {ran[at]} (stage {stages[at]}) before {ran[at + 1]} (stage {stages[at + 1]})"
    if len(set(ran)) < len(ran):
        twice = next(name for name in ran if ran.count(name) > 1)
        rule = f"{said}, and {twice} more than once. Put all blocks between its calls on its stage."
        return Problem(key="strategy.map", value=None if given else "auto", rule=rule)
    by_name = {unit.name: unit for unit in cut.units}
    inside = tuple(by_name[name] for name in ran)
    better = Cut(units=inside, stages=tuple(sorted(stages)), num_stages=cut.num_stages)
    rule = f"{said}. A pipeline runs forwards: use {better.words()}."
    return Problem(key="strategy.map", value=None if given else "auto", rule=rule)


def _distinct(unit: Unit) -> list[Tensor]:
    return list({id(tensor): tensor for _, tensor in unit.tensors()}.values())


def _is_trained(unit: Unit) -> bool:
    return any(tensor.requires_grad for _, tensor in unit.tensors())
