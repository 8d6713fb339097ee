"""Models that users bring: Python objects between blocks, writing in place, blocks that count; the same, or refused.

An in-place write or an object between blocks that a strategy moves, gathers, recomputes, copies or loses is caught
here alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.checks import alone, assert_bits, assert_close
from tests.contract.stepping import STRATEGIES, Case, refusals_of, train
from tests.support import object_models
from tests.support.pool import Pool
from trainkit.errors import TrainingError
from trainkit.strategies.maps import layout as placing
from trainkit.strategies.model_transforms import ModelTransforms
from trainkit.strategies.object_snapshot import ObjectSnapshot

KINDS: dict[str, type[nn.Module]] = object_models.EQUAL | object_models.REFUSED
MODELS = ("ObjectBetweenBlocks", "ListBetweenBlocks", "DictBetweenBlocks", "Containers", "WritingInPlace")
"""A pipeline refuses the first three by name: tests/contract/test_pipeline.py."""


def untidy(named: str) -> nn.Module:
    """Build a model by name; of some the second block is not trained."""
    model = KINDS[named]()
    if named in ("ObjectBetweenBlocks", "WritingInPlace"):
        model.get_submodule("second").requires_grad_(requires_grad=False)
    return model


# FSDP gives blocks copies, and refuses by name a block that writes into them: below.
CASES = [
    (strategy, named)
    for strategy in STRATEGIES
    for named in MODELS
    if strategy not in ("one_device", "pipeline") and not (strategy in ("fsdp", "mesh") and named in MODELS[:3])
]


@pytest.mark.parametrize(("strategy", "named"), CASES)
def test_objects_between_blocks_and_writing_in_place_are_trained_as_on_one_device(
    strategy: str, named: str, pool: Pool
) -> None:
    # A strategy that copies the arguments of a block would lose what the block leaves in an object.
    short = Case(global_size=16, micro_size=4, rate_scale=0.3, resume_at=3)  # the last batch of an epoch
    case = replace(short, build=untidy, model={"named": named}, strategy=strategy)
    assert_close(train(pool, case), alone(case), atol=1e-13)


def of_model(named: str, **settings: Any) -> Case:
    """A training of a model of `object_models`."""
    return Case(build=KINDS[named], global_size=11, micro_size=6, **settings)


@pytest.mark.parametrize(("named", "kind"), [("ListBetweenBlocks", "list"), ("ObjectBetweenBlocks", "tests.Notes")])
def test_fsdp_refuses_a_block_that_writes_into_what_it_is_given(named: str, kind: str, pool: Pool) -> None:
    (text,) = refusals_of(pool, of_model(named, strategy="fsdp", settings={"replicas": 2, "wrap": ["Noting"]}))
    assert text.startswith(f"the block first changes the {kind} among its arguments, and FSDP gives each block copies")
    assert text.endswith("or use strategy=mirrored.")


@pytest.mark.parametrize("named", ["ListBetweenBlocks", "DictBetweenBlocks", "ObjectBetweenBlocks"])
def test_a_device_map_of_one_device_gives_blocks_the_objects_themselves(named: str, pool: Pool) -> None:
    settings = {"map": {"first": "cpu", "rest": "/cpu:0"}}
    case = of_model(named, strategy="device_map", settings=settings, num_steps=4)
    assert_bits(train(pool, case), alone(case))


def test_a_device_map_refuses_a_block_that_writes_into_a_list_that_was_moved() -> None:
    model: Any = KINDS["ListBetweenBlocks"]()
    moved: list[ObjectSnapshot] = []
    model.second.register_forward_pre_hook(placing.bring_inputs(torch.device("meta"), moved), with_kwargs=True)
    model.second.register_forward_hook(placing._check_arguments("second", moved))
    model.second.to("meta")
    with pytest.raises(TrainingError, match=r"^the block second changes the list .*, or use strategy=mirrored\.$"):
        model(torch.zeros(2, 6))


def test_recomputation_refuses_a_block_that_writes_into_what_it_is_given(pool: Pool) -> None:
    case = of_model("DictBetweenBlocks", shaping=ModelTransforms(recompute=["Noting"]))
    message = r"^the block of the class Noting changes the dict .*, or set activation_checkpointing=none\.$"
    with pytest.raises(Exception, match=message):
        train(pool, case)


@pytest.mark.parametrize(
    "settings", [{"shaping": ModelTransforms(recompute=["CountingBlock"])}, {"reproducible": True}]
)
def test_a_block_that_counts_its_calls_counts_each_shard_once(settings: dict[str, Any], pool: Pool) -> None:
    # a recomputation, and the first shard that is thrown away to see what is exchanged, count for nothing
    case = of_model("BlockThatCounts", num_steps=4)
    assert_close(train(pool, replace(case, **settings)), alone(case))
