"""A run that loses replicas, goes on without them, and takes them back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.faking import run_fakes
from tests.support.present import present
from tests.support.verdicts import plain
from trainkit.errors import CrashLoopError
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.supervisor.supervisor import _result


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


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
    result = run_fakes(folder, 3, min_replicas=2, log=said.append)
    assert result == {"status": "finished", "attempt": 2}
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


def test_a_replica_that_returns_is_taken_back_at_a_checkpoint(
    folder: RunFolder, fake: Callable[..., None], tmp_path: Path
) -> None:
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
