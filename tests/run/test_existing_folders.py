"""A file of the user, or a checkpoint of another run, that is deleted or overwritten is caught here alone."""

import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
import torch

from tests.support.saving import save
from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import CheckpointError, ConfigError, StorageError, UnreadableError
from trainkit.files import write_json_atomically
from trainkit.run.folder.run_folder import RunFolder
from trainkit.trainer.checkpoint.retention import delete
from trainkit.trainer.manifest import list_complete
from trainkit.trainer.ownership import MARK, OwnershipToken, discard_lock, locked


def put(path: Path, step: int, owner: OwnershipToken | None = None) -> None:
    save(path / "checkpoints", step=step, tensors={"param/w": torch.ones(2)}, meta={}, owner=owner)


def test_a_first_run_leaves_the_live_and_logs_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("live", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_1").write_text("mine")
    folder = RunFolder(tmp_path)
    for _ in range(3):
        folder.begin()
        folder.open_live()
        folder.heartbeat_of(0).write_text("beat")
    assert [(tmp_path / name / "rank_1").read_text() for name in ("live", "logs")] == ["mine", "mine"]
    assert (folder.live.name, folder.logs.name) == ("live-2", "logs-2")
    assert capsys.readouterr().err == "".join(
        f"{tmp_path}/{name} was not written by this run: it is left where it is, and {tmp_path}/{name}-2 is used.\n"
        for name in ("live", "logs")
    )


def test_a_first_run_renames_files_that_have_its_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["result.json", "metrics.jsonl", "plots/loss.png", "checkpoints/index.json", MARK]
    for name in (*names, "thesis.tex"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    RunFolder(tmp_path).begin()
    assert [(tmp_path / f"{name}.aside").read_text() for name in names] == names
    assert (tmp_path / "thesis.tex").read_text() == "thesis.tex"
    line = f"{tmp_path}/result.json was not written by this run: renamed to {tmp_path}/result.json.aside.\n"
    assert line in capsys.readouterr().err


def test_a_run_that_begins_again_clears_its_own_live_state_and_result_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for _ in range(2):
        folder.begin()
        assert not folder.live.exists()
        assert folder.read_result() is None
        folder.open_live()
        (folder.live / "rank_0").touch()
        (folder.live / "rank_1.error.json").touch()
        folder.write_result({"status": "stopped"})
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["live"]
    (folder.live / "notes.txt").write_text("mine")
    folder.begin()
    assert (tmp_path / "live.aside" / "notes.txt").read_text() == "mine"


def test_a_link_in_the_place_of_live_is_not_followed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.begin()
    owner = OwnershipToken.found(folder.path)
    assert owner is not None
    owner.make(tmp_path / "users")
    (tmp_path / "users" / "rank_0").write_text("mine")
    folder.live.symlink_to(tmp_path / "users")
    folder.begin()
    assert (tmp_path / "users" / "rank_0").read_text() == "mine"


def test_a_run_folder_that_was_copied_without_hidden_files_keeps_its_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin()
    put(tmp_path, 1)
    (tmp_path / "resolved.yaml").touch()
    (tmp_path / MARK).unlink()
    folder.begin()
    assert [entry.step for entry in list_complete(folder.checkpoints)] == [1]


def test_a_run_folder_without_a_token_and_checkpoints_of_several_runs_is_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step, OwnershipToken())
    (tmp_path / "resolved.yaml").touch()
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path).begin()
    assert str(caught.value).startswith(f"{tmp_path} has no token (.owner), and its checkpoints carry those of several")
    assert str(caught.value).endswith(f"resume={tmp_path}/checkpoints/step_00000002")


def test_a_damaged_token_of_a_run_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").touch()
    (tmp_path / MARK).write_text("{}")
    with pytest.raises(CheckpointError, match=r"\.owner cannot be read: its key token is missing.*or remove it"):
        RunFolder(tmp_path).begin()


def test_a_folder_in_which_a_run_did_not_begin_keeps_the_users_files(tmp_path: Path) -> None:
    for users in (True, False):
        folder = RunFolder.claim(tmp_path / f"run{users}")
        folder.begin()
        if users:
            (folder.path / "thesis.tex").touch()
        folder.discard()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["runTrue", "runTrue/thesis.tex"]


