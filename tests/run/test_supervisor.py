"""A rank that is killed, hangs or leaves, and whose run does not go on from its checkpoint, is caught here alone.
A replica that is lost too early, twice, or never taken back is caught here alone; also who may be elastic.
A run that restarts for ever, or that is given up although it gets further, is caught here alone.
"""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.launches import launch_of
from tests.run.faking import assert_no_process_is_left, run_fakes, run_roles
from tests.support.present import present
from tests.support.refusing import refused
from tests.support.verdicts import plain
from trainkit.cluster.launch import LaunchEnvironment, workers
from trainkit.cluster.tasks import Task
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.errors import ConfigError, CrashLoopError, DataError, HangError, LinkError, TrainingError
from trainkit.run.agent.agent import AgentSettings
from trainkit.run.agent.failure import Failure
from trainkit.run.agent.policy import (
    Fault,
    RaisedError,
    ReplicaMembership,
    RestartPolicy,
    TaskRestarter,
    fault_of,
    record_relaunch,
)
from trainkit.run.agent.supervisor import _result, supervise
from trainkit.run.folder.run_folder import RESTARTS, Restart, RunFolder, record_restart, restarts_of
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.process.error_report import write_error_report
from trainkit.run.process.heartbeat import Heartbeat
from trainkit.strategies.data_parallel.strategy import Mirrored


def starts_of(folder: RunFolder, rank: int) -> list[dict[str, Any]]:
    """What a rank printed at each of its starts."""
    lines = folder.log_of(rank).read_text().splitlines()
    return [json.loads(line.partition(" says ")[2]) for line in lines if line.startswith(f"rank {rank} says ")]


