"""A cluster written by hand whose tasks get other ranks in one process than in another is caught here alone.

The same rules hold for `cluster=spec` and for TF_CONFIG.
"""

import json
from typing import Any

import pytest

from tests.cluster.refusals import refused
from tests.support.present import present
from trainkit.cluster.address import Address, derived_port, is_loopback
from trainkit.cluster.local import detect
from trainkit.cluster.spec import Spec
from trainkit.cluster.tasks import VARIABLES, Identity, Task
from trainkit.cluster.tf_config import read_tf_config
from trainkit.errors import ConfigError

FOUR: dict[str, Any] = {"chief": "a:1", "worker": ("b:1", "b:2"), "evaluator": ("c:1",)}
TWO: dict[str, Any] = {"worker": ("a:1", "b:1")}
SECOND = {"type": "worker", "index": 1}


def environ(content: object, variable: str = "TF_CONFIG") -> dict[str, str]:
    return {variable: content if isinstance(content, str) else json.dumps(content)}


def test_ranks_follow_the_roles_and_the_chief_is_first() -> None:
    launch = present(Spec(**FOUR, task="worker:1").launch({}))
    assert [str(task) for task in launch.tasks] == ["chief:0", "worker:0", "worker:1", "evaluator:0"]
    assert (launch.rank, launch.store, launch.hosts_store) == (2, ("a", 1), False)
    assert (launch.local_rank, launch.num_local, launch.num_hosts, launch.takes_devices) == (1, 2, 3, True)
    assert launch.place_of(1) == "worker:0 (b:1)"
    assert launch.line() == "launch by cluster=spec: rank 2 (worker:1) of 4 on 3 hosts, rendezvous at a:1"


def test_an_evaluator_counts_neither_as_a_rank_nor_as_a_host_of_the_training() -> None:
    cluster = {"worker": ("a:1", "b:1", "b:2"), "evaluator": ("c:1",)}
    launch = present(Spec(**cluster, task="worker:2").launch({})).training
    assert (launch.rank, launch.num_ranks) == (2, 3)
    assert (launch.local_rank, launch.num_local, launch.num_hosts) == (1, 2, 2)


def test_without_a_chief_worker_0_has_rank_0_and_opens_the_store() -> None:
    launch = present(Spec(**TWO, task="worker:0").launch({}))
    assert (launch.rank, launch.hosts_store, str(launch.task)) == (0, True, "worker:0")


def test_an_ipv6_cluster_keeps_its_brackets_in_what_a_person_reads() -> None:
    launch = present(Spec(worker=("[fd00::1]:2222", "[fd00::2]:2222"), task="worker:1").launch({}))
    assert launch.store == ("fd00::1", 2222)
    assert launch.line() == "launch by cluster=spec: rank 1 of 2 on 2 hosts, rendezvous at [fd00::1]:2222"


def test_a_cluster_of_one_task_and_an_empty_variable_are_no_launch() -> None:
    assert Spec(worker=("a:1",)).launch({}) is None
    assert detect(environ({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}})) is None
    assert detect({"TF_CONFIG": ""}) is None


def test_tf_config_is_a_launch_whatever_else_a_cloud_writes_into_it() -> None:
    cluster = {"chief": "a:1", "worker": ["b:1", "c:1"], "ps": []}
    task = {"type": "worker", "index": "1", "trial": "", "cloud": "x"}
    content = {"cluster": cluster, "task": task, "environment": "cloud", "job": "{}"}
    assert present(read_tf_config(environ(content))).members == {"chief": ("a:1",), "worker": ("b:1", "c:1")}
    launch = present(detect(environ(content)))
    assert (launch.kind, launch.rank, str(launch.task), launch.num_ranks) == ("TF_CONFIG", 2, "worker:1", 3)


def test_vertex_says_worker_pools_where_it_sets_no_tf_config() -> None:
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"]}
    content = {"cluster": pools, "task": {"type": "workerpool1", "index": 1}}
    launch = present(detect(environ(content, "CLUSTER_SPEC")))
    assert (launch.kind, launch.rank, str(launch.task)) == ("CLUSTER_SPEC", 2, "worker:1")
    both = environ(content, "CLUSTER_SPEC") | environ({"cluster": TWO, "task": SECOND})
    assert present(detect(both)).kind == "TF_CONFIG"


