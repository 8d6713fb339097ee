"""Axes of one mesh in any combination are the training of one device.

A sum of gradients, of buffers or of norms over the wrong axes of the mesh is caught here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from tests.contract import test_tensor_parallel as cut
from tests.contract.checks import alone
from tests.contract.meshes import TOLERANCES, Mesh, Resumed, case_of, compare, resume_error
from tests.contract.stepping import Case, Trained, oracle, train
from tests.contract.test_compression import distance
from tests.contract.test_tensor_parallel import MLP, STREAM, check
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.strategies.base import PlanContext
from trainkit.strategies.model_transforms import ModelTransforms
from trainkit.strategies.reducers.options import Reducing

GATE = [
    ("Gpt", Mesh(2, 2, 2)),
    ("Gpt", Mesh(1, 1, 2)),
    ("Gpt", Mesh(1, 2, 1, 2, 2)),
    ("Gpt", Mesh(1, 2, 2, 2)),
    ("Llama", Mesh(2, 1, 1, 2)),
    ("Llama", Mesh(1, 1, 2, 1, 2)),
    ("GPT-2", Mesh(1, 2, 1)),
    ("GPT-2", Mesh(2, 1, 1, 1, 2)),
]
"""Eight of the layouts that `benchmarks/meshes.py` tries: each axis, each pair of axes, each model."""
ALL_AXES = {"replicate": 2, "shard": 2, "tensor": 2}

GPT = replace(cut.GPT, strategy="mesh", settings={}, optimizer="adamw", model={"bias": False}, micro_size=3)
NET = Case(strategy="mesh", task="classes", model={"width": 8}, global_size=16, max_norm=0.05)


def partly_frozen() -> nn.Module:
    """The embedding, which the head shares, is not trained, nor is a part of the first block."""
    model = zoo.even_gpt()
    for name, param in model.named_parameters():
        param.requires_grad_("embed" not in name and "blocks.0.mlp" not in name)
    return model


FROZEN = Case(strategy="mesh", task="tokens", build=partly_frozen, num_steps=4, max_norm=0.05)
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 x 1": {"shard": 1},
    "1 x 2": {"shard": 2},
    "1 x 4": {"shard": 4},
    "2 x 2": {"replicate": 2, "shard": 2},
    "1 x 3": {"shard": 3},
    "3 x 1": {"replicate": 3, "shard": 1},
}
"""replicate x shard."""
FIXED: dict[str, Any] = {"optimizer": "adamw_loop", "reproducible": True, "precision": "fp32"}
FIXED_GPT = replace(GPT, **FIXED, num_steps=4)
BITS: dict[str, tuple[Case, Sequence[str]]] = {
    "dropout, accumulated": (replace(FIXED_GPT, model={"dropout": 0.2}, global_size=12, micro_size=1), tuple(LAYOUTS)),
    "statistics, ragged": (
        replace(NET, **FIXED, model={"width": 7, "norm": True, "dropout": 0.3}, micro_size=3),
        tuple(LAYOUTS),
    ),
    "idle ranks, summed last": (
        replace(FIXED_GPT, global_size=4, micro_size=2, settings={"sync": "last"}),
        ("1 x 4", "2 x 2"),
    ),
    "tied and frozen": (replace(FROZEN, **FIXED, resume_at=2), ("2 x 2", "1 x 3")),
    "bf16_mixed": (replace(FIXED_GPT, precision="bf16_mixed"), ("2 x 2", "1 x 3")),
    "bf16": (replace(FIXED_GPT, precision="bf16", micro_size=1), ("2 x 2", "1 x 3")),
}


def hashes(rank: Trained) -> dict[str, str]:
    """SHA-256 of each tensor of a rank's state: of the sign of zero too."""
    found = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in rank.state.items()}
    return {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in found.items()}


@pytest.mark.parametrize(("family", "mesh"), GATE, ids=str)
@pytest.mark.slow
def test_a_language_model_on_a_mesh_is_that_of_the_reference(family: str, mesh: Mesh, pool: Pool) -> None:
    begins_alike, error = compare(pool, family, mesh, "fp64")
    assert begins_alike
    assert error <= TOLERANCES["fp64"]


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_in_another_precision_it_is_that_of_one_device_up_to_rounding(precision: str, pool: Pool) -> None:
    begins_alike, error = compare(pool, "Gpt", Mesh(1, 2, 2), precision)
    assert begins_alike
    assert error <= TOLERANCES[precision]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Mesh(1, 2, 2), Mesh(2, 1, 1)),
        (Mesh(2, 2, 1), Mesh(1, 1, 2)),
        (Mesh(1, 1, 4), Mesh(1, 2, 2, 2)),
        (Mesh(1, 2, 1, 2), Mesh(2, 1, 2)),
    ],
    ids=str,
)
def test_a_training_goes_to_another_mesh_in_the_middle_of_an_epoch(
    before: Mesh, after: Mesh, pool: Pool, tmp_path: Path
) -> None:
    assert resume_error(pool, Resumed("Gpt", before, after, 6), tmp_path) <= TOLERANCES["fp64"]


