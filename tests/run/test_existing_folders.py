"""A file of the user, or a checkpoint of another run, that is deleted or overwritten is caught here alone.
A full, read-only or lost file system that is taken for an error of the data or the code is caught here alone.

Real file systems: tests/end_to_end/test_full_disk.py.
A killed run that `ls` shows as running, or a running one as killed, is caught here alone.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.saving import save, whole
from tests.support.waiting import wait_for
from trainkit import cli
from trainkit.cluster.host import Machine, ProcessId
from trainkit.config.targets.allowed import allow_packages
from trainkit.data.reading.files import fetch
from trainkit.errors import CheckpointError, ConfigError, HangupError, StorageError, UnreadableError
from trainkit.files import Free, Presence, as_storage_error, naming, reporting, storage_error, write_json_atomically
from trainkit.report.events import EventFile
from trainkit.run import record
from trainkit.run.agent.supervisor import _result
from trainkit.run.begin import refuse_small_disk
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import FILE, read_status
from trainkit.run.process.error_report import write_error_report
from trainkit.run.process.heartbeat import Heartbeat
from trainkit.run.record import StatusFile
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.manifest import delete, list_complete
from trainkit.trainer.ownership import MARK, OwnershipToken, discard_lock, locked
from trainkit.verbs.looking import ls
from trainkit.verbs.support.call import Call


def put(path: Path, step: int, owner: OwnershipToken | None = None) -> None:
    save(path / "checkpoints", step=step, tensors={"param/w": torch.ones(2)}, meta={}, owner=owner)


@pytest.mark.parametrize("name", ["result.json", "plots/loss.png", "checkpoints/index.json", "logs/rank_1", MARK])
def test_a_folder_with_files_of_a_runs_names_is_refused_and_not_changed(tmp_path: Path, name: str) -> None:
    for file in (name, "thesis.tex"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=rf"holds {name.partition('/rank')[0]}, which a run would write, and no run"):
        RunFolder(tmp_path).begin()
    assert (sorted(tmp_path.rglob("*")), (tmp_path / name).read_text()) == (before, name)


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
    owner = OwnershipToken.find(folder.path)
    assert owner is not None
    owner.make(tmp_path / "users")
    (tmp_path / "users" / "rank_0").write_text("mine")
    folder.live.symlink_to(tmp_path / "users")
    folder.begin()
    assert (tmp_path / "users" / "rank_0").read_text() == "mine"


def test_a_run_folder_that_was_copied_without_hidden_files_is_not_written(tmp_path: Path) -> None:
    put(tmp_path, 2, OwnershipToken())
    (tmp_path / "resolved.yaml").touch()
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path).begin()
    assert str(caught.value).startswith(
        f"{tmp_path} has no token (.owner), as a copy without hidden files: no run writ"
    )
    assert str(caught.value).endswith(f"resume={tmp_path}/checkpoints/step_00000002.")
    assert not (tmp_path / MARK).exists()


def test_a_damaged_token_of_a_run_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").touch()
    (tmp_path / MARK).write_text("{}")
    with pytest.raises(CheckpointError, match=r"\.owner cannot be read: its key token is missing: no run writes there"):
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
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_the_command_to_resume_allows_the_packages_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.config.targets.allowed._OPENED", Counter())  # the tests allow themselves
    with allow_packages(["tests", "benchmarks"]):
        allowed = RunFolder(Path("out puts/1")).resume_command
    assert allowed == "trainkit resume --allow-package tests,benchmarks 'out puts/1'"
    assert RunFolder(Path("outputs/1")).resume_command == "trainkit resume outputs/1"


ELSEWHERE = "or choose a folder on another file system (hydra.run.dir=FOLDER)."


def failure(number: int, *names: str) -> OSError:
    """What the system raises."""
    return OSError(number, os.strerror(number), *names)


def set_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int, num_files: int | None = None) -> None:
    monkeypatch.setattr(Free, "at", lambda _: Free(num_bytes=num_bytes, num_files=num_files))


TOLD = {
    errno.ENOSPC: "No space left on device (2 KiB are needed; 512 B are free on its file system). Free space there,",
    errno.EDQUOT: "request a larger quota",
    errno.EROFS: "Mount the file system writable",
    errno.EACCES: "Change its permissions",
    errno.EIO: "The storage device or its connection failed",
    errno.ENOENT: "It was removed, renamed or unmounted",
}


@pytest.mark.parametrize("number", TOLD)
def test_each_refusal_of_the_system_has_its_remedy(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    set_free(monkeypatch, 512, 9)
    error = storage_error(Path("run/result.json"), failure(number), needed=2048)
    assert str(error).startswith(f"run/result.json cannot be written: {os.strerror(number)} (2 KiB are needed")
    assert str(error).endswith(ELSEWHERE)
    assert TOLD[number] in str(error)
    assert error.exit_code == 4
    for few in (0, 2):  # none, or two that the removal of what could not be written has given back
        set_free(monkeypatch, 1 << 30, few)
        assert "no more files (inodes)" in str(storage_error(Path("run"), failure(errno.ENOSPC), needed=2048))
    set_free(monkeypatch, 512, 2)
    for needed in (2048, None):
        assert "inodes" not in str(storage_error(Path("run"), failure(errno.ENOSPC), needed=needed))


def test_only_refusals_in_the_folder_of_the_run_are_about_storage(tmp_path: Path) -> None:
    inside = failure(errno.EACCES, str(tmp_path / "run/metrics.jsonl"))
    assert str(as_storage_error(inside, tmp_path / "run")).startswith(f"{tmp_path}/run/metrics.jsonl cannot be written")
    for error in (failure(errno.ENOENT, "data/train.csv"), ConnectionResetError(), ValueError("peer")):
        with pytest.raises(type(error)), reporting(tmp_path / "run"):
            raise error


def test_a_full_disk_without_a_name_is_the_one_that_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = Path("/dev/shm")
    monkeypatch.setattr(Free, "at", lambda path: Free(num_bytes=4096 if path == full else 1 << 30, num_files=9))
    assert str(as_storage_error(failure(errno.ENOSPC), tmp_path)) == (
        "/dev/shm cannot be written: No space left on device (4 KiB are free on its file system). Free space there, "
        "enlarge it (docker run --shm-size=1g; mount -o remount,size=1g /dev/shm), or lower loader.num_workers."
    )
    set_free(monkeypatch, 1 << 30)  # where none is full the line of code is named
    message = r"a file cannot be written \(.*test_existing_folders.py:\d+\): No space left"
    with pytest.raises(StorageError, match=message), reporting(tmp_path):
        raise failure(errno.ENOSPC)


def test_a_folder_that_does_not_answer_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "resolved.yaml").touch()
    presence = Presence(run)
    presence.check()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda *_, **__: (_ for _ in ()).throw(failure(errno.ETIMEDOUT)))
        presence.check()
    shutil.rmtree(run)
    run.mkdir()  # another program made a folder of the same name
    with pytest.raises(StorageError) as caught:
        presence.check()
    assert str(caught.value).startswith(f"the run folder {run} is gone: it was removed, renamed or unmounted while")


def test_a_run_that_its_disk_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 3 << 20)
    refuse_small_disk(tmp_path, size=1 << 20, num_kept=3, steps_left=3)  # it saves three times at most
    with pytest.raises(StorageError) as caught:
        refuse_small_disk(tmp_path, size=1 << 20, num_kept=3, steps_left=9)
    rule = "has too little room for the checkpoints of this run: 4 MiB are needed (4 checkpoints of 1 MiB), 3 MiB are"
    assert rule in str(caught.value)
    # checkpoints that are there need no room again
    save(tmp_path / "checkpoints", step=1, tensors={"param/w": torch.zeros(1 << 18)}, meta={})
    set_free(monkeypatch, 1 << 20)
    refuse_small_disk(tmp_path, size=1 << 20, num_kept=1, steps_left=9)


def test_a_save_is_refused_in_its_step_and_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 1 << 15)
    with pytest.raises(StorageError, match=r"1.03 MiB are needed; 32 KiB are free"):
        Saver(tmp_path).save(step=3, pieces=whole({"param/w": torch.zeros(1 << 18)}), meta={})
    set_free(monkeypatch, 1 << 30)
    with pytest.raises(StorageError, match=r"It was removed, renamed or unmounted"):
        save(tmp_path / "run" / "checkpoints", step=1, tensors={"param/w": torch.ones(3)}, meta={})
    assert list(tmp_path.iterdir()) == []


def test_a_result_is_written_at_the_cost_of_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, write = RunFolder(tmp_path), write_json_atomically
    folder.begin()
    assert folder.reserve.stat().st_size == 64 * 1024

    def refuse_while_full(path: Path, content: Any) -> None:
        if folder.reserve.exists():
            raise failure(errno.ENOSPC, str(path))
        write(path, content)

    monkeypatch.setattr("trainkit.run.folder.run_folder.write_json_atomically", refuse_while_full)
    folder.write_result({"status": "failed"})
    assert (folder.read_result() or {})["status"] == "failed"


def test_a_heartbeat_needs_no_block_of_the_disk_later(tmp_path: Path) -> None:
    """When it needed one, a full disk ended the rank with SIGBUS."""
    Heartbeat(tmp_path / "rank_0").close()
    with (tmp_path / "rank_0").open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0


def test_a_report_that_is_refused_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gone" / "live" / "rank_1.error.json"
    write_error_report(path, 1, ValueError("my own"))
    errors = capsys.readouterr().err
    assert "ValueError: my own" in errors
    assert errors.endswith(f"This report could not be written to {path}: No such file or directory.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_result_has_not_finished(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"all ranks ended with exit code 0, and .*result.json is missing"):
        _result(RunFolder(tmp_path), None)


class Full(io.RawIOBase):
    def write(self, content: Any) -> int:
        raise failure(errno.ENOSPC)


def test_events_that_are_refused_are_refused_once(tmp_path: Path) -> None:
    events = EventFile(tmp_path)
    events.scalars({"train/loss": 0.5}, step=1, wall_time=0.0)
    events._file.close()
    events._file = Full()  # type: ignore[assignment]
    with pytest.raises(StorageError, match=r"events.out.tfevents.* cannot be written: No space left on device"):
        events.close()
    events.close()


def test_a_download_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 1 << 20)
    answer = type("Answer", (io.BytesIO,), {"length": 3 << 20})
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: answer(bytes(3 << 20)))
    with pytest.raises(StorageError) as caught:
        fetch("https://example.org/data.gz", tmp_path / "data.gz", accept=lambda _: None)
    assert str(caught.value).startswith(f"{tmp_path}/data.gz cannot be written: No space left on device (3 MiB are ne")
    assert str(caught.value).endswith("or download the file yourself and give its path as data.path.")
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_ends_with_4_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def write(_: Any) -> int:
        with naming(tmp_path / "leaderboard.md"):
            raise failure(errno.EROFS)

    monkeypatch.setattr(cli, "_dispatch", write)
    assert cli.main([]) == 4
    monkeypatch.setattr(cli, "_dispatch", lambda _: (_ for _ in ()).throw(failure(errno.EROFS, "/read/only")))
    assert cli.main([]) == 4
    assert [line.partition(" cannot")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"{tmp_path}/leaderboard.md",
        "/read/only",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "later")
    (folder.checkpoints / "step_00000003").mkdir(parents=True)
    (folder.checkpoints / "step_00000003" / "manifest.json").touch()
    return folder


def written(folder: RunFolder, **changes: Any) -> None:
    """A status that this process could have written a moment ago."""
    machine, mark = Machine.here(), ProcessId.of(os.getpid())
    content = {
        "state": "running", "step": 3, "pid": mark.pid, "process_start": mark.started, "host": machine.host,
        "boot_id": machine.boot_id, "processes": machine.processes, "resumable": True, "updated": time.time(),
    }  # fmt: skip
    (folder.path / FILE).write_text(json.dumps(content | changes))


def test_the_file_follows_the_run_and_says_how_it_ended(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_WRITE_S", 0.01)
    step = [7]
    with StatusFile(folder) as file:
        assert read_status(folder).state == "starting"
        file.follow(lambda: step[0])
        wait_for(lambda: read_status(folder).step == 7)
        step[0] = 8
        wait_for(lambda: read_status(folder).step == 8)
        assert (read_status(folder).state, read_status(folder).resumable) == ("running", True)
        folder.write_result({"status": "finished", "steps": 9})
    assert (read_status(folder).state, read_status(folder).step) == ("finished", 9)
    assert [path.name for path in folder.path.glob(".*")] == []


@pytest.mark.parametrize(
    ("error", "state"), [(HangupError("gone"), "hangup"), (KeyboardInterrupt(), "stopped"), (ValueError(), "failed")]
)
def test_an_error_is_the_last_state(folder: RunFolder, error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), StatusFile(folder):
        raise error
    assert read_status(folder).state == state


def test_a_run_whose_process_is_gone_was_killed(folder: RunFolder) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mark = ProcessId.of(process.pid)
        written(folder, pid=mark.pid, process_start=mark.started)
        assert read_status(folder).summary() == f"runs as process {mark.pid} on {Machine.here().host}, at step 3"
        process.kill()
        process.wait()
    assert read_status(folder).summary() == "was killed at step 3"


@pytest.mark.parametrize("changed", [{"process_start": ProcessId.of(os.getpid()).started - 1}, {"boot_id": "another"}])
def test_a_later_process_of_the_same_number_is_another(folder: RunFolder, changed: dict[str, Any]) -> None:
    written(folder, **changed)
    assert read_status(folder).state == "killed"
    assert ("restarted" in read_status(folder).note) == ("boot_id" in changed)
    folder.write_result({"status": "finished", "steps": 3})
    assert read_status(folder).state == "finished", "it was killed after its result"


def test_the_status_of_another_host_depends_on_its_age_and_shows_it(folder: RunFolder) -> None:
    written(folder, host="elsewhere", updated=1000.0)
    renamed = replace(Machine.here(), host="here")
    fresh, old = (read_status(folder, machine=renamed, now=now) for now in (1030.0, 1500.0))
    assert (fresh.state, fresh.note) == ("running", "last update 30 s ago on another host")
    assert (old.state, old.note) == ("silent", "last update 500 s ago on another host")


@pytest.mark.parametrize("content", ["{", '{"state": "running"}', '{"state": []}', "[" * 10_000])
def test_a_status_file_with_other_content_gives_an_unknown_state(folder: RunFolder, content: str) -> None:
    (folder.path / FILE).write_text(content)
    folder.result.write_text('{"status": ["finished"]}')
    assert read_status(folder).state == "unknown"
    (folder.path / FILE).unlink()
    os.mkfifo(folder.path / FILE)  # a named pipe does not block
    assert read_status(folder).state == "unknown"


def test_ls_shows_the_runs_of_a_folder(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    written(folder, process_start=1, updated=1e300)
    earlier = folder.path.parent / "earlier"
    earlier.mkdir()
    (earlier / "resolved.yaml").touch()
    RunFolder(earlier).write_result({"status": "preempted", "steps": 12})
    assert ls.run(Call(verb="ls", arguments=(str(folder.path.parent),))) == 0
    head, killed, preempted = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["run", "state", "step", "checkpoint", "updated", "process"]
    assert killed[:4] == [str(folder.path), "killed", "3", "yes"]
    assert preempted == [str(earlier), "preempted", "12", "no"]
