"""Axes of one mesh, alone and in any combination, are the training of one device.

Layers are cut by a plan, parameters over shards, the model into stages, and sequences over ranks.

A cut layer whose bias is added on each rank, a sum of gradients, of buffers or of norms over the wrong axes of the
mesh, a clip by the norm of one rank's parts, a stage that exchanges its shards with another stage or fills up
microbatches with samples that count, and a position, a key or a target of the wrong part of a sequence are caught here
alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from benchmarks.context_memory import LongCase
from tests.contract.checks import alone, assert_close, assert_reference
from tests.contract.meshes import TOLERANCES, Mesh, Resumed, case_of, compare, resume_error
from tests.contract.stepping import Case, Trained, oracle, refusals_of, train
from tests.contract.test_reducers import distance
from tests.support import zoo
from tests.support.counted import bytes_of_rank, bytes_of_start
from tests.support.pool import Member, Pool, TaskError
from tests.support.requests import request_for
from trainkit.cluster.tasks import Identity, Task
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Access
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.mesh.strategy import Mesh as MeshOfRanks
from trainkit.strategies.mesh.strategy import TensorParallel
from trainkit.strategies.model_transforms import ModelTransforms
from trainkit.strategies.reducers.options import Reducing

TWO = {"degree": 2, "replicas": 1}
COPIES = {"degree": 2, "replicas": 2}
TENSOR_SHARDED = {"shard": 2, "tensor": 2}
MLP = {"0": "colwise", "2": "rowwise"}

LAYERED = Case(strategy="tensor_parallel", task="tokens", build=zoo.even_gpt, settings=TWO, max_norm=0.1)
LAYERED_NET = Case(strategy="tensor_parallel", task="classes", model={"width": 8}, global_size=16, max_norm=0.05)


def check(case: Case, pool: Pool) -> None:
    ranks = assert_reference(train(pool, case), case)
    assert min(ranks[0].norms) > (case.max_norm or 0.0)


@pytest.mark.parametrize(
    ("settings", "optimizer", "bias"),
    [(TWO, "adamw", False), (COPIES, "sgd", True)],
    ids=["two ranks", "two replicas"],
)
@pytest.mark.slow
def test_a_language_model_cut_by_its_own_plan_is_that_of_the_reference(
    settings: dict[str, object], optimizer: str, bias: bool, pool: Pool
) -> None:
    # without biases under AdamW: that of a key has no gradient, and AdamW makes steps of its rounding
    check(replace(LAYERED, optimizer=optimizer, settings=settings, model={"bias": bias}, micro_size=3), pool)


EVEN = replace(LAYERED, samples=zoo.EvenSentences, micro_size=4)
STREAM = {
    "embed": "sequence_split",
    "blocks.*_norm": "sequence",
    "queries_keys_values": "colwise_sequence",
    "expand": "colwise_sequence",
    "project": "rowwise_sequence",
    "head": "sequence_join",
    "head.output": "colwise_gathered",
    "embed.tokens": "rowwise",
}


def test_layers_that_stay_whole_in_a_cut_sequence_are_those_of_the_reference(pool: Pool) -> None:
    plan = {"mlp": "sequence", "attention.project": "rowwise_sequence"}
    plan |= {name: style for name, style in STREAM.items() if name not in ("expand", "project")}
    check(replace(EVEN, settings=COPIES | {"plan": plan}), pool)


def test_the_head_of_a_resnet_is_cut_as_the_reference(pool: Pool) -> None:
    plan = {"type:Linear": "rowwise_scattered"}
    base = Case(task="resnet", strategy="tensor_parallel", micro_size=4, num_steps=4, rate_scale=0.1, max_norm=0.1)
    check(replace(base, settings=TWO | {"plan": plan}), pool)


DROPS = replace(LAYERED_NET, model={"width": 8, "dropout": 0.5}, micro_size=3)
DROPPING: dict[str, tuple[Case, dict[str, Any]]] = {
    "whole activations": (DROPS, TWO | {"plan": {"0": "colwise_gathered"}}),
    "cut features": (DROPS, COPIES | {"plan": {"0": "colwise", "2": "dropout", "3": "rowwise"}}),
    "heads": (replace(LAYERED, model={"dropout": 0.3}, micro_size=3), COPIES),
    "a sequence": (
        replace(EVEN, model={"dropout": 0.3}),
        COPIES | {"plan": STREAM | {"blocks.*.dropout": "sequence"}},
    ),
}


@pytest.mark.parametrize("where", DROPPING)
def test_what_is_dropped_out_of_cut_layers_is_that_of_one_device(where: str, pool: Pool) -> None:
    base, settings = DROPPING[where]
    assert_close(train(pool, replace(base, settings=settings)), alone(base))


@pytest.mark.parametrize(
    ("strategy", "settings"), [("tensor_parallel", TWO), ("mesh", TENSOR_SHARDED)], ids=["two ranks", "sharded"]
)
def test_rounded_parameters_have_masters_that_are_cut_and_saved(
    strategy: str, settings: dict[str, object], pool: Pool
) -> None:
    base = replace(LAYERED, strategy=strategy, precision="bf16", rate_scale=0.1, settings=settings, micro_size=4)
    expected, resumed = train(pool, base)[0], train(pool, replace(base, resume_at=4))[0]
    assert {tensor.dtype for key, tensor in expected.state.items() if key.startswith("param/")} == {torch.float32}
    for name, tensor in expected.state.items():
        torch.testing.assert_close(resumed.state[name], tensor, rtol=0, atol=0)
    assert expected.losses[-1] == pytest.approx(oracle(base).losses[-1], rel=0.02)


def drift(member: Member, wrong: int, name: str) -> str | None:
    """What the check of the replicas says, once a rank has changed one bit of what it holds."""
    strategy = TensorParallel(degree=2, replicas=2, plan=MLP)
    task = Task(role="worker", index=member.rank, rank=member.rank, device="cpu")
    request = request_for(
        zoo.Net(width=8),
        identity=Identity(task=task, num_ranks=member.num_ranks, store=member.store, prefix=member.prefix),
        precision=Precision(value="fp32"),
        make_optimizer=lambda params: torch.optim.SGD(list(params.values()), lr=0.1),
    )
    executor = strategy.setup(request)
    if member.rank == wrong:
        executor.local.params[name].detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    drifted = executor.check_replicas()
    executor.close()
    return drifted


@pytest.mark.parametrize(
    ("wrong", "name", "text"),
    [
        (-1, "0.weight", None),
        (3, "0.weight", "the parameter 0.weight differs on rank 3 from rank 1, which holds the same part of it."),
        (1, "2.bias", "the parameter 2.bias differs on rank 1 from rank 0, which holds the same part of it."),
    ],
)
def test_one_changed_bit_of_a_part_is_found_and_named(wrong: int, name: str, text: str | None, pool: Pool) -> None:
    texts = pool.run("tests.contract.test_mesh.drift", wrong, name, num_ranks=4)
    assert texts == [text] * 4


GATE = [
    ("Gpt", Mesh(2, 2, 2)),
    ("Llama", Mesh(2, 1, 1, 2)),
    ("Llama", Mesh(1, 1, 2, 1, 2)),
    ("GPT-2", Mesh(1, 2, 1)),
    ("GPT-2", Mesh(2, 1, 1, 1, 2)),
]
"""Some of the layouts that `benchmarks/meshes.py` tries: each axis, each model; the tests below have other pairs."""
ALL_AXES = {"replicate": 2, "shard": 2, "tensor": 2}

GPT = replace(LAYERED, strategy="mesh", settings={}, optimizer="adamw", model={"bias": False}, micro_size=3)
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
    "dropout, accumulated": (
        replace(FIXED_GPT, model={"dropout": 0.2}, global_size=12, micro_size=1),
        ("2 x 2", "1 x 3"),
    ),
    "statistics, ragged": (
        replace(NET, **FIXED, model={"width": 7, "norm": True, "dropout": 0.3}, micro_size=3),
        tuple(LAYOUTS),
    ),
    "idle ranks, summed last": (
        replace(FIXED_GPT, global_size=4, micro_size=2, settings={"sync": "last"}),
        ("1 x 4", "2 x 2"),
    ),
    "tied and frozen": (replace(FROZEN, **FIXED, resume_at=2), ("2 x 2", "1 x 3")),
    "bf16_mixed": (replace(FIXED_GPT, precision="bf16_mixed"), ("2 x 2",)),
    "bf16": (replace(FIXED_GPT, precision="bf16", micro_size=1), ("1 x 3",)),
}


def hashes(rank: Trained) -> dict[str, str]:
    """SHA-256 of each tensor of a rank's state: of the sign of zero too."""
    bits = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in rank.state.items()}
    return {name: sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in bits.items()}


