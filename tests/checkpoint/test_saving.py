"""A kill or a full disk in the middle of a save that leaves half a checkpoint is caught here alone.

A background save that holds numbers of a later step, or whose full disk nobody hears of, is caught here alone.
A copy to a checkpoint that has not arrived when the training changes the tensor is caught here alone.
The memory of background saves is allocated while the training goes on, and nothing of a save depends on it.
A rank whose piece lands in the wrong rows, or whose failed write the others do not hear of, is caught here alone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.ranks import small_files, state
from tests.contract.running import run
from tests.support.pool import Pool
from tests.support.present import present
from tests.support.saving import save, whole
from trainkit.errors import CheckpointError, StorageError
from trainkit.files import Free
from trainkit.trainer import failpoints
from trainkit.trainer.checkpoint import saving
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.checkpoint.snapshot import CopyStream, Pairs, Snapshot, blocks_of
from trainkit.trainer.checkpoint.tensors import load, newest_valid, weights_sha256
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
    monkeypatch.setattr(Free, "at", lambda _: Free(num_bytes=3 << 20, num_files=9))
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


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits for this event."""
    gate, write = threading.Event(), saving.write_part

    def wait_and_write(*args: Any, **kwargs: Any) -> dict[str, Any]:
        assert gate.wait(10)
        return write(*args, **kwargs)

    monkeypatch.setattr(saving, "write_part", wait_and_write)
    yield gate
    gate.set()


def test_what_changes_after_the_call_is_not_saved(tmp_path: Path, slow_disk: threading.Event) -> None:
    saver, weight = Saver(tmp_path), torch.ones(3)
    saver.save(step=1, pieces=whole({"param/w": weight, "param/tied": weight}), meta={})
    weight.zero_()
    assert saver.finished() == []
    slow_disk.set()
    saver.save(step=2, pieces=whole({"param/w": weight}), meta={})
    assert [entry.step for entry in saver.close()] == [1, 2]
    loaded = load(tmp_path / "step_00000001")
    assert loaded.tensors["param/w"].tolist() == [1, 1, 1]
    assert loaded.aliases == {"param/tied": "param/w"}


@pytest.mark.parametrize("call", ["finished", "wait", "close", "save"])
def test_an_error_of_the_disk_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(failpoints, "ARMED", failpoints.parse("step=1,phase=save,action=full"))
    saver = Saver(tmp_path)
    saver.save(step=1, pieces={}, meta={})
    present(present(saver._pending).thread).join()
    with pytest.raises(CheckpointError, match=r"step 1 could not be written below .*: No space left on device"):
        saver.save(step=2, pieces={}, meta={}) if call == "save" else getattr(saver, call)()
    assert saver.close() == []  # said once


@pytest.mark.gpu
def test_snapshots_of_the_device_are_whole(tmp_path: Path) -> None:
    images = torch.randn(8, 3, 5, 5, device="cuda").to(memory_format=torch.channels_last)
    state = {"param/w": torch.arange(1 << 20, device="cuda"), "param/conv": images}
    state |= {"optimizer/exp_avg/w": torch.rand(1 << 22, device="cuda"), "buffer/none": torch.empty(0, device="cuda")}
    saver, expected = Saver(tmp_path), dict[int, dict[str, torch.Tensor]]()
    saver.prepare(whole(state))
    for step in (1, 2):
        expected[step] = {name: tensor.cpu() for name, tensor in state.items()}
        saver.save(step=step, pieces=whole(state), meta={})
        for tensor in state.values():
            tensor.add_(1)
    saver.close()
    for step, tensors in expected.items():
        loaded = load(tmp_path / f"step_{step:08}").tensors
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_prepared_save_allocates_nothing() -> None:
    snapshot, tensors = Snapshot(), {"a": torch.ones(5000), "b": torch.tensor(3), "c": torch.ones(0)}
    snapshot.prepare(tensors)
    snapshot.wait_prepared()
    prepared = {name: buffer.data_ptr() for name, buffer in snapshot.buffers.items()}
    taken = snapshot.take(tensors)
    assert {name: buffer.data_ptr() for name, buffer in taken.items()} == prepared
    assert all(torch.equal(taken[name], tensor) for name, tensor in tensors.items())


