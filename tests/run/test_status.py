"""A killed run that `ls` shows as running, or a running one as killed, is caught here alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.run.faking import wait_for
from trainkit.cluster.host import Machine, ProcessId
from trainkit.errors import HangupError
from trainkit.run import record
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.folder.status import FILE, read_status
from trainkit.run.record import StatusFile
from trainkit.verbs.looking.ls import list_runs


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "later")
    (folder.checkpoints / "step_00000003").mkdir(parents=True)
    (folder.checkpoints / "step_00000003" / "manifest.json").touch()
    return folder


def written(folder: RunFolder, **changes: Any) -> None:
    """A status that this process could have written a moment ago."""
    here, mark = Machine.here(), ProcessId.of(os.getpid())
    content = {
        "state": "running", "step": 3, "pid": mark.pid, "process_start": mark.started, "host": here.host,
        "boot_id": here.boot_id, "processes": here.processes, "resumable": True, "updated": time.time(),
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
    there = replace(Machine.here(), host="here")
    fresh, old = (read_status(folder, here=there, now=now) for now in (1030.0, 1500.0))
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
    assert list_runs(folder.path.parent) == 0
    head, killed, preempted = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["run", "state", "step", "checkpoint", "updated", "process"]
    assert killed[:4] == [str(folder.path), "killed", "3", "yes"]
    assert preempted == [str(earlier), "preempted", "12", "no"]
