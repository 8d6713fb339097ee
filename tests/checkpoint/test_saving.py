"""A kill or a full disk in the middle of a save that leaves half a checkpoint is caught here alone."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint.ranks import small_files
from tests.support.present import present
from tests.support.saving import save
from trainkit import storage
from trainkit.errors import CheckpointError, StorageError
from trainkit.trainer import failpoints
from trainkit.trainer.checkpoint import saving
from trainkit.trainer.checkpoint.tensors import load, newest_valid
from trainkit.trainer.manifest import list_complete


@pytest.mark.parametrize("asks_before", [True, False])
def test_a_disk_that_refuses_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_before: bool
) -> None:
    if not asks_before:
        monkeypatch.setattr(saving, "lacking", lambda *_: None)
    save(tmp_path, step=1, tensors={"param/w": torch.zeros(10)}, meta={})
    said = r"File too large \(4.03 MiB are needed; a file may have 64 KiB\)\. The la"
    with small_files(), pytest.raises(CheckpointError, match=said):
        save(tmp_path, step=2, tensors={"param/w": torch.zeros(1 << 20)}, meta={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "step_00000001"]


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "ARMED", failpoints.parse("phase=save,action=full"))
    monkeypatch.setattr(storage.Free, "at", lambda _: storage.Free(num_bytes=3 << 20, num_files=9))
    with pytest.raises(StorageError) as caught:
        save(tmp_path, step=2, tensors={}, meta={})
    assert str(caught.value) == (
        f"the checkpoint of step 2 could not be written below {tmp_path}: No space left on device "
        "(32 KiB are needed; 3 MiB are free on its file system). There is no earlier one. "
        "Free space there, or choose a folder on another file system (hydra.run.dir=FOLDER)."
    )
    assert list(tmp_path.iterdir()) == []


SAVE_FOR_EVER = """
import itertools, os, sys, torch
from pathlib import Path
from trainkit.trainer import failpoints
from tests.support.saving import save
from trainkit.trainer.manifest import Retention

def save_for_ever(root):
    for step in itertools.count():
        tensors = {f"param/{i}": torch.full((1 << 16,), float(step)) for i in range(8)}
        save(Path(root), step=step, tensors=tensors, meta={"position": step}, retention=Retention(keep_last=2))
        print(step, flush=True)

if (child := os.fork()) == 0:
    sys.stdout = sys.stderr
    failpoints.ARMED = failpoints.parse("step=2,phase=save,action=kill")
    save_for_ever(sys.argv[1])
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
save_for_ever(sys.argv[2])
"""


def test_a_kill_just_before_the_manifest_and_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    before, later = tmp_path / "before", tmp_path / "later"
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(before), str(later)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert int(present(process.stdout).readline()) == -signal.SIGKILL
        for moment in range(4):  # the last checkpoint is looked at while the next ones are written, then after the kill
            present(process.stdout).readline()
            time.sleep(0.003 * moment)
        process.kill()
    loaded = present(newest_valid(later, pytest.fail))
    assert loaded.checkpoint.step >= 3
    assert all(tensor.eq(loaded.meta["position"]).all() for tensor in loaded.tensors.values())
    assert present(newest_valid(before, pytest.fail)).checkpoint.step == 1
    assert (before / ".tmp_step_00000002").exists()
    save(before, step=9, tensors={}, meta={})
    assert not (before / ".tmp_step_00000002").exists()


def test_the_manifest_tells_sizes_hashes_position_and_fingerprint(tmp_path: Path) -> None:
    meta = {"position": {"epoch": 2}, "fingerprint": "abc", "other": 1}
    checkpoint = save(tmp_path, step=4, tensors={}, meta=meta, metric=0.5)
    assert list_complete(tmp_path) == [checkpoint]
    content = json.loads((checkpoint.folder / "manifest.json").read_text())
    wanted = {"format": 1, "step": 4, "position": {"epoch": 2}, "fingerprint": "abc", "metric": 0.5}
    assert {key: content[key] for key in wanted} == wanted
    assert sorted(content["files"]) == ["index.json", "meta.json", "rank_00000.safetensors"]


def test_keys_that_are_no_text_do_not_upset_the_manifest(tmp_path: Path) -> None:
    save(tmp_path, step=1, tensors={}, meta={"position": {2: "b", 10: "a"}})
    assert load(tmp_path / "step_00000001").meta["position"] == {"2": "b", "10": "a"}
