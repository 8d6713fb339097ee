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

from trainkit.config.targets.allowed import allow_packages
from trainkit.errors import ConfigError
from trainkit.files import write_json_atomically
from trainkit.run.folder.run_folder import RunFolder


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


def test_a_folder_can_be_locked_again_once_it_is_free(tmp_path: Path) -> None:
    for _ in range(2):
        with RunFolder(tmp_path).lock():
            pass


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


def test_json_replaces_a_file_in_one_move(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json_atomically(path, {"loss": 1.0})
    write_json_atomically(path, {"loss": math.nan, "list": [math.inf, 2.0], "path": Path("a/b")})
    assert json.loads(path.read_text()) == {"loss": None, "list": [None, 2.0], "path": "a/b"}
    assert [found.name for found in path.parent.iterdir()] == ["result.json"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json_atomically(path, {"loss": 1.0})
    with pytest.raises(TypeError):
        write_json_atomically(path, {"loss": object()})
    assert json.loads(path.read_text()) == {"loss": 1.0}


def test_a_run_that_begins_again_removes_its_old_result(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_result({"status": "stopped"})
    folder.live.mkdir()
    folder.begin()
    assert folder.read_result() is None
    assert not folder.live.exists()


def test_a_result_that_is_no_json_is_none(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    assert RunFolder(tmp_path).read_result() is None


def test_the_command_to_resume_quotes_what_a_shell_would_split() -> None:
    assert RunFolder(Path("out puts/1")).resume_command == "trainkit resume --allow-package tests 'out puts/1'"


def test_the_command_to_resume_allows_the_packages_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.config.targets.allowed._OPENED", Counter())  # the tests allow themselves
    with allow_packages(["tests", "benchmarks"]):
        allowed = RunFolder(Path("outputs/1")).resume_command
    assert allowed == "trainkit resume --allow-package tests,benchmarks outputs/1"
    assert RunFolder(Path("outputs/1")).resume_command == "trainkit resume outputs/1"