def test_tensors_that_have_changed_since_are_saved_as_they_are(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    saver.prepare(whole({"param/w": torch.zeros(3), "param/gone": torch.zeros(2)}))
    wide = torch.arange(6.0)
    saver.save(step=1, pieces=whole({"param/w": wide, "param/new": torch.ones(1)}), meta={})
    wide.zero_()
    saver.close()
    found = {name: tensor.tolist() for name, tensor in load(tmp_path / "step_00000001").tensors.items()}
    assert found == {"param/w": [0, 1, 2, 3, 4, 5], "param/new": [1]}


def test_no_memory_to_prepare_is_left_to_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, empty = Snapshot(), torch.empty

    def refuse(*_args: object, **_settings: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    snapshot.prepare({"a": torch.ones(3)})
    snapshot.wait_prepared()
    monkeypatch.setattr(torch, "empty", empty)
    assert snapshot.take({"a": torch.ones(3)})["a"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_a_run_prepares_its_whole_state_once_if_it_saves_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[set[str]] = []
    monkeypatch.setattr(Snapshot, "prepare", lambda _, tensors: found.append(set(tensors)))
    result = run(tmp_path / "a", "model=net", "data=points", "steps=4")
    assert found == [set(load(Path(present(result["last"]))).tensors)]
    run(tmp_path / "b", "model=net", "data=points", "steps=4", "checkpoint.background=false")
    run(tmp_path / "c", "model=net", "data=points", "steps=1")
    assert len(found) == 1


class Late(CopyStream):
    """A device that copies when something waits for it, and not before."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.pairs = log, list[tuple[Tensor, Tensor]]()

    def start(self, pairs: Pairs) -> None:
        self.pairs = list(pairs)
        self.log.append(f"start {len(pairs)}")

    def hold(self) -> None:
        self.log.append(f"hold {len(self.pairs)}")
        self.wait()

    def wait(self) -> None:
        while self.pairs:
            source, target = self.pairs.pop()
            target.copy_(source)


STATE = ("param/w", "buffer/mean", "optimizer/exp_avg/w", "callback/mine/count")


@pytest.mark.parametrize(
    ("phase", "later"),
    [("data", 3), ("forward", 1), ("backward", 1), ("reduce", 0), ("update", 0), ("evaluate", 0), ("callback", 0)],
)
def test_the_training_waits_for_the_copies_of_what_a_phase_may_change(phase: str, later: int) -> None:
    log: list[str] = []
    snapshot = Snapshot(overlaps=True, stream_of=lambda _: Late(log))
    state = {name: torch.zeros(2) for name in STATE}
    taken = snapshot.take(state)
    # One stream copies them in this order: the parts that the training waits for later are copied later.
    assert log == ["start 1", "start 2", "start 1", "hold 1"], "callback, model, optimizer; that of the callback"
    snapshot.on_phase(phase, 1)
    for tensor in state.values():
        tensor.add_(1)
    snapshot.wait_copied()
    assert sum(int(copy.sum().item() != 0) for copy in taken.values()) == later


def test_a_step_without_announced_updates_waits_for_all_copies_at_once() -> None:
    log: list[str] = []
    snapshot = Snapshot(stream_of=lambda _: Late(log))
    taken = snapshot.take(state := {name: torch.zeros(2) for name in STATE})
    for tensor in state.values():
        tensor.add_(1)
    assert all(copy.sum() == 0 for copy in taken.values())


def test_a_checkpoint_is_written_when_its_copies_are_complete(tmp_path: Path) -> None:
    snapshot = Snapshot(overlaps=True, stream_of=lambda _: Late([]))
    saver = Saver(tmp_path, snapshot=snapshot)
    for step in (1, 2):
        saver.save(step=step, pieces=whole({"param/w": torch.full((3,), float(step))}), meta={})
    saver.close()
    assert [load(tmp_path / f"step_0000000{step}").tensors["param/w"][0] for step in (1, 2)] == [1, 2]


def test_a_device_that_fails_in_a_copy_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    class Failed(Late):
        def wait(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        def hold(self) -> None:
            pass

    streams = [Late([]), Failed([])]
    saver = Saver(tmp_path, snapshot=Snapshot(overlaps=True, stream_of=lambda _: streams.pop(0)))
    tensors = {"param/w": torch.ones(3)}
    saver.save(step=1, pieces=whole(tensors), meta={})
    saver.wait()
    saver.save(step=2, pieces=whole(tensors), meta={})
    with pytest.raises(RuntimeError, match="launch failure"):
        saver.wait()
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == ["step_00000001"]
    assert load(tmp_path / "step_00000001").tensors["param/w"].tolist() == [1, 1, 1]


def test_blocks_of_page_locked_memory_are_little_more_than_the_state_and_hold_each_tensor_once() -> None:
    widths = {"qkv": 2304, "up": 3072, "bias": 1}
    sizes = {f"{layer}.{name}": 768 * width * 4 for layer in range(12) for name, width in widths.items()}
    blocks = list(blocks_of(sizes))
    assert sum(block for block, _ in blocks) < 1.1 * sum(sizes.values())
    for block, places in blocks:
        ends = [start + sizes[name] for name, start in places.items()]
        assert all(end <= start for end, start in zip(ends, [*list(places.values())[1:], block], strict=True))
    assert sorted(name for _, places in blocks for name in places) == sorted(sizes)


HERE = "tests.checkpoint.ranks"


def test_pieces_of_several_ranks_are_assembled_on_each_to_the_bit(pool: Pool) -> None:
    for found, sha256 in pool.run(f"{HERE}.assemble", num_ranks=3, group=True):
        assert found.keys() == state().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state().items())
        assert sha256 == weights_sha256(state())


@pytest.mark.parametrize("background", [True, False])
def test_ranks_write_a_checkpoint_that_is_the_same_as_from_one(pool: Pool, tmp_path: Path, background: bool) -> None:
    finished = pool.run(f"{HERE}.save_twice", tmp_path, background, num_ranks=3, group=True)
    assert finished == [[1, 2], [], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "step_00000002"]
    loaded = load(tmp_path / "step_00000002")
    assert loaded.meta["rank"] == 0
    assert loaded.checkpoint.metric == 0.5
    assert sorted(loaded.checkpoint.files) == [
        "index.json", "meta.json", "rank_00000.safetensors", "rank_00001.safetensors",
    ]  # fmt: skip
    expected = {name: (tensor * 2.0).to(tensor.dtype) for name, tensor in state().items()}
    assert loaded.tensors.keys() == expected.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_written_beside_the_training_is_completed_between_steps(pool: Pool, tmp_path: Path) -> None:
    looks = pool.run(f"{HERE}.proceed_until_it_stands", tmp_path, num_ranks=2, group=True)
    assert looks[0] == looks[1] >= 1
    assert [one.step for one in list_complete(tmp_path)] == [3]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_on_one_rank_is_the_same_error_on_all_and_leaves_nothing(
    pool: Pool, tmp_path: Path, rank: int
) -> None:
    told = pool.run(f"{HERE}.fail", tmp_path, rank, "full", num_ranks=3, group=True)
    (text,) = {one.partition(": ")[2] for one in told}
    assert f"could not be written below {tmp_path}: {'rank 1: ' * rank}No space left on device" in text
    assert f"The last complete one is {tmp_path}/step_00000001. " in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "step_00000001"]


def test_half_a_part_is_no_checkpoint(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(f"{HERE}.fill_the_disk", tmp_path, num_ranks=2, group=True)
    (text,) = set(told)
    assert f"the checkpoint of step 2 could not be written below {tmp_path}: rank 1: File too large" in text
    assert "There is no earlier one. Raise the limit of the size of a file (ulimit -f)" in text
    assert list(tmp_path.iterdir()) == []
