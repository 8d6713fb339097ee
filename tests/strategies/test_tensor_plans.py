"""A plan that cuts a layer whose heads or rows do not come out even is caught here alone.

Plans of tensor parallelism: what patterns name, what is refused, and what is drawn where activations are cut.
"""

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
from trainkit.strategies.tensor_parallel.cutting import ActivationRngRegions
from trainkit.strategies.tensor_parallel.plans import match_plan

SIZES: dict[str, Any] = {"vocab_size": 12, "context": 4, "num_layers": 2, "num_heads": 2, "width": 8}


def gpt(**sizes: Any) -> Gpt:
    with torch.device("meta"):
        return Gpt(**{**SIZES, **sizes})


def test_the_plan_of_the_gpt_cuts_every_large_matrix_and_a_vocabulary_that_comes_out_even() -> None:
    fit = match_plan(gpt(), "auto", 2)
    whole = {name for name, _ in gpt().named_parameters()} - fit.dims.keys()
    kept = {name.rpartition(".")[0].rpartition(".")[2] for name in whole}
    assert kept == {"positions", "attention_norm", "mlp_norm", "norm"}
    assert fit.dims["embed.tokens.weight"] == 0
    assert not {name for name in match_plan(gpt(vocab_size=13), "auto", 2).dims if "tokens" in name}


@pytest.mark.parametrize("pattern", ["expand", "mlp.expand", "blocks.*.mlp.expand", "type:Li*r"])
def test_a_pattern_is_a_name_the_end_of_one_a_glob_or_a_class(pattern: str) -> None:
    names = {one.name for one in match_plan(gpt(), {pattern: "colwise_gathered", "tokens": "rowwise"}, 2).chosen}
    assert names >= {"blocks.0.mlp.expand", "blocks.1.mlp.expand"}


def test_the_first_pattern_that_names_a_module_has_it() -> None:
    fit = match_plan(gpt(), {"blocks.1.mlp.expand": "colwise_gathered", "expand": "colwise"}, 2)
    found = {one.name: one.style.name for one in fit.chosen}
    assert found == {"blocks.0.mlp.expand": "colwise", "blocks.1.mlp.expand": "colwise_gathered"}


EXPAND = "blocks.0.mlp.expand"
UNFIT: list[tuple[nn.Module, Any, str, str]] = [
    (zoo.Net(), "auto", "plan=auto", "Net has no plan"),
    (gpt(), {}, "plan={}", "shards nothing"),
    (gpt(), {"expand": "colwize"}, "plan.expand=colwize", "Did you mean colwise?"),
    (gpt(), {"mlp.expnd": "colwise"}, "plan.mlp.expnd=colwise", "no such module. Did you mean mlp.expand?"),
    (gpt(), {"type:Conv2d": "colwise"}, "plan.type:Conv2d=colwise", "no such module."),
    (gpt(), {"expand": "colwise", EXPAND: "rowwise"}, f"plan.{EXPAND}=rowwise", "is in expand already"),
    (gpt(), {"mlp_norm": "colwise"}, "plan.mlp_norm=colwise", "is for nn.Linear and nn.Embedding"),
    (gpt(), {"expand": "sequence"}, "plan.expand=sequence", "keep their weights whole"),
    (zoo.Net(width=7), {"0": "colwise", "2": "rowwise"}, "degree=2", "does not divide the 7 rows of 0.weight"),
    (gpt(num_heads=1), {"queries_keys_values": "colwise"}, "degree=2", "does not divide the 1 heads"),
    (gpt(), {"head.output": "colwise_gathered"}, "plan.head.output=colwise_gathered", "are one parameter (tied)"),
    (gpt(dropout=0.1), {"embed": "sequence_split", "head": "sequence_join"}, "plan.embed=sequence_split",
     "embed.dropout would draw the same numbers"),
    (nn.Sequential(nn.MultiheadAttention(4, 2)), {"out_proj": "rowwise"}, "plan.out_proj=rowwise",
     "part of an nn.MultiheadAttention"),
    (nn.Sequential(nn.Embedding(4, 2, sparse=True)), {"0": "rowwise"}, "plan.0=rowwise", "need whole rows"),
    (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))), {"0": "rowwise_scattered"},
     "plan.0=rowwise_scattered", "0 computes its weight from other parameters, as weight_norm does"),
]  # fmt: skip


