"""A rank that trains by another plan than the one its parent resolved is caught here alone."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import trainkit
from trainkit.cluster.local import detect
from trainkit.config.schema import RunConfig
from trainkit.errors import DataError, TrainkitError
from trainkit.run.planning.plan import VARIABLE, RunPlan, make_plan, plan_from_environ, plan_to_environ

LAUNCH = {"TF_CONFIG": '{"cluster": {"worker": ["10.0.0.1:1", "10.0.0.2:1"]}, "task": {"type": "worker", "index": 1}}'}


def sent(plan: RunPlan) -> RunPlan | None:
    """Return the plan of a rank that reads `resolved.yaml` and the variable."""
    return plan_from_environ(plan_to_environ(plan), RunConfig.from_dict(plan.cfg.to_dict()))


@pytest.mark.parametrize(
    "arguments",
    [
        ["strategy=mirrored", "strategy.replicas=2"],
        ["strategy=fsdp", "strategy.replicas=2", "batch.drop_last=true", "warmup.epochs=0.1", "optimizer.lr=0.1"],
        ["strategy=parameter_server", "strategy.workers=2", "lr_scaling.reference_batch=48", "epochs=3"],
    ],
)
def test_a_rank_has_the_plan_that_its_parent_sent(arguments: list[str]) -> None:
    plan = make_plan(trainkit.compose(["recipe=digits", *arguments]).cfg, num_gpus=0)
    received = sent(plan)
    assert received is not None
    for name in {field.name for field in fields(plan)} - {"components", "facts"}:
        assert getattr(received, name) == getattr(plan, name), name
    assert received.facts.num_gpus == plan.facts.num_gpus
    assert received.facts.micro_size == plan.facts.micro_size
    assert received.auxiliary_ranks == plan.auxiliary_ranks


def test_the_launch_of_a_host_travels_with_the_plan() -> None:
    launch = detect(LAUNCH)
    cfg = trainkit.compose(["recipe=digits", "strategy=multi_worker_mirrored"]).cfg
    received = sent(make_plan(cfg, num_gpus=0, launch=launch))
    assert received is not None
    assert received.facts.launch == launch
    assert len(received.tasks) == 2


def test_a_rank_whose_data_has_another_size_is_refused() -> None:
    plan = make_plan(trainkit.compose(["recipe=digits"]).cfg, num_gpus=0)
    other = replace(plan, batch=replace(plan.batch, num_samples=7))
    with pytest.raises(DataError, match="1437 samples in this process, and 7 in the process that planned the run"):
        sent(other)


def test_a_rank_without_a_plan_makes_its_own_and_a_malformed_one_is_refused() -> None:
    cfg = make_plan(trainkit.compose(["recipe=digits"]).cfg, num_gpus=0).cfg
    assert plan_from_environ({}, cfg) is None
    for text in ("{", "[]", '{"tasks": 1}'):
        with pytest.raises(TrainkitError, match=f"^{VARIABLE} holds no plan: "):
            plan_from_environ({VARIABLE: text}, cfg)
