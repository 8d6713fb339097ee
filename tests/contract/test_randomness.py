"""Keyed randomness, derived a second time: what a dropout draws is the hash of seed, step, shard and block.

A mask that does not follow from seed, step, shard and block is caught here alone: others compare trainkit with itself.
"""

import hashlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.contract.checks import assert_reference
from tests.contract.stepping import Case, train
from tests.support import reference
from tests.support.pool import Pool

DROPOUT = Case(global_size=16, micro_size=6, model={"dropout": 0.5}, num_steps=6)


def keyed_loss_sum(case: Case) -> reference.LossSum:
    """The oracle's loss, with the generator keyed before the dropout as docs/numbers.md says."""
    digest = hashlib.blake2b(b"2", digest_size=8).digest()
    block = int.from_bytes(digest, "little")  # the dropout is element "2" of the Sequential
    steps_per_epoch = -(-37 // case.global_size)
    calls = iter(
        (step, shard) for step in range(case.num_steps) for shard in range(_shards(case, step, steps_per_epoch))
    )

    def loss_sum(model: nn.Module, batch: reference.Sample) -> tuple[torch.Tensor, float]:
        inputs, targets = batch
        step, shard = next(calls)
        assert isinstance(model, nn.Sequential)
        first, activation, dropout, last = model
        hidden = activation(first(inputs))
        torch.manual_seed(reference.chain(case.seed, step, shard, block) & 0xFFFFFFFF)
        return functional.cross_entropy(last(dropout(hidden)), targets, reduction="sum"), float(len(targets))

    return loss_sum


def _shards(case: Case, step: int, steps_per_epoch: int) -> int:
    size = case.global_size if step % steps_per_epoch < steps_per_epoch - 1 else 37 % case.global_size
    return -(-size // case.micro_size)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_masks_are_those_that_the_keys_give(replicas: int, pool: Pool) -> None:
    case = replace(DROPOUT, strategy="mirrored", settings={"replicas": replicas})
    assert_reference(train(pool, case), case, loss_sum=keyed_loss_sum(case))


def test_the_seed_decides_the_masks_and_the_order(pool: Pool) -> None:
    first, again, other = (train(pool, replace(DROPOUT, seed=seed))[0] for seed in (3, 3, 4))
    assert all(torch.equal(first.weights[name], tensor) for name, tensor in again.weights.items())
    assert first.samples != other.samples
    assert not torch.equal(first.weights["0.weight"], other.weights["0.weight"])


def test_a_model_without_dropout_ignores_the_generators(pool: Pool) -> None:
    plain = replace(DROPOUT, model={})
    torch.manual_seed(1)
    assert_reference(train(pool, plain), plain)
