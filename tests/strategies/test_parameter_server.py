"""A parameter server by its parts: what it refuses, its frames, its scheduler without processes, and its variables.

A cluster whose last rank computes instead of keeping variables, a malformed frame or half a push that changes the
variables, a shard that is used twice or never since its worker was slow, died or came back, variables cut over servers
whose update differs in a bit from one optimizer's, and what travels once too often are caught here alone.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launchers.launches import launch_of
from tests.support import zoo
from tests.support.present import present
from tests.support.serving import TOKEN, Farm, links_to, serving, state_of, stepping
from trainkit.cluster.tasks import Task
from trainkit.errors import CheckpointError, LinkError, TrainingError
from trainkit.numerics.batch import BatchPlan, Ticket, lane_order
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.core.optimizer import OptimizerStepper, optimizer_state
from trainkit.strategies.parameter_server import ParameterServer
from trainkit.strategies.reducers.vector import DeterministicReducer
from trainkit.strategies.tensors.layouts import FlatBuffer
from trainkit.strategies.updates.links import AuthenticatedListener, Connection, connect
from trainkit.strategies.updates.scheduler import (
    AsyncScheduler,
    Decision,
    PendingUpdate,
    Policy,
    ReplayScheduler,
    Staleness,
    SyncScheduler,
    UpdateLog,
    WorkItem,
    WorkScheduler,
    read_record,
)
from trainkit.strategies.updates.server import ParameterServerClient, ServerShard, VariableServer, lane_sum
from trainkit.strategies.updates.variables import (
    Variable,
    VariableShards,
    split_problems,
    tensors_of,
    variables_of,
)

ANY, REPRODUCIBLE = PlanContext(), PlanContext(numerics=Numerics(reproducible=True))
REPLACED = {"workers": 3, "spare_replicas": 1, "spare_mode": "replace"}
STALE = {name: Staleness(policy=name) for name in ("scale", "drop")}
REFUSED: list[tuple[dict[str, Any], PlanContext, str, str]] = [
    ({"workers": 2, "spare_replicas": 2}, ANY, "strategy.spare_replicas=2", "Use 1 or less."),
    ({"spare_mode": "replace"}, ANY, "strategy.spare_mode=replace", "without strategy.spare_replicas"),
    (REPLACED, REPRODUCIBLE, "numerics.reproducible=true", "depends on time"),
    (REPLACED | {"devices_per_worker": 2}, ANY, "strategy.devices_per_worker=2", "single shards"),
    ({"staleness": STALE["scale"]}, ANY, "strategy.staleness.policy=scale", "with strategy.mode=sync"),
    ({"warmup_steps": 3}, ANY, "strategy.warmup_steps=3", "with strategy.mode=sync"),
    ({"mode": "async", "workers": 3, "spare_replicas": 1}, ANY, "strategy.spare_replicas=1", "strategy.mode=async"),
    ({"mode": "async", "spare_mode": "replace"}, ANY, "strategy.spare_mode=replace", "with strategy.mode=async"),
    ({"mode": "async"}, REPRODUCIBLE, "numerics.reproducible=true", "Use strategy.mode=sync"),
    ({"mode": "async", "staleness": STALE["drop"]}, ANY, "strategy.staleness.bound=null", "needed by"),
    ({"mode": "async", "staleness": Staleness(policy="lr", bound=3)}, ANY, "strategy.staleness.bound=3", "no effect"),
    ({"transfer": "bf16"}, REPRODUCIBLE, "strategy.transfer=bf16", "Use full"),
    ({"devices_per_worker": 3}, PlanContext(num_gpus=2), "strategy.devices_per_worker=3", "2 GPUs"),
    ({"shard": 2}, REPRODUCIBLE, "numerics.reproducible=true", "Use strategy.shard=1, or false."),
    (REPLACED | {"shard": 2}, ANY, "strategy.spare_mode=replace", "Use strategy.shard=1, or duplicate."),
    ({"tensor": 2, "devices_per_worker": 2}, ANY, "strategy.devices_per_worker=2", "Use strategy.tensor=1, or 1."),
    ({"shard": 2}, PlanContext(num_gpus=3), "strategy.workers=auto", "take 4 devices, and this host has 3 GPUs"),
    ({"replay": "nowhere"}, ANY, "strategy.replay=nowhere", "updates.jsonl"),
]


def test_impossible_settings_are_problems_before_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for settings, facts, key, word in REFUSED:
        (problem,) = ParameterServer(**settings).validate(facts)
        assert str(problem).startswith(f"{key}: ")
        assert word in str(problem)


def launch(*roles: str) -> PlanContext:
    tasks = tuple(Task(role=role, index=roles[:rank].count(role), rank=rank) for rank, role in enumerate(roles))
    return PlanContext(launch=launch_of(tasks=tasks, kind="a cluster spec", num_local=1, num_hosts=4, names_roles=True))


def test_a_launch_decides_how_many_tasks_there_are() -> None:
    facts = launch("chief", "worker", "worker", "ps", "ps")
    strategy = ParameterServer()
    assert strategy.validate(facts) == []
    assert [str(task) for task in strategy.tasks(facts)] == ["chief:0", "worker:0", "worker:1", "ps:0", "ps:1"]
    assert (strategy.num_replicas(facts), strategy.num_servers(facts)) == (3, 2)
    (problem,) = replace(strategy, workers=2).validate(facts)
    assert str(problem).startswith("strategy.workers=2: but a cluster spec names 3")


def test_the_first_worker_is_the_chief_of_a_cluster_that_names_none() -> None:
    facts, strategy = launch("worker", "worker", "ps"), ParameterServer()
    assert strategy.validate(facts) == []
    assert [str(task) for task in strategy.tasks(facts) if strategy.runs_loop(task)] == ["worker:0"]
    assert [str(task) for task in strategy.tasks(facts) if strategy.restarts_alone(task)] == ["worker:1"]
    (problem,) = strategy.validate(launch("chief", "worker"))
    assert "Add one: ps=[HOST:PORT]." in str(problem)


def test_the_last_ranks_of_a_launch_without_roles_keep_the_variables() -> None:
    facts = PlanContext(launch=launch_of(4))
    assert [str(task) for task in ParameterServer().tasks(facts)] == ["chief:0", "worker:0", "worker:1", "ps:0"]
    assert [str(task) for task in ParameterServer(servers=2).tasks(facts)] == ["chief:0", "worker:0", "ps:0", "ps:1"]
    (problem,) = ParameterServer(servers=4).validate(facts)
    assert "started 4 processes. Start 5 or more." in str(problem)
    (problem,) = ParameterServer(workers=2).validate(facts)
    assert str(problem).startswith("strategy.workers=2: but torchrun started 4 processes: 3")


def test_a_launch_with_workers_in_parts_has_as_many_processes_for_each() -> None:
    strategy = ParameterServer(shard=2, tensor=2)
    named = launch("chief", *["worker"] * 8, "ps")
    assert strategy.validate(named) == []
    assert (strategy.num_workers(named), strategy.num_replicas(named)) == (2, 4)
    assert strategy.num_workers(launch(*["worker"] * 5, "ps")) == 1  # the first worker is the chief
    for wrong in (launch("chief", *["worker"] * 6, "ps"), PlanContext(launch=launch_of(2))):
        (problem,) = strategy.validate(wrong)
        assert str(problem).startswith("strategy.shard=2: takes 4 processes for each worker, and beside the chief")
        assert str(problem).endswith("Start a multiple of 4.")


def test_the_processes_of_a_worker_have_a_gpu_each_and_its_chief_has_none() -> None:
    strategy = ParameterServer(workers=2, shard=2)
    tasks = strategy.tasks(PlanContext(num_gpus=4))
    assert [task.device for task in tasks] == ["cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "cpu"]
    assert not any(map(strategy.restarts_alone, tasks))  # what one has, the others of its worker lack
    assert [strategy.num_slots(num_gpus) for num_gpus in (0, 8)] == [6, 4]


def test_a_plan_counts_the_parts_of_a_gpu_and_says_what_it_does_not_know() -> None:
    strategy, model, gpus = ParameterServer(shard=2), nn.Linear(8, 8), PlanContext(num_gpus=4)
    assert strategy.estimate_memory(model, gpus).resident == {"weight": 32, "bias": 4}
    assert strategy.estimate_memory(model, PlanContext()).resident == {"weight": 64, "bias": 8}  # of the chief
    assert strategy.observed_ranks(gpus) == (0,)
    with pytest.raises(TrainingError, match="without the other processes"):
        strategy.as_observed()
    (note,) = strategy.notes(model, gpus)
    assert "each worker is 2 processes with parts of the model" in note


@pytest.mark.parametrize("strategy", [ParameterServer(shard=2), ParameterServer(tensor=2)], ids=["shard", "tensor"])
def test_workers_in_parts_refuse_sparse_tables(strategy: ParameterServer) -> None:
    model = zoo.even_gpt()
    table = model.get_submodule("embed.positions")  # no plan cuts it
    assert isinstance(table, nn.Embedding)
    table.sparse = True
    (problem,) = strategy.validate_model(model, ANY)
    assert str(problem).startswith("model: embed.positions has sparse gradients, wh")


def test_only_the_chief_trains_and_only_workers_are_replaced_alone() -> None:
    strategy = ParameterServer(workers=2, evaluator=True)
    tasks = strategy.tasks(PlanContext(num_gpus=2))
    assert [task.role for task in tasks if strategy.runs_loop(task)] == ["chief"]
    assert [task.role for task in tasks if strategy.restarts_alone(task)] == ["worker"]
    assert [task.device for task in tasks] == ["cuda:0", "cuda:1", "cpu", "cpu"]


def test_workers_of_several_devices_take_the_gpus_in_turn() -> None:
    strategy = ParameterServer(workers=3, devices_per_worker=2)
    assert [task.device for task in strategy.tasks(PlanContext(num_gpus=4))] == ["cuda:0", "cuda:2", "cuda:0", "cpu"]
    assert (strategy.num_replicas(PlanContext()), replace(strategy, mode="async").num_replicas(PlanContext())) == (6, 2)
    assert [strategy.num_slots(num_gpus) for num_gpus in (0, 4, 8)] == [7, 4, 6]


def test_a_note_of_the_parameter_server_names_a_different_training() -> None:
    for same in (ParameterServer(), ParameterServer(mode="async", workers=1)):
        assert same.notes(nn.Identity(), PlanContext()) == ()
    (note,) = ParameterServer(mode="async", transfer="bf16").notes(nn.Identity(), PlanContext())
    assert all(words in note for words in ("applied as they arrive", "bfloat16", "a different training"))


def test_rows_that_are_looked_up_when_they_are_needed_cannot_be_replayed() -> None:
    model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Linear(2, 2))
    strategy = ParameterServer(mode="async", replay="run")
    (problem,) = strategy.validate_model(model, PlanContext())
    assert str(problem).startswith("strategy.replay=run: cannot be to the bit")
    assert replace(strategy, mode="sync").validate_model(model, PlanContext()) == []


HEAD = struct.Struct("!4sI")


@pytest.fixture
def ends() -> Iterator[list[Connection]]:
    """Two links that talk to each other."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first, second = socket.create_connection(server.getsockname()), server.accept()[0]
    links = [Connection(first, peer="b", timeout_s=0.3), Connection(second, peer="a", timeout_s=0.3)]
    yield links
    for link in links:
        link.close()


