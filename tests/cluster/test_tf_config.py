import json

import pytest

from tests.cluster.refusals import refused
from tests.support.present import present
from trainkit.cluster.local import detect
from trainkit.cluster.tf_config import read_tf_config

REMEDY = "Correct it, or unset it: TF_CONFIG= trainkit ..."


TWO = {"worker": ["a:1", "b:1"]}
SECOND = {"type": "worker", "index": 1}


def environ(content: object, variable: str = "TF_CONFIG") -> dict[str, str]:
    return {variable: content if isinstance(content, str) else json.dumps(content)}


def test_tf_config_is_a_launch() -> None:
    launch = present(detect(environ({"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "task": SECOND})))
    assert launch.line() == (
        "launch by TF_CONFIG: rank 2 (worker:1) of 3 on 3 hosts, rendezvous at a:1 (TRAINKIT_LAUNCHER=none ignores it)"
    )


def test_what_else_a_cloud_writes_into_it_is_left_alone() -> None:
    task = {"type": "worker", "index": "1", "trial": "", "cloud": "x"}
    said = present(read_tf_config(environ({"cluster": TWO, "task": task, "environment": "cloud", "job": "{}"})))
    assert said.task == ("worker", 1)


def test_a_chief_may_be_one_text_and_empty_roles_are_none() -> None:
    said = present(
        read_tf_config(
            environ({"cluster": {"chief": "a:1", "worker": ["b:1"], "ps": []}, "task": SECOND | {"index": 0}})
        )
    )
    assert said.members == {"chief": ("a:1",), "worker": ("b:1",)}


def test_vertex_says_worker_pools_where_it_sets_no_tf_config() -> None:
    content = {
        "cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"]},
        "task": {"type": "workerpool1", "index": 1},
    }
    launch = present(detect(environ(content, "CLUSTER_SPEC")))
    assert (launch.kind, launch.rank, str(launch.task)) == ("CLUSTER_SPEC", 2, "worker:1")
    both = environ(content, "CLUSTER_SPEC") | environ({"cluster": TWO, "task": SECOND})
    assert present(detect(both)).kind == "TF_CONFIG"


def test_a_cluster_of_one_and_an_empty_variable_are_no_launch() -> None:
    alone = {"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}
    assert detect(environ(alone)) is None
    assert detect({"TF_CONFIG": ""}) is None


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        (
            "{",
            [
                (
                    "TF_CONFIG: cannot be read: it is not JSON: Expecting property name enclosed in double quotes: "
                    f"line 1 column 2 (char 1). {REMEDY}"
                )
            ],
        ),
        (
            "[" * 5000,
            [f"TF_CONFIG: cannot be read: its JSON is nested deeper than 64. {REMEDY}"],
        ),
        ("[]", ["TF_CONFIG: must be a JSON object with cluster and task."]),
        (
            "{}",
            [
                'TF_CONFIG.cluster: is missing: {"worker": ["HOST:PORT", ...]}.',
                'TF_CONFIG.task: is missing: it names the task of this process, {"type": "worker", "index": 0}.',
            ],
        ),
        (
            {"clutser": TWO, "cluster": TWO, "task": {"type": "worker", "index": 0, "indx": 1}},
            [
                "TF_CONFIG.clutser: no such key. Did you mean cluster?",
                "TF_CONFIG.task.indx: no such key. Did you mean index?",
            ],
        ),
        (
            {"cluster": {"workers": ["a:1"]}, "task": ["worker", 0]},
            [
                (
                    "TF_CONFIG.cluster.workers: no such role. Did you mean worker? "
                    "There are: chief, worker, ps, evaluator."
                ),
                (
                    "TF_CONFIG.task: must be an object that names the task of this process, "
                    '{"type": "worker", "index": 0}.'
                ),
            ],
        ),
        ({"cluster": ["a:1"], "task": SECOND}, ["TF_CONFIG.cluster: must be an object: role to addresses."]),
        ({"cluster": {"worker": [1]}, "task": SECOND}, ["TF_CONFIG.cluster.worker: must be a list of HOST:PORT."]),
        (
            {"cluster": {}, "task": SECOND},
            ["TF_CONFIG.cluster: names no task. It needs at least one worker: worker=[HOST:PORT,...]."],
        ),
        (
            {"cluster": {"worker": ["a:1"], "master": ["b:1"]}, "task": SECOND | {"index": 0}},
            ["TF_CONFIG.cluster.master: no such role. There are: chief, worker, ps, evaluator."],
        ),
        (
            {"cluster": {"worker": ["a:1", "a:1", "b:99999"]}, "task": {"type": "worker"}},
            [
                "TF_CONFIG.cluster.worker=a:1: is also the address of worker:0. Every task needs its own.",
                "TF_CONFIG.cluster.worker=b:99999: its port must be a number from 1 to 65535.",
                "TF_CONFIG.task.index: is missing: a whole number, 0 or more.",
            ],
        ),
        (
            {"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "boss", "index": True}},
            [
                (
                    "TF_CONFIG.cluster.chief=[a:1, b:1]: a cluster has one chief, and 2 are given. "
                    "List the others under worker."
                ),
                "TF_CONFIG.task.type=boss: no such role. There are: chief, worker, ps, evaluator.",
                "TF_CONFIG.task.index=true: must be a whole number, 0 or more.",
            ],
        ),
        (
            {"cluster": TWO, "task": {"type": "worker", "index": 2}},
            ["TF_CONFIG.task=worker:2: the cluster has 2 workers, worker:0 to worker:1."],
        ),
        (
            {"cluster": TWO, "task": {"index": 0}},
            ["TF_CONFIG.task.type: is missing. There are: chief, worker, ps, evaluator."],
        ),
        (
            {"cluster": TWO, "task": {"type": "evaluator", "index": 0}},
            ["TF_CONFIG.task=evaluator:0: the cluster has no evaluator. Its tasks: worker:0, worker:1."],
        ),
    ],
)
def test_a_bad_tf_config_is_refused_in_these_words(content: object, problems: list[str]) -> None:
    assert refused(lambda: detect(environ(content))) == [f"{problem} (environment)" for problem in problems]
