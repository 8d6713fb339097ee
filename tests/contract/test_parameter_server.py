"""A synchronous parameter server is the training of one device, and so is an asynchronous one with one worker."""

from dataclasses import replace

import pytest
import torch

from tests.contract.stepping import Case, oracle, train
from tests.support import reference
from tests.support.pool import Pool

CLASSES = Case(task="classes", global_size=16, micro_size=3)
TOKENS = Case(task="tokens", global_size=8, micro_size=2)


def served(case: Case, workers: int, servers: int, **settings: object) -> Case:
    chosen = {"workers": workers, "servers": servers, "timeout_s": 60.0, **settings}
    return replace(case, strategy="parameter_server", settings=chosen)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("base", [CLASSES, TOKENS], ids=["classes", "tokens"])
def test_ten_steps_are_those_of_the_reference(
    base: Case, optimizer: str, workers: int, servers: int, pool: Pool
) -> None:
    case = served(replace(base, optimizer=optimizer, max_norm=0.05), workers, servers)
    expected = oracle(case)
    (chief,) = train(pool, case)
    assert reference.differences(chief.weights, expected) == []
    assert chief.losses == pytest.approx(expected.losses, rel=1e-12)
    assert [sorted(used) for used in chief.samples] == [sorted(used) for used in expected.samples]


def test_async_with_one_worker_is_one_device_to_the_bit(pool: Pool) -> None:
    base = replace(CLASSES, precision="fp32", optimizer="adamw", model={"norm": True, "dropout": 0.3}, max_norm=0.5)
    (expected,), (found,) = train(pool, base), train(pool, served(base, 1, 2, mode="async"))
    assert [key for key, tensor in expected.state.items() if not torch.equal(tensor, found.state[key])] == []