def test_the_task_of_a_spec_may_come_from_tf_config_which_must_name_the_same_cluster() -> None:
    assert present(Spec(**TWO).launch(environ({"cluster": TWO, "task": SECOND}))).rank == 1
    other = environ({"cluster": {"worker": ["a:1", "c:1"], "ps": ["d:1"]}, "task": SECOND})
    spec = Spec(**TWO, task="worker:0")
    keys = [problem.partition(": ")[0] for problem in refused(lambda: spec.launch(other))]
    assert keys == ["TF_CONFIG.cluster.worker", "TF_CONFIG.cluster.ps", "TF_CONFIG.task"]
    assert present(spec.launch(other | {"TRAINKIT_LAUNCHER": "none"})).rank == 0


UNKNOWN = "no such role. There are: chief, worker, ps, evaluator."


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "cluster: names no task. It needs at least one worker"),
        ({"ps": ("a:1",)}, "cluster: has neither chief nor worker"),
        ({"worker": ("a:1", "A:1")}, "cluster.worker=A:1: is also the address of worker:0. Every task needs its own."),
        ({"chief": ("a:1", "b:1")}, "cluster.chief=[a:1, b:1]: a cluster has one chief, and 2 are given. "),
        ({"chief": "a:1", "evaluator": ("b:1", "c:1")}, "cluster.evaluator=[b:1, c:1]: a cluster has one evaluator"),
        ({"worker": ("a:70000",)}, "cluster.worker=a:70000: its port must be a number from 1 to 65535."),
        ({"worker": ("127.0.0.1:1", "b:1")}, "cluster: 127.0.0.1:1 is the local machine on every host: worker:0 needs"),
        ({"worker": ("a:1",), "task": "worker:-1"}, "cluster.task=worker:-1: must be ROLE:INDEX"),
        ({**TWO, "task": "worker:2"}, "cluster.task=worker:2: the cluster has 2 workers, worker:0 to worker:1."),
        ({**TWO, "task": "wroker:1"}, "cluster.task=wroker:1: no such role. Did you mean worker? "),
        ({**TWO, "task": "chief:0"}, "cluster.task=chief:0: the cluster has no chief. Without one, worker:0 acts as"),
    ],
)
def test_a_bad_cluster_is_refused_by_its_key(keys: dict[str, Any], problem: str) -> None:
    (found,) = refused(lambda: Spec(**keys))
    assert found.startswith(problem)


def test_all_problems_of_a_cluster_and_a_missing_task_are_named() -> None:
    problems = refused(lambda: Spec(chief=("a:1", "b:1"), worker=("a:1", "c"), ps=("d:0",), task="ps:1"))
    assert [problem.partition(": ")[0] for problem in problems] == [
        "cluster.chief=[a:1, b:1]", "cluster.worker=a:1", "cluster.worker=c", "cluster.ps=d:0", "cluster.task=ps:1",
    ]  # fmt: skip
    (missing,) = refused(lambda: Spec(**TWO).launch({}))
    assert missing.startswith("cluster.task: is missing")
    assert missing.endswith("Give cluster.task=ROLE:INDEX, of worker:0, worker:1.")


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        ("{", ["TF_CONFIG: cannot be read: it is not JSON"]),
        ("[" * 5000, ["TF_CONFIG: cannot be read: its JSON is nested deeper than 64"]),
        ("3", ["TF_CONFIG: must be a JSON object"]),
        ("{}", ["TF_CONFIG.cluster: is missing", "TF_CONFIG.task: is missing"]),
        ({"clutser": TWO, "cluster": TWO, "task": {"type": "worker", "index": 0, "indx": 1}},
         ["TF_CONFIG.clutser: no such key. Did you mean cluster?", "TF_CONFIG.task.indx: no such key. Did you "]),
        ({"cluster": {"workers": ["a:1"]}, "task": ["worker", 0]},
         ["TF_CONFIG.cluster.workers: no such role. Did you mean worker? ", "TF_CONFIG.task: must be an object"]),
        ({"cluster": ["a:1"], "task": SECOND}, ["TF_CONFIG.cluster: must be an object"]),
        ({"cluster": {"worker": [1]}, "task": SECOND}, ["TF_CONFIG.cluster.worker: must be a list of HOST:PORT"]),
        ({"cluster": {}, "task": SECOND}, ["TF_CONFIG.cluster: names no task"]),
        ({"cluster": {"worker": ["a:1", "b:99999"], "master": ["b:1"]}, "task": {"type": "worker"}},
         ["TF_CONFIG.cluster.worker=b:99999: its port", f"TF_CONFIG.cluster.master: {UNKNOWN}",
          "TF_CONFIG.task.index: is missing"]),
        ({"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "boss", "index": True}},
         ["TF_CONFIG.cluster.chief=[a:1, b:1]", f"TF_CONFIG.task.type=boss: {UNKNOWN}", "TF_CONFIG.task.index=true"]),
        ({"cluster": TWO, "task": {"type": "worker", "index": 2}}, ["TF_CONFIG.task=worker:2: the cluster has 2 work"]),
        ({"cluster": TWO, "task": {"index": 0}}, ["TF_CONFIG.task.type: is missing"]),
    ],
)  # fmt: skip
def test_a_bad_tf_config_is_refused_by_its_key(content: object, problems: list[str]) -> None:
    found = refused(lambda: detect(environ(content)))
    assert len(found) == len(problems), found
    assert all(one.startswith(start) for one, start in zip(found, problems, strict=True)), found


