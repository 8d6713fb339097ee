"""A pipeline is the training of one device, whatever its schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contract.stepping import Case, oracle, train
from tests.support import reference
from tests.support.pool import Pool

TOKENS = Case(task="tokens", global_size=8, micro_size=2, strategy="pipeline")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("base", [TOKENS], ids=["tokens"])
def test_ten_steps_are_those_of_the_reference(base: Case, optimizer: str, schedule: str, pool: Pool) -> None:
    case = replace(base, optimizer=optimizer, settings={"schedule": schedule}, max_norm=0.05)
    expected = oracle(case)
    for rank in train(pool, case):
        assert reference.differences(rank.weights, expected) == []
        assert rank.losses == pytest.approx(expected.losses, rel=1e-12)
