"""A sequence that is cut over ranks is the training of one device.

A position, a key or a target of the wrong part of a sequence is caught here alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.context_memory import LongCase
from tests.contract.checks import alone, assert_close
from tests.contract.meshes import TOLERANCES, Mesh, Resumed, compare, resume_error
from tests.contract.stepping import Case, train
from tests.contract.test_mesh import FROZEN, GPT, NET, check
from tests.support import zoo
from tests.support.counted import bytes_of_rank
from tests.support.pool import Pool, TaskError
from trainkit.objectives.base import Access
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.strategies.base import PlanContext
from trainkit.strategies.mesh.strategy import Mesh as MeshOfRanks
from trainkit.strategies.model_transforms import ModelTransforms

CUT: dict[str, Any] = {"context": 2, "shard": 1}
AXES: dict[str, dict[str, Any]] = {
    "2": CUT,
    "4": CUT | {"context": 4},
    "replicate": CUT | {"replicate": 2},
    "replicate, shard": {"replicate": 2, "shard": 2, "context": 2},
    "tensor": CUT | {"tensor": 2},
    "shard, tensor": {"shard": 2, "context": 2, "tensor": 2},
    "pipe": CUT | {"pipe": 2},
    "pipe, replicate": CUT | {"pipe": 2, "replicate": 2},
    "pipe, shard": {"shard": 2, "context": 2, "pipe": 2},
    "pipe, tensor": CUT | {"pipe": 2, "tensor": 2},
}
SHARDED, STAGES, SHARDED_STAGES = {"context": 2, "shard": 2}, AXES["pipe"], AXES["pipe, shard"]
CASES: dict[str, Case] = {
    **{axes: replace(GPT, settings=settings, num_steps=4) for axes, settings in AXES.items()},
    "accumulated, ragged": replace(GPT, settings=CUT, task="hidden", global_size=10, micro_size=3, num_steps=5),
    "an idle copy": replace(GPT, settings=CUT | {"replicate": 2, "reduce": "ring"}, global_size=4, micro_size=4),
    "summed last": replace(GPT, settings=SHARDED | {"sync": "last"}, global_size=10, micro_size=2, num_steps=5),
    "recomputed": replace(GPT, settings=CUT, shaping=ModelTransforms(recompute="full"), num_steps=4),
    "frozen, resumed": replace(FROZEN, settings=SHARDED, resume_at=2),
    "pipe, gpipe": replace(GPT, settings=STAGES | {"schedule": "gpipe"}, micro_size=2),
    "pipe, interleaved": replace(GPT, settings=STAGES | {"schedule": "interleaved"}, micro_size=1),
    "pipe, zero_bubble": replace(GPT, settings=STAGES | {"schedule": "zero_bubble"}, micro_size=1),
    "pipe, shard, interleaved": replace(GPT, settings=SHARDED_STAGES | {"schedule": "interleaved"}, micro_size=2),
    "pipe, ragged": replace(GPT, settings=STAGES, task="hidden", global_size=10, micro_size=3, num_steps=5),
    "pipe, shard, accumulated": replace(GPT, settings=SHARDED_STAGES, global_size=10, micro_size=1, num_steps=5),
    "pipe, shard, idle": replace(GPT, settings=SHARDED_STAGES, global_size=4, micro_size=4, num_steps=5),
    "pipe, recomputed": replace(
        GPT, settings=STAGES, shaping=ModelTransforms(recompute="full"), micro_size=2, num_steps=4
    ),
    "pipe, frozen, resumed": replace(FROZEN, settings=STAGES, micro_size=2, resume_at=2),
    "pipe, shard, frozen": replace(FROZEN, settings=SHARDED_STAGES, micro_size=2),
}


@pytest.mark.parametrize("case", CASES)
def test_sequences_cut_over_ranks_are_those_of_the_reference(case: str, pool: Pool) -> None:
    check(CASES[case], pool)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
@pytest.mark.parametrize("mesh", [Mesh(1, 1, 1, context=4), Mesh(1, 2, 1, context=2)], ids=str)
def test_a_model_of_transformers_is_that_of_the_reference(family: str, mesh: Mesh, pool: Pool) -> None:
    begins_alike, error = compare(pool, family, mesh, "fp64")
    assert begins_alike
    assert error <= TOLERANCES["fp64"]


@pytest.mark.parametrize("family", ["Gpt", "Llama"])
def test_in_bf16_mixed_it_is_that_of_one_device_up_to_rounding(family: str, pool: Pool) -> None:
    assert compare(pool, family, Mesh(1, 1, 1, context=2), "bf16_mixed").error <= TOLERANCES["bf16_mixed"]


@pytest.mark.parametrize(
    ("cut", "even"),
    [(CUT, {}), (SHARDED, {}), (STAGES, {}), (SHARDED_STAGES, {"micro_size": 2, "num_steps": 2})],
    ids=["whole", "sharded", "stages", "both"],
)
def test_what_is_dropped_out_of_parts_is_that_of_one_device(
    cut: dict[str, Any], even: dict[str, Any], pool: Pool
) -> None:
    base = replace(GPT, **{"model": {"bias": False, "dropout": 0.3}, "num_steps": 4, **even})
    assert_close(train(pool, replace(base, settings=cut)), alone(base))


@pytest.mark.slow
def test_a_rank_keeps_the_activations_of_its_positions(pool: Pool) -> None:
    base = LongCase(task="hidden", precision="fp32", num_steps=1, global_size=1, length=1024, width=16, blocks=2)
    one, most = bytes_of_rank(None, base)
    case = replace(base, strategy="mesh", settings=CUT | {"context": 4})
    ranks = pool.run("tests.support.counted.bytes_of_rank", case, num_ranks=4)
    assert max(peak - lasting for lasting, peak in ranks) <= 0.4 * (most - one)


@pytest.mark.parametrize(
    ("before", "after"),
    [(Mesh(1, 1, 1, context=4), Mesh(2, 1, 2)), (Mesh(1, 2, 1), Mesh(1, 2, 1, context=2))],
    ids=str,
)
def test_a_training_goes_to_another_mesh_in_the_middle_of_an_epoch(
    before: Mesh, after: Mesh, pool: Pool, tmp_path: Path
) -> None:
    assert resume_error(pool, Resumed("Gpt", before, after, 6), tmp_path) <= TOLERANCES["fp64"]


class Noisy(nn.Dropout):
    """Draws by itself."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Add noise."""
        return given + torch.randn_like(given)