def test_copies_alone_take_what_needs_whole_parameters() -> None:
    adafactor = PlanContext(optimizer=torch.optim.Adafactor)
    copies, parts = {"replicate": 2, "shard": 1}, {"replicate": 1, "shard": 2}
    assert replace(NET, settings=copies).make_strategy().validate(adafactor) == []
    (problem,) = replace(NET, settings=parts).make_strategy().validate(adafactor)
    assert "Adafactor uses whole parameters, and here a rank has only parts" in str(problem)


@pytest.mark.slow
def test_the_fused_layers_of_gpt2_are_not_cut_by_name() -> None:
    case = replace(case_of("GPT-2", Mesh(1, 1, 2)), settings={"shard": 1, "tensor": 2, "plan": {"c_attn": "colwise"}})
    (problem,) = case.make_strategy().validate_model(case.make_model(), PlanContext())
    assert "transformer.h.0.attn.c_attn is a Conv1D, and colwise is for nn.Linear" in str(problem)


@pytest.mark.parametrize(
    "base",
    [
        replace(NET, settings={"plan": MLP}, micro_size=3),
        replace(cut.EVEN, strategy="mesh", settings={"plan": STREAM}),
        replace(GPT, shaping=ModelTransforms(recompute="full"), micro_size=4, num_steps=4),
        replace(GPT, settings={"sync": "last", "reshard_after_forward": False}, num_steps=4),
        replace(GPT, global_size=10, micro_size=1, num_steps=5),
        replace(GPT, global_size=4, micro_size=2, num_steps=5),
        FROZEN,
    ],
    ids=["ragged shards", "sequence", "recomputed", "summed last", "accumulated", "idle ranks", "frozen"],
)
def test_all_axes_together_are_the_reference(base: Case, pool: Pool) -> None:
    check(replace(base, settings=ALL_AXES | base.settings), pool)


@pytest.mark.parametrize("shard", [1, 2])
def test_batch_statistics_are_summed_over_replicate_and_shard(shard: int, pool: Pool) -> None:
    settings = {"replicate": 2, "shard": shard}
    check(replace(NET, model={"width": 8, "norm": True}, settings=settings, micro_size=4), pool)


@pytest.mark.parametrize("reduce", get_args(Reducing)[1:])
@pytest.mark.slow
def test_every_reducer_sums_the_copies_of_a_part(reduce: str, pool: Pool) -> None:
    settings = {"reduce": reduce, "replicate": 2, "shard": 2}
    check(replace(NET, model={"width": 7, "norm": True}, micro_size=3, settings=settings), pool)
    check(replace(GPT, micro_size=1, settings={**settings, "replicate": 3, "shard": 1}, num_steps=3), pool)
    check(replace(GPT, settings=ALL_AXES | {"reduce": reduce, "sync": "last"}, num_steps=3), pool)


@pytest.mark.parametrize(("compression", "least", "most"), [("bf16", 1e-4, 2.0**-6), ("fp16", 1e-5, 2.0**-9)])
def test_copies_of_a_part_lose_what_compression_loses(compression: str, least: float, most: float, pool: Pool) -> None:
    base = replace(NET, precision="fp32", max_norm=None, micro_size=4, settings={"replicate": 2, "shard": 2})
    exact = train(pool, base)[0].weights
    ranks = train(pool, replace(base, settings={**base.settings, "compression": compression}))
    assert least < distance(ranks[0].weights, exact) < most
    assert all(hashes(rank) == hashes(ranks[0]) for rank in ranks)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.slow
def test_a_reproducible_run_ends_in_the_bits_of_one_device(name: str, pool: Pool) -> None:
    case, layouts = BITS[name]
    one = alone(case)
    for layout in layouts:
        for rank in train(pool, replace(case, settings={**case.settings, **LAYOUTS[layout]})):
            assert (layout, hashes(rank)) == (layout, hashes(one))
            assert (layout, rank.norms) == (layout, one.norms)


def test_an_overflow_is_tried_again_by_all_axes(pool: Pool) -> None:
    base = replace(GPT, precision="fp16_mixed", rate_scale=0.1, settings=ALL_AXES, micro_size=4)
    ranks = train(pool, base)
    assert {rank.scale for rank in ranks} == {ranks[0].scale}
    assert ranks[0].losses[-1] == pytest.approx(oracle(base).losses[-1], rel=0.02)
