"""A loss that is computed in the output layer of a language model is that of all scores, wherever the model is.

A chunked loss under a strategy that cuts or recomputes the layer whose gradient it computes is caught here alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
from torch import nn

from tests.contract.stepping import Case, oracle, train
from tests.support import reference, zoo
from tests.support.pool import Pool
from trainkit.models.gpt import Gpt
from trainkit.strategies.model_transforms import ModelTransforms

PLACES: Final[dict[str, dict[str, Any]]] = {
    "one_device": {},
    "mirrored": {"replicas": 2},
    "fsdp": {"replicas": 2},
    "tensor_parallel": {"degree": 2, "replicas": 1},
    "pipeline": {"stages": 2},
    "device_map": {},
    "central_storage": {},
    "parameter_server": {},
}


@dataclass(frozen=True, kw_only=True)
class HiddenCase(Case):
    """A small language model, whose objective refuses to see scores while it trains."""

    task: str = "hidden"
    global_size: int = 8
    micro_size: int = 3
    num_steps: int = 6
    max_norm: float | None = 0.1

    def make_model(self) -> nn.Module:
        """Two blocks; the vocabulary is even, and shared with the embedding."""
        sizes = {"vocab_size": 12, "context": zoo.LENGTH, "num_layers": 2, "num_heads": 2, "width": 8, "bias": True}
        return zoo.fill(Gpt(**{**sizes, **self.model}))


@dataclass(frozen=True, kw_only=True)
class OwnWeight(HiddenCase):
    """The output layer has a weight of its own and a bias: fsdp gathers it with its block alone."""

    def make_model(self) -> nn.Module:
        """The same model, with another output layer."""
        made = super().make_model()
        made.get_submodule("head").output = nn.Linear(8, 12)
        return zoo.fill(made)


def check(case: Case, pool: Pool) -> None:
    ranks, expected = train(pool, case), oracle(case)
    for rank in ranks:
        assert reference.differences(rank.weights, expected) == []
        assert rank.losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.parametrize("strategy", PLACES)
def test_it_trains_as_the_reference(strategy: str, pool: Pool) -> None:
    check(HiddenCase(strategy=strategy, settings=PLACES[strategy], resume_at=4), pool)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel"])
def test_a_layer_with_a_weight_of_its_own_trains_as_the_reference(strategy: str, pool: Pool) -> None:
    check(OwnWeight(strategy=strategy, settings=PLACES[strategy], num_steps=4), pool)


def test_replicas_of_a_cut_vocabulary_that_are_cut_again_train_as_the_reference(pool: Pool) -> None:
    check(HiddenCase(strategy="mesh", settings={"shard": 2, "tensor": 2}), pool)


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.long), "aot_eager"])
@pytest.mark.parametrize("strategy", ["one_device", "fsdp"])
@pytest.mark.slow
def test_compiled_and_recomputed_models_train_as_the_reference(strategy: str, backend: str, pool: Pool) -> None:
    shaping = ModelTransforms(compile_mode="default", backend=backend, recompute="full")
    check(HiddenCase(strategy=strategy, settings=PLACES[strategy], shaping=shaping, num_steps=4), pool)
    whole = replace(shaping, recompute="none")
    if strategy == "one_device":
        check(HiddenCase(strategy=strategy, settings=PLACES[strategy], shaping=whole, num_steps=4), pool)


def test_where_the_vocabulary_is_cut_no_rank_gathers_scores(pool: Pool) -> None:
    case = HiddenCase(
        strategy="tensor_parallel", settings=PLACES["tensor_parallel"], num_steps=1, model={"vocab_size": 14}
    )
    for widths in pool.run("tests.support.scores.widths_of_rank", case, num_ranks=2):
        assert 7 in widths
        assert 14 not in widths
