from dataclasses import replace

import pytest

from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.errors import ConfigError
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.strategies.data_parallel.strategy import Mirrored

MIRRORED = ("recipe=null", "strategy=mirrored", "strategy.replicas=2")


def plan(*overrides: str, launch: LaunchEnvironment | None) -> RunPlan:
    composed = checked(compose(overrides))
    return make_plan(composed.cfg, num_gpus=0, launch=launch)


def refused(*overrides: str, launch: LaunchEnvironment | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides, launch=launch)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            (*MIRRORED, "elastic.min_replicas=3"),
            "elastic.min_replicas=3: more than the 2 replicas of this run. Use 2 or fewer.",
        ),
        (
            ("recipe=null", "elastic.min_replicas=1"),
            "elastic.min_replicas=1: has no effect: this strategy runs in one process. (command line)",
        ),
        (
            (*MIRRORED, "elastic.retry_s=5"),
            (
                "elastic.retry_s=5: has no effect without elastic.min_replicas: the run needs all its replicas. "
                "(command line)"
            ),
        ),
        (
            (*MIRRORED, "elastic.min_replicas=1", "supervisor.max_restarts=0"),
            "elastic.min_replicas=1: has no effect with supervisor.max_restarts=0: nothing restarts. (command line)",
        ),
        (
            (*MIRRORED, "cluster=spark", "cluster.num_gpus=0", "elastic.min_replicas=1"),
            "elastic.min_replicas=1: has no effect: Spark starts all processes or none.",
        ),
        ((*MIRRORED, "elastic.min_replicas=0"), "elastic.min_replicas=0: must be at least 1. (command line)"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(overrides: tuple[str, ...], told: str) -> None:
    assert refused(*overrides) == [told]


def test_an_engine_watches_over_a_single_process_too() -> None:
    checked(compose(("recipe=null", "cluster=ray", "supervisor.max_restarts=1")))


def test_elastic_settings_are_refused_under_a_launcher_that_restarts_itself() -> None:
    tasks = tuple(Task(role="worker", index=rank, rank=rank) for rank in range(2))
    launch = LaunchEnvironment(
        kind="torchrun", tasks=tasks, rank=0, local_rank=0, num_local=2, num_hosts=1, store=("127.0.0.1", 1)
    )
    overrides = ("recipe=null", "strategy=multi_worker_mirrored", "elastic.min_replicas=1")
    assert refused(*overrides, launch=launch) == [
        "elastic.min_replicas=1: has no effect under torchrun, which restarts processes itself: set the number there."
    ]


def test_a_strategy_whose_ranks_hold_what_others_lack_is_not_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirrored, "traits", replace(Mirrored.traits, elastic=False))
    assert refused(*MIRRORED, "elastic.min_replicas=1") == [
        "elastic.min_replicas=1: has no effect: this strategy needs all its processes."
    ]
