"""Tasks that die alone are started again alone; a task that holds state takes the group with it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.faking import assert_no_process_is_left, run_roles
from tests.support.verdicts import plain
from trainkit.errors import CrashLoopError, DataError
from trainkit.run.folder.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def lives(folder: RunFolder, rank: int) -> list[tuple[int, int]]:
    """(attempt, life) of each start of a rank, by its log."""
    lines = folder.log_of(rank).read_text().splitlines()
    told = [json.loads(line.removeprefix(f"rank {rank} says ")) for line in lines if line.startswith("rank ")]
    return [(one["attempt"], one["life"]) for one in told]


def test_a_worker_that_is_killed_is_started_again_alone(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=100 pause=0.02", fail="rank=1,step=3,phase=forward,life=0,action=kill")
    said: list[str] = []
    assert run_roles(folder, "worker worker ps", log=said.append) == {"status": "finished", "attempt": 0}
    expected = "rank 1 was ended by SIGKILL in step 3 (forward). Restarting only worker:0; the others continue."
    assert [plain(line) for line in said] == [expected]
    assert [lives(folder, rank) for rank in (1, 2, 3)] == [[(0, 0), (0, 1)], [(0, 0)], [(0, 0)]]
    assert_no_process_is_left(folder)


@pytest.mark.long
def test_a_server_that_is_killed_takes_the_group_with_it(folder: RunFolder, fake: Callable[..., None]) -> None:
    # At step 150 the chief has begun and saved, on a loaded machine too.
    fake("steps=200 save=2 pause=0.02", fail="rank=2,step=150,phase=idle,attempt=0,action=kill")
    said: list[str] = []
    assert run_roles(folder, "worker ps", log=said.append) == {"status": "finished", "attempt": 1}
    assert plain(said[0]).startswith("rank 2 was ended by SIGKILL in step 150 (idle).")
    assert lives(folder, 1) == [(0, 0), (1, 0)]


def test_a_worker_that_hangs_is_ended_and_started_again_alone(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=200 pause=0.02", fail="rank=1,step=3,phase=forward,life=0,action=hang")
    said: list[str] = []
    assert run_roles(folder, "worker ps", hang_timeout_s=1, log=said.append)["attempt"] == 0
    expected = (
        "rank 1 has made no progress for 1 s in step 3 (forward). The limit is supervisor.hang_timeout_s=1: "
        "raise it if the rank was healthy. "
        "Restarting only worker:0; the others continue."
    )
    assert [plain(line) for line in said] == [expected]


def test_an_idle_task_is_not_reported_as_hanging(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.run.supervisor.attempts._SHUTDOWN_GRACE_S", 0.2)
    fake("steps=80 pause=0.02", fail="rank=1,step=3,phase=idle,action=hang")
    assert run_roles(folder, "worker", hang_timeout_s=1, log=pytest.fail)["status"] == "finished"


def test_a_worker_that_keeps_dying_while_nothing_moves_ends_the_run(
    folder: RunFolder, fake: Callable[..., None]
) -> None:
    hang = "rank=0,step=0,phase=forward,action=hang"
    fake("steps=9", fail=f"{hang};rank=1,step=2,phase=forward,action=kill")
    said: list[str] = []
    with pytest.raises(CrashLoopError) as caught:
        run_roles(folder, "worker", max_restarts=1, log=said.append)
    assert len(said) == 1
    assert plain(caught.value).splitlines()[0] == (
        "gave up after 1 restarts of worker:0 alone without progress beyond step 0: "
        "rank 1 was ended by SIGKILL in step 2 (forward)."
    )
    assert_no_process_is_left(folder)


def test_an_evaluator_that_keeps_dying_is_given_up_and_the_training_goes_on(
    folder: RunFolder, fake: Callable[..., None], tmp_path: Path
) -> None:
    marker, said = tmp_path / "slow", []
    marker.touch()  # the training is slow until the evaluator is given up, however loaded the machine is
    slow = f"rank=0,phase=forward,while={marker},action=slow"
    fake("steps=2000", fail=f"{slow};rank=1,step=0,phase=forward,action=kill")

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            marker.unlink()

    assert run_roles(folder, "evaluator", max_restarts=1, log=say)["status"] == "finished"
    assert len(said) == 2
    assert said[1].endswith(
        "Evaluation gave up after 1 restarts of evaluator:0 alone; the training continues without it."
    )


def test_an_error_of_a_workers_own_ends_the_run(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=400 pause=0.02", raising="1:DataError:/gone")
    with pytest.raises(DataError, match=r"^/gone$"):
        run_roles(folder, "worker", log=pytest.fail)


def test_an_error_of_the_evaluators_own_does_not(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=150 pause=0.02", raising="1:DataError:/gone")
    said: list[str] = []
    assert run_roles(folder, "evaluator", log=said.append)["status"] == "finished"
    assert [plain(line) for line in said] == [
        "rank 1 failed in step 2 (idle): DataError: /gone. Restarting only evaluator:0; the others continue."
    ]


def test_a_worker_that_stays_when_the_training_has_ended_is_ended(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.run.supervisor.attempts._SHUTDOWN_GRACE_S", 0.2)
    fake("steps=3 stays=worker")
    assert run_roles(folder, "worker ps", log=pytest.fail)["status"] == "finished"
    assert_no_process_is_left(folder)


def test_tasks_share_a_token_that_no_file_holds(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.run.supervisor.attempts.token_hex", lambda size: "5ec2e7" * size)
    fake("steps=3")
    run_roles(folder, "worker", log=pytest.fail)
    written = [path for path in folder.path.rglob("*") if path.is_file() and b"5ec2e7" in path.read_bytes()]
    assert folder.log_of(1).is_file()
    assert written == []
