"""A rank that is killed, hangs or leaves, and whose run does not go on from its checkpoint, is caught here alone."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.faking import assert_no_process_is_left, run_fakes, run_roles
from tests.support.present import present
from tests.support.verdicts import plain
from trainkit.cluster.tasks import Task
from trainkit.errors import ConfigError, CrashLoopError, DataError, HangError, TrainingError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.supervisor.failure import Failure
from trainkit.run.supervisor.restart_policy import TaskRestarter


def said_by(folder: RunFolder, rank: int) -> list[dict[str, Any]]:
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
    assert said_by(folder, 1) == [{"attempt": 0, "life": 0, "prefix": "attempt/0", "omp": "2"}]


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
    said: list[str] = []
    assert run_fakes(folder, 2, log=said.append) == {"status": "finished", "attempt": 1}
    expected = (
        "rank 1 was ended by SIGKILL in step 3 (forward). "
        "Restarting from the checkpoint of step 2 (1 of 3 without a newer one)."
    )
    assert [plain(line) for line in said] == [expected]
    assert [line["prefix"] for line in said_by(folder, 1)] == ["attempt/0", "attempt/1"]


def test_without_a_checkpoint_a_failure_ends_the_run(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=4 pause=0.02", fail="rank=1,step=2,phase=update,action=exit")
    with pytest.raises(TrainingError) as caught:
        run_fakes(folder, 2)
    assert plain(caught.value).splitlines()[0] == (
        "rank 1 exited with code 7 in step 2 (update) without an error report. There is no checkpoint to restart from."
    )
    assert_no_process_is_left(folder)


def test_the_traceback_of_the_failing_rank_is_shown(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=4", fail="rank=1,step=2,phase=update,action=raise")
    with pytest.raises(TrainingError) as caught:
        run_fakes(folder, 2)
    first, title, *_, last = plain(caught.value).splitlines()
    assert first.startswith("rank 1 failed in step 2 (update): RuntimeError: failpoint in update of step 2.")
    assert (title, last) == ("Traceback (most recent call last):", "RuntimeError: failpoint in update of step 2")


def test_restarts_that_get_no_further_are_given_up(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=1 pause=0.02", fail="rank=0,step=3,phase=forward,action=kill")
    said: list[str] = []
    with pytest.raises(CrashLoopError) as caught:
        run_fakes(folder, 2, max_restarts=2, log=said.append)
    assert len(said) == 2
    assert plain(caught.value) == (
        "gave up after 2 restarts without progress beyond the checkpoint of step 3: "
        "rank 0 was ended by SIGKILL in step 3 (forward)."
    )
    assert_no_process_is_left(folder)
    result = present(folder.read_result())
    assert [(one["kind"], one["step"], one["checkpoint"]) for one in result["restarts"]] == [("all", 3, 3)] * 2
    assert (result["status"], result["steps"], result["reason"]) == ("failed", 3, str(caught.value))
    assert result["last"] == f"{folder.path}/checkpoints/step_00000003"
    assert result["resume"] == f"trainkit resume --allow-package tests {folder.path}"


def test_restarts_that_get_further_may_go_on(folder: RunFolder, fake: Callable[..., None]) -> None:
    fail = ";".join(f"rank=0,step={attempt + 1},attempt={attempt},phase=update,action=kill" for attempt in (0, 1, 2))
    fake("steps=5 save=1", fail=fail)
    assert run_fakes(folder, 1, max_restarts=1, log=print) == {"status": "finished", "attempt": 3}


def test_no_restarts_means_none(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=1 pause=0.02", fail="rank=0,step=3,phase=forward,action=exit")
    with pytest.raises(TrainingError, match=r"exited with code 7 in step 3 \(forward\) without an error report\.$"):
        run_fakes(folder, 1, max_restarts=0)


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


def test_a_hang_is_restarted_from_a_checkpoint(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=4 save=1 pause=0.02", fail="rank=1,step=2,phase=forward,attempt=0,action=hang")
    assert run_fakes(folder, 2, hang_timeout_s=2, log=print)["status"] == "finished"


def lives(folder: RunFolder, rank: int) -> list[tuple[int, int]]:
    """(attempt, life) of each start of a rank, by its log."""
    return [(one["attempt"], one["life"]) for one in said_by(folder, rank)]


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
    (line,) = map(plain, said)
    assert line.startswith("rank 1 has made no progress for 1 s in step 3 (forward). ")
    assert line.endswith(" Restarting only worker:0; the others continue.")


def test_an_idle_task_does_not_hang(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.run.supervisor.attempts._SHUTDOWN_GRACE_S", 0.2)
    fake("steps=80 pause=0.02", fail="rank=1,step=3,phase=idle,action=hang")
    assert run_roles(folder, "worker", hang_timeout_s=1, log=pytest.fail)["status"] == "finished"


def test_a_worker_that_keeps_dying_without_progress_ends_it(folder: RunFolder, fake: Callable[..., None]) -> None:
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


def test_an_evaluator_that_keeps_dying_is_given_up(
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
    (line,) = map(plain, said)
    assert line.startswith("rank 1 failed in step 2 (idle): DataError: /gone. Restarting only evaluator:0")


def test_a_task_that_dies_before_it_begins_waits_1_s_then_2_and_at_most_60(folder: RunFolder) -> None:
    folder.live.mkdir(parents=True)
    said: list[str] = []
    task = Task(role="worker", index=0, rank=1)
    restarter = TaskRestarter(tasks={1: task}, folder=folder, max_restarts=99, log=said.append, clock=lambda: 0.0)
    for _ in range(8):
        restarter.on_death(Failure(rank=1, headline="It died."))
    waits = [line.rpartition(" in ")[2] for line in said]
    assert waits == [f"{seconds} s; the others continue." for seconds in (1, 2, 4, 8, 16, 32, 60, 60)]
    assert restarter.due() == []


def test_a_worker_that_stays_is_ended(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.run.supervisor.attempts._SHUTDOWN_GRACE_S", 0.2)
    fake("steps=3 stays=worker")
    assert run_roles(folder, "worker ps", log=pytest.fail)["status"] == "finished"
    assert_no_process_is_left(folder)


def test_no_file_holds_the_token(folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.run.supervisor.attempts.token_hex", lambda size: "5ec2e7" * size)
    fake("steps=3")
    run_roles(folder, "worker", log=pytest.fail)
    written = [path for path in folder.path.rglob("*") if path.is_file() and b"5ec2e7" in path.read_bytes()]
    assert folder.log_of(1).is_file()
    assert written == []
