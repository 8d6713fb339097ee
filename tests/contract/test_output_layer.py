"""A loss that is computed in the output layer of a language model is that of all scores, wherever the model is.

A chunked loss under a strategy that cuts or recomputes the layer whose gradient it computes is caught here alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from torch import nn

from tests.contract.checks import assert_reference
from tests.contract.stepping import PLACES, Case, train
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.strategies.model_transforms import ModelTransforms

CUT: Final = PLACES | {"tensor_parallel": {"degree": 2, "replicas": 1}}


def own_weight() -> nn.Module:
    """The output layer has a weight of its own and a bias: fsdp gathers it with its block alone."""
    model = zoo.even_gpt()
    model.get_submodule("head").output = nn.Linear(8, 12)
    return zoo.fill(model)


HIDDEN: Final = Case(task="hidden", build=zoo.even_gpt, micro_size=3, max_norm=0.1)
"""A small language model, whose objective refuses to see scores while it trains."""


def check(pool: Pool, strategy: str, **changes: Any) -> None:
    case = replace(HIDDEN, strategy=strategy, **{"settings": CUT.get(strategy, {}), **changes})
    assert_reference(train(pool, case), case)


@pytest.mark.parametrize("strategy", CUT)
def test_it_trains_as_the_reference(strategy: str, pool: Pool) -> None:
    check(pool, strategy, resume_at=4)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel"])
def test_a_layer_with_a_weight_of_its_own_trains_as_the_reference(strategy: str, pool: Pool) -> None:
    check(pool, strategy, build=own_weight, num_steps=4)


def test_replicas_of_a_cut_vocabulary_that_are_cut_again_train_as_the_reference(pool: Pool) -> None:
    check(pool, "mesh", settings={"shard": 2, "tensor": 2})


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.long), "aot_eager"])
@pytest.mark.parametrize("strategy", ["one_device", "fsdp"])
@pytest.mark.slow
def test_compiled_and_recomputed_models_train_as_the_reference(strategy: str, backend: str, pool: Pool) -> None:
    shaping = ModelTransforms(compile_mode="default", backend=backend, recompute="full")
    check(pool, strategy, shaping=shaping, micro_size=4, num_steps=2)  # one shape: each takes seconds to compile
    if strategy == "one_device":
        check(pool, strategy, shaping=replace(shaping, recompute="none"), micro_size=4, num_steps=2)


def test_where_the_vocabulary_is_cut_no_rank_gathers_scores(pool: Pool) -> None:
    settings = CUT["tensor_parallel"]
    case = replace(HIDDEN, strategy="tensor_parallel", settings=settings, num_steps=1, model={"vocab_size": 14})
    for widths in pool.run("tests.support.counted.widths_of_rank", case, num_ranks=2):
        assert 7 in widths
        assert 14 not in widths
