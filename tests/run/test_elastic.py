"""A replica that is lost too early, twice, or never taken back is caught here alone; also who may be elastic."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launchers.launches import launch_of
from tests.run.faking import run_fakes
from tests.support.present import present
from tests.support.verdicts import plain
from trainkit.cluster.launch import LaunchEnvironment
from trainkit.cluster.tasks import Task
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.errors import ConfigError, CrashLoopError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.supervisor.supervisor import ReplicaMembership, _result
from trainkit.strategies.data_parallel.strategy import Mirrored


def story(folder: RunFolder, index: int) -> list[str]:
    """What a task was in each attempt that it took part in."""
    return (folder.path / f"index_{index}").read_text().splitlines()


def broken(index: int, marker: Path | None = None) -> str:
    """Killed in step 3 of the first attempt, and at every later start, for ever or as long as a file exists."""
    lasting = "" if marker is None else f",while={marker}"
    starts = "".join(f";index={index},phase=start,attempt={number}{lasting},action=kill" for number in range(1, 9))
    return f"index={index},step=3,phase=forward,attempt=0,action=kill{starts}"


def test_a_run_goes_on_with_those_left(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=2 pause=0.02", fail=broken(1))
    said: list[str] = []
    assert run_fakes(folder, 3, min_replicas=2, log=said.append) == {"status": "finished", "attempt": 2}
    assert len(said) == 2
    assert plain(said[1]) == (
        "rank 1 was ended by SIGKILL while starting. "
        "worker:1 (cpu) is lost: the run continues with 2 of 3 replicas, and retries it in 60 s. "
        "Restarting from the checkpoint of step 2."
    )
    assert story(folder, 2)[-1] == "attempt 2: rank 1 of 2"


def test_the_owner_of_the_folder_may_be_the_one_that_is_lost(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=2 pause=0.02", fail=broken(0))
    assert run_fakes(folder, 2, min_replicas=1, log=print) == {"status": "finished", "attempt": 2}
    assert story(folder, 1)[0] == "attempt 0: rank 1 of 2"
    assert story(folder, 1)[-1] == "attempt 2: rank 0 of 1"  # of attempt 1 it may not have lived to write


def test_several_lost_replicas_do_not_count_as_restarts(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=2 pause=0.02", fail=";".join(broken(index) for index in (0, 1, 3)))
    result = run_fakes(folder, 4, min_replicas=1, max_restarts=1, log=print)
    assert result["status"] == "finished"
    assert story(folder, 2)[-1].endswith("rank 0 of 1")


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
    said = []

    def say(line: str) -> None:
        said.append(line)
        if "is lost" in line:
            (tmp_path / "gone").unlink()

    result = run_fakes(folder, 2, min_replicas=1, retry_s=0.1, log=say)
    assert result == {"status": "finished", "attempt": 3}
    assert said[-1] == "tries worker:1 (cpu) again: 2 of 2 replicas."
    assert story(folder, 0)[-2:] == ["attempt 2: rank 0 of 1", "attempt 3: rank 0 of 2"]


def test_a_stop_while_the_run_changes_its_size_ends_it(folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.write_result({"status": "resized", "steps": 7})
    ended = {"status": "stopped", "reason": "Ctrl-C", "steps": 7, "restarts": []}
    assert _result(folder, "stopped") == ended
    assert present(folder.read_result())["status"] == "stopped"


@pytest.mark.long
def test_one_that_fails_as_it_returns_is_no_crash_loop(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=200 save=2 pause=0.01", fail=broken(1))
    said: list[str] = []
    result = run_fakes(folder, 2, min_replicas=1, max_restarts=1, retry_s=0.1, log=said.append)
    assert result["status"] == "finished"
    assert [line.partition("retries it in ")[2][:3] for line in said if "is lost" in line][:2] == ["0.1", "0.2"]


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
    clock = Clock()
    membership = membership_of(4, clock)
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


@pytest.mark.parametrize("fewest", [None, 3])
def test_without_elasticity_or_at_the_minimum_no_replica_is_removed(fewest: int | None) -> None:
    membership = membership_of(3, Clock(), min_replicas=fewest)
    assert [membership.record_failure(0, at_start=True) for _ in range(3)] == [None] * 3
    assert membership.at_minimum == (fewest is not None)


MIRRORED = ("recipe=null", "strategy=mirrored", "strategy.replicas=2")


def plan(*overrides: str, launch: LaunchEnvironment | None = None) -> RunPlan:
    return make_plan(checked(compose(overrides)).cfg, num_gpus=0, launch=launch)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((*MIRRORED, "elastic.min_replicas=3"), "elastic.min_replicas=3: more than the 2 replicas of this run"),
        (("recipe=null", "elastic.min_replicas=1"), "elastic.min_replicas=1: has no effect: this strategy runs in one"),
        ((*MIRRORED, "elastic.retry_s=5"), "elastic.retry_s=5: has no effect without elastic.min_replicas"),
        ((*MIRRORED, "elastic.min_replicas=1", "supervisor.max_restarts=0"), "elastic.min_replicas=1: has no effect"),
        ((*MIRRORED, "cluster=spark", "cluster.num_gpus=0", "elastic.min_replicas=1"),
         "elastic.min_replicas=1: has no effect: Spark starts all processes or none."),
        ((*MIRRORED, "elastic.min_replicas=0"), "elastic.min_replicas=0: must be at least 1"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*overrides)
    (problem,) = caught.value.problems
    assert str(problem).startswith(told)


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
