"""A strategy copied from docs/adding-a-strategy.md that trains otherwise than one device is caught here alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.checks import assert_bits, assert_reference
from tests.contract.crossing import cross
from tests.contract.documented import Documented, Stretched
from tests.contract.stepping import Case, oracle, run_rank, train
from tests.support.pool import Pool
from trainkit.strategies.base import PlanContext

# 37 points in batches of 16 and 5, in shards of at most 3: each rank has several, and the last ones are short
TWO = Documented(settings={"replicas": 2}, global_size=16, micro_size=3)


@pytest.mark.parametrize("case", [
    replace(TWO, model={"norm": True}, max_norm=0.05), replace(TWO, optimizer="adamw", resume_at=4),
], ids=["clipped", "resumed"])  # fmt: skip
def test_its_steps_are_those_of_the_reference(case: Documented, pool: Pool) -> None:
    assert case.make_strategy().validate(PlanContext()) == []
    assert_reference(train(pool, case), case)


def test_its_reproducible_runs_end_in_the_bits_of_one_device(pool: Pool) -> None:
    drawn = {"norm": True, "dropout": 0.3}
    case = replace(TWO, precision="fp32", optimizer="adamw", reproducible=True, model=drawn, max_norm=0.5)
    plain = {name: getattr(case, name) for name in Case.__dataclass_fields__ if name not in {"strategy", "settings"}}
    assert_bits(train(pool, case), run_rank(None, Case(**plain)))


@pytest.mark.parametrize(("earlier", "later"), [("fsdp", "my_strategy"), ("my_strategy", "fsdp")])
def test_checkpoints_cross_to_it_and_from_it(earlier: str, later: str, pool: Pool, tmp_path: Path) -> None:
    def case(name: str, num_steps: int) -> Case:
        kind = Documented if name == "my_strategy" else Case
        sizes = {"global_size": 16, "micro_size": 4, "num_steps": num_steps}
        return kind(strategy=name, settings={"replicas": 2}, optimizer="adamw", **sizes)  # type: ignore[arg-type]

    saved = cross(pool, case(earlier, 4), source=None, target=tmp_path, saves_at=4)
    last = case(later, 7)
    ranks = cross(pool, last, source=tmp_path / "step_00000004", target=tmp_path / "again", saves_at=4)
    assert {rank.sha256 for rank in ranks} - {None} == {rank.sha256 for rank in saved} - {None}
    assert all(rank.losses == pytest.approx(oracle(last).losses[4:], rel=1e-12) for rank in ranks)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_sequence_cut_over_ranks_is_that_of_the_reference(parts: int, pool: Pool) -> None:
    # 29 sequences in batches of 8 and 5, in shards of at most 3, with unequal numbers of tokens that count
    case = Stretched(settings={"parts": parts}, micro_size=3, max_norm=0.1, resume_at=3)
    assert_reference(train(pool, case), case)


def test_a_sequence_that_the_ranks_cannot_cut_is_refused() -> None:
    case = Stretched(settings={"parts": 3})
    context = PlanContext(sample=case.make_data()[0])
    assert [problem.key for problem in case.make_strategy().validate(context)] == ["strategy.parts"]