@pytest.mark.parametrize("text", ["node-7.cluster.local:65535", "[::1]:1", "[fe80::1%eth0]:29400"])
def test_an_address_is_read_and_written_back(text: str) -> None:
    host, _, port = text.rpartition(":")
    assert Address.parse(text) == (host.strip("[]"), int(port))
    assert str(Address.parse(text)) == text


def test_what_is_no_address_names_the_rule() -> None:
    rules = {
        "node7": "has no port", ":2222": "has no host", "::1:2222": "an IPv6 address needs brackets",
        "node7:": "its port must be", "node7:0": "its port must be", "node7:65536": "its port must be",
        "node 7:1": "its host must be", "[node7]:1": "its host must be",
    }  # fmt: skip
    for text, rule in rules.items():
        with pytest.raises(ValueError, match=rule):
            Address.parse(text)


def test_spellings_of_one_address_are_equal_once_canonical() -> None:
    assert Address.parse("LOCALHOST:1").canonical == Address.parse("127.0.0.1:1").canonical
    assert Address.parse("[0:0::1]:1").canonical == Address.parse("[::1]:1").canonical
    assert Address.parse("a:1").canonical != Address.parse("a:2").canonical
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("localhost.example.org", "10.0.0.1", "n1")))


def test_derived_ports_lie_below_those_of_outgoing_connections() -> None:
    ports = {derived_port(f"slurm {job}.0") for job in range(1000)}
    assert min(ports) >= 20_000
    assert max(ports) < 32_000
    assert len(ports) > 900


def test_an_identity_survives_the_environment() -> None:
    task = Task(role="ps", index=1, rank=3, device="cuda:1")
    identity = Identity(task=task, num_ranks=4, store=("::1", 29400), prefix="attempt/2", attempt=2, life=1, token="t0")
    assert Identity.from_environ(identity.to_environ()) == identity
    assert set(identity.to_environ()) == set(VARIABLES)
    assert Identity.from_environ({"PATH": "/bin"}) == Identity.solo("cpu")


def test_every_bad_variable_of_an_identity_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Identity.from_environ({"TRAINKIT_RANK": "one", "TRAINKIT_RANKS": "-2", "TRAINKIT_STORE": "localhost"})
    assert str(caught.value) == (
        "3 problems in the config\n"
        "  TRAINKIT_RANK=one: must be a whole number, 0 or more. (environment)\n"
        "  TRAINKIT_RANKS=-2: must be a whole number, 0 or more. (environment)\n"
        "  TRAINKIT_STORE=localhost: must be HOST:PORT, as in 127.0.0.1:29400. (environment)"
    )
    with pytest.raises(ConfigError, match=r"TRAINKIT_RANK=2: ranks go from 0 to TRAINKIT_RANKS - 1 = 1\."):
        Identity.from_environ({"TRAINKIT_RANK": "2", "TRAINKIT_RANKS": "2"})
