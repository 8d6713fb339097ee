"""Where central storage computes, as a plan of another host shows it."""

import pytest

from trainkit.config.compose import compose
from trainkit.run.planning.memory import memory_of, meta_model
from trainkit.run.planning.plan import make_plan
from trainkit.run.planning.where import where_rows


def test_a_plan_for_four_gpus_names_the_devices_that_compute() -> None:
    plan = make_plan(compose(["recipe=digits", "strategy=central_storage"]).cfg, num_gpus=4)
    assert plan.summary(1)["replicas"] == "4 on cuda"
    shown = dict(where_rows(plan))["tasks"]
    assert shown == "worker:0 on cpu, computes on cuda:0, cuda:1, cuda:2, cuda:3, in this process"


@pytest.mark.parametrize(("num_gpus", "copies"), [(0, 4), (4, 8)])
def test_the_copies_of_an_asynchronous_plan_are_those_of_its_host(num_gpus: int, copies: int) -> None:
    keys = ["recipe=digits", "strategy=central_storage", "strategy.mode=async"]
    plan = make_plan(compose(keys).cfg, num_gpus=num_gpus)
    memory = memory_of(plan, meta_model(plan))
    assert memory.exchange_bytes == copies * memory.gradient_bytes