@pytest.mark.parametrize(("family", "mesh"), GATE, ids=str)
@pytest.mark.slow
def test_a_language_model_on_a_mesh_is_that_of_the_reference(family: str, mesh: Mesh, pool: Pool) -> None:
    begins_alike, error = compare(pool, family, mesh, "fp64")
    assert begins_alike
    assert error <= TOLERANCES["fp64"]


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 2), Mesh(1, 1, 1, context=2)], ids=str)
def test_in_bf16_mixed_it_is_that_of_one_device_up_to_rounding(mesh: Mesh, pool: Pool) -> None:
    begins_alike, error = compare(pool, "Gpt", mesh, "bf16_mixed")
    assert begins_alike
    assert error <= TOLERANCES["bf16_mixed"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Mesh(1, 1, 4), Mesh(1, 2, 1, 2)),
        (Mesh(1, 2, 1, 2), Mesh(2, 1, 2)),
        (Mesh(1, 2, 1), Mesh(1, 2, 1, context=2)),
    ],
    ids=str,
)
def test_a_training_goes_to_another_mesh_in_the_middle_of_an_epoch(
    before: Mesh, after: Mesh, pool: Pool, tmp_path: Path
) -> None:
    assert resume_error(pool, Resumed("Gpt", before, after, 6), tmp_path) <= TOLERANCES["fp64"]


