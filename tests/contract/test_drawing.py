"""Models and objectives that draw random numbers: the same numbers at the same cut, wherever shards are computed.

A dropout in a function, or noise of an objective, that differs with the number of ranks is caught here alone.
"""

from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from tests.contract.checks import assert_close
from tests.contract.stepping import Case, train
from tests.support.pool import Pool
from trainkit.objectives.base import Loss, Model
from trainkit.objectives.classification import Classification
from trainkit.strategies.base import PlanContext
from trainkit.strategies.mesh.strategy import Pipeline
from trainkit.strategies.model_transforms import ModelTransforms

PLACES: Final[dict[str, dict[str, Any]]] = {
    "mirrored": {"replicas": 2},
    "fsdp": {"replicas": 2},
    "tensor_parallel": {"replicas": 2},
    "device_map": {},
    "central_storage": {},
    "parameter_server": {},
    "pipeline": {},
}
MODELS: Final = ("functional_dropout", "vae", "drop_path", "drawing_body", "noisy_scores")
OBJECTIVES: Final = ("diffusion", "diffusion_in_dropout", "two_views", "mixup", "masked_words")
BASE: Final = Case(global_size=16, micro_size=4, num_steps=4, rate_scale=0.3)


def check(case: Case, pool: Pool) -> None:
    (alone,) = train(pool, replace(case, strategy="one_device", settings={}, resume_at=None))
    assert_close(train(pool, case), alone, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("task", MODELS)
@pytest.mark.parametrize("strategy", PLACES)
def test_a_model_that_draws_in_its_own_code_is_that_of_one_device(strategy: str, task: str, pool: Pool) -> None:
    check(replace(BASE, task=task, strategy=strategy, settings=PLACES[strategy], resume_at=2), pool)


@pytest.mark.parametrize("task", OBJECTIVES)
@pytest.mark.parametrize("strategy", [name for name in PLACES if name != "pipeline"])
def test_an_objective_that_draws_is_that_of_one_device(strategy: str, task: str, pool: Pool) -> None:
    check(replace(BASE, task=task, strategy=strategy, settings=PLACES[strategy], resume_at=2), pool)


def test_ranks_of_a_cut_layer_draw_alike_for_whole_activations(pool: Pool) -> None:
    settings = {"degree": 2, "replicas": 1, "plan": {"encoder": "colwise_gathered"}}
    check(replace(BASE, task="vae", strategy="tensor_parallel", settings=settings, resume_at=2), pool)


@pytest.mark.parametrize("task", ["drop_path", "diffusion_in_dropout", "mixup"])
def test_a_reproducible_training_ends_in_the_same_bits_on_any_number_of_replicas(task: str, pool: Pool) -> None:
    base = replace(BASE, task=task, micro_size=2, reproducible=True, resume_at=2)
    (alone,) = train(pool, replace(base, resume_at=None))
    for replicas in (2, 3, 4):
        for rank in train(pool, replace(base, strategy="mirrored", settings={"replicas": replicas})):
            assert all(torch.equal(rank.weights[name], tensor) for name, tensor in alone.weights.items())


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
    said = "its forward draws from Python's random or NumPy, which are keyed by shard and not by block"
    assert [str(problem) for problem in problems] == [f"model: cannot be cut into stages: {said}. Use strategy=fsdp."]


def test_a_pipeline_refuses_an_objective_with_a_loss_of_its_own() -> None:
    class Own(Classification):
        def loss(self, model: Model, batch: Any) -> Loss:
            return super().loss(model, batch)

    (problem,) = Pipeline().access_problems(PlanContext(objective=Own()))
    assert problem.key == "objective"
    assert "Use a Supervised objective that keeps the default `loss`." in str(problem)
