"""Plans of tensor parallelism: what patterns name, and what is refused before any process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.support import zoo
from trainkit.models.gpt import Gpt
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.tensor_parallel import TensorParallel
from trainkit.strategies.tensor_parallel.plans import match_plan

SIZES: dict[str, Any] = {"vocab_size": 12, "context": 4, "num_layers": 2, "num_heads": 2, "width": 8}


def gpt(**sizes: Any) -> Gpt:
    with torch.device("meta"):
        return Gpt(**{**SIZES, **sizes})


def told(model: nn.Module, **settings: Any) -> list[str]:
    return [str(problem) for problem in TensorParallel(**settings).validate_model(model, PlanContext())]


def test_the_plan_of_the_gpt_cuts_every_large_matrix() -> None:
    fit = match_plan(gpt(), "auto", 2)
    whole = {name for name, _ in gpt().named_parameters()} - fit.dims.keys()
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in whole} == {
        "positions",
        "attention_norm",
        "mlp_norm",
        "norm",
    }
    assert fit.dims["embed.tokens.weight"] == 0


def test_a_weight_that_is_computed_from_others_is_refused() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    (found,) = told(model, degree=2, plan={"0": "rowwise_scattered"})
    assert "0 computes its weight from other parameters, as weight_norm does: it cannot be sharded." in found


def test_a_vocabulary_that_does_not_come_out_even_stays_whole() -> None:
    assert not {name for name in match_plan(gpt(vocab_size=13), "auto", 2).dims if "tokens" in name}


@pytest.mark.parametrize("pattern", ["expand", "mlp.expand", "blocks.*.mlp.expand", "type:Li*r"])
def test_a_pattern_is_a_name_the_end_of_one_a_glob_or_a_class(pattern: str) -> None:
    names = {one.name for one in match_plan(gpt(), {pattern: "colwise_gathered", "tokens": "rowwise"}, 2).chosen}
    assert names >= {"blocks.0.mlp.expand", "blocks.1.mlp.expand"}


def test_the_first_pattern_that_names_a_module_has_it() -> None:
    fit = match_plan(gpt(), {"blocks.1.mlp.expand": "colwise_gathered", "expand": "colwise"}, 2)
    assert {one.name: one.style.name for one in fit.chosen} == {
        "blocks.0.mlp.expand": "colwise",
        "blocks.1.mlp.expand": "colwise_gathered",
    }


EXPAND = "blocks.0.mlp.expand"


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            zoo.Net(),
            {},
            (
                "strategy.plan=auto: Net has no plan. Name its layers with their styles, "
                "{expand:colwise,project:rowwise}."
            ),
        ),
        (
            gpt(),
            {"plan": {}},
            (
                "strategy.plan={}: shards nothing. Name layers with their styles, "
                "{expand:colwise,project:rowwise}, or use auto."
            ),
        ),
        (gpt(), {"plan": {"expand": "colwize"}}, "strategy.plan.expand=colwize: no such style. Did you mean colwise?"),
        (
            gpt(),
            {"plan": {"mlp.expnd": "colwise"}},
            "strategy.plan.mlp.expnd=colwise: no such module. Did you mean mlp.expand?",
        ),
        (gpt(), {"plan": {"type:Conv2d": "colwise"}}, "strategy.plan.type:Conv2d=colwise: no such module."),
        (
            gpt(),
            {"plan": {"expand": "colwise", EXPAND: "rowwise"}},
            f"strategy.plan.{EXPAND}=rowwise: names no remaining module: {EXPAND} is in expand already.",
        ),
        (
            gpt(),
            {"plan": {"mlp_norm": "colwise"}},
            (
                "strategy.plan.mlp_norm=colwise: blocks.0.mlp_norm is a LayerNorm, and colwise is for nn.Linear and "
                "nn.Embedding."
            ),
        ),
        (
            gpt(),
            {"plan": {"expand": "sequence"}},
            (
                f"strategy.plan.expand=sequence: {EXPAND} is a Linear, and sequence is for modules that "
                "keep their weights whole."
            ),
        ),
        (
            zoo.Net(width=7),
            {"plan": {"0": "colwise", "2": "rowwise"}},
            "strategy.degree=2: does not divide the 7 rows of 0.weight, which colwise cuts.",
        ),
        (
            gpt(num_heads=1),
            {"plan": {"queries_keys_values": "colwise"}},
            (
                "strategy.degree=2: does not divide the 1 heads of "
                "blocks.0.attention.queries_keys_values, which are not cut apart."
            ),
        ),
        (
            gpt(),
            {"plan": {"head.output": "colwise_gathered"}},
            (
                "strategy.plan.head.output=colwise_gathered: head.output.weight and embed.tokens.weight "
                "are one parameter (tied), and embed.tokens.weight is not sharded. Shard both in the same way, or "
                "neither."
            ),
        ),
        (
            gpt(dropout=0.1),
            {"plan": {"embed": "sequence_split", "head": "sequence_join"}},
            (
                "strategy.plan.embed=sequence_split: shards the sequence, and embed.dropout would draw the same "
                "numbers in each part. Use no dropout, or no sequence."
            ),
        ),
        (
            nn.Sequential(nn.MultiheadAttention(4, 2)),
            {"plan": {"out_proj": "rowwise"}},
            (
                "strategy.plan.out_proj=rowwise: 0.out_proj is part of an nn.MultiheadAttention, which "
                "reads its weight itself: it cannot be sharded."
            ),
        ),
        (
            nn.Sequential(nn.Embedding(4, 2, sparse=True)),
            {"plan": {"0": "rowwise"}},
            (
                "strategy.plan.0=rowwise: 0 has sparse gradients or a largest norm, which need whole rows: it cannot "
                "be sharded."
            ),
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(
    model: nn.Module, settings: dict[str, Any], message: str
) -> None:
    assert message in told(model, degree=2, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"degree": 0}, "strategy.degree=0: must be 1 or more."),
        (
            {"plan": {"0": "colwise"}},
            (
                "strategy.plan={0:colwise}: has no effect with strategy.degree=1, which shards nothing. "
                "Use a degree of 2 or more."
            ),
        ),
        (
            {"degree": 2, "replicas": 1, "shard": True},
            "strategy.shard=true: has no effect with 1 replica. Use strategy.replicas=2 or more.",
        ),
        (
            {"degree": 2, "replicas": 2, "devices": ("cpu", "cpu")},
            "strategy.devices=['cpu', 'cpu']: names 2 devices, and 2 replicas of 2 ranks need 4 devices. Name as many.",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    assert [str(problem) for problem in TensorParallel(**settings).validate(PlanContext())] == [message]


def test_an_order_of_summation_cannot_be_kept() -> None:
    facts = PlanContext(numerics=Numerics(reproducible=True))
    (problem,) = TensorParallel(degree=2).validate(facts)
    assert str(problem) == (
        "numerics.reproducible=true: is not kept where gradients are summed part by part. Use strategy=mirrored, or "
        "leave it out."
    )


def test_a_rank_holds_its_part_of_what_is_cut_and_of_all_rows_where_replicas_share_them_out() -> None:
    plain, sharing = TensorParallel(degree=2, replicas=2), TensorParallel(degree=2, replicas=2, shard=True)
    whole = sum(param.numel() for param in gpt().parameters())
    context = PlanContext()
    whole_rows, shared_rows = plain.estimate_memory(gpt(), context), sharing.estimate_memory(gpt(), context)
    assert sum(whole_rows.resident.values()) == (whole - 72) // 2 + 72
    assert sum(shared_rows.resident.values()) == ((whole - 72) // 2 + 72) // 2
    assert whole_rows.transient == 0 < shared_rows.transient


def test_the_plan_of_a_run_says_which_layers_are_cut() -> None:
    assert TensorParallel(degree=2).notes(gpt(dropout=0.1)) == (
        (
            "sharded over 2 ranks: embed.tokens rowwise, queries_keys_values colwise, project rowwise, expand colwise, "
            "head.output colwise_gathered. Each rank has 72 of 1,704 parameters whole."
        ),
        "the model draws random numbers: for sharded layers, only the distribution is the same.",
    )
    assert TensorParallel().notes(gpt()) == (
        "strategy.degree=1 shards no layer: every rank has a whole replica, as in strategy=mirrored.",
    )
