import json
from typing import Any

import pytest

from tests.cluster.refusals import refused
from tests.support.present import present
from trainkit.cluster.spec import Spec

FOUR: dict[str, Any] = {"chief": "a:1", "worker": ("b:1", "b:2"), "evaluator": ("c:1",)}


def tf_config(cluster: object, task: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_ranks_follow_the_roles_and_the_chief_is_first() -> None:
    launch = present(Spec(**FOUR, task="worker:1").launch({}))
    assert [str(task) for task in launch.tasks] == ["chief:0", "worker:0", "worker:1", "evaluator:0"]
    assert (launch.rank, launch.store, launch.hosts_store) == (2, ("a", 1), False)
    assert launch.place_of(1) == "worker:0 (b:1)"


def test_tasks_of_one_host_share_it() -> None:
    launch = present(Spec(**FOUR, task="worker:1").launch({}))
    assert (launch.local_rank, launch.num_local, launch.num_hosts, launch.takes_devices) == (1, 2, 3, True)


def test_without_a_chief_worker_0_has_rank_0_and_opens_the_store() -> None:
    launch = present(Spec(worker=("a:1", "b:1"), task="worker:0").launch({}))
    assert (launch.rank, launch.hosts_store, str(launch.task)) == (0, True, "worker:0")


def test_an_ipv6_cluster_keeps_its_brackets_in_what_a_person_reads() -> None:
    launch = present(Spec(worker=("[fd00::1]:2222", "[fd00::2]:2222"), task="worker:1").launch({}))
    assert launch.store == ("fd00::1", 2222)
    assert launch.line() == "launch by cluster=spec: rank 1 of 2 on 2 hosts, rendezvous at [fd00::1]:2222"


def test_the_line_names_the_task_where_its_index_is_not_its_rank() -> None:
    line = present(Spec(**FOUR, task="worker:1").launch({})).line()
    assert line == "launch by cluster=spec: rank 2 (worker:1) of 4 on 3 hosts, rendezvous at a:1"


def test_a_cluster_of_one_task_is_no_launch() -> None:
    assert Spec(worker=("a:1",)).launch({}) is None or Spec(worker=("a:1",), task="worker:0").launch({}) is None


def test_the_task_may_come_from_tf_config() -> None:
    environ = tf_config({"worker": ["a:1", "b:1"]}, {"type": "worker", "index": 1})
    assert present(Spec(worker=("a:1", "b:1")).launch(environ)).rank == 1


def test_tf_config_that_says_otherwise_is_a_problem_each() -> None:
    environ = tf_config({"worker": ["a:1", "c:1"], "ps": ["d:1"]}, {"type": "worker", "index": 1})
    spec = Spec(worker=("a:1", "b:1"), task="worker:0")
    assert refused(lambda: spec.launch(environ)) == [
        (
            "TF_CONFIG.cluster.worker: is [a:1, c:1], but cluster.worker is [a:1, b:1]. "
            "Make them the same, or unset TF_CONFIG. (environment)"
        ),
        (
            "TF_CONFIG.cluster.ps: is [d:1], but cluster.ps is none. "
            "Make them the same, or unset TF_CONFIG. (environment)"
        ),
        (
            "TF_CONFIG.task: is worker:1, but cluster.task is worker:0. "
            "Make them the same, or unset TF_CONFIG. (environment)"
        ),
    ]


def test_tf_config_is_not_read_where_launchers_are_ignored() -> None:
    environ = tf_config({"worker": ["a:1", "c:1"]}, {"type": "worker", "index": 1}) | {"TRAINKIT_LAUNCHER": "none"}
    assert present(Spec(worker=("a:1", "b:1"), task="worker:0").launch(environ)).rank == 0


def test_a_missing_task_lists_those_there_are() -> None:
    assert refused(lambda: Spec(worker=("a:1", "b:1")).launch({})) == [
        (
            "cluster.task: is missing: it names the task of this process. "
            "Give cluster.task=ROLE:INDEX, of worker:0, worker:1."
        )
    ]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "cluster: names no task. It needs at least one worker: worker=[HOST:PORT,...]."),
        (
            {"ps": ("a:1",)},
            "cluster: has neither chief nor worker, so no task would train. Add worker=[HOST:PORT,...].",
        ),
        (
            {"worker": ("a:1", "A:1")},
            "cluster.worker=A:1: is also the address of worker:0. Every task needs its own.",
        ),
        (
            {"chief": ("a:1", "b:1")},
            "cluster.chief=[a:1, b:1]: a cluster has one chief, and 2 are given. List the others under worker.",
        ),
        (
            {"chief": "a:1", "evaluator": ("b:1", "c:1")},
            "cluster.evaluator=[b:1, c:1]: a cluster has one evaluator, and 2 are given.",
        ),
        ({"worker": ("a:70000",)}, "cluster.worker=a:70000: its port must be a number from 1 to 65535."),
        (
            {"worker": ("127.0.0.1:1", "b:1")},
            ("cluster: 127.0.0.1:1 is the local machine on every host: "
            "worker:0 needs a name that other hosts can reach."),
        ),
        ({"worker": ("a:1", "b:1"), "task": "worker"}, "cluster.task=worker: must be ROLE:INDEX, as in worker:0."),
        ({"worker": ("a:1", "b:1"), "task": "worker:"}, "cluster.task=worker:: must be ROLE:INDEX, as in worker:0."),
        ({"worker": ("a:1",), "task": "worker:-1"}, "cluster.task=worker:-1: must be ROLE:INDEX, as in worker:0."),
        (
            {"worker": ("a:1", "b:1"), "task": "worker:2"},
            "cluster.task=worker:2: the cluster has 2 workers, worker:0 to worker:1.",
        ),
        (
            {"worker": ("a:1", "b:1"), "task": "wroker:1"},
            "cluster.task=wroker:1: no such role. Did you mean worker? There are: chief, worker, ps, evaluator.",
        ),
        (
            {"worker": ("a:1", "b:1"), "task": "chief:0"},
            ("cluster.task=chief:0: the cluster has no chief. Without one, worker:0 acts as the chief. "
            "Its tasks: worker:0, worker:1."),
        ),
    ],
)  # fmt: skip
def test_a_bad_cluster_is_refused_in_these_words(keys: dict[str, Any], problem: str) -> None:
    assert refused(lambda: Spec(**keys)) == [problem]


def test_all_problems_of_a_cluster_are_reported_together() -> None:
    problems = refused(lambda: Spec(chief=("a:1", "b:1"), worker=("a:1", "c"), ps=("d:0",), task="ps:1"))
    assert [problem.partition(": ")[0] for problem in problems] == [
        "cluster.chief=[a:1, b:1]", "cluster.worker=a:1", "cluster.worker=c", "cluster.ps=d:0", "cluster.task=ps:1",
    ]  # fmt: skip
