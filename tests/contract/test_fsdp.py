"""Parameters cut over ranks train as on one device: hybrid groups, both ways to sum, every way to gather.

A part of a parameter that is summed over the wrong group, or a clip by the norm of one rank's parts is caught here
alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contract.checks import alone, assert_reference
from tests.contract.stepping import Case, train
from tests.support.counted import bytes_of_rank, bytes_of_start
from tests.support.pool import Pool

pytestmark = pytest.mark.pairwise

CLASSES = Case(task="classes", global_size=16, micro_size=16, strategy="fsdp")
GPT = Case(task="gpt", global_size=8, micro_size=2, strategy="fsdp", num_steps=6)
# without biases: that of a key has no gradient, and AdamW makes steps of its rounding
ADAMW = replace(GPT, optimizer="adamw", model={"bias": False})
RESNET = Case(task="resnet", global_size=8, micro_size=4, strategy="fsdp", num_steps=4, rate_scale=0.1)

HYBRID = {"replicas": 4, "replicate": 2}
LATE = {"replicas": 2, "sync": "last"}
KEPT = {**HYBRID, "sync": "last", "reshard_after_forward": False}
CASES = [(GPT, {"replicas": 2}), (GPT, KEPT), (ADAMW, LATE), (ADAMW, HYBRID), (RESNET, HYBRID)]
MORE = [(GPT, {"replicas": 4}), (GPT, HYBRID), (RESNET, {"replicas": 2}), (RESNET, {"replicas": 4, "sync": "last"})]
"""Each model, and each way to place it, is in one of the cases above."""


def named(case: Any) -> str:
    return f"{case.task} {case.optimizer}" if isinstance(case, Case) else " ".join(f"{k}={v}" for k, v in case.items())


@pytest.mark.parametrize(
    ("base", "settings"), [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE)], ids=named
)
@pytest.mark.slow
def test_steps_are_those_of_the_reference(base: Case, settings: dict[str, Any], pool: Pool) -> None:
    case = replace(base, settings=settings)
    assert_reference(train(pool, case), case)


@pytest.mark.parametrize("settings", [HYBRID, {"replicas": 4, "sync": "last"}], ids=named)
@pytest.mark.parametrize("base", [replace(CLASSES, model={"norm": True}), GPT], ids=["norm", "gpt"])
def test_clip_accumulation_ragged_batches_and_a_resume_at_once(
    base: Case, settings: dict[str, Any], pool: Pool
) -> None:
    case = replace(base, settings=settings, micro_size=3, max_norm=0.05, resume_at=2)
    assert min(assert_reference(train(pool, case), case)[0].norms) > 0.05


@pytest.mark.parametrize("wrap", [("_Block",), ("Linear", "_Mlp")], ids=str)
@pytest.mark.slow
def test_what_is_gathered_at_once_changes_nothing(wrap: Any, pool: Pool) -> None:
    case = replace(GPT, settings={"replicas": 2, "wrap": wrap})
    assert_reference(train(pool, case), case)


def test_ranks_without_a_shard_take_part_from_the_first_step_on(pool: Pool) -> None:
    # the last batch of an epoch has 5 of 16 samples: on 4 ranks with shards of 3, two have none
    case = replace(CLASSES, micro_size=3, settings={"replicas": 4}, model={"norm": True}, num_steps=3)
    ranks = train(pool, replace(case, resume_at=2))  # a new placement begins with that batch
    assert [len(rank.samples[2]) for rank in assert_reference(ranks, case)] == [3, 2, 0, 0]


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed"])
@pytest.mark.slow
def test_rounded_compute_keeps_float32_parts(precision: str, pool: Pool) -> None:
    base = replace(GPT, precision=precision, optimizer="adamw", rate_scale=0.1)
    one = alone(base)
    for rank in train(pool, replace(base, settings={"replicas": 2})):
        assert {tensor.dtype for tensor in rank.weights.values()} == {torch.float32}
        assert rank.losses == pytest.approx(one.losses, rel=2e-2)


def test_an_overflow_on_one_rank_is_tried_again_by_all(pool: Pool) -> None:
    base = replace(CLASSES, micro_size=5, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1)
    one = alone(base)
    for rank in train(pool, replace(base, settings={"replicas": 4})):
        assert rank.scale == one.scale
        assert [len(step) > 0 for step in rank.samples].count(True) >= 4
        assert rank.losses == pytest.approx(one.losses, rel=1e-2)


def test_a_checkpoint_is_that_of_one_device_and_loads_there(pool: Pool) -> None:
    base = replace(ADAMW, num_steps=3)
    one = alone(base)
    cut, *_ = train(pool, replace(base, settings={"replicas": 4}))
    assert {key: tensor.shape for key, tensor in cut.state.items()} == {k: t.shape for k, t in one.state.items()}
    (further,) = train(pool, replace(base, strategy="one_device", start=cut.state))
    (expected,) = train(pool, replace(base, strategy="one_device", start=one.state))
    assert further.losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.slow
def test_four_ranks_hold_a_quarter_each_and_gather_a_block_at_a_time(pool: Pool) -> None:
    blocks = 12
    model = {"width": 128, "num_layers": blocks, "bias": False}
    base = replace(ADAMW, model=model, precision="fp32", num_steps=2, global_size=4, micro_size=1)
    lasting, peak = bytes_of_rank(None, replace(base, strategy="one_device"))
    case = replace(base, settings={"replicas": 4})
    for rank_lasting, rank_peak in pool.run("tests.support.counted.bytes_of_rank", case, num_ranks=4):
        assert 0.24 < rank_lasting / lasting <= 0.26
        assert 0.26 < rank_peak / peak <= 0.26 + 1 / blocks


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_at_the_start_rank_0_has_one_whole_model_and_the_others_a_part_and_a_block(strategy: str, pool: Pool) -> None:
    blocks = 12
    model = {"width": 128, "num_layers": blocks, "bias": False}
    base = replace(GPT, model=model, precision="fp32")
    whole = bytes_of_start(None, replace(base, strategy="one_device"))
    case = replace(base, strategy=strategy, settings={"replicas" if strategy == "fsdp" else "stages": 4})
    first, *others = pool.run("tests.support.counted.bytes_of_start", case, num_ranks=4)
    assert first / whole == pytest.approx(1.0, abs=0.01)
    assert max(others) / whole < 0.26 + 1 / blocks