@pytest.mark.parametrize(("wait", "message"), [
    (lambda link: link.tensors(15), "a sent 16 unexpected bytes"),
    (lambda link: link.tensors(99, {"grad": torch.zeros(2)}), "a sent 16 unexpected bytes"),
    (lambda link: link.receive(), "a sent 16 unexpected bytes"),
])  # fmt: skip
def test_numbers_that_nobody_waits_for_end_the_connection(ends: list[Connection], wait: Any, message: str) -> None:
    ends[0].send("push", {}, {"grad": torch.zeros(4)})
    ends[1].receive()
    with pytest.raises(LinkError, match=message):
        wait(ends[1])
    with pytest.raises(LinkError, match="b closed the connection"):
        ends[0].receive()


def test_a_peer_that_stops_in_the_middle_is_given_up(ends: list[Connection]) -> None:
    ends[0]._connection.sendall(HEAD.pack(b"tkl2", 100) + b"{")
    with pytest.raises(LinkError, match=r"a sent nothing for 0\.3 s"):
        ends[1].receive()


def test_sending_leaves_the_patience_of_who_waits_alone(ends: list[Connection]) -> None:
    patience = ends[0]._connection.gettimeout()
    ends[0].send("order")
    assert ends[0]._connection.gettimeout() == patience
    assert ends[1].receive().kind == "order"


