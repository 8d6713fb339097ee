"""Axes of one mesh in any combination are the training of one device.

A sum of gradients, of buffers or of norms over the wrong axes of the mesh is caught here alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import nn

from tests.contract.stepping import Case, oracle, train
from tests.contract.test_tensor_parallel import MLP, STREAM, GptCase, StreamCase
from tests.support import reference
from tests.support.pool import Pool
from trainkit.strategies.model_transforms import ModelTransforms

MESHES: dict[str, dict[str, Any]] = {
    "replicate 2": {"replicate": 2, "shard": 1},
    "shard 2": {"shard": 2},
    "tensor 2": {"shard": 1, "tensor": 2},
    "replicate 2 x shard 2": {"replicate": 2, "shard": 2},
    "replicate 2 x tensor 2": {"replicate": 2, "shard": 1, "tensor": 2},
    "shard 2 x tensor 2": {"shard": 2, "tensor": 2},
    "replicate 2 x shard 2 x tensor 2": {"replicate": 2, "shard": 2, "tensor": 2},
}
ALL_AXES = MESHES["replicate 2 x shard 2 x tensor 2"]

GPT = GptCase(strategy="mesh", optimizer="adamw", model={"bias": False}, micro_size=3, max_norm=0.1)
NET = Case(strategy="mesh", task="classes", model={"width": 8}, global_size=16, max_norm=0.05)


@dataclass(frozen=True, kw_only=True)
class FrozenCase(GptCase):
    """The embedding, which the head shares, is not trained, nor is a part of the first block."""

    strategy: str = "mesh"
    num_steps: int = 4
    max_norm: float | None = 0.05

    def make_model(self) -> nn.Module:
        model = super().make_model()
        for name, param in model.named_parameters():
            param.requires_grad_("embed" not in name and "blocks.0.mlp" not in name)
        return model


def check(case: Case, pool: Pool) -> None:
    expected, ranks = oracle(case), train(pool, case)
    for rank in ranks:
        assert reference.differences(rank.weights, expected) == []
        assert rank.losses == pytest.approx(expected.losses, rel=1e-12)
        assert rank.norms == ranks[0].norms
    assert min(ranks[0].norms) > (case.max_norm or 0.0)


@pytest.mark.parametrize("axes", MESHES)
def test_a_language_model_on_a_mesh_is_that_of_the_reference(axes: str, pool: Pool) -> None:
    check(replace(GPT, settings=MESHES[axes], resume_at=4), pool)


@pytest.mark.parametrize(
    "base",
    [
        replace(NET, settings={"plan": MLP}, micro_size=3),
        StreamCase(strategy="mesh", settings={"plan": STREAM}, max_norm=0.1, micro_size=4),
        replace(GPT, shaping=ModelTransforms(recompute="full"), micro_size=4, num_steps=4),
        replace(GPT, settings={"sync": "last", "reshard_after_forward": False}, num_steps=4),
        replace(GPT, global_size=10, micro_size=1, num_steps=5),
        replace(GPT, global_size=4, micro_size=2, num_steps=5),
        FrozenCase(),
    ],
    ids=["ragged shards", "sequence", "recomputed", "summed last", "accumulated", "idle ranks", "frozen"],
)
def test_all_axes_together_are_the_reference(base: Case, pool: Pool) -> None:
    check(replace(base, settings=ALL_AXES | base.settings), pool)


@pytest.mark.parametrize("axes", ["replicate 2 x shard 2", "replicate 2"])
def test_batch_statistics_are_summed_over_replicate_and_shard(axes: str, pool: Pool) -> None:
    check(replace(NET, model={"width": 8, "norm": True}, settings=MESHES[axes], micro_size=4), pool)


def test_an_overflow_is_tried_again_by_all_axes(pool: Pool) -> None:
    base = replace(GPT, precision="fp16_mixed", rate_scale=0.1, settings=ALL_AXES, micro_size=4)
    ranks = train(pool, base)
    assert {rank.scale for rank in ranks} == {ranks[0].scale}
    assert ranks[0].losses[-1] == pytest.approx(oracle(base).losses[-1], rel=0.02)