def test_a_plan_that_does_not_fit_the_model_is_refused() -> None:
    for model, plan, key, word in UNFIT:
        told = [str(problem) for problem in TensorParallel(degree=2, plan=plan).validate_model(model, PlanContext())]
        assert [one for one in told if one.startswith(f"strategy.{key}: ") and word in one], (key, told)


@pytest.mark.parametrize(("settings", "key", "word"), [
    ({"degree": 0}, "degree=0", "1 or more"),
    ({"plan": {"0": "colwise"}}, "plan={0:colwise}", "no effect with strategy.degree=1"),
    ({"degree": 2, "replicas": 1, "shard": True}, "shard=true", "no effect with 1 replica"),
    ({"degree": 2, "replicas": 2, "devices": ("cpu", "cpu")}, "devices=['cpu', 'cpu']", "need 4 devices"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], key: str, word: str) -> None:
    (problem,) = TensorParallel(**settings).validate(PlanContext())
    assert str(problem).startswith(f"strategy.{key}: ")
    assert word in str(problem)


def test_an_order_of_summation_cannot_be_kept() -> None:
    (problem,) = TensorParallel(degree=2).validate(PlanContext(numerics=Numerics(reproducible=True)))
    assert str(problem).startswith("numerics.reproducible=true: ")


def test_a_rank_holds_its_part_of_what_is_cut_and_of_all_rows_where_replicas_share_them_out() -> None:
    plain, sharing = TensorParallel(degree=2, replicas=2), TensorParallel(degree=2, replicas=2, shard=True)
    whole = sum(param.numel() for param in gpt().parameters())
    context = PlanContext()
    whole_rows, shared_rows = plain.estimate_memory(gpt(), context), sharing.estimate_memory(gpt(), context)
    assert sum(whole_rows.resident.values()) == (whole - 72) // 2 + 72
    assert sum(shared_rows.resident.values()) == ((whole - 72) // 2 + 72) // 2
    assert whole_rows.transient == 0 < shared_rows.transient


def test_the_plan_of_a_run_says_which_layers_are_cut() -> None:
    layers, draws = TensorParallel(degree=2).notes(gpt(dropout=0.1))
    assert "embed.tokens rowwise, queries_keys_values colwise, project rowwise" in layers
    assert layers.endswith("Each rank has 72 of 1,704 parameters whole.")
    assert "draws random numbers" in draws
    (alone,) = TensorParallel().notes(gpt())
    assert "shards no layer" in alone


def drawn(place: int) -> list[float]:
    """Before, in and after a stretch of cut activations, in a block that all ranks enter with one key."""
    regions = ActivationRngRegions(place=place, devices=[torch.device("cpu")], draws=True)
    torch.default_generator.manual_seed(7)
    numbers = [float(torch.rand(()))]
    regions.enter("query")
    regions.enter("key")  # the second of several layers that are cut side by side
    numbers.append(float(torch.rand(())))
    regions.leave("project")
    numbers.append(float(torch.rand(())))
    return numbers


def test_ranks_draw_apart_inside_alone() -> None:
    (before, inside, after), (same, other, again) = drawn(0), drawn(1)
    assert (before, after) == (same, again)
    assert len({before, inside, other, after}) == 4
    assert drawn(1) == [same, other, again]  # as a recomputation does


def test_a_model_that_draws_nothing_leaves_the_generators_alone() -> None:
    regions = ActivationRngRegions(place=1, devices=[torch.device("cpu")], draws=False)
    torch.default_generator.manual_seed(7)
    regions.enter("query")
    assert torch.default_generator.initial_seed() == 7