def test_who_pulls_when_the_run_ends_finds_the_connection_closed() -> None:
    with serving(Net(), optimizer_of("sgd"), loads=False) as farm:
        worker = farm.client()
        worker.links[0].send("pull", {"skip": [], "dtype": "float32", "version": 0})
    with pytest.raises(LinkError, match=r"ps:0 (closed the connection|is gone)"):
        worker.answer(0)
    worker.close()


def test_a_client_with_another_token_is_refused_and_served_nothing() -> None:
    served: list[Connection] = []
    with AuthenticatedListener("ps:0", token=b"one") as listener:
        listener.serve(served.append)
        with pytest.raises(LinkError, match="ps:0 does not know the token of this run"):
            connect(listener.address, token=b"two", name="worker:1", peer="ps:0", timeout_s=3)
    assert served == []


def test_an_unreachable_peer_is_waited_for_while_the_training_lasts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    to = {"token": TOKEN, "name": "worker:1", "peer": "ps:1"}
    with pytest.raises(LinkError, match=rf"ps:1 at 127\.0\.0\.1:{address[1]} cannot be reached: 0\.2 s, .*refused"):
        connect(address, timeout_s=0.2, **to)  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="no longer listens: the training is over"):
        connect(address, timeout_s=600, is_over=lambda: True, **to)  # type: ignore[arg-type]


HELLO = {"name": "worker:1", "nonce": "0" * 64}


def frame_of(kind: Any, meta: Any, tensors: Any = ()) -> bytes:
    """A frame of any content."""
    text = json.dumps([kind, meta, tensors]).encode()
    return HEAD.pack(b"tkl2", len(text)) + text


GARBAGE = [
    random.Random(5).randbytes(199),
    HEAD.pack(b"tkl2", 2**32 - 1),
    HEAD.pack(b"tkl2", 60_000) + b"[" * 60_000,
    HEAD.pack(b"tkl2", 900) + b"[" * 900,
    frame_of("push", HELLO, [["x", "float32", 2**40]]),
    frame_of("hello", HELLO, [["x", "float32", 2**40]]),
    frame_of("hello", HELLO) + frame_of("proof", {}),
    frame_of("hello", HELLO, [["x", "object", -1]]),
    frame_of(["hello"], [HELLO], 3),
]
"""Half frames, frames of too much, frames of nothing known, noise."""


def test_malformed_frames_of_strangers_do_no_harm() -> None:
    model = Net()
    with serving(model, optimizer_of("adamw")) as farm:
        worker, before = farm.client(), farm.chief.state()
        for frame in GARBAGE * 5:
            with socket.create_connection(farm.addresses[0]) as connection, suppress(OSError):  # dropped
                connection.sendall(frame)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
        equal(farm.chief.state(), before)
        worker.push("a", gradients(model, 1))
        farm.chief.apply(version=1, lr_factor=1.0, keys=["a"])
        worker.close()


