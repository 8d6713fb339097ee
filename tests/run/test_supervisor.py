import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.faking import assert_no_process_is_left, run_fakes
from tests.support.present import present
from tests.support.verdicts import plain
from trainkit.errors import ConfigError, CrashLoopError, DataError, HangError, Problem, TrainingError
from trainkit.run.folder.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def said_by_rank_1(folder: RunFolder) -> list[dict[str, Any]]:
    lines = folder.log_of(1).read_text().splitlines()
    return [json.loads(line.removeprefix("rank 1 says ")) for line in lines if line.startswith("rank 1 says")]


def test_ranks_run_to_the_end_and_the_result_comes_back(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("trainkit.run.process.worker_group.num_cores", lambda: 7)
    fake("steps=4")
    assert run_fakes(folder, 3) == {"status": "finished", "attempt": 0}
    assert said_by_rank_1(folder) == [{"attempt": 0, "life": 0, "prefix": "attempt/0", "omp": "2"}]


def test_rank_0_prints_through_and_the_others_into_their_logs(
    folder: RunFolder, fake: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    fake("steps=1")
    run_fakes(folder, 2)
    assert [line[:11] for line in capfd.readouterr().out.splitlines()] == ["rank 0 says"]
    assert sorted(path.name for path in folder.logs.iterdir()) == ["rank_1.log"]


def test_in_a_notebook_rank_0_prints_into_the_cell(
    folder: RunFolder, fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("steps=1")
    cell = io.StringIO()
    monkeypatch.setattr("sys.stdout", cell)
    run_fakes(folder, 2)
    assert [line[:11] for line in cell.getvalue().splitlines()] == ["rank 0 says"]


def test_a_killed_rank_is_named_and_all_continue_from_the_last_checkpoint(
    folder: RunFolder, fake: Callable[..., None]
) -> None:
    fake("steps=6 save=2 pause=0.05", fail="rank=1,step=3,phase=forward,attempt=0,action=kill")
    said: list[str] = []
    assert run_fakes(folder, 2, log=said.append) == {"status": "finished", "attempt": 1}
    expected = (
        "rank 1 was ended by SIGKILL in step 3 (forward). "
        "Restarting from the checkpoint of step 2 (1 of 3 without a newer one)."
    )
    assert [plain(line) for line in said] == [expected]
    assert [line["prefix"] for line in said_by_rank_1(folder)] == ["attempt/0", "attempt/1"]


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
    lines = plain(caught.value).splitlines()
    assert lines[0] == (
        "rank 1 failed in step 2 (update): RuntimeError: failpoint in update of step 2. "
        "There is no checkpoint to restart from."
    )
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: failpoint in update of step 2"


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
    assert [(one["kind"], one["step"], one["checkpoint"]) for one in result.pop("restarts")] == [("all", 3, 3)] * 2
    assert result == {
        "status": "failed",
        "reason": str(caught.value),
        "last": f"{folder.path}/checkpoints/step_00000003",
        "steps": 3,
        "skipped_steps": [],
        "resume": f"trainkit resume --allow-package tests {folder.path}",
    }


def test_restarts_that_get_further_may_go_on(folder: RunFolder, fake: Callable[..., None]) -> None:
    fail = ";".join(f"rank=0,step={attempt + 1},attempt={attempt},phase=update,action=kill" for attempt in (0, 1, 2))
    fake("steps=5 save=1", fail=fail)
    assert run_fakes(folder, 1, max_restarts=1, log=print) == {"status": "finished", "attempt": 3}


def test_no_restarts_means_none(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=6 save=1 pause=0.02", fail="rank=0,step=3,phase=forward,action=exit")
    with pytest.raises(TrainingError) as caught:
        run_fakes(folder, 1, max_restarts=0)
    assert plain(caught.value) == "rank 0 exited with code 7 in step 3 (forward) without an error report."


@pytest.mark.parametrize("kind", ["DataError", "ConfigError"])
def test_an_error_of_ours_is_not_tried_again(folder: RunFolder, fake: Callable[..., None], kind: str) -> None:
    fake("steps=6 save=1", raising=f"1:{kind}:/gone")
    expected = {
        "DataError": DataError("/gone"),
        "ConfigError": ConfigError([Problem(key="data.path", value="/gone", rule="does not exist.")]),
    }[kind]
    with pytest.raises(type(expected)) as caught:
        run_fakes(folder, 2, log=pytest.fail)
    assert str(caught.value) == str(expected)


@pytest.mark.parametrize("action", ["hang", "stop"])
def test_a_rank_without_a_pulse_is_named_and_ended(folder: RunFolder, fake: Callable[..., None], action: str) -> None:
    fake("steps=600 pause=0.02 child=1", fail=f"rank=1,step=2,phase=forward,action={action}")
    with pytest.raises(HangError) as caught:
        run_fakes(folder, 2, hang_timeout_s=2)
    lines = plain(caught.value).splitlines()
    stopped = ": it is stopped by a signal (state T). To let it continue: kill -CONT PID" if action == "stop" else ""
    assert re.sub(r"CONT \d+", "CONT PID", lines[0]) == (
        f"rank 1 has made no progress for 2 s in step 2 (forward){stopped}. The limit is supervisor.hang_timeout_s=2: "
        "raise it if the rank was healthy. There is no checkpoint to restart from."
    )
    assert any("failpoints.py" in line for line in lines) == (action == "hang")  # a stopped one cannot tell
    assert_no_process_is_left(folder)


def test_a_hang_is_restarted_from_a_checkpoint(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=4 save=1 pause=0.02", fail="rank=1,step=2,phase=forward,attempt=0,action=hang")
    assert run_fakes(folder, 2, hang_timeout_s=2, log=print)["status"] == "finished"


def test_children_of_a_worker_end_with_it(folder: RunFolder, fake: Callable[..., None]) -> None:
    fake("steps=1 child=1")
    run_fakes(folder, 2)
    assert_no_process_is_left(folder)