@pytest.mark.parametrize(
    "base",
    [
        replace(NET, settings={"plan": MLP, "replicate": 1}, micro_size=3),
        replace(EVEN, strategy="mesh", settings={"plan": STREAM}),
        replace(GPT, settings={"replicate": 1}, shaping=ModelTransforms(recompute="full"), micro_size=4, num_steps=4),
        replace(GPT, settings={"sync": "last", "reshard_after_forward": False}, num_steps=4),
        replace(GPT, settings={"replicate": 1}, global_size=10, micro_size=1, num_steps=5),
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
    check(replace(GPT, settings=settings | {"sync": "last"}, num_steps=3), pool)


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
    expected = alone(case)
    for layout in layouts:
        for rank in train(pool, replace(case, settings={**case.settings, **LAYOUTS[layout]})):
            assert (layout, hashes(rank)) == (layout, hashes(expected))
            assert (layout, rank.norms) == (layout, expected.norms)


@pytest.mark.parametrize("settings", [ALL_AXES, {"shard": 2, "pipe": 2, "tensor": 2}], ids=["whole", "in stages"])
def test_an_overflow_is_tried_again_by_all_axes(settings: dict[str, int], pool: Pool) -> None:
    base = replace(GPT, precision="fp16_mixed", rate_scale=0.1, settings=settings, micro_size=4)
    ranks = train(pool, base)
    assert {rank.scale for rank in ranks} == {ranks[0].scale}
    assert ranks[0].losses[-1] == pytest.approx(oracle(base).losses[-1], rel=0.02)


STAGED = replace(GPT, micro_size=2)
PIPES: dict[str, dict[str, int]] = {
    "pipe x shard": {"shard": 2, "pipe": 2},
    "pipe x tensor": {"shard": 1, "pipe": 2, "tensor": 2},
    "pipe x replicate x shard": {"replicate": 2, "shard": 2, "pipe": 2},
    "pipe x shard x tensor": {"shard": 2, "pipe": 2, "tensor": 2},
}


@pytest.mark.parametrize("name", ["pipe x tensor", "pipe x replicate x shard", "pipe x shard x tensor"])
def test_stages_on_a_mesh_train_as_the_reference(name: str, pool: Pool) -> None:
    check(replace(STAGED, settings=PIPES[name]), pool)


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        (STAGED, {"schedule": "gpipe"}),
        (STAGED, {"schedule": "interleaved", "virtual_stages": 2}),
        (replace(STAGED, micro_size=3), {}),
        (replace(STAGED, global_size=10, micro_size=1, num_steps=5), {}),
        (replace(STAGED, global_size=4, micro_size=4, num_steps=5), {}),
        (replace(STAGED, shaping=ModelTransforms(recompute="full"), num_steps=4), {}),
        (replace(STAGED, resume_at=3), {}),
        (replace(FROZEN, micro_size=2), {}),
    ],
    ids=["gpipe", "interleaved", "ragged", "accumulated", "idle", "recomputed", "resumed", "frozen"],
)
def test_sharded_stages_train_as_the_reference(base: Case, settings: dict[str, Any], pool: Pool) -> None:
    check(replace(base, settings={**PIPES["pipe x shard"], **settings}), pool)