def test_a_file_in_the_place_of_a_run_folder_is_named_and_stays_alone(tmp_path: Path) -> None:
    (file := tmp_path / "notes").touch()
    (nowhere := tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (itself := tmp_path / "itself").symlink_to(tmp_path / "itself")
    for first in (file, nowhere, itself):
        for path in (first, first / "run"):
            with pytest.raises(StorageError) as caught:
                RunFolder.claim(path)
            assert str(caught.value).startswith(f"{path} cannot be the folder of a run: {first} is no folder.")
    assert {*tmp_path.iterdir()} == {file, nowhere, itself}


def test_a_lock_of_a_job_that_never_began_is_deleted_unless_it_is_held_or_not_ours(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    for content in ("", '{"pid": 1, "host": "h", "since": "s"}'):
        lock.write_text(content)
        with locked(lock):
            discard_lock(lock)
            assert lock.exists()
        discard_lock(lock)
        assert not lock.exists()
    lock.write_text("mine")
    discard_lock(lock)
    with pytest.raises(ConfigError, match=r"has a \.lock that is not a lock file"), locked(lock):
        pass
    assert lock.read_text() == "mine"


def test_a_half_written_token_does_not_keep_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = OwnershipToken()
    put(tmp_path, 1, owner)
    root = tmp_path / "checkpoints"
    (checkpoint,) = list_complete(root)
    (checkpoint.folder / f"{MARK}.4700").write_text('{"token"')
    delete(checkpoint, owner)
    assert [path.name for path in root.iterdir() if path.is_dir()] == []
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="the system has no such links")
def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("")
    (tmp_path / ".lock").symlink_to(tmp_path / "users")
    with pytest.raises(UnreadableError, match="it is a symbolic link"), locked(tmp_path / ".lock"):
        pass
    assert (tmp_path / "users").read_text() == ""


def test_three_runs_of_one_second_get_three_folders(tmp_path: Path) -> None:
    now = datetime(2026, 11, 21, 9, 8, 7)  # noqa: DTZ001 - what the wall clock shows
    paths = [RunFolder.create(tmp_path, "digits", now=now).path for _ in range(3)]
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "digits/2026-11-21_09-08-07",
        "digits/2026-11-21_09-08-07-2",
        "digits/2026-11-21_09-08-07-3",
    ]


def test_a_folder_in_use_says_by_whom(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.lock(), pytest.raises(ConfigError) as caught, folder.lock():
        pass
    start, _, since = str(caught.value).splitlines()[1].partition(" since ")
    host = os.uname().nodename
    assert start == f"  run folder={tmp_path}: in use by process {os.getpid()} on {host}"
    assert since.endswith(". Wait for it to end, or stop it.")


def test_a_folder_stays_locked_until_the_last_worker_with_the_descriptor_has_ended(tmp_path: Path) -> None:
    with RunFolder(tmp_path).lock() as descriptor:
        command = [sys.executable, "-c", "input()"]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(descriptor,))
    with pytest.raises(ConfigError), RunFolder(tmp_path).lock():
        pass
    worker.communicate(b"\n")
    with RunFolder(tmp_path).lock():
        pass


def test_a_folder_of_a_killed_run_is_free_once_its_last_worker_has_ended(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys; from pathlib import Path; from trainkit.trainer.ownership import locked\n"
        "with locked(Path(sys.argv[1])) as lock:\n"
        "    subprocess.Popen([sys.executable, '-c', 'input()'], pass_fds=(lock,)); os.kill(os.getpid(), 9)"
    )
    lock, (ending, end) = tmp_path / ".lock", os.pipe()
    killed = subprocess.run([sys.executable, "-c", code, str(lock)], stdin=ending, check=False)
    assert killed.returncode == -9
    os.close(ending)
    with os.fdopen(end, "wb", buffering=0) as worker:
        threading.Timer(0.3, worker.write, [b"\n"]).start()
        with RunFolder(tmp_path).lock():
            assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_json_replaces_a_file_in_one_move_or_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json_atomically(path, {"loss": 1.0})
    write_json_atomically(path, {"loss": math.nan, "list": [math.inf, 2.0], "path": Path("a/b")})
    with pytest.raises(TypeError):
        write_json_atomically(path, {"loss": object()})
    assert json.loads(path.read_text()) == {"loss": None, "list": [None, 2.0], "path": "a/b"}
    assert [found.name for found in path.parent.iterdir()] == ["result.json"]


def test_the_command_to_resume_allows_the_packages_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.config.targets.allowed._OPENED", Counter())  # the tests allow themselves
    with allow_packages(["tests", "benchmarks"]):
        allowed = RunFolder(Path("out puts/1")).resume_command
    assert allowed == "trainkit resume --allow-package tests,benchmarks 'out puts/1'"
    assert RunFolder(Path("outputs/1")).resume_command == "trainkit resume outputs/1"