def noisy() -> nn.Module:
    """A model that draws for its part of a sequence."""
    made = zoo.even_gpt()
    made.get_submodule("blocks.1").dropout = Noisy(0.0)
    return made


@pytest.mark.parametrize("cut", [CUT, STAGES | {"schedule": "interleaved"}], ids=["alone", "in the last stage"])
def test_code_that_draws_for_its_part_without_saying_so_is_refused(cut: dict[str, Any], pool: Pool) -> None:
    with pytest.raises(TaskError, match=re.escape("blocks.1.dropout (Noisy) draws random numbers")):
        train(pool, replace(GPT, build=noisy, model={}, settings=cut))


def test_what_a_cut_sequence_does_not_take_is_refused_by_name() -> None:
    strategy, tokens = MeshOfRanks(context=2, shard=1), PlanContext(objective=LanguageModelling())
    assert strategy.validate(tokens) == []
    assert strategy.facts_in(tokens).compiles == "nothing"
    assert Access.calls in strategy.facts_in(tokens).withheld

    class Own(LanguageModelling):
        """May couple positions."""

    (problem,) = strategy.validate(PlanContext(objective=Own()))
    assert "objective=Own: does not declare by_position" in str(problem)
    (problem,) = strategy.validate_model(NET.make_model(), tokens)
    assert "needs a model that declares set_sequence_cut, or one of transformers, and Net is neither" in str(problem)
    dropping = replace(GPT, model={"dropout": 0.1}).make_model()
    (problem,) = MeshOfRanks(context=2, shard=1, tensor=2).validate_model(dropping, tokens)
    assert (
        "strategy.tensor=2: cuts activations for which random numbers are drawn, and so does strategy.context"
        in str(problem)
    )
