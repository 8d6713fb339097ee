"""Validate that the stages match the computation of the model: blocks in order, and tensors on the stages that use
them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from trainkit.cluster.host import mig_instances
from trainkit.errors import Problem
from trainkit.strategies.mesh.pipe.forward import CannotCut, Program
from trainkit.strategies.mesh.pipe.stage_assignment import StageAssignment


def version_problems(version: str) -> list[Problem]:
    """Return a problem if this version of torch is below 2.11: its schedules need a microbatch per stage.

    Example:
        >>> [str(problem) for problem in version_problems("2.9.1+cu128")], version_problems("2.11.0")
        (['strategy=pipeline: needs torch 2.11 or newer, and this is 2.9.1+cu128.'], [])
    """
    if tuple(map(int, version.split(".")[:2])) >= (2, 11):
        return []
    return [Problem(key="strategy", value="pipeline", rule=f"needs torch 2.11 or newer, and this is {version}.")]


def sending_problems(num_gpus: int) -> list[Problem]:
    """Return the problem, on MIG instances, whose ranks cannot send tensors of GPUs to each other."""
    if not (num_gpus and mig_instances(os.environ)):
        return []
    rule = (
        "sends tensors between GPUs, which MIG instances cannot: NCCL does not support them, and gloo sends "
        "memory of the host alone. Use whole GPUs, or another strategy."
    )
    return [Problem(key="strategy", value="pipeline", rule=rule)]


def misfits(
    cut: StageAssignment, programs: Sequence[Program], *, better: StageAssignment | None = None
) -> list[Problem]:
    """Return problems of a stage assignment, and `better` if it is valid; without programs, only problems of the block
    order.
    """
    if better is not None and misfits(better, programs):
        better = None
    if not programs:
        return _order_problems(cut, [unit.name for unit in cut.units], better)
    found = [problem for program in programs for problem in run_problems(cut, program, better=better)]
    return list(dict.fromkeys(found))


def _order_problems(cut: StageAssignment, ran: Sequence[str], better: StageAssignment | None) -> list[Problem]:
    """Return a problem if the stages are not in the order of the blocks."""
    stages = [cut.stage_of[name] for name in ran]
    at = next((place for place, (one, other) in enumerate(pairwise(stages)) if one > other), None)
    if at is None:
        return []
    text = f"goes back from stage {stages[at]} ({ran[at]}) to stage {stages[at + 1]} ({ran[at + 1]})"
    twice = next((name for name in ran if ran.count(name) > 1), None)
    use = "" if better is None else f" Use {better.words()}."
    if twice is not None:
        rule = f"{text}, and the model runs {twice} more than once. Put all blocks between its calls on its stage.{use}"
        return [Problem(key="strategy.map", rule=rule)]
    changes = sum(one != other for one, other in pairwise(stages))
    rule = (
        f"{text}; activations change their stage {changes} time{'' if changes == 1 else 's'}, and "
        f"{cut.num_stages - 1} would suffice. "
        f"A pipeline runs forwards{'.' if better is None else f': use {better.words()}.'}"
    )
    return [Problem(key="strategy.map", rule=rule)]


def run_problems(cut: StageAssignment, program: Program, *, better: StageAssignment | None = None) -> list[Problem]:
    """Return problems of one recorded pass: the order of its blocks, and tensors that are used on other stages."""
    if found := _order_problems(cut, program.blocks, better):
        return found
    for call in program.starts(cut.stage_of, cut.num_stages)[1:-1]:
        if call < len(program.blocks) and isinstance(error := program.crossings[call], CannotCut):
            return [Problem(key="model", rule=f"cannot be cut before {program.blocks[call]}: {error}. {error.remedy}")]
    for name, block in program.used.items():
        rule = f"its own code uses {name} after {block}, and every stage runs that code. Move it into a block, "
        return [Problem(key="model", rule=f"cannot be cut into stages: {rule}or use strategy=fsdp.")]
    return []