STAGED_NET = Case(strategy="mesh", task="classes", model={"width": 8, "norm": True}, global_size=12, micro_size=4)


class EvenPoints(zoo.Points):
    """Three batches of three microbatches: one rank along shard has two, the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.targets = self.inputs[:36], self.targets[:36]


def test_batch_statistics_of_sharded_stages_are_summed_over_samples(pool: Pool) -> None:
    check(replace(STAGED_NET, samples=EvenPoints, settings=PIPES["pipe x shard"], max_norm=0.05), pool)


def test_microbatches_of_coupled_samples_are_not_filled_up(pool: Pool) -> None:
    case = replace(STAGED_NET, settings=PIPES["pipe x shard"], global_size=16)
    for refused in refusals_of(pool, case):
        assert re.search(r"micro_size=4: gives microbatches of \d and 4 samples, which 1 couples", refused)


def test_dropout_in_sharded_stages_is_that_of_one_device(pool: Pool) -> None:
    base = replace(STAGED, model={"bias": False, "dropout": 0.3}, num_steps=2)  # then shards are of other sizes
    assert_close(train(pool, replace(base, settings=PIPES["pipe x shard"])), alone(base), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("name", "precision"), [("pipe x shard", "bf16"), ("pipe x tensor", "bf16_mixed")])
def test_in_another_precision_stages_are_those_of_one_device_up_to_rounding(
    name: str, precision: str, pool: Pool
) -> None:
    base = replace(STAGED, optimizer="sgd", precision=precision, num_steps=4)
    expected = alone(base).losses
    for rank in train(pool, replace(base, settings=PIPES[name])):
        assert rank.losses == pytest.approx(expected, rel=0.03)


class Owning(nn.Module):
    """A model with a parameter of its own, outside of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(self.first(inputs * self.scale))
        return outputs


def test_what_stages_do_not_take_is_refused_by_name() -> None:
    def rule(settings: dict[str, Any], model: nn.Module | None = None, **facts: Any) -> str:
        strategy, context = replace(STAGED, settings=settings).make_strategy(), PlanContext(**facts)
        problems = strategy.validate(context)
        (problem,) = problems or strategy.validate_model((model or STAGED.make_model()).to("meta"), context)
        return str(problem)

    pipe = PIPES["pipe x shard"]
    assert rule({**pipe, "schedule": "zero_bubble"}).startswith("strategy.schedule=zero_bubble: computes the gradients")
    assert rule({**pipe, "reduce": "ring"}).startswith("strategy.reduce=ring: does not work with several stages")
    assert rule({"shard": 2, "schedule": "gpipe"}).startswith("strategy.schedule=gpipe: has no effect with one rank")
    assert rule(pipe, numerics=Numerics(reproducible=True)).startswith("numerics.reproducible=true: does not work with")
    assert rule(pipe, Owning()).startswith("model: scale is in no block, and shard gathers")
    cut = {"shard": 1, "pipe": 2, "tensor": 2, "plan": {"first": "colwise", "second": "rowwise"}}
    assert rule(cut, Owning()).startswith("strategy.plan.first=colwise: colwise cuts activations between first and")


