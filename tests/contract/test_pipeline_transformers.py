"""GPT-2 of transformers, from its config: trained in stages as on one device, or refused with the key to set.

A GPT-2 of transformers that trace cannot cut, or that computes other numbers in stages is caught here alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.checks import alone, assert_close
from tests.contract.stepping import Case, train
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.strategies.base import PlanContext
from trainkit.strategies.mesh.strategy import Pipeline

SENTENCE = (torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long))


def gpt2(**settings: Any) -> nn.Module:
    """Four layers, as `transformers.AutoModelForCausalLM.from_config` makes them."""
    from transformers import AutoModelForCausalLM, GPT2Config  # slow: only the tests of this file pay for it

    sizes = {"vocab_size": zoo.TOKENS, "n_positions": zoo.LENGTH, "n_embd": 8, "n_layer": 4, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, **settings)
    made: nn.Module = AutoModelForCausalLM.from_config(config)
    return made


class Scores(nn.Module):
    """A user's own module around a decoder of transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(samples, length) int64 -> (samples, length, tokens)."""
        scores: torch.Tensor = self.inner(tokens).logits
        return scores


def refusals(model: nn.Module) -> list[str]:
    return [str(problem) for problem in Pipeline().validate_model(model.to("meta"), PlanContext(sample=SENTENCE))]


@pytest.mark.slow
def test_a_cache_of_keys_and_values_is_refused_with_the_key_that_turns_it_off() -> None:
    refused = (
        "model: cannot be cut into stages: the block {} changes the transformers.DynamicLayer among its arguments, of "
        "which each stage has its own. Use {}."
    )
    assert refusals(gpt2()) == [refused.format("transformer.h.0", "model.config.use_cache=false")]
    within = "config.use_cache=false of model.inner"
    assert refusals(Scores(gpt2())) == [refused.format("inner.transformer.h.0", within)]


def filled(*, use_cache: bool = False) -> nn.Module:
    """GPT-2 with dropout; its weights by formula."""
    return zoo.fill(gpt2(use_cache=use_cache, attn_pdrop=0.0))


BASE = Case(task="tokens", build=filled)


@pytest.mark.slow
def test_shards_refuse_the_cache_with_the_key_that_turns_it_off(pool: Pool) -> None:
    pytest.importorskip("transformers")
    settings = {"replicas": 2, "wrap": ["GPT2Block"]}
    with pytest.raises(Exception, match=r"dataclasses\. Return what it adds, or use model\.config\.use_cache=false\."):
        train(pool, replace(BASE, model={"use_cache": True}, strategy="fsdp", settings=settings))


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.slow
def test_it_trains_in_stages_of_auto_as_on_one_device(stages: int, pool: Pool) -> None:
    model, facts = gpt2(use_cache=False).to("meta"), PlanContext(sample=SENTENCE, objective=LanguageModelling())
    strategy = Pipeline(stages=stages)
    assert strategy.validate_model(model, facts) == []
    decided = strategy.resolve(lambda: model, facts).map
    settings = {"map": decided, "stages": stages}
    case = replace(BASE, micro_size=2, settings=settings, strategy="pipeline")
    assert_close(train(pool, case), alone(case))
