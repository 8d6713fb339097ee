"""Every way to sum gradients over ranks, against the oracle; what each exchanges, and what happens when a rank dies.

A way to sum gradients over ranks that leaves out or doubles a rank's part is caught here alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from tests.contract.checks import assert_bits, assert_reference
from tests.contract.stepping import Case, train
from tests.support.pool import Pool
from trainkit.strategies.reducers.options import Reduce

REDUCERS = get_args(Reduce)
# an odd number of replicas, and two groups of two; the other places are matrix
SHORT = {*((reduce, 3) for reduce in REDUCERS), ("hierarchical", 4)}
PLACES = [
    pytest.param(*place, marks=() if place in SHORT else pytest.mark.matrix) for place in product(REDUCERS, (2, 3, 4))
]
# 29 sequences in batches of 8 and 5, with unequal numbers of targets: the counted weight is exchanged too
TOKENS = Case(strategy="mirrored", task="tokens", global_size=8)
# 37 points in batches of 16 and 5, in shards of 6 and 5: batch statistics are exchanged too, by ranks without a shard
CLASSES = Case(strategy="mirrored", task="classes", global_size=16, micro_size=6, model={"norm": True})


@pytest.mark.parametrize(("reduce", "replicas"), PLACES)
@pytest.mark.slow
def test_every_reducer_takes_the_steps_of_the_reference(reduce: str, replicas: int, pool: Pool) -> None:
    once, thrice = (replace(TOKENS, micro_size=-(-8 // (replicas * shards))) for shards in (1, 3))
    for base in (once, thrice, CLASSES):
        case = replace(base, settings={"replicas": replicas, "reduce": reduce})
        ranks = assert_reference(train(pool, case), case)
        assert_bits(ranks, ranks[0])


@pytest.mark.parametrize("bucket_mb", [0, 1e-6, 3e-4])
def test_buckets_of_any_size_take_the_steps_of_the_reference(bucket_mb: float, pool: Pool) -> None:
    settings = {"replicas": 3, "bucket_mb": bucket_mb}
    for base in (replace(TOKENS, micro_size=1), CLASSES):
        case = replace(base, settings=settings, max_norm=0.05)
        assert_reference(train(pool, case), case)
