"""Models that make Python objects in their forward passes: trained as on one device, or refused beforehand.

A Python object that a forward pass leaves behind and that a traced stage would share between microbatches is caught
here alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.checks import alone, assert_bits, assert_reference
from tests.contract.running import run, weights
from tests.contract.stepping import Case, train
from tests.support import object_models, refused_models
from tests.support.decoders import Decoder
from tests.support.pool import Pool
from trainkit.errors import ConfigError
from trainkit.strategies.base import PlanContext
from trainkit.strategies.mesh.strategy import Pipeline

POINT = (torch.zeros(6), 0)
ELSEWHERE = "or use strategy=mirrored."


BASE = Case(strategy="pipeline", global_size=11, micro_size=4)


@pytest.mark.parametrize("named", object_models.EQUAL)
def test_fresh_containers_modes_and_blocks_own_counts_train_to_the_bits_of_one_device(named: str, pool: Pool) -> None:
    # 11 points are 4, 4 and 3: two shapes. In bf16_mixed the autocast that a model turns off itself shows.
    precision = "bf16_mixed" if named == "FullPrecision" else "fp64"
    case = replace(BASE, build=object_models.EQUAL[named], precision=precision)
    expected = alone(case)
    assert [rank.losses for rank in assert_bits(train(pool, case), expected)] == [expected.losses] * 2


CHANGES = "the block first changes the {} among its arguments, of which each stage has its own."
OWN = "its own code changes {}, and every stage runs that code. Compute it from the inputs, move it into a block,"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("ObjectBetweenBlocks", f"{CHANGES.format('tests.Notes')} Return what it adds, {ELSEWHERE}"),
        ("ListBetweenBlocks", f"{CHANGES.format('list')} Return what it adds, {ELSEWHERE}"),
        ("DictBetweenBlocks", f"{CHANGES.format('dict')} Return what it adds, {ELSEWHERE}"),
        ("CacheBetweenBlocks", f"{CHANGES.format('list')} Use model.config.use_cache=false."),
        (
            "ObjectReturned",
            (
                "the block first returns an object of the class tests.Notes, which is not sent to other stages. "
                f"Use tensors and numbers, in tuples, lists or dicts, {ELSEWHERE}"
            ),
        ),
        ("Counting", f"{OWN.format('calls (int)')} {ELSEWHERE}"),
        (
            "CountingOutside",
            (
                "its own code after first does something else in each pass, or where that block is on another stage. "
                f"Compute it from the inputs and from what blocks return, {ELSEWHERE}"
            ),
        ),
        ("Remembering", f"{OWN.format('last (Tensor)')} {ELSEWHERE}"),
        (
            "Tossing",
            (
                "its forward draws from Python's random or NumPy, which are keyed by shard and not by block. "
                "Use strategy=fsdp."
            ),
        ),
        (
            "OwnGenerator",
            (
                "its own code gives aten.randn.generator a torch.Generator, which each stage would have for itself. "
                f"Draw from torch's own generator, {ELSEWHERE}"
            ),
        ),
        (
            "Averaging",
            (
                "its own code writes into mean between its blocks. Move the tensor and that code into a block, "
                f"{ELSEWHERE}"
            ),
        ),
        (
            "ReadingAttribute",
            (
                "its own code needs what a block does beside what it returns (AssertionError). "
                f"Return it from the block, {ELSEWHERE}"
            ),
        ),
        (
            "SharingAList",
            (
                "second.seen (list) of the block second is changed outside of the block. Pass it as an argument, "
                f"{ELSEWHERE}"
            ),
        ),
    ],
)  # fmt: skip
def test_what_a_pass_leaves_in_python_objects_is_refused_in_these_words(named: str, said: str) -> None:
    model = refused_models.REFUSED[named]().to("meta")
    found = Pipeline().validate_model(model, PlanContext(sample=POINT))
    assert [str(problem) for problem in found] == [f"model: cannot be cut into stages: {said}"]


def test_looking_at_a_model_leaves_its_attributes_and_all_generators_as_they_were() -> None:
    model: Any = object_models.BlockThatCounts()
    state = torch.get_rng_state()
    assert Pipeline().validate_model(model, PlanContext(sample=POINT)) == []
    assert (model.first.calls, model.first.sizes) == (0, [0])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_of_such_a_model_ends_before_its_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the block first changes the tests\.Notes among its arguments"):
        run(
            tmp_path / "run",
            "model._target_=tests.support.refused_models.ObjectBetweenBlocks",
            *("model=net", "~model.width", "~model.norm", "~model.dropout"),
            *("data=points", "strategy=pipeline", "steps=2"),
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_attribute_that_a_callback_changes_counts_from_the_next_step_on(tmp_path: Path) -> None:
    common = (
        "model._target_=tests.support.object_models.Tempered",
        *("model=net", "~model.width", "~model.norm", "~model.dropout", "data=points", "steps=6"),
        *("batch.global_size=16", "batch.micro_size=4"),
        "callbacks.annealing._target_=tests.support.object_models.Annealing",
    )
    plain, staged = (weights(run(tmp_path / name, *common, f"strategy={name}")) for name in ("one_device", "pipeline"))
    torch.testing.assert_close(staged, plain, rtol=1e-12, atol=1e-13)


SENTENCE = (torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long))


@pytest.mark.parametrize(
    ("given", "stages"),
    [
        (
            "auto",
            ["transformer.wte, transformer.wpe, transformer.h.0-1", "transformer.h.2-3, transformer.ln_f, lm_head"],
        ),
        (
            {"transformer": 0, "transformer.h.3": 1, "lm_head": 1},
            ["transformer.wte, transformer.wpe, transformer.h.0-2", "transformer.h.3, transformer.ln_f, lm_head"],
        ),
    ],
)
@pytest.mark.slow
def test_a_decoder_of_one_child_is_cut_by_auto_and_by_a_layer_named_beside_its_parent(
    given: Any, stages: list[str], pool: Pool
) -> None:
    strategy = Pipeline(map=given)
    model, facts = Decoder().to("meta"), PlanContext(sample=SENTENCE)
    assert strategy.validate_model(model, facts) == []
    assert [part.modules for part in strategy.describe_partition(model, facts)] == stages
    decided = strategy.resolve(lambda: model, facts).map
    decoding = replace(BASE, task="tokens", build=Decoder, global_size=8, micro_size=2)
    case = replace(decoding, settings={"map": decided}, resume_at=4)
    assert_reference(train(pool, case), case)


@pytest.mark.parametrize("given", [{"transformer.h.1": 1, "rest": 0}, {"lm_head": 0, "transformer.h": 1, "rest": 0}])
def test_the_map_that_is_advised_is_balanced_and_taken(given: Any) -> None:
    model, facts = Decoder().to("meta"), PlanContext(sample=SENTENCE)
    (problem,) = Pipeline(map=given).validate_model(model, facts)
    advised = problem.rule.partition("A pipeline runs forwards: use {")[2].removesuffix("}.")
    assert advised == (
        "transformer.wte:0,transformer.wpe:0,transformer.h.0-1:0,transformer.h.2-3:1,transformer.ln_f:1,lm_head:1"
    )
    pasted = {name: int(stage) for name, _, stage in (pair.rpartition(":") for pair in advised.split(","))}
    assert Pipeline(map=pasted).validate_model(model, facts) == []
