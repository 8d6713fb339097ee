"""What draws: masks that follow from keys, models and objectives that draw, initial values; the same command twice.

A mask that does not follow from seed, step, shard and block, noise that differs with the number of ranks, numbers that
differ between two runs of one command, and a rank that begins with weights of its own are caught here alone.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.contract.checks import alone, assert_close, assert_reference
from tests.contract.running import run
from tests.contract.stepping import PLACES, Case, _Rank, train
from tests.support import reference
from tests.support.pool import Member, Pool
from tests.support.zoo import Net
from trainkit.objectives.base import Loss, Model
from trainkit.objectives.classification import Classification
from trainkit.strategies.base import PlanContext
from trainkit.strategies.mesh.strategy import Pipeline
from trainkit.strategies.model_transforms import ModelTransforms
from trainkit.strategies.tensors.layouts import local_part

DROPOUT = Case(global_size=16, micro_size=6, model={"dropout": 0.5}, num_steps=6)


def keyed_loss_sum(case: Case) -> reference.LossSum:
    """The oracle's loss, with the generator keyed before the dropout as docs/numbers.md says."""
    digest = hashlib.blake2b(b"2", digest_size=8).digest()
    block = int.from_bytes(digest, "little")  # the dropout is element "2" of the Sequential
    steps_per_epoch = -(-37 // case.global_size)
    calls = iter(
        (step, shard) for step in range(case.num_steps) for shard in range(_shards(case, step, steps_per_epoch))
    )

    def loss_sum(model: nn.Module, batch: reference.Sample) -> tuple[torch.Tensor, float]:
        inputs, targets = batch
        step, shard = next(calls)
        assert isinstance(model, nn.Sequential)
        first, activation, dropout, last = model
        hidden = activation(first(inputs))
        torch.manual_seed(reference.chain(case.seed, step, shard, block) & 0xFFFFFFFF)
        return functional.cross_entropy(last(dropout(hidden)), targets, reduction="sum"), float(len(targets))

    return loss_sum


def _shards(case: Case, step: int, steps_per_epoch: int) -> int:
    size = case.global_size if step % steps_per_epoch < steps_per_epoch - 1 else 37 % case.global_size
    return -(-size // case.micro_size)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_masks_are_those_that_the_keys_give(replicas: int, pool: Pool) -> None:
    case = replace(DROPOUT, strategy="mirrored", settings={"replicas": replicas})
    assert_reference(train(pool, case), case, loss_sum=keyed_loss_sum(case))


def test_the_seed_decides_the_masks_and_the_order(pool: Pool) -> None:
    first, again, other = (train(pool, replace(DROPOUT, seed=seed))[0] for seed in (3, 3, 4))
    assert all(torch.equal(first.weights[name], tensor) for name, tensor in again.weights.items())
    assert first.samples != other.samples
    assert not torch.equal(first.weights["0.weight"], other.weights["0.weight"])


def test_a_model_without_dropout_ignores_the_generators(pool: Pool) -> None:
    plain = replace(DROPOUT, model={})
    torch.manual_seed(1)
    assert_reference(train(pool, plain), plain)


OTHERS_THAN_ONE: Final = sorted(PLACES.keys() - {"one_device"})
MODELS: Final = ("functional_dropout", "vae", "drop_path", "drawing_body", "noisy_scores")
OBJECTIVES: Final = ("diffusion", "diffusion_in_dropout", "two_views", "mixup", "masked_words")
BASE: Final = Case(global_size=16, micro_size=4, num_steps=4, rate_scale=0.3)


def check(case: Case, pool: Pool) -> None:
    assert_close(train(pool, case), alone(case), atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("task", MODELS)
@pytest.mark.parametrize("strategy", OTHERS_THAN_ONE)
def test_a_model_that_draws_in_its_own_code_is_that_of_one_device(strategy: str, task: str, pool: Pool) -> None:
    check(replace(BASE, task=task, strategy=strategy, settings=PLACES[strategy], resume_at=2), pool)


@pytest.mark.parametrize("task", OBJECTIVES)
@pytest.mark.parametrize("strategy", [name for name in OTHERS_THAN_ONE if name != "pipeline"])
def test_an_objective_that_draws_is_that_of_one_device(strategy: str, task: str, pool: Pool) -> None:
    check(replace(BASE, task=task, strategy=strategy, settings=PLACES[strategy], resume_at=2), pool)


def test_ranks_of_a_cut_layer_draw_alike_for_whole_activations(pool: Pool) -> None:
    settings = {"degree": 2, "replicas": 1, "plan": {"encoder": "colwise_gathered"}}
    check(replace(BASE, task="vae", strategy="tensor_parallel", settings=settings, resume_at=2), pool)


@pytest.mark.parametrize("task", ["drop_path", "diffusion_in_dropout", "mixup"])
def test_a_reproducible_training_ends_in_the_same_bits_on_any_number_of_replicas(task: str, pool: Pool) -> None:
    base = replace(BASE, task=task, micro_size=2, reproducible=True, resume_at=2)
    expected = alone(base).weights
    for replicas in (2, 3, 4):
        for rank in train(pool, replace(base, strategy="mirrored", settings={"replicas": replicas})):
            assert all(torch.equal(rank.weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("task", ["drop_path", "two_views", "mixup"])
def test_threads_that_share_a_generator_draw_what_one_device_draws(task: str, pool: Pool) -> None:
    settings = {"workers": 1, "devices_per_worker": 2}
    check(replace(BASE, task=task, strategy="parameter_server", settings=settings), pool)


@pytest.mark.parametrize("task", ["functional_dropout", "drop_path", "two_views"])
def test_a_recomputed_block_draws_the_same_in_functions_too(task: str, pool: Pool) -> None:
    check(replace(BASE, task=task, shaping=ModelTransforms(recompute=["_Residual", "Linear"])), pool)


HOST = replace(BASE, task="drop_path", model={"host": True})


@pytest.mark.parametrize("strategy", ["mirrored", "fsdp", "parameter_server"])
def test_a_block_that_draws_from_pythons_random_is_keyed_by_the_shard(strategy: str, pool: Pool) -> None:
    check(replace(HOST, strategy=strategy, settings=PLACES[strategy]), pool)


def test_a_recomputed_block_takes_the_branch_that_pythons_random_took_first(pool: Pool) -> None:
    check(replace(HOST, shaping=ModelTransforms(recompute=["_Residual"])), pool)


def test_a_pipeline_refuses_a_model_that_draws_from_pythons_random() -> None:
    problems = Pipeline().validate_model(HOST.make_model(), PlanContext(sample=HOST.make_data()[0]))
    reason = "its forward draws from Python's random or NumPy, which are keyed by shard and not by block"
    assert [str(problem) for problem in problems] == [f"model: cannot be cut into stages: {reason}. Use strategy=fsdp."]


def test_a_pipeline_refuses_an_objective_with_a_loss_of_its_own() -> None:
    class Own(Classification):
        def loss(self, model: Model, batch: Any) -> Loss:
            return super().loss(model, batch)

    (problem,) = Pipeline().access_problems(PlanContext(objective=Own()))
    assert problem.key == "objective"
    assert "Use a Supervised objective that keeps the default `loss`." in str(problem)


POINTS: Final = ("steps=6", "batch.global_size=16", "batch.micro_size=4", "data=slow", "eval.every_steps=3")
UNTIDY: Final = {
    "functional_dropout": ("model=functional_dropout", "objective=classification"),
    "drop_path": ("model=drop_path", "model.host=true", "objective=classification"),
    "diffusion": ("model=net", "objective=diffusion"),
    "masked_words": ("model=attention", "objective=masked_words", "data.of=sentences"),
}
VAE: Final = ("model=vae", "objective=classification")

WITHOUT_KEYS: Final = "model=functional_dropout"
CLASSIFIED: Final = (WITHOUT_KEYS, "objective=classification")
# mixing, strides of tied parameters, a block that returns an object, and one that writes into its input: what draws
# nothing differed where restored or exchanged tensors lay in memory otherwise
LONG: Final = {
    "mixup": ("model=net", "objective=mixup"),
    "transposed_tied": (
        *(WITHOUT_KEYS, "model._target_=tests.support.zoo.transposed_tied"),
        *("objective=masked_words", "data.of=sentences"),
    ),
    "object": (*CLASSIFIED, "model._target_=tests.support.object_models.ObjectBetweenBlocks"),
    "in_place": (*CLASSIFIED, "model._target_=tests.support.object_models.WritingInPlace"),
}


def ended(folder: Path, *overrides: str) -> tuple[str, float]:
    result = run(folder, *POINTS, *overrides)
    return result["weights_sha256"], result["metrics"]["val/loss"]


@pytest.mark.parametrize("name", [*UNTIDY, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
@pytest.mark.slow
def test_two_runs_of_one_command_end_in_the_same_bits(name: str, tmp_path: Path) -> None:
    command = (UNTIDY | LONG)[name]
    once = ended(tmp_path / "once", *command)
    assert ended(tmp_path / "again", *command) == once
    assert ended(tmp_path / "apart", *command, "loader.num_workers=2") == once


@pytest.mark.slow
def test_an_evaluation_draws_the_same_on_two_replicas_and_after_a_resume(tmp_path: Path) -> None:
    vae = (*VAE, "eval.batch_size=4")
    _, loss = ended(tmp_path / "whole", *vae)
    for strategy in ("mirrored", "pipeline", "parameter_server"):
        _, spread = ended(tmp_path / strategy, *vae, f"strategy={strategy}")
        assert spread == pytest.approx(loss, rel=1e-12), strategy
    first = run(tmp_path / "begun", *POINTS, *vae, "stop_at_step=4")
    _, resumed = ended(tmp_path / "ended", *vae, f"resume={first['last']}")
    assert resumed == loss


PLAN = {"0": "colwise", "2": "rowwise"}


class Unseeded(Net):
    """Draws all parameters and two buffers anew in each process; one of them is not saved."""

    def __init__(self) -> None:
        super().__init__(width=8)
        self.register_buffer("saved", torch.zeros(3))
        self.register_buffer("table", torch.zeros(3, dtype=torch.complex64), persistent=False)
        generator = torch.Generator()
        generator.seed()
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.copy_(torch.rand(tensor.shape, generator=generator))


def tensors_of(member: Member, case: Case) -> dict[str, Tensor]:
    """The tensors of a rank before the first step; those of sharded parameters are its parts."""
    executor = _Rank(member, case).setup(0)
    model = executor.local.model
    tensors = {
        name: local_part(tensor).detach().clone()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if not tensor.is_meta
    }
    executor.close()
    return tensors


BEGINNINGS: list[tuple[str, dict[str, Any], list[tuple[int, ...]]]] = [
    ("mirrored", {"replicas": 2}, [(0, 1)]),
    ("local_sgd", {"replicas": 2}, [(0, 1)]),
    ("fsdp", {"replicas": 2}, []),
    ("tensor_parallel", {"degree": 2, "replicas": 2, "plan": PLAN}, [(0, 2), (1, 3)]),
    ("mesh", {"shard": 2, "tensor": 2, "plan": PLAN}, []),
    ("mesh", {"replicate": 2, "shard": 2, "plan": "auto"}, [(0, 2), (1, 3)]),
    ("pipeline", {"stages": 2, "replicas": 2}, [(0, 2), (1, 3)]),
]
"""Strategy, settings, and the ranks that hold the same parts of all parameters."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("strategy", "settings", "alike"), BEGINNINGS)
def test_ranks_begin_with_the_same_numbers(
    strategy: str, settings: dict[str, Any], alike: list[tuple[int, ...]], precision: str, pool: Pool
) -> None:
    case = Case(build=Unseeded, strategy=strategy, settings=settings, precision=precision)
    sizes = [settings.get(axis, 1) for axis in ("replicas", "degree", "replicate", "shard", "tensor", "stages")]
    ranks = pool.run(f"{__name__}.tensors_of", case, num_ranks=math.prod(sizes))
    for tensors in ranks[1:]:
        assert torch.equal(tensors["saved"], ranks[0]["saved"])
        assert torch.equal(tensors["table"], ranks[0]["table"])
    for first, second in alike:
        torch.testing.assert_close(ranks[first], ranks[second], rtol=0, atol=0)
    if settings.keys() & {"degree", "tensor"}:  # the second bias is whole along this axis: ranks 0 and 1, 2 and 3
        assert torch.equal(ranks[0]["2.bias"], ranks[1]["2.bias"])
        assert torch.equal(ranks[2]["2.bias"], ranks[3]["2.bias"])