CUT: dict[str, Any] = {"context": 2, "shard": 1}
SHARDED, STAGES = {"context": 2, "shard": 2}, CUT | {"pipe": 2}
SEQUENCES: dict[str, Case] = {
    "2": replace(GPT, settings=CUT, num_steps=4),
    "4": replace(GPT, settings=CUT | {"context": 4}, num_steps=4),
    "shard, tensor": replace(GPT, settings=SHARDED | {"tensor": 2}, num_steps=4),
    "replicate, shard": replace(GPT, settings=SHARDED | {"replicate": 2}, num_steps=4),
    "pipe, tensor": replace(GPT, settings=STAGES | {"tensor": 2}, num_steps=4),
    "accumulated, ragged": replace(GPT, settings=CUT, task="hidden", global_size=10, micro_size=3, num_steps=5),
    "an idle copy": replace(GPT, settings=CUT | {"replicate": 2, "reduce": "ring"}, global_size=4, micro_size=4),
    "summed last": replace(GPT, settings=SHARDED | {"sync": "last"}, global_size=10, micro_size=2, num_steps=5),
    "recomputed": replace(GPT, settings=CUT, shaping=ModelTransforms(recompute="full"), num_steps=4),
    "frozen, resumed": replace(FROZEN, settings=SHARDED, resume_at=2),
    "pipe, gpipe": replace(GPT, settings=STAGES | {"schedule": "gpipe"}, micro_size=2),
    "pipe, interleaved": replace(GPT, settings=STAGES | {"schedule": "interleaved"}, micro_size=1),
    "pipe, zero_bubble": replace(GPT, settings=STAGES | {"schedule": "zero_bubble"}, micro_size=1),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences_cut_over_ranks_are_those_of_the_reference(case: str, pool: Pool) -> None:
    check(SEQUENCES[case], pool)


@pytest.mark.parametrize("cut", [CUT, SHARDED, STAGES], ids=["whole", "sharded", "stages"])
def test_what_is_dropped_out_of_parts_is_that_of_one_device(cut: dict[str, Any], pool: Pool) -> None:
    base = replace(GPT, model={"bias": False, "dropout": 0.3}, num_steps=4)
    assert_close(train(pool, replace(base, settings=cut)), alone(base))


@pytest.mark.slow
def test_a_rank_keeps_the_activations_of_its_positions(pool: Pool) -> None:
    base = LongCase(task="hidden", precision="fp32", num_steps=1, global_size=1, length=1024, width=16, blocks=2)
    least, most = bytes_of_rank(None, base)
    case = replace(base, strategy="mesh", settings=CUT | {"context": 4})
    ranks = pool.run("tests.support.counted.bytes_of_rank", case, num_ranks=4)
    assert max(peak - lasting for lasting, peak in ranks) <= 0.4 * (most - least)


class Noisy(nn.Dropout):
    """Draws by itself."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add noise."""
        return inputs + torch.randn_like(inputs)


def noisy() -> nn.Module:
    """A model that draws for its part of a sequence."""
    model = zoo.even_gpt()
    model.get_submodule("blocks.1").dropout = Noisy(0.0)
    return model


DRAWING = replace(GPT, build=noisy, model={})


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (replace(DROPS, settings=TWO | {"plan": {"0": "colwise", "3": "rowwise"}}), "2 (Dropout) draws"),
        (replace(EVEN, settings=TWO | {"plan": STREAM}, model={"dropout": 0.3}), "blocks.0.dropout (Dropout) draws"),
        (replace(DRAWING, settings=CUT), "blocks.1.dropout (Noisy) draws"),
        (replace(DRAWING, settings=CUT | {"tensor": 2}), "blocks.1.dropout (Noisy) draws"),
    ],
    ids=["features", "a sequence", "context", "context beside tensor"],
)
def test_code_that_draws_for_its_part_without_saying_so_is_refused(case: Case, text: str, pool: Pool) -> None:
    for refused in refusals_of(pool, case):
        assert re.search(f"{re.escape(text)} random numbers for .* has cut", refused)


def test_code_that_draws_so_in_the_last_stage_is_refused_while_the_first_one_waits(pool: Pool) -> None:
    with pytest.raises(TaskError, match=re.escape("blocks.1.dropout (Noisy) draws random numbers")):
        train(pool, replace(DRAWING, settings=STAGES | {"schedule": "interleaved"}))


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
    for family in ("Gpt", "Llama"):
        case = case_of(family, Mesh(1, 1, 2, context=2))
        assert case.make_strategy().validate_model(case.make_model(), tokens) == []


