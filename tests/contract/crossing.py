"""A training that goes from one strategy to another by way of the files of a checkpoint; run by the pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.contract.stepping import Case, _Rank
from tests.support.pool import Member, Pool
from tests.support.saving import save
from trainkit.strategies.base import Executor, PlanContext, Strategy
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.checkpoint.tensors import load, sha256_of_pieces, weights_sha256


@dataclass(frozen=True, kw_only=True)
class Crossed:
    """What one rank has seen."""

    losses: list[float]
    """The mean loss of every step that it made, over all ranks."""
    sha256: str | None
    """The hash of the weights it saved; None where it does not know it."""


def cross(pool: Pool, case: Case, *, source: Path | None, target: Path, saves_at: int) -> list[Crossed]:
    """Take up a checkpoint, train on to `case.num_steps`, and save on the way; what each rank has seen."""
    num_ranks = len(case.make_strategy().tasks(PlanContext()))
    if num_ranks == 1:
        return [cross_rank(None, case, source, target, saves_at)]
    crossed: list[Crossed] = pool.run(
        "tests.contract.crossing.cross_rank", case, source, target, saves_at, num_ranks=num_ranks
    )
    return crossed


def cross_rank(member: Member | None, case: Case, source: Path | None, target: Path, saves_at: int) -> Crossed:
    """One rank of it."""
    rank = _Rank(member, case)
    executor = rank.setup(0)
    try:
        if source is not None:
            loaded = load(source)
            rank.position.step = loaded.checkpoint.step
            executor.load_state_dict(loaded.tensors)
        executor.tune()
        rank.steps(executor, saves_at)
        sha256 = _save(rank.strategy, executor, target, saves_at)
        rank.steps(executor, case.num_steps)
        return Crossed(losses=rank.losses(executor), sha256=sha256)
    finally:
        executor.close()


def _save(strategy: Strategy, executor: Executor, target: Path, step: int) -> str | None:
    """As the engine does: by all ranks where they hold pieces, else by the owner."""
    all_ranks = executor.local.all_ranks
    if strategy.facts_in(PlanContext()).is_sharded and all_ranks.num_ranks > 1:
        saver, pieces = Saver(target, all_ranks), executor.sharded_state_dict()
        saver.save(step=step, pieces=pieces, meta={})
        saver.close()
        return sha256_of_pieces(pieces, all_ranks)
    if not executor.local.is_rank0:
        return None
    tensors = executor.state_dict()
    save(target, step=step, tensors=tensors, meta={})
    return weights_sha256(tensors)
