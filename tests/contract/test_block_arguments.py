"""Blocks that write into what they are given, and blocks that count: the same everywhere, or refused by name.

A block whose writes into its arguments reach a tensor that was moved, gathered or recomputed is caught here alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contract.checks import alone, assert_bits, assert_close
from tests.contract.stepping import Case, train
from tests.support import object_models, refused_models
from tests.support.pool import Pool
from trainkit.errors import TrainingError
from trainkit.strategies.maps import layout as placing
from trainkit.strategies.model_transforms import ModelTransforms
from trainkit.strategies.object_snapshot import ObjectSnapshot


def untidy(named: str, **settings: Any) -> Case:
    """A training of a model of `object_models` or `refused_models`."""
    build = (object_models.EQUAL | refused_models.REFUSED)[named]
    return Case(build=build, global_size=11, micro_size=6, **settings)


@pytest.mark.parametrize(("named", "kind"), [("ListBetweenBlocks", "list"), ("ObjectBetweenBlocks", "tests.Notes")])
def test_fsdp_refuses_a_block_that_writes_into_what_it_is_given(named: str, kind: str, pool: Pool) -> None:
    said = (
        f"TrainingError: the block first changes the {kind} among its arguments, and FSDP gives each block copies of "
        "lists, dicts and dataclasses. Return what it adds, or use strategy=mirrored."
    )
    with pytest.raises(Exception, match=re.escape(said)):
        train(pool, untidy(named, strategy="fsdp", settings={"replicas": 2, "wrap": ["Noting"]}))


@pytest.mark.parametrize("named", ["ListBetweenBlocks", "DictBetweenBlocks", "ObjectBetweenBlocks"])
def test_a_device_map_of_one_device_gives_blocks_the_objects_themselves(named: str, pool: Pool) -> None:
    settings = {"map": {"first": "cpu", "rest": "/cpu:0"}}
    case = untidy(named, strategy="device_map", settings=settings, num_steps=4)
    assert_bits(train(pool, case), alone(case))


def test_a_device_map_refuses_a_block_that_writes_into_a_list_that_was_moved() -> None:
    model: Any = refused_models.REFUSED["ListBetweenBlocks"]()
    moved: list[ObjectSnapshot] = []
    model.second.register_forward_pre_hook(placing.bring_inputs(torch.device("meta"), moved), with_kwargs=True)
    model.second.register_forward_hook(placing._check_arguments("second", moved))
    said = (
        "the block second changes the list among its arguments, and a device map gives it copies of lists and dicts on "
        "its device. Return what it adds, or use strategy=mirrored."
    )
    model.second.to("meta")
    with pytest.raises(TrainingError, match="the block second") as caught:
        model(torch.zeros(2, 6))
    assert str(caught.value) == said


def test_recomputation_refuses_a_block_that_writes_into_what_it_is_given(pool: Pool) -> None:
    case = untidy("DictBetweenBlocks", shaping=ModelTransforms(recompute=["Noting"]))
    said = (
        "the block of the class Noting changes the dict among its arguments, and activation_checkpointing computes the "
        "block twice. Return what it adds, or set activation_checkpointing=none."
    )
    with pytest.raises(Exception, match="changes the dict") as caught:
        train(pool, case)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "settings", [{"shaping": ModelTransforms(recompute=["CountingBlock"])}, {"reproducible": True}]
)
def test_a_block_that_counts_its_calls_counts_each_shard_once(settings: dict[str, Any], pool: Pool) -> None:
    # a recomputation, and the first shard that is thrown away to see what is exchanged, count for nothing
    case = untidy("BlockThatCounts", num_steps=4)
    assert_close(train(pool, replace(case, **settings)), alone(case))
