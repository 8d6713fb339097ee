"""Objectives as users write them: the training of one device, which is that of a plain loop, or refused by name.

A term of an objective that is logged as a mean of means of shards is caught here alone.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from tests.contract.running import run
from tests.contract.stepping import TASKS, Case, oracle, train
from tests.support.pool import Pool
from trainkit.objectives.base import needs_of
from trainkit.strategies.base import PlanContext
from trainkit.strategies.parameter_server import ParameterServer

PLACES: Final[dict[str, dict[str, Any]]] = {
    "one_device": {},
    "mirrored": {"replicas": 2},
    "fsdp": {"replicas": 2},
    "tensor_parallel": {"replicas": 2},
    "device_map": {},
    "central_storage": {},
    "parameter_server": {},
    "pipeline": {},
}
BASE: Final = Case(global_size=16, micro_size=4, num_steps=4, rate_scale=0.3, resume_at=2)
OBJECTIVES: Final = ("two_terms", "taught", "gradient_penalty", "weight_penalty")


def refusals(case: Case) -> list[str]:
    context = PlanContext(objective=TASKS[case.task].objective())
    return [str(problem) for problem in case.make_strategy().access_problems(context)]


def check(case: Case, pool: Pool) -> None:
    expected = oracle(case).model.state_dict()
    for rank in train(pool, case):
        for name, wanted in expected.items():
            torch.testing.assert_close(rank.weights[name], wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("task", OBJECTIVES)
@pytest.mark.parametrize("strategy", PLACES)
def test_an_objective_of_ones_own_is_a_plain_loops_or_refused(strategy: str, task: str, pool: Pool) -> None:
    case = replace(BASE, task=task, strategy=strategy, settings=PLACES[strategy])
    needed = needs_of(TASKS[task].objective())
    if refused := refusals(case):
        assert strategy == "pipeline" or (strategy == "fsdp" and task.endswith("penalty"))
        assert needed
        assert "Use " in refused[0]
        return
    check(case, pool)


@pytest.mark.parametrize(
    ("strategy", "returns"), [(name, "dict") for name in PLACES] + [("fsdp", "tuple"), ("fsdp", "dataclass")]
)
def test_a_model_of_several_outputs_is_that_of_one_device(strategy: str, returns: str, pool: Pool) -> None:
    settings = PLACES[strategy]
    check(replace(BASE, task="two_heads", model={"returns": returns}, strategy=strategy, settings=settings), pool)


def test_the_problem_names_what_the_objective_needs_and_what_to_choose() -> None:
    (said,) = refusals(replace(BASE, task="gradient_penalty", strategy="fsdp", settings={"replicas": 2}))
    assert said == (
        "objective=GradientPenalty: differentiates the model by its inputs, and fsdp reshards parameters after the "
        "first backward pass. Use strategy=mirrored, whose replicas are unsharded."
    )
    assert refusals(replace(BASE, task="gradient_penalty", strategy="fsdp", settings={"replicas": 1})) == []
    settings = {"degree": 2, "replicas": 1}
    (said,) = refusals(replace(BASE, task="weight_penalty", strategy="tensor_parallel", settings=settings))
    assert said == (
        "objective=WeightPenalty: reads the parameters of the model, and each rank of tensor_parallel holds a part of "
        "them. Use strategy=mirrored, whose replicas are unsharded."
    )


def test_a_parameter_server_refuses_to_read_parameters_of_sparse_tables() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    context = PlanContext(objective=TASKS["weight_penalty"].objective())
    (problem,) = ParameterServer().validate_model(model, context)
    assert "a worker has only the looked-up rows of a sparse table. Use strategy=mirrored" in str(problem)


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name.endswith(("/loss", "/labels", "/size"))} for row in rows]


@pytest.mark.parametrize("strategy", [name for name in PLACES if name != "one_device"])
@pytest.mark.slow
def test_terms_are_logged_as_their_means_over_all_targets(strategy: str, tmp_path: Path) -> None:
    """37 points: the last batch of an epoch and the last of the evaluation are short."""
    same = ("model=net", "data=points", "objective=two_terms", "batch.global_size=16", "batch.micro_size=4")
    more = ("optimizer=sgd", "epochs=2", "log_every_steps=3", "eval.batch_size=4")
    settings = [f"strategy.{key}={value}" for key, value in PLACES[strategy].items()]
    run(tmp_path / "one", *same, *more)
    run(tmp_path / "other", *same, *more, f"strategy={strategy}", *settings)

    expected, found = rows_of(tmp_path / "one"), rows_of(tmp_path / "other")

    assert len(expected) == len(found) == 4
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-12)
        split = next(iter(one)).partition("/")[0]
        assert one[f"{split}/labels"] + 0.1 * one[f"{split}/size"] == pytest.approx(one[f"{split}/loss"], rel=1e-12)