SHARDED_NET = Case(task="classes", global_size=16, micro_size=16, strategy="fsdp")
GATHERED = Case(task="gpt", global_size=8, micro_size=2, strategy="fsdp", num_steps=6)
# without biases: that of a key has no gradient, and AdamW makes steps of its rounding
ADAMW = replace(GATHERED, optimizer="adamw", model={"bias": False})
HYBRID = {"replicas": 4, "replicate": 2}


@pytest.mark.parametrize(
    ("base", "settings"),
    [(replace(SHARDED_NET, model={"norm": True}), {"replicas": 4, "sync": "last"}), (GATHERED, HYBRID)],
    ids=["norm, summed last", "gpt, hybrid"],
)
def test_clip_accumulation_ragged_batches_and_a_resume_at_once(
    base: Case, settings: dict[str, Any], pool: Pool
) -> None:
    case = replace(base, settings=settings, micro_size=3, max_norm=0.05, resume_at=2)
    assert min(assert_reference(train(pool, case), case)[0].norms) > 0.05


@pytest.mark.parametrize("wrap", [("_Block",), ("Linear", "_Mlp")], ids=str)
@pytest.mark.slow
def test_what_is_gathered_at_once_changes_nothing(wrap: Any, pool: Pool) -> None:
    case = replace(GATHERED, settings={"replicas": 2, "wrap": wrap})
    assert_reference(train(pool, case), case)


def test_ranks_without_a_shard_take_part_from_the_first_step_on(pool: Pool) -> None:
    # the last batch of an epoch has 5 of 16 samples: on 4 ranks with shards of 3, two have none
    case = replace(SHARDED_NET, micro_size=3, settings={"replicas": 4}, model={"norm": True}, num_steps=3)
    ranks = train(pool, replace(case, resume_at=2))  # a new placement begins with that batch
    assert [len(rank.samples[2]) for rank in assert_reference(ranks, case)] == [3, 2, 0, 0]


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed"])
@pytest.mark.slow
def test_rounded_compute_keeps_float32_parts(precision: str, pool: Pool) -> None:
    base = replace(GATHERED, precision=precision, optimizer="adamw", rate_scale=0.1)
    expected = alone(base)
    for rank in train(pool, replace(base, settings={"replicas": 2})):
        assert {tensor.dtype for tensor in rank.weights.values()} == {torch.float32}
        assert rank.losses == pytest.approx(expected.losses, rel=2e-2)


def test_an_overflow_on_one_rank_is_tried_again_by_all(pool: Pool) -> None:
    base = replace(SHARDED_NET, micro_size=5, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1)
    expected = alone(base)
    for rank in train(pool, replace(base, settings={"replicas": 4})):
        assert rank.scale == expected.scale
        assert [len(step) > 0 for step in rank.samples].count(True) >= 4
        assert rank.losses == pytest.approx(expected.losses, rel=1e-2)


def test_a_checkpoint_is_that_of_one_device_and_loads_there(pool: Pool) -> None:
    base = replace(ADAMW, num_steps=3)
    saved = alone(base)
    cut, *_ = train(pool, replace(base, settings={"replicas": 4}))
    assert {key: tensor.shape for key, tensor in cut.state.items()} == {k: t.shape for k, t in saved.state.items()}
    (further,) = train(pool, replace(base, strategy="one_device", start=cut.state))
    (expected,) = train(pool, replace(base, strategy="one_device", start=saved.state))
    assert further.losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.slow
def test_four_ranks_hold_a_quarter_each_and_gather_a_block_at_a_time(pool: Pool) -> None:
    blocks = 6
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
    base = replace(GATHERED, model=model, precision="fp32")
    full = bytes_of_start(None, replace(base, strategy="one_device"))
    case = replace(base, strategy=strategy, settings={"replicas" if strategy == "fsdp" else "stages": 4})
    first, *others = pool.run("tests.support.counted.bytes_of_start", case, num_ranks=4)
    assert first / full == pytest.approx(1.0, abs=0.01)
    assert max(others) / full < 0.26 + 1 / blocks
