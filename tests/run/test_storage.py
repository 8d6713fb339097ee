"""A full, read-only or lost file system that is taken for an error of the data or the code is caught here alone.

Real file systems: tests/end_to_end/test_full_disk.py.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.saving import save, whole
from trainkit import cli
from trainkit.data.reading.files import fetch
from trainkit.errors import StorageError
from trainkit.files import write_json_atomically
from trainkit.report.events import EventFile
from trainkit.run.begin import refuse_small_disk
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import write_error_report
from trainkit.run.process.heartbeat import Heartbeat
from trainkit.run.supervisor.supervisor import _result
from trainkit.storage import Free, Presence, as_storage_error, naming, reporting, storage_error
from trainkit.trainer.checkpoint.saving import Saver

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
    set_free(monkeypatch, 1 << 30, 0)
    assert "no more files (inodes)" in str(storage_error(Path("run"), failure(errno.ENOSPC)))


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
    told = r"a file cannot be written \(.*test_storage.py:\d+\): No space left"
    with pytest.raises(StorageError, match=told), reporting(tmp_path):
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
    refuse_small_disk(tmp_path, size=1 << 20, kept=3, steps_left=3)  # it saves three times at most
    with pytest.raises(StorageError) as caught:
        refuse_small_disk(tmp_path, size=1 << 20, kept=3, steps_left=9)
    told = "has too little room for the checkpoints of this run: 4 MiB are needed (4 checkpoints of 1 MiB), 3 MiB are"
    assert told in str(caught.value)
    # checkpoints that are there need no room again
    save(tmp_path / "checkpoints", step=1, tensors={"param/w": torch.zeros(1 << 18)}, meta={})
    set_free(monkeypatch, 1 << 20)
    refuse_small_disk(tmp_path, size=1 << 20, kept=1, steps_left=9)


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
    """Where it did, a full disk ended the rank with SIGBUS."""
    Heartbeat(tmp_path / "rank_0").close()
    with (tmp_path / "rank_0").open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0


def test_a_report_that_is_refused_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gone" / "live" / "rank_1.error.json"
    write_error_report(path, 1, ValueError("my own"))
    told = capsys.readouterr().err
    assert "ValueError: my own" in told
    assert told.endswith(f"This report could not be written to {path}: No such file or directory.\n")
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