def test_ranks_run_to_the_end_and_the_result_comes_back(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("trainkit.run.process.worker_group.num_cores", lambda: 7)
    fake("steps=4 child=1")
    assert run_fakes(folder, 3) == {"status": "finished", "attempt": 0}
    assert_no_process_is_left(folder)
    assert starts_of(folder, 1) == [{"attempt": 0, "life": 0, "prefix": "attempt/0", "omp": "2"}]


def test_rank_0_prints_through_also_into_a_notebook_and_the_others_into_their_logs(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake("steps=1")
    run_fakes(folder, 2)
    assert [line[:11] for line in capfd.readouterr().out.splitlines()] == ["rank 0 says"]
    assert sorted(path.name for path in folder.logs.iterdir()) == ["rank_1.log"]
    cell = io.StringIO()
    monkeypatch.setattr("sys.stdout", cell)
    run_fakes(folder, 2)
    assert [line[:11] for line in cell.getvalue().splitlines()] == ["rank 0 says"]


def test_a_killed_rank_is_named_and_all_continue_from_a_save(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=2 pause=0.05", fail="rank=1,step=3,phase=forward,attempt=0,action=kill")
    messages: list[str] = []
    assert run_fakes(folder, 2, log=messages.append) == {"status": "finished", "attempt": 1}
    expected = (
        "rank 1 was ended by SIGKILL in step 3 (forward). "
        "Restarting from the checkpoint of step 2 (1 of 3 without a newer one)."
    )
    assert [plain(line) for line in messages] == [expected]
    assert [line["prefix"] for line in starts_of(folder, 1)] == ["attempt/0", "attempt/1"]


def test_without_a_checkpoint_a_failure_ends_the_run(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=4 pause=0.02", fail="rank=1,step=2,phase=update,action=raise")
    with pytest.raises(TrainingError) as caught:
        run_fakes(folder, 2)
    first, title, *_, last = plain(caught.value).splitlines()
    assert first == (
        "rank 1 failed in step 2 (update): RuntimeError: failpoint in update of step 2. "
        "There is no checkpoint to restart from."
    )
    assert (title, last) == ("Traceback (most recent call last):", "RuntimeError: failpoint in update of step 2")
    assert_no_process_is_left(folder)


def test_a_host_without_a_loopback_interface_is_refused_and_the_result_says_so(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    folder.path.mkdir()
    monkeypatch.setattr("socket.create_connection", unreachable)
    with pytest.raises(LinkError, match=r"does not reach its own address 127\.0\.0\.1: Network is unreachable\."):
        supervise(folder.resolved, workers(2), AgentSettings(), folder=folder)
    assert "ip link set lo up" in json.loads((folder.path / "result.json").read_text())["reason"]


def test_restarts_that_get_no_further_are_given_up(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=1 pause=0.02", fail="rank=0,step=3,phase=forward,action=kill")
    messages: list[str] = []
    with pytest.raises(CrashLoopError) as caught:
        run_fakes(folder, 2, max_restarts=2, log=messages.append)
    assert len(messages) == 2
    assert plain(caught.value) == (
        "gave up after 2 restarts without progress beyond the checkpoint of step 3: "
        "rank 0 was ended by SIGKILL in step 3 (forward)."
    )
    assert_no_process_is_left(folder)
    result = present(folder.read_result())
    assert [(row["kind"], row["step"], row["checkpoint"]) for row in result["restarts"]] == [("all", 3, 3)] * 2
    assert (result["status"], result["steps"], result["reason"]) == ("failed", 3, str(caught.value))
    assert result["last"] == f"{folder.path}/checkpoints/step_00000003"
    assert result["resume"] == f"trainkit resume --allow-package tests {folder.path}"


@pytest.mark.parametrize("kind", ["DataError", "ConfigError"])
def test_an_error_of_ours_is_not_tried_again(folder: RunFolder, fake: Callable[..., None], kind: str) -> None:
    fake("steps=6 save=1", raising=f"1:{kind}:/gone")
    with pytest.raises((DataError, ConfigError), match="/gone") as caught:
        run_fakes(folder, 2, log=pytest.fail)
    assert type(caught.value).__name__ == kind


@pytest.mark.parametrize("action", ["hang", "stop"])
def test_a_rank_without_a_pulse_is_named_and_ended(folder: RunFolder, fake: Callable[..., None], action: str) -> None:
    fake("steps=600 pause=0.02 child=1", fail=f"rank=1,step=2,phase=forward,action={action}")
    with pytest.raises(HangError) as caught:
        run_fakes(folder, 2, hang_timeout_s=2)
    lines = plain(caught.value).splitlines()
    assert lines[0].startswith("rank 1 has made no progress for 2 s in step 2 (forward)")
    assert ("it is stopped by a signal (state T). To let it continue: kill -CONT" in lines[0]) == (action == "stop")
    assert any("failpoints.py" in line for line in lines) == (action == "hang")  # a stopped one cannot tell
    assert_no_process_is_left(folder)


def lives(folder: RunFolder, rank: int) -> list[tuple[int, int]]:
    """(attempt, life) of each start of a rank, by its log."""
    return [(restart["attempt"], restart["life"]) for restart in starts_of(folder, rank)]


def test_a_worker_that_is_killed_is_started_again_alone(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=100 pause=0.02", fail="rank=1,step=3,phase=forward,life=0,action=kill")
    messages: list[str] = []
    assert run_roles(folder, "worker worker ps", log=messages.append) == {"status": "finished", "attempt": 0}
    expected = "rank 1 was ended by SIGKILL in step 3 (forward). Restarting only worker:0; the others continue."
    assert [plain(line) for line in messages] == [expected]
    assert [lives(folder, rank) for rank in (1, 2, 3)] == [[(0, 0), (0, 1)], [(0, 0)], [(0, 0)]]
    assert_no_process_is_left(folder)


def test_a_worker_that_hangs_is_ended_and_started_again_alone(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=200 pause=0.02", fail="rank=1,step=3,phase=forward,life=0,action=hang")
    messages: list[str] = []
    assert run_roles(folder, "worker ps", hang_timeout_s=1, log=messages.append)["attempt"] == 0
    (line,) = map(plain, messages)
    assert line.startswith("rank 1 has made no progress for 1 s in step 3 (forward). ")
    assert line.endswith(" Restarting only worker:0; the others continue.")


def test_a_worker_that_keeps_dying_without_progress_ends_it(folder: RunFolder, fake: Callable[..., None]) -> None:
    hang = "rank=0,step=0,phase=forward,action=hang"
    fake("steps=9", fail=f"{hang};rank=1,step=2,phase=forward,action=kill")
    messages: list[str] = []
    with pytest.raises(CrashLoopError) as caught:
        run_roles(folder, "worker", max_restarts=1, log=messages.append)
    assert len(messages) == 1
    assert plain(caught.value).splitlines()[0] == (
        "gave up after 1 restarts of worker:0 alone without progress beyond step 0: "
        "rank 1 was ended by SIGKILL in step 2 (forward)."
    )
    assert_no_process_is_left(folder)


def test_an_evaluator_that_keeps_dying_is_given_up(
    folder: RunFolder, fake: Callable[..., None], tmp_path: Path
) -> None:
    marker, messages = tmp_path / "slow", []
    marker.touch()  # the training is slow until the evaluator is given up, however loaded the machine is
    slow = f"rank=0,phase=forward,while={marker},action=slow"
    fake("steps=2000", fail=f"{slow};rank=1,step=0,phase=forward,action=kill")

    def log(line: str) -> None:
        messages.append(line)
        if len(messages) == 2:
            marker.unlink()

    assert run_roles(folder, "evaluator", max_restarts=1, log=log)["status"] == "finished"
    assert len(messages) == 2
    assert messages[1].endswith(
        "Evaluation gave up after 1 restarts of evaluator:0 alone; the training continues without it."
    )


def test_an_error_of_a_workers_own_ends_the_run(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=400 pause=0.02", raising="1:DataError:/gone")
    with pytest.raises(DataError, match=r"^/gone$"):
        run_roles(folder, "worker", log=pytest.fail)


def test_an_error_of_the_evaluators_own_does_not(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=150 pause=0.02", raising="1:DataError:/gone")
    messages: list[str] = []
    assert run_roles(folder, "evaluator", log=messages.append)["status"] == "finished"
    (line,) = map(plain, messages)
    assert line.startswith("rank 1 failed in step 2 (idle): DataError: /gone. Restarting only evaluator:0")


def test_a_task_that_dies_before_it_begins_waits_1_s_then_2_and_at_most_60(folder: RunFolder) -> None:
    folder.live.mkdir(parents=True)
    messages: list[str] = []
    task = Task(role="worker", index=0, rank=1)
    restarter = TaskRestarter(tasks={1: task}, folder=folder, max_restarts=99, log=messages.append, clock=lambda: 0.0)
    for _ in range(8):
        restarter.on_death(Failure(rank=1, headline="It died."))
    waits = [line.rpartition(" in ")[2] for line in messages]
    assert waits == [f"{seconds} s; the others continue." for seconds in (1, 2, 4, 8, 16, 32, 60, 60)]
    assert restarter.due() == []


def test_a_worker_that_stays_is_ended(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.run.agent.agent._SHUTDOWN_GRACE_S", 0.2)
    fake("steps=3 stays=worker")
    assert run_roles(folder, "worker ps", log=pytest.fail)["status"] == "finished"
    assert_no_process_is_left(folder)


def test_no_file_holds_the_token(folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.run.agent.supervisor.token_hex", lambda size: "5ec2e7" * size)
    fake("steps=3")
    run_roles(folder, "worker", log=pytest.fail)
    written = [path for path in folder.path.rglob("*") if path.is_file() and b"5ec2e7" in path.read_bytes()]
    assert folder.log_of(1).is_file()
    assert written == []


def story(folder: RunFolder, index: int) -> list[str]:
    """What a task was in each attempt that it took part in."""
    return (folder.path / f"index_{index}").read_text().splitlines()


def broken(index: int, marker: Path | None = None) -> str:
    """Killed in step 3 of the first attempt, and at every later start, for ever or as long as a file exists."""
    lasting = "" if marker is None else f",while={marker}"
    starts = "".join(f";index={index},phase=start,attempt={number}{lasting},action=kill" for number in range(1, 9))
    return f"index={index},step=3,phase=forward,attempt=0,action=kill{starts}"


def test_several_lost_replicas_do_not_count_as_restarts(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=2 pause=0.02", fail=";".join(broken(index) for index in (0, 1, 3)))
    messages: list[str] = []
    assert run_fakes(folder, 4, min_replicas=1, max_restarts=1, log=messages.append)["status"] == "finished"
    assert story(folder, 2)[0] == "attempt 0: rank 2 of 4"
    assert story(folder, 2)[-1].endswith("rank 0 of 1")
    lost = "(cpu) is lost: the run continues with 1 of 4 replicas, and retries it in 60 s. Restarting from the checkpo"
    assert lost in plain(messages[-1])


def test_below_the_minimum_the_run_is_given_up(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=2 pause=0.02", fail=";".join(broken(index) for index in (0, 1)))
    with pytest.raises(CrashLoopError) as caught:
        run_fakes(folder, 3, min_replicas=2, max_restarts=2, log=print)
    assert plain(caught.value).startswith(
        "gave up after 2 restarts without progress beyond the checkpoint of step 2, with elastic.min_replicas=2 left: "
        "rank 0 was ended by SIGKILL while starting."
    )


def test_a_replica_is_taken_back_at_a_checkpoint(folder: RunFolder, fake: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "gone").touch()
    fake("steps=200 save=2 pause=0.01", fail=broken(1, tmp_path / "gone"))
    messages = []

    def log(line: str) -> None:
        messages.append(line)
        if "is lost" in line:
            (tmp_path / "gone").unlink()

    assert run_fakes(folder, 2, min_replicas=1, retry_s=0.1, log=log) == {"status": "finished", "attempt": 3}
    assert messages[-1] == "tries worker:1 (cpu) again: 2 of 2 replicas."
    assert story(folder, 0)[-2:] == ["attempt 2: rank 0 of 1", "attempt 3: rank 0 of 2"]


def test_a_stop_while_the_run_changes_its_size_ends_it(folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.write_result({"status": "resized", "steps": 7})
    ended = {"status": "stopped", "reason": "Ctrl-C", "exit_code": 130, "steps": 7, "restarts": []}
    assert _result(folder, "stopped") == ended
    assert present(folder.read_result())["status"] == "stopped"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def membership_of(count: int, clock: Clock, min_replicas: int | None = 1, retry_s: float = 60.0) -> ReplicaMembership:
    tasks = [Task(role="worker", index=rank, rank=rank, device=f"cuda:{rank}") for rank in range(count)]
    return ReplicaMembership(tasks, min_replicas=min_replicas, retry_s=retry_s, clock=clock)


def indices(membership: ReplicaMembership) -> list[int]:
    assert [task.rank for task in membership.tasks] == list(range(len(membership.tasks)))
    return [task.index for task in membership.tasks]


def test_a_replica_is_removed_by_its_second_failure() -> None:
    membership = membership_of(4, Clock())
    assert membership.record_failure(2, at_start=False) is None
    membership.clear_failures()  # a newer checkpoint
    assert membership.record_failure(2, at_start=False) is None
    expected = "worker:2 (cuda:2) is lost: the run continues with 3 of 4 replicas, and retries it in 60 s."
    assert membership.record_failure(2, at_start=False) == expected
    assert indices(membership) == [0, 1, 3]
    assert [task.device for task in membership.tasks] == ["cuda:0", "cuda:1", "cuda:3"]


def test_a_lost_replica_returns_after_its_waiting_time() -> None:
    clock = Clock()
    membership = membership_of(3, clock)
    assert membership.record_failure(1, at_start=True) is not None  # in a restart before its first step: at once
    clock.now = 59.9
    assert (membership.is_due, membership.next_members(), indices(membership)) == (False, (), [0, 2])
    clock.now = 60.0
    assert membership.is_due
    assert membership.next_members() == ("tries worker:1 (cuda:1) again: 3 of 3 replicas.",)
    assert (membership.is_due, indices(membership)) == (False, [0, 1, 2])


def test_the_wait_doubles_until_a_checkpoint_was_made_with_it() -> None:
    clock = Clock()
    membership, waits = membership_of(2, clock), []
    for _ in range(3):
        waits.append(present(membership.record_failure(1, at_start=True)).rpartition(" in ")[2])
        membership.clear_failures()  # a checkpoint without the lost one changes nothing for it
        clock.now += 1000.0
        membership.next_members()
    membership.clear_failures()
    waits.append(present(membership.record_failure(1, at_start=True)).rpartition(" in ")[2])
    assert waits == ["60 s.", "120 s.", "240 s.", "60 s."]


def test_ranks_that_are_left_over_by_a_replica_wait_for_the_lost_one() -> None:
    clock = Clock()
    tasks = [Task(role="worker", index=rank, rank=rank, device="cpu") for rank in range(6)]
    membership = ReplicaMembership(tasks, min_replicas=1, ranks_a_replica=2, clock=clock)
    message = membership.record_failure(1, at_start=True)
    assert message == "worker:1 (cpu) is lost: the run continues with 2 of 3 replicas, and retries it in 60 s."
    assert (indices(membership), membership.at_minimum) == ([0, 2, 3, 4], False)  # and 5 waits
    assert membership.record_failure(3, at_start=True) is not None
    assert (indices(membership), membership.at_minimum) == ([0, 2, 3, 5], False)
    assert membership.record_failure(3, at_start=True) is not None
    assert (indices(membership), membership.at_minimum) == ([0, 2], False)  # and 3 waits
    assert membership.record_failure(0, at_start=True) is not None
    assert (indices(membership), membership.at_minimum) == ([2, 3], True)
    clock.now = 60.0
    membership.next_members()
    assert indices(membership) == list(range(6))


@pytest.mark.parametrize("fewest", [None, 3])
def test_without_elasticity_or_at_the_minimum_no_replica_is_removed(fewest: int | None) -> None:
    membership = membership_of(3, Clock(), min_replicas=fewest)
    assert [membership.record_failure(0, at_start=True) for _ in range(3)] == [None] * 3
    assert membership.at_minimum == (fewest is not None)


MIRRORED = ("recipe=null", "strategy=mirrored", "strategy.replicas=2")
CUT = (
    "recipe=python_source", "strategy=mesh", "strategy.tensor=2", "strategy.shard=auto",
    "strategy.devices=[cpu,cpu,cpu,cpu]",
)  # fmt: skip


def plan(*overrides: str, launch: LaunchEnvironment | None = None) -> RunPlan:
    return make_plan(checked(compose(overrides)).cfg, num_gpus=0, launch=launch)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((*MIRRORED, "elastic.min_replicas=3"), "elastic.min_replicas=3: more than the 2 replicas of this run"),
        (("recipe=null", "elastic.min_replicas=1"), "elastic.min_replicas=1: has no effect: this strategy runs in one"),
        ((*MIRRORED, "elastic.retry_s=5"), "elastic.retry_s=5: has no effect without elastic.min_replicas"),
        ((*MIRRORED, "elastic.min_replicas=1", "supervisor.max_restarts=0"), "elastic.min_replicas=1: has no effect"),
        ((*MIRRORED, "cluster=spark", "cluster.num_gpus=0", "elastic.min_replicas=1"),
         "elastic.min_replicas=1: has no effect: Spark starts all processes or none."),
        ((*CUT, "elastic.min_replicas=3"), "elastic.min_replicas=3: more than the 2 replicas of this run"),
        ((*CUT[:3], "strategy.shard=2", "elastic.min_replicas=1"), "elastic.min_replicas=1: has no effect: this"),
        ((*MIRRORED, "elastic.min_replicas=0"), "elastic.min_replicas=0: must be at least 1"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused(overrides: tuple[str, ...], expected: str) -> None:
    (problem,) = refused(plan, *overrides)
    assert problem.startswith(expected)


def test_all_replicas_may_be_the_fewest_and_an_engine_watches_over_a_single_process_too() -> None:
    assert plan(*MIRRORED, "elastic.min_replicas=2").num_replicas == 2
    checked(compose(("recipe=null", "cluster=ray", "supervisor.max_restarts=1")))


def test_a_launcher_that_restarts_and_a_strategy_that_needs_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = replace(launch_of(2), kind="torchrun")
    with pytest.raises(ConfigError, match="has no effect under torchrun, which restarts processes itself"):
        plan("recipe=null", "strategy=multi_worker_mirrored", "elastic.min_replicas=1", launch=launch)
    monkeypatch.setattr(Mirrored, "facts", replace(Mirrored.facts, elastic=False))
    with pytest.raises(ConfigError, match="has no effect: this strategy needs all its processes"):
        plan(*MIRRORED, "elastic.min_replicas=1")


@pytest.mark.parametrize(
    ("keys", "fits"),
    [
        (("strategy=mesh",), True),
        (("strategy=mesh", "strategy.shard=1", "strategy.replicate=auto"), True),
        (("strategy=fsdp", "strategy.replicas=4"), True),
        (("strategy=mesh", "strategy.shard=4"), False),
        (("strategy=mesh", "strategy.replicate=2"), False),
        (("strategy=mesh", "strategy.tensor=2"), True),
        (("strategy=fsdp", "strategy.replicas=4", "strategy.replicate=2"), False),
    ],
)
def test_a_mesh_continues_on_fewer_ranks_if_any_number_has_a_layout(keys: tuple[str, ...], fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(ConfigError, match="needs all its processes"):
        plan("recipe=null", *keys, "strategy.devices=[cpu,cpu,cpu,cpu]", "elastic.min_replicas=2")


def raised(rank: int = 1, step: int = 5, text: str = "ValueError: bad sample") -> frozenset[RaisedError]:
    return frozenset({RaisedError(task=f"worker:{rank}", rank=rank, step=step, text=text)})


def killed(step: int, begun_at: int, reached: int) -> Fault:
    return Fault(step=step, begun_at=begun_at, reached=reached, newer=reached > begun_at)


def failed(step: int, begun_at: int, reached: int, **fields: Any) -> Fault:
    return replace(killed(step, begun_at, reached), raised=raised(step=step, **fields))


TWICE = "gave up: rank 1 raised the same exception twice in the same place, in step 5"
NO_FURTHER = "gave up after 2 restarts without progress beyond the checkpoint of step 3"
ONE_STEP = "gave up after 2 restarts: 3 attempts failed in step 5, regardless of checkpoints between them"
EARLY = "gave up after 2 restarts: 3 attempts in a row raised an exception within their first two steps"
SEQUENCES = {
    "the same exception at the same step": ([failed(5, 0, 3), failed(5, 3, 3)], TWICE),
    "the same exception, a newer checkpoint between": ([failed(5, 0, 3), failed(5, 3, 5)], TWICE),
    "other text": ([failed(5, 0, 3), failed(5, 3, 4, text="ValueError: another")], None),
    "another rank": ([failed(5, 0, 3), failed(5, 3, 4, rank=0)], None),
    "signals without a newer checkpoint": ([killed(5, 0, 3), killed(4, 3, 3), killed(3, 3, 3)], NO_FURTHER),
    "signals that fail at one step": ([killed(5, 0, 2), killed(5, 2, 3), killed(5, 3, 4)], ONE_STEP),
    "that step, with others between": (
        [killed(5, 0, 2), killed(4, 2, 3), killed(5, 3, 4), killed(6, 4, 5), killed(5, 5, 6)],
        ONE_STEP,
    ),
    "signals, each a step further": ([killed(step, step - 1, step) for step in range(1, 60)], None),
    "exceptions, each a step further": ([failed(step, step - 1, step) for step in (6, 7, 8)], EARLY),
    "exceptions, each three steps further": ([failed(step, step - 3, step) for step in range(3, 60, 3)], None),
    "failures before the first step": ([Fault(step=None, begun_at=0, reached=n, newer=True) for n in range(9)], None),
}


@pytest.mark.parametrize(("faults", "refusal"), SEQUENCES.values(), ids=SEQUENCES)
def test_the_rule_over_a_sequence_of_failures(faults: list[Fault], refusal: str | None) -> None:
    rule, lenient = RestartPolicy(max_restarts=2), RestartPolicy(max_restarts=1)
    answers = [rule.refuse(fault) for fault in faults]
    assert answers[:-1] == [None] * (len(faults) - 1)
    assert answers[-1] == refusal
    assert {lenient.refuse(fault, lost=True) for fault in faults} == {None}, "lost replicas count in no rule"


def test_the_same_exception_of_all_ranks_is_recognised_whichever_rank_is_named_first(folder: RunFolder) -> None:
    folder.live.mkdir(parents=True)
    tasks = [Task(role="worker", index=rank, rank=rank) for rank in range(2)]
    faults = []
    for named in (0, 1):
        for task in tasks:
            heart = Heartbeat(folder.heartbeat_of(task.rank))
            heart.beat(5, "forward")
            heart.close()
            write_error_report(folder.error_of(task.rank), task.rank, ValueError(f"at {object()}"))
        faults.append(fault_of(folder, tasks, named, begun_at=3, reached=3))
    rule = RestartPolicy(max_restarts=3)
    expected = "gave up: rank 0 raised the same exception twice in the same place, in step 5"
    assert [rule.refuse(fault) for fault in faults] == [None, expected]


@pytest.mark.parametrize(("error", "lost"), [(ValueError("gone"), True), (DataError("no such file"), False)])
def test_what_follows_from_another_rank_and_what_trainkit_raises_is_not_of_the_user(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, error: Exception, lost: bool
) -> None:
    folder.live.mkdir(parents=True)
    monkeypatch.setattr("trainkit.run.process.error_report.is_after_effect", lambda _: lost)
    write_error_report(folder.error_of(1), 1, error)
    fault = fault_of(folder, [Task(role="worker", index=1, rank=1)], 1, begun_at=None, reached=3)
    assert fault == Fault(step=None, begun_at=0, reached=3, newer=True)


def test_the_record_survives_lines_that_are_none(folder: RunFolder) -> None:
    folder.path.mkdir()
    restart = Restart(kind="all", cause="rank 1 was ended by SIGKILL.\nA second line.", step=3, rank=1, task="worker:1")
    record_restart(folder.path, restart)
    with (folder.path / RESTARTS).open("a") as file:
        file.write('{"kind": "all"}\nnonsense\n[1]\n{"kind"')
    folder.write_result({"status": "finished"})
    expected = {"kind": "all", "step": 3, "rank": 1, "task": "worker:1", "cause": "rank 1 was ended by SIGKILL."}
    assert folder.read_result() == {"status": "finished", "restarts": [{**expected, "checkpoint": None}]}


def test_a_group_started_again_from_outside_is_refused_if_its_error_comes_again(folder: RunFolder) -> None:
    folder.path.mkdir()
    answers, failure = list[str | None](), Failure(rank=1, headline="rank 1 failed.")
    before: list[dict[str, Any]] = []
    for _ in range(2):
        folder.begin()
        folder.live.mkdir(parents=True)
        write_error_report(folder.error_of(1), 1, ValueError("bad sample"))
        relaunch = record_relaunch(folder, failure, before=json.loads(json.dumps(before)))
        answers.append(relaunch.refusal)
        before = relaunch.to_json()
    assert answers == [None, "gave up: rank 1 raised the same exception twice in the same place, while starting"]
    assert [restart["cause"] for restart in restarts_of(folder.path)["restarts"]] == ["rank 1 failed."]
    assert record_relaunch(folder, failure, before=before, tolerant=True).refusal is None
    assert record_relaunch(folder, None, before=before).refusal is None, "the processes left no report"


def test_of_many_restarts_the_first_are_listed_and_the_rest_is_counted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.path.mkdir()
    monkeypatch.setattr("trainkit.run.folder.run_folder._LISTED", 2)
    for step in range(5):
        record_restart(folder.path, Restart(kind="all", cause="", step=step))
    document = restarts_of(folder.path)
    assert ([row["step"] for row in document["restarts"]], document["restarts_not_listed"]) == ([0, 1], 3)


def test_restarts_are_counted_through_resume(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=2 pause=0.02", fail="rank=1,step=3,phase=forward,attempt=0,action=kill")
    run_fakes(folder, 2, log=print)
    assert len(present(folder.read_result())["restarts"]) == 1
    fake("steps=9 save=2 pause=0.02", fail="rank=0,step=7,phase=forward,attempt=0,action=kill")
    run_fakes(folder, 2, log=print)
    rows = present(folder.read_result())["restarts"]
    assert [(row["kind"], row["task"], row["step"]) for row in rows] == [("all", "worker:1", 3), ("all", "worker:0", 7)]


def test_a_worker_that_raises_it_again_is_not_started_again(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=500 pause=0.02", fail="rank=1,step=3,phase=forward,action=raise")
    messages: list[str] = []
    with pytest.raises(CrashLoopError) as caught:
        run_roles(folder, "worker ps", log=messages.append)
    assert len(messages) == 1
    expected = "gave up: worker:0 raised the same exception twice in the same place: rank 1 "
    assert str(caught.value).startswith(expected)