PULL = {"version": 0, "dtype": "float32", "skip": []}
ROWS = torch.tensor([101])
BAD: list[tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = [
    ("push", {"key": "a"}, {"99": torch.zeros(3)}),
    ("push", {"key": "a"}, {"-1": torch.zeros(3)}),
    ("push", {"key": "a"}, {"0": torch.zeros(3)}),
    ("push", {"key": "a"}, {"0": torch.zeros(10**6)}),
    ("push", {"key": "a"}, {"0.rows": ROWS}),
    ("push", {"key": "a"}, {"0.rows": ROWS, "0.values": torch.ones(37)}),
    ("push", {"key": "a"}, {"0.rows": torch.tensor([2, 1]), "0.values": torch.ones(74)}),
    ("push", {"key": "a" * 2000}, {}),
    ("push", {"keys": ["a"]}, {}),
    ("rows", {"piece": 0, "dtype": "float32"}, {"rows": ROWS}),
    ("rows", {"piece": 99, "dtype": "float32"}, {"rows": ROWS}),
    ("pull", PULL | {"version": "x"}, {}),
    ("pull", PULL | {"dtype": "object"}, {}),
    ("pull", PULL | {"skip": ["0"]}, {}),
    ("load", {"key": "param/large.weight", "shape": [2**40]}, {}),
]


def test_an_invalid_request_of_an_authenticated_peer_is_refused_or_ends_its_connection() -> None:
    with serving(Net(), optimizer_of("sgd")) as farm:
        before = farm.chief.state()
        for kind, meta, tensors in BAD:
            worker = farm.client()
            with suppress(LinkError):  # the server may end the connection before all of a request is sent
                worker.links[0].send(kind, meta, tensors)
                assert worker.links[0].receive(5).kind == "refused", (kind, meta)
            worker.close()
        equal(farm.chief.state(), before)


def test_a_worker_that_dies_in_the_middle_of_a_push_leaves_nothing() -> None:
    push = frame_of("push", {"key": "a"}, [["0", "float32", 37 * 101]])
    with serving(Net(), optimizer_of("sgd")) as farm:
        before, worker = farm.chief.state(), farm.client()
        worker.links[0]._connection.sendall(push + bytes(99))
        worker.close()
        with pytest.raises(TrainingError, match="ps:0 refuses: there is no gradient a"):
            farm.chief.apply(version=1, lr_factor=1.0, keys=["a"])
        equal(farm.chief.state(), before)


PLAN = BatchPlan(num_samples=37, global_size=8, micro_size=2)  # steps of 8, 8, 8, 8 and 5 samples: 4 or 3 shards


def asynchronous(workers: int = 2, policy: Policy = "accept", bound: int | None = None, **more: Any) -> WorkScheduler:
    return with_workers(AsyncScheduler(plan=PLAN, staleness=Staleness(policy=policy, bound=bound), **more), workers)


def synchronous(workers: int = 4, spares: int = 0, **more: Any) -> WorkScheduler:
    return with_workers(SyncScheduler(plan=PLAN, spares=spares, **more), workers)


def with_workers(scheduler: WorkScheduler, workers: int) -> WorkScheduler:
    scheduler.recall({}, 0, None)
    for index in range(workers):
        scheduler.join(f"w{index}")
    return scheduler


def next_item(scheduler: WorkScheduler, worker: str) -> WorkItem:
    item = scheduler.next(worker)
    assert item is not None
    return item


def report(scheduler: WorkScheduler, item: WorkItem, version: int) -> PendingUpdate | None:
    scheduler.report(item.number, item.worker, version)
    merge = scheduler.next_ready_update()
    if merge is not None:
        scheduler.merged(merge)
    return merge


def test_each_policy_judges_by_staleness() -> None:
    drop, lr = Staleness(policy="drop", bound=2), Staleness(policy="lr")
    assert Staleness(policy="accept").decide(7) == Staleness(policy="bound", bound=1).decide(9) == Decision()
    assert [drop.decide(staleness) for staleness in (2, 3)] == [Decision(), Decision(takes=False)]
    assert Staleness(policy="scale").decide(3) == Decision(factor=0.25)
    assert [lr.decide(staleness).lr_divisor for staleness in (0, 3)] == [1.0, 3.0]


def test_a_dropped_gradient_is_computed_again_before_any_other_step() -> None:
    scheduler = asynchronous(2, "drop", 0)
    first, second = next_item(scheduler, "w0"), next_item(scheduler, "w1")
    assert report(scheduler, second, 0) is not None
    assert report(scheduler, first, 0) is None
    assert next_item(scheduler, "w0").ticket == Ticket(0, (0, 1, 2, 3))
    assert scheduler.late == {"w0": 1}


def test_a_worker_ahead_of_the_slowest_waits_for_it_unless_it_is_lost() -> None:
    scheduler = asynchronous(2, "bound", 1)
    slow = next_item(scheduler, "w1")
    for version in range(2):
        report(scheduler, next_item(scheduler, "w0"), version)
    assert scheduler.next("w0") is None
    report(scheduler, slow, 0)
    report(scheduler, next_item(scheduler, "w0"), 3)
    assert scheduler.next("w0") is None
    scheduler.leave("w1")
    assert scheduler.next("w0") is not None


def test_in_the_warmup_one_gradient_at_a_time_is_computed() -> None:
    scheduler = asynchronous(3, warmup_steps=2)
    for version in range(2):
        item = next_item(scheduler, "w0")
        assert scheduler.next("w1") is None
        assert report(scheduler, item, version) is not None
    assert all(scheduler.next(worker) is not None for worker in ("w0", "w1", "w2"))


def test_an_idle_worker_computes_an_outstanding_shard_again_and_the_first_result_wins() -> None:
    scheduler = synchronous(5, spares=1)
    items = [next_item(scheduler, f"w{index}") for index in range(4)]
    spare = next_item(scheduler, "w4")
    assert spare.ticket == items[0].ticket
    for item in (*items[1:], spare):
        merge = report(scheduler, item, 0)
    assert merge is not None
    assert merge.items[0].worker == "w4"
    assert not scheduler.report(items[0].number, "w0", 0)
    assert scheduler.late == {"w0": 1}


def test_no_more_than_the_spares_are_repeated() -> None:
    for spares, expected in ((2, [0, 1, 2, 3, 0, 1, None]), (0, [0, 1, 2, 3, None, None, None])):
        scheduler = synchronous(7, spares=spares)
        items = [scheduler.next(f"w{index}") for index in range(7)]
        assert [item.ticket.shards[0] if item else None for item in items] == expected


def test_an_overflowed_step_is_scheduled_again() -> None:
    scheduler = synchronous(4)
    for index in range(4):
        scheduler.report(next_item(scheduler, f"w{index}").number, f"w{index}", 0)
    merge = scheduler.next_ready_update()
    assert merge is not None
    scheduler.requeue_after_overflow(merge)
    assert [next_item(scheduler, f"w{index}").ticket for index in range(4)] == [item.ticket for item in merge.items]
    assert scheduler.version == 0


class Trial:
    """Workers at random speeds, some dying, some slow; what every update was made of."""

    def __init__(self, scheduler: WorkScheduler, seed: int, num_workers: int) -> None:
        self.scheduler, self.random = scheduler, Random(seed)
        self.names = [f"w{index}" for index in range(num_workers)]
        self.busy: dict[str, WorkItem] = {}
        self.reads: dict[int, int] = {}
        self.updates: list[PendingUpdate] = []

    def run(self, num_updates: int) -> None:
        for name in self.names:
            self.scheduler.join(name)
        while len(self.updates) < num_updates:
            self._turn()

    def _turn(self) -> None:
        for name in self.names:
            if name not in self.busy and (item := self.scheduler.next(name)) is not None:
                self.busy[name] = item
                self.reads[item.number] = self.scheduler.version
        name = self.random.choice(sorted(self.busy))
        if self.random.random() < 0.05 and not isinstance(self.scheduler, ReplayScheduler):
            self.scheduler.leave(name)
            self.busy.pop(name)
            self.scheduler.join(name)
        elif name not in self.names[:2] or self.random.random() < 0.2:  # two are slow
            item = self.busy.pop(name)
            self.scheduler.report(item.number, name, self.reads[item.number])
        while (merge := self.scheduler.next_ready_update()) is not None:
            self.scheduler.merged(merge)
            self.updates.append(merge)


def shard_counts(updates: list[PendingUpdate]) -> Counter[tuple[int, int]]:
    tickets = [item.ticket for update in updates for item in update.items]
    return Counter((ticket.step, shard) for ticket in tickets for shard in ticket.shards)


SCHEDULERS: dict[str, Callable[[], WorkScheduler]] = {
    "async": lambda: AsyncScheduler(plan=PLAN, until=20),
    "drop": lambda: AsyncScheduler(plan=PLAN, staleness=Staleness(policy="drop", bound=2), until=20),
    "bound": lambda: AsyncScheduler(plan=PLAN, staleness=Staleness(policy="bound", bound=1), until=20),
    "sync": lambda: SyncScheduler(plan=PLAN, until=20),
    "duplicate": lambda: SyncScheduler(plan=PLAN, spares=2, until=20),
    "wide duplicate": lambda: SyncScheduler(plan=PLAN, width=2, spares=2, until=20),
    "replace-2": lambda: SyncScheduler(plan=PLAN, spares=2, replaces=True, until=20),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("seed", range(3))
def test_every_shard_is_used_once_an_epoch_whichever_worker_is_slow_or_dies(kind: str, seed: int) -> None:
    trial = Trial(SCHEDULERS[kind](), seed, 5)
    trial.run(20)
    every = {(step, shard) for step in range(20) for shard in range(PLAN.num_shards(step))}
    assert shard_counts(trial.updates) == Counter(dict.fromkeys(every, 1))
    if kind.startswith("replace"):
        for epoch in range(4):
            steps = {step for step, _ in shard_counts(trial.updates[5 * epoch : 5 * epoch + 5])}
            assert steps == set(range(5 * epoch, 5 * epoch + 5))


@pytest.mark.parametrize("kind", ["async", "replace-2"])
@pytest.mark.parametrize("stop", [1, 7])
def test_nothing_is_lost_or_used_twice_over_a_resume(kind: str, stop: int) -> None:
    first = Trial(SCHEDULERS[kind](), 1, 5)
    first.run(stop)
    updates = first.updates[:stop]
    assert len(first.updates) == stop
    scheduler = SCHEDULERS[kind]()
    scheduler.recall(json.loads(json.dumps(first.scheduler.remember())), stop, 20)
    second = Trial(scheduler, 2, 4)
    second.run(20 - stop)
    every = {(step, shard) for step in range(20) for shard in range(PLAN.num_shards(step))}
    assert shard_counts([*updates, *second.updates]) == Counter(dict.fromkeys(every, 1))


def test_a_record_is_read_as_it_was_written_and_cut_where_a_checkpoint_is_continued(tmp_path: Path) -> None:
    trial = Trial(SCHEDULERS["async"](), 3, 3)
    trial.run(6)
    record = UpdateLog(tmp_path / "updates.jsonl", 0)
    for merge in trial.updates:
        record.note(merge)
    record.close()
    lines = list(read_record(tmp_path / "updates.jsonl"))
    assert [line.text() for line in lines] == [merge.text() for merge in trial.updates]
    UpdateLog(tmp_path / "updates.jsonl", 4).close()
    assert list(read_record(tmp_path / "updates.jsonl")) == lines[:4]


def test_a_damaged_record_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    path.write_text('{"version":0,"of":[]}\nnothing\n{"version":1')
    with pytest.raises(CheckpointError, match=r"updates\.jsonl:2 is not an update of a run"):
        list(read_record(path))


@pytest.mark.parametrize("kind", ["async", "drop", "replace-2"])
@pytest.mark.parametrize("workers", [1, 6])
def test_a_replay_makes_the_same_updates_of_gradients_that_read_the_same(kind: str, workers: int) -> None:
    recorded = Trial(SCHEDULERS[kind](), 4, 4)
    recorded.run(20)
    scheduler = ReplayScheduler(script=recorded.updates)
    scheduler.recall({}, 0, 20)
    replayed = Trial(scheduler, 5, workers)
    replayed.run(20)

    def inputs_of(updates: list[PendingUpdate]) -> list[tuple[tuple[Ticket, ...], tuple[int, ...]]]:
        return [(update.tickets, tuple(item.version for item in update.items)) for update in updates]

    assert inputs_of(replayed.updates) == inputs_of(recorded.updates)


def test_a_replay_that_cannot_continue_raises_an_error() -> None:
    items = [WorkItem(worker=f"w{step}", ticket=Ticket(step, (0,)), version=0) for step in range(2)]
    scheduler = ReplayScheduler(script=[PendingUpdate(version=step, items=(item,)) for step, item in enumerate(items)])
    with pytest.raises(TrainingError, match=r"cannot continue from step 1: update 1 .* computed at version 0"):
        scheduler.recall({}, 1, 3)
    scheduler.recall({}, 0, 3)
    with pytest.raises(TrainingError, match=r"the recorded run made 2 updates, and this run needs more"):
        Trial(scheduler, 0, 2).run(3)


COUNTS = [1, 4]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


class Net(nn.Module):
    """Sizes that no server count divides: a large matrix, small ones, a frozen one, statistics."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.large = nn.Linear(37, 101)
        self.norm = nn.BatchNorm1d(101)
        self.fixed = nn.Linear(101, 3).requires_grad_(False)
        self.head = nn.Linear(101, 7)
        self.register_buffer("table", torch.arange(5.0), persistent=False)


def optimizer_of(name: str) -> Callable[[Mapping[str, torch.Tensor]], torch.optim.Optimizer]:
    return lambda named: OPTIMIZERS[name](list(named.values()))


def gradients(model: nn.Module, seed: int, *, missing: tuple[int, ...] = ()) -> list[Tensor | None]:
    torch.manual_seed(seed)
    params = [param for param in model.parameters() if param.requires_grad]
    return [None if index in missing else torch.randn_like(param) for index, param in enumerate(params)]


def equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(actual) == sorted(expected)
    assert [key for key in actual if not torch.equal(actual[key], expected[key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("servers", COUNTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_on_servers_are_those_of_one_optimizer_bit_for_bit(optimizer: str, servers: int) -> None:
    model, worked = Net(), Net()
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    stepper = OptimizerStepper(optimizer_of(optimizer)(named), list(named.values()))
    with serving(worked, optimizer_of(optimizer), servers=servers) as farm:
        worker = farm.client()
        for step in range(5):
            missing = (1,) if step == 2 else ()
            stepper.step(gradients(model, step, missing=missing), 1.0 + step)
            worker.push("w0/0", gradients(model, step, missing=missing))
            farm.chief.apply(version=step + 1, lr_factor=1.0 + step, keys=["w0/0"])
            assert worker.pull(tensors_of(worked)) == step + 1
        state = farm.chief.state()
        worker.close()
    equal(state_of(worked), state_of(model))
    equal(state, {**state_of(model), **optimizer_state(stepper.optimizer, named)})


def updated(farm: Farm, model: nn.Module, version: int) -> dict[str, Tensor]:
    """The state after one more update."""
    farm.chief.push("a", gradients(model, version))
    farm.chief.apply(version=version, lr_factor=1.0, keys=["a"])
    return farm.chief.state()


def test_a_state_that_one_server_gave_goes_on_on_three() -> None:
    model = Net()
    with serving(model, optimizer_of("adamw")) as farm:
        early, late = updated(farm, model, 1), updated(farm, model, 2)
    with serving(model, optimizer_of("adamw"), servers=3, loads=False) as farm:
        farm.chief.load_state({**early, "buffer/table": model.table}, version=1)
        equal(updated(farm, model, 2), late)
    assert late["optimizer/step/head.bias"] == 2


@pytest.mark.parametrize("servers", COUNTS)
def test_sums_over_lanes_have_the_bits_of_the_lane_reducer(servers: int) -> None:
    model, shards = Net(), 12  # some of the 8 lanes have two
    pushed = [gradients(model, seed, missing=(2,) if seed == 3 else ()) for seed in range(shards)]
    packing = FlatBuffer([param.shape for _, param in trainable(model)], torch.float32, CPU)
    of_lane = {lane: [clones(grads) for grads in pushed[lane::8]] for lane in lane_order(8) if lane < shards}
    reducer = DeterministicReducer(lanes=8, rank=0, num_ranks=1)
    reducer.begin(packing, num_shards=shards)
    for lane, shard_grads in of_lane.items():
        reducer.add(lane, lane_sum(shard_grads, 0, packing) if len(shard_grads) > 1 else shard_grads[0])
    expected = [present(total) for total in reducer.finish()]
    norms = torch.stack(torch._foreach_norm(expected, 2.0))
    with serving(model, optimizer_of("sgd"), servers=servers) as farm:
        for shard, grads in enumerate(pushed):
            farm.chief.push(f"s/{shard}", grads)
        keys = [f"s/{shard}" for shard in range(shards)]
        summed = farm.chief.sum(keys, lanes=8, checks=True, norms=True)
        assert summed.finite
        assert torch.equal(summed.norm, torch.linalg.vector_norm(norms))
        farm.chief.apply(version=1, lr_factor=1.0)
        state = farm.chief.state()
    for (name, param), total in zip(trainable(model), expected, strict=True):
        assert torch.equal(state[f"param/{name}"], param.detach().clone().add_(total, alpha=-0.1))


CPU = torch.device("cpu")


def clones(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def test_what_is_discarded_changes_nothing() -> None:
    model = Net()
    grads = gradients(model, 1)
    present(grads[-1])[0] = float("nan")
    with serving(model, optimizer_of("momentum"), servers=2) as farm:
        farm.chief.push("a", grads)
        assert not farm.chief.sum(["a"], checks=True).finite
        farm.chief.push("b", gradients(model, 1))
        farm.chief.discard_staged(["b", "never there"])
        with pytest.raises(TrainingError, match="ps:0 refuses: there is no gradient b"):
            farm.chief.apply(version=1, lr_factor=1.0, keys=["b"])
        equal(farm.chief.state(), state_of(model))


def test_servers_between_two_updates_are_read_again() -> None:
    model, worked = Net(), Net()
    with serving(model, optimizer_of("sgd"), servers=2) as farm:
        worker = farm.client()

        def apply(server: int) -> None:
            request = {"version": 1, "lr_factor": 1.0, "factor": 1.0, "buffer_factor": 1.0, "keys": ["a"]}
            farm.chief.ask(server, {}, VariableServer.apply, **request)  # type: ignore[arg-type]

        worker.pull(tensors_of(worked))
        farm.chief.push("a", gradients(model, 1))
        apply(1)
        before, pulled = worker.links[0].received_bytes, Thread(target=worker.pull, args=(tensors_of(worked),))
        pulled.start()
        while worker.links[0].received_bytes == before:  # it has read the one that is behind
            time.sleep(0.001)
        apply(0)
        pulled.join()
        assert (worker.version, worker.mixed) == (1, False)
        state = farm.chief.state()
        worker.close()
    assert all(torch.equal(state[f"param/{name}"], param) for name, param in worked.named_parameters())


def test_only_the_chief_gives_orders() -> None:
    with serving(Net(), optimizer_of("sgd")) as farm:
        worker = farm.client("worker:3")
        with pytest.raises(ConnectionError, match=r"ps:0 (closed the connection|is gone)"):
            worker.apply(version=1, lr_factor=1.0)
        worker.close()
        assert farm.chief.pull(tensors_of(Net())) == 0


REQUESTS = {"pull": {"version": 0, "dtype": "float32", "skip": []}, "rows": {"piece": 0, "dtype": "float32"}}


@pytest.mark.parametrize(
    ("verb", "wrong"),
    [
        ("pull", {"version": -1}),
        ("pull", {"version": True}),
        ("pull", {"version": 2**60}),
        ("pull", {"skip": ["0"]}),
        ("pull", {"skip": [-1]}),
        ("pull", {"skip": None}),
        ("rows", {"piece": -1}),
        ("push", {"key": "k" * 1025}),
        ("push", {}),
    ],
    ids=["behind", "flag", "long", "text in a list", "behind in a list", "nothing", "no piece", "long name", "no name"],
)
def test_a_request_with_a_value_of_another_type_or_size_is_refused(verb: str, wrong: dict[str, Any]) -> None:
    with serving(Net(), optimizer_of("sgd")) as farm:
        worker = farm.client("worker:3")
        worker.links[0].send(verb, {**REQUESTS.get(verb, {}), **wrong}, {"rows": torch.zeros(0, dtype=torch.int64)})
        (name,) = wrong or ["key"]
        with pytest.raises(TrainingError, match=f"ps:0 refuses: {name} is not "):
            worker.answer(0)
        assert worker.pull(tensors_of(Net())) == 0
        worker.close()


def test_a_client_or_a_checkpoint_of_another_model_is_refused() -> None:
    model = Net()
    with serving(model, optimizer_of("sgd")) as farm:
        other = VariableShards(variables_of(nn.Linear(2, 2), torch.float32), 1)
        with pytest.raises(TrainingError, match="ps:0 refuses: worker:1 has another model, or another number of serv"):
            ParameterServerClient(links_to(farm.addresses, "worker:1"), other)
        tensors = state_of(model)
        del tensors["param/head.bias"]
        with pytest.raises(CheckpointError, match=r"param/head.bias is missing there"):
            farm.chief.load_state(tensors, version=0)


@pytest.mark.parametrize("servers", [2, 7])
def test_servers_hold_equal_bytes_and_cut_at_most_one_variable_a_boundary(servers: int) -> None:
    sizes = [(50_000, 64), (64,), (256, 64), (256,), (64, 256), (64,), (1,), ()]
    variables = [Variable(name=f"v{i}", kind="param", shape=s, dtype=torch.float32) for i, s in enumerate(sizes)]
    shares = VariableShards(variables, servers)
    fair = sum(variable.num_bytes for variable in variables) / servers
    assert [server for server in range(servers) if abs(shares.bytes_of(server) / fair - 1) > 0.1] == []
    assert len(shares.split) <= servers - 1
    pieces = [piece for of_server in shares.pieces for piece in of_server]
    rows = [(piece.index, row) for piece in pieces for row in range(piece.start, piece.stop)]
    assert rows == [(index, row) for index, variable in enumerate(variables) for row in range(variable.num_rows)]


def test_a_cut_that_an_optimizer_feels_is_refused() -> None:
    shares = VariableShards(variables_of(nn.Linear(64, 64, bias=False), torch.float32), 2)
    [problem] = split_problems(shares, PlanContext(optimizer=torch.optim.Adafactor))
    assert "Adafactor uses whole parameters, and 2 servers would have parts of weight" in str(problem)
    assert split_problems(VariableShards(shares.variables, 1), PlanContext(optimizer=torch.optim.Adafactor)) == []
    assert split_problems(shares, PlanContext(optimizer=torch.optim.AdamW)) == []
    shares = VariableShards([Variable(name="odd", kind="param", shape=(30, 100_001), dtype=torch.float32)], 2)
    assert shares.bytes_of(0) == shares.bytes_of(1)
    [problem] = split_problems(shares, PlanContext(numerics=Numerics(reproducible=True)))
    assert str(problem).startswith("numerics.reproducible=true: 2 servers would cut odd within 16 numbers")


def test_what_is_being_sent_stays_as_it_is_while_an_update_goes_on_in_other_memory() -> None:
    model = Net()
    pieces = VariableShards(variables_of(model, torch.float32), 1).pieces[0]
    shard = ServerShard(pieces, torch.float32, stepping(optimizer_of("momentum")))
    shard.load({**state_of(model), "buffer/table": model.table}, version=3)
    memory, lent = shard.begin_read(range(4, len(pieces)), torch.float32)
    before = memory.clone()
    for version in (4, 5):
        shard.update([*gradients(model, version), *[None] * 6], version=version, lr_factor=1.0)
    assert torch.equal(memory, before)
    assert torch.equal(lent["0"], before[: lent["0"].numel()])
    shard.end_read(memory)
    after, _ = shard.begin_read((), torch.float32)
    assert (after.data_ptr() != memory.data_ptr(), shard.version) == (True, 5)
    assert torch.equal(after, torch.cat([master.detach().flatten() for master in shard.masters.values()]))
    assert not torch.equal(after, before)


def bytes_moved(worker: ParameterServerClient, act: Callable[[], object]) -> dict[int, int]:
    """Bytes to and from each server while something is done."""
    before = [link.sent_bytes + link.received_bytes for link in worker.links]
    act()
    return {server: link.sent_bytes + link.received_bytes - before[server] for server, link in enumerate(worker.links)}


def a_step(farm: Farm, worker: ParameterServerClient, model: nn.Module, grads: list[Tensor | None]) -> dict[int, int]:
    """Bytes of a push and a pull of everything."""
    pushed = bytes_moved(worker, lambda: worker.push("a", grads))
    farm.chief.apply(version=worker.version + 1, lr_factor=1.0, keys=["a"])
    pulled = bytes_moved(worker, lambda: worker.pull(tensors_of(model)))
    return {server: pushed[server] + count for server, count in pulled.items()}


def test_what_is_not_trained_travels_once() -> None:
    fixed = nn.Linear(100, 100).requires_grad_(False)
    model = nn.Sequential(fixed, nn.Linear(100, 2))
    with serving(model, optimizer_of("sgd")) as farm:
        worker = farm.client()
        first = bytes_moved(worker, lambda: worker.pull(tensors_of(model)))[0]
        second = bytes_moved(worker, lambda: worker.pull(tensors_of(model)))[0]
        with torch.no_grad():
            fixed.bias.fill_(3.0)
        farm.chief.load_state(state_of(model), version=7)
        other = nn.Sequential(nn.Linear(100, 100).requires_grad_(False), nn.Linear(100, 2))
        assert worker.pull(tensors_of(other)) == 7
        worker.close()
    assert 4 * 100 * 101 <= first - second < 4 * 100 * 101 + 100  # their names travel as well
    equal(state_of(other), state_of(model))


def test_bf16_halves_the_bytes_and_rounds_what_travels_once() -> None:
    model, worked = Net(), Net()
    grads = gradients(model, 1)
    with serving(model, optimizer_of("sgd"), servers=2) as farm:
        whole, half = farm.client("worker:0"), farm.client("worker:1", transfer=torch.bfloat16)
        for worker in (whole, half):
            worker.pull(tensors_of(worked))
        full = a_step(farm, whole, worked, grads)
        farm.chief.load_state({**state_of(model), "buffer/table": model.table}, version=0)
        half.pull(tensors_of(worked))
        short = a_step(farm, half, worked, grads)
        state = farm.chief.state()
        whole.close()
        half.close()
    buffers = 4 * (2 * 101 + 5) + 8
    assert abs((sum(short.values()) - buffers) / (sum(full.values()) - buffers) - 0.5) < 0.02
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    pulled = dict(worked.named_parameters())
    for (name, param), grad in zip(params, grads, strict=True):
        expected = param.detach().clone().add_(present(grad).bfloat16().float(), alpha=-0.1)
        assert torch.equal(state[f"param/{name}"], expected)
        assert torch.equal(pulled[name], state[f"param/{name}"].bfloat16().float())


class Table(nn.Module):
    """A table and a head."""

    def __init__(self, rows: int = 1000, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(rows, width, sparse=True)
        self.head = nn.Linear(width, 3)


def sparse_gradients(model: Table, rows: list[int], seed: int) -> list[Tensor]:
    """A row that occurs twice, and none of the second server's."""
    torch.manual_seed(seed)
    values = torch.randn(len(rows), model.embed.weight.shape[1])
    table = torch.sparse_coo_tensor(torch.tensor([rows]), values, model.embed.weight.shape, check_invariants=False)
    return [table, torch.randn_like(model.head.weight), torch.randn_like(model.head.bias)]


@pytest.mark.parametrize(("optimizer", "servers"), [("sgd", 1), ("adagrad", 3)])
def test_rows_and_values_make_the_update_of_one_optimizer_and_to_rounding_that_of_the_dense_gradient(
    optimizer: str, servers: int
) -> None:
    model, dense = Table(), Table()
    steppers = {
        net: OptimizerStepper(optimizer_of(optimizer)(dict(net.named_parameters())), list(net.parameters()))
        for net in (model, dense)
    }
    with serving(model, optimizer_of(optimizer), servers=servers) as farm:
        for step, rows in enumerate([[3, 3, 700], [5], [999, 0, 3]]):
            table, *others = sparse_gradients(model, rows, step)
            steppers[model].step([table.coalesce(), *others], 1.0)
            steppers[dense].step([grad.to_dense() for grad in sparse_gradients(model, rows, step)], 1.0)
            farm.chief.push("a", sparse_gradients(model, rows, step))
            farm.chief.apply(version=step + 1, lr_factor=1.0, keys=["a"])
        state = farm.chief.state()
        pulled = farm.chief.pull_rows(0, torch.tensor([700, 3, 3, 999]))
    equal(state, {**state_of(model), **optimizer_state(steppers[model].optimizer, dict(model.named_parameters()))})
    torch.testing.assert_close(model.embed.weight, dense.embed.weight, rtol=1e-6, atol=0)
    assert torch.equal(pulled, model.embed.weight[[700, 3, 3, 999]])
