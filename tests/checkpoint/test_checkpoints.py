"""A kill or a full disk in the middle of a save that leaves half a checkpoint is caught here alone.

A background save that holds numbers of a later step, or whose full disk nobody hears of, is caught here alone.
A copy to a checkpoint that has not arrived when the training changes the tensor is caught here alone.
The memory of background saves is allocated while the training goes on, and nothing of a save depends on it.
A rank whose piece lands in the wrong rows, or whose failed write the others do not hear of, is caught here alone.

A tensor that comes back with other bits, another layout or from the wrong piece is caught here alone.

A checkpoint with one flipped bit, or cut short, that is loaded instead of the one before it is caught here alone.
A pruning that deletes the best checkpoint, or takes a NaN or a later equal for the best, is caught here alone.
A save, a pruning or a fallback that deletes a file of the user or of another run is caught here alone.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.checkpoint.ranks import small_files, state
from tests.contract.running import run
from tests.support.pool import Pool
from tests.support.present import present
from tests.support.saving import save, whole
from trainkit.errors import CheckpointError, StorageError, UnreadableError
from trainkit.files import Free
from trainkit.strategies.tensor_shards import TensorShard, meta_of, read_slice
from trainkit.trainer import failpoints
from trainkit.trainer.checkpoint import saving
from trainkit.trainer.checkpoint.saving import Draft, Saver, begin, commit, write_part
from trainkit.trainer.checkpoint.snapshot import CopyStream, Pairs, Snapshot, blocks_of
from trainkit.trainer.checkpoint.tensors import DTYPES, load, newest_valid, note_foreign, weights_sha256
from trainkit.trainer.manifest import Retention, list_complete, read_manifest
from trainkit.trainer.ownership import MARK, OwnershipToken


@pytest.mark.parametrize("asks_before", [True, False])
def test_a_disk_that_refuses_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks_before: bool
) -> None:
    if not asks_before:
        monkeypatch.setattr(saving, "lacking", lambda *_: None)
    save(tmp_path, step=1, tensors={"param/w": torch.zeros(10)}, meta={})
    text = r"File too large \(4.03 MiB are needed; a file may have 64 KiB\)\. The la"
    with small_files(), pytest.raises(CheckpointError, match=text):
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
    expected = {"format": 1, "step": 4, "position": {"epoch": 2}, "fingerprint": "abc", "metric": 0.5}
    assert {key: content[key] for key in expected} == expected
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
    copies = snapshot.take(tensors)
    assert {name: buffer.data_ptr() for name, buffer in copies.items()} == prepared
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())


def test_tensors_that_have_changed_since_are_saved_as_they_are(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    saver.prepare(whole({"param/w": torch.zeros(3), "param/gone": torch.zeros(2)}))
    wide = torch.arange(6.0)
    saver.save(step=1, pieces=whole({"param/w": wide, "param/new": torch.ones(1)}), meta={})
    wide.zero_()
    saver.close()
    values = {name: tensor.tolist() for name, tensor in load(tmp_path / "step_00000001").tensors.items()}
    assert values == {"param/w": [0, 1, 2, 3, 4, 5], "param/new": [1]}


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
    prepared: list[set[str]] = []
    monkeypatch.setattr(Snapshot, "prepare", lambda _, tensors: prepared.append(set(tensors)))
    result = run(tmp_path / "a", "model=net", "data=points", "steps=4")
    assert prepared == [set(load(Path(present(result["last"]))).tensors)]
    run(tmp_path / "b", "model=net", "data=points", "steps=4", "checkpoint.background=false")
    run(tmp_path / "c", "model=net", "data=points", "steps=1")
    assert len(prepared) == 1


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
    copies = snapshot.take(state)
    # One stream copies them in this order: the parts that the training waits for later are copied later.
    assert log == ["start 1", "start 2", "start 1", "hold 1"], "callback, model, optimizer; that of the callback"
    snapshot.on_phase(phase, 1)
    for tensor in state.values():
        tensor.add_(1)
    snapshot.wait_copied()
    assert sum(int(copy.sum().item() != 0) for copy in copies.values()) == later


def test_a_step_without_announced_updates_waits_for_all_copies_at_once() -> None:
    log: list[str] = []
    snapshot = Snapshot(stream_of=lambda _: Late(log))
    copies = snapshot.take(state := {name: torch.zeros(2) for name in STATE})
    for tensor in state.values():
        tensor.add_(1)
    assert all(copy.sum() == 0 for copy in copies.values())


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
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step_00000001"]
    assert load(tmp_path / "step_00000001").tensors["param/w"].tolist() == [1, 1, 1]


def test_blocks_of_page_locked_memory_are_little_more_than_the_state_and_hold_each_tensor_once() -> None:
    widths = {"qkv": 2304, "up": 3072, "bias": 1}
    sizes = {f"{layer}.{name}": 768 * width * 4 for layer in range(12) for name, width in widths.items()}
    blocks = list(blocks_of(sizes))
    assert sum(block for block, _ in blocks) < 1.1 * sum(sizes.values())
    for block, offsets in blocks:
        ends = [start + sizes[name] for name, start in offsets.items()]
        assert all(end <= start for end, start in zip(ends, [*list(offsets.values())[1:], block], strict=True))
    assert sorted(name for _, offsets in blocks for name in offsets) == sorted(sizes)


HERE = "tests.checkpoint.ranks"


def test_pieces_of_several_ranks_are_assembled_on_each_to_the_bit(pool: Pool) -> None:
    for tensors, sha256 in pool.run(f"{HERE}.assemble", num_ranks=3, group=True):
        assert tensors.keys() == state().keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in state().items())
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
    looks = pool.run(f"{HERE}.save_and_poll", tmp_path, num_ranks=2, group=True)
    assert looks[0] == looks[1] >= 1
    assert [checkpoint.step for checkpoint in list_complete(tmp_path)] == [3]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_on_one_rank_is_the_same_error_on_all_and_leaves_nothing(
    pool: Pool, tmp_path: Path, rank: int
) -> None:
    errors = pool.run(f"{HERE}.fail", tmp_path, rank, "full", num_ranks=3, group=True)
    (text,) = {error.partition(": ")[2] for error in errors}
    assert f"could not be written below {tmp_path}: {'rank 1: ' * rank}No space left on device" in text
    assert f"The last complete one is {tmp_path}/step_00000001. " in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "step_00000001"]


def test_half_a_part_is_no_checkpoint(pool: Pool, tmp_path: Path) -> None:
    errors = pool.run(f"{HERE}.fill_the_disk", tmp_path, num_ranks=2, group=True)
    (text,) = set(errors)
    assert f"the checkpoint of step 2 could not be written below {tmp_path}: rank 1: File too large" in text
    assert "There is no earlier one. Raise the limit of the size of a file (ulimit -f)" in text
    assert list(tmp_path.iterdir()) == []


def content() -> dict[str, torch.Tensor]:
    weight = torch.arange(6.0).reshape(2, 3)
    return {
        "param/weight": weight,
        "buffer/count": torch.tensor(7),
        "optimizer/exp_avg/weight": weight.to(torch.float64) / 3,
        "buffer/nothing": torch.empty(0, 4),
    }


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    meta = {"position": {"step": 3}, "fingerprint": "f00", "scale": 65536.0}
    save(tmp_path, step=3, tensors=content(), meta=meta)
    folder = tmp_path / "step_00000003"
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.json", "manifest.json", "meta.json", "rank_00000.safetensors",
    ]  # fmt: skip
    of_another_program = safetensors.torch.load_file(folder / "rank_00000.safetensors")
    loaded = load(folder)
    assert loaded.meta == meta
    shutil.rmtree(folder)  # what is being loaded outlives its folder
    for tensors in (loaded.tensors, of_another_program):
        assert tensors.keys() == content().keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in content().items())


def test_a_tensor_larger_than_a_chunk_keeps_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.trainer.checkpoint.tensors._CHUNK", 16)
    save(tmp_path, step=3, tensors={"param/w": torch.arange(11.0)}, meta={})
    assert load(tmp_path / "step_00000003").tensors["param/w"].tolist() == list(range(11))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_dtype_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 16), dtype=torch.uint8).view(dtype)
    save(tmp_path, step=0, tensors={"param/x": tensor}, meta={})
    loaded = load(tmp_path / "step_00000000").tensors["param/x"]
    assert loaded.dtype is dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_the_layout_in_memory_does_not_matter(tmp_path: Path) -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    odd = {"param/a": image.to(memory_format=torch.channels_last), "param/b": image[0, 0].T, "param/c": image[..., ::2]}
    save(tmp_path, step=0, tensors=odd, meta={})
    loaded = load(tmp_path / "step_00000000").tensors
    assert all(torch.equal(loaded[name], tensor) and loaded[name].is_contiguous() for name, tensor in odd.items())


def test_tied_tensors_are_written_once_and_load_as_one(tmp_path: Path) -> None:
    weight = torch.ones(4, 4)
    tensors = {"param/wte": weight, "param/head": weight, "param/view": weight.view(4, 4)}
    save(tmp_path, step=0, tensors=tensors, meta={})
    folder = tmp_path / "step_00000000"
    loaded = load(folder)
    assert loaded.aliases == {"param/head": "param/wte", "param/view": "param/wte"}
    assert loaded.tensors["param/head"] is loaded.tensors["param/wte"]
    assert (folder / "rank_00000.safetensors").stat().st_size < 2 * 64 + 200


def test_a_file_that_changes_once_it_was_verified_is_named(tmp_path: Path) -> None:
    save(tmp_path, step=0, tensors=content(), meta={})
    tensors, path = load(tmp_path / "step_00000000").tensors, tmp_path / "step_00000000" / "rank_00000.safetensors"
    size = path.stat().st_size
    path.write_bytes(b"\xff" * size)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors was changed after it was verified\.$"):
        tensors["param/weight"]
    os.truncate(path, size // 2)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors was cut short after it was verified\.$"):
        tensors["param/weight"]


def test_a_tensor_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    tensor, owner = torch.arange(20.0).reshape(5, 4), OwnershipToken()
    draft = Draft(folder=begin(tmp_path, 8, owner), step=8)
    cuts = [(slice(0, 2), slice(0, 4)), (slice(2, 5), slice(0, 1)), (slice(2, 5), slice(1, 4))]
    pieces = [TensorShard(tensor=tensor[a, b], offset=(a.start, b.start), shape=(5, 4)) for a, b in cuts]
    parts = [write_part(draft.folder, {"param/w": [piece]}, rank=rank) for rank, piece in enumerate(pieces)]
    commit(draft, parts, owner)
    tensors = load(tmp_path / "step_00000008").tensors
    assert torch.equal(tensors["param/w"], tensor)
    for number in (0, 2):  # what is read first needs neither
        os.truncate(tmp_path / "step_00000008" / f"rank_0000{number}.safetensors", 0)
    assert meta_of(tensors, "param/w").shape == (5, 4)
    region = (slice(3, 5), slice(0, 1))
    assert torch.equal(read_slice(tensors, "param/w", region), tensor[region])
    with pytest.raises(CheckpointError, match="was cut short"):
        tensors["param/w"]


@pytest.mark.parametrize(
    ("cuts", "wrong"),
    [([(0, 2), (3, 5)], "pieces hold 8 of 10 numbers"), ([(0, 3), (2, 4)], "pieces overlap")],
)
def test_pieces_that_do_not_make_up_a_tensor_are_never_written(
    tmp_path: Path, cuts: list[tuple[int, int]], wrong: str
) -> None:
    tensor, owner = torch.arange(10.0).reshape(5, 2), OwnershipToken()
    draft = Draft(folder=begin(tmp_path, 8, owner), step=8)
    pieces = [TensorShard(tensor=tensor[a:b], offset=(a, 0), shape=(5, 2)) for a, b in cuts]
    parts = [write_part(draft.folder, {"param/w": [piece]}, rank=rank) for rank, piece in enumerate(pieces)]
    with pytest.raises(CheckpointError, match=f"param/w cannot be saved: its {wrong}"):
        commit(draft, parts, owner)
    assert list_complete(tmp_path) == []


def test_a_sparse_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^param/s cannot be saved: it is not a dense tensor with data\.$"):
        save(tmp_path, step=0, tensors={"param/s": torch.eye(2).to_sparse()}, meta={})
    assert list_complete(tmp_path) == []


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save(tmp_path, step=5, tensors={"param/w": torch.tensor(value)}, meta={})
    assert load(tmp_path / "step_00000005").tensors["param/w"] == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "step_00000005"]


def test_the_hash_of_the_weights_sees_order_names_and_kinds() -> None:
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    same = weights_sha256({"param/b": first, "buffer/a": second})
    assert same == weights_sha256({"buffer/a": second, "param/b": first, "optimizer/exp_avg/b": second})
    assert same != weights_sha256({"param/a": first, "buffer/b": second})


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2; every value is the step."""
    for step in (1, 2):
        save(tmp_path, step=step, tensors={"param/w": torch.full((4096,), float(step))}, meta={"position": step})
    return tmp_path


def flipped(index: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[index % len(content)] ^= 1
        path.write_bytes(content)

    return flip


def zeroed(start: int, stop: int) -> Callable[[Path], None]:
    def zero(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[:start] + bytes(len(content[start:stop])) + content[stop:])

    return zero


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


CHANGED = "has changed since it was written (SHA-256 differs)"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flipped(10_000), CHANGED),
    "the last bit": (flipped(-1), CHANGED),
    "a flipped bit in the header": (flipped(20), CHANGED),
    "a zeroed page": (zeroed(8192, 12288), CHANGED),
    "half the file": (truncate, "has 8248 bytes instead of 16496"),
    "a byte more": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 16497 bytes instead of 16496"),
    "no file": (Path.unlink, "is absent"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_tensor_file_is_named_and_the_one_before_is_used(two: Path, kind: str) -> None:
    damage, what = DAMAGE[kind]
    damage(two / "step_00000002" / "rank_00000.safetensors")
    messages: list[str] = []
    loaded = present(newest_valid(two, messages.append))
    assert loaded.checkpoint.step == 1
    assert loaded.tensors["param/w"].eq(1.0).all()
    folder = two / "step_00000002"
    assert messages == [f"checkpoint {folder} is damaged: rank_00000.safetensors {what}. Using step_00000001 instead."]


@pytest.mark.parametrize("name", ["index.json", "meta.json", "manifest.json"])
@pytest.mark.parametrize("damage", [flipped(20), truncate, zeroed(0, 9999)], ids=["flipped", "half", "zeros"])
def test_a_damaged_json_file_is_named_and_the_one_before_is_used(
    two: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(two / "step_00000002" / name)
    messages: list[str] = []
    assert present(newest_valid(two, messages.append)).checkpoint.step == 1
    assert f"damaged: {name} " in messages[0]


def test_every_single_flipped_bit_of_a_manifest_is_noticed(two: Path) -> None:
    manifest = two / "step_00000002" / "manifest.json"
    original, expected = manifest.read_bytes(), read_manifest(two / "step_00000002")
    for index in range(len(original)):
        manifest.write_bytes(original[:index] + bytes([original[index] ^ 1]) + original[index + 1 :])
        try:
            parsed = read_manifest(two / "step_00000002")
            assert parsed == expected, index  # white space may change, nothing else
        except CheckpointError:
            pass


def test_a_folder_without_manifest_is_no_checkpoint(two: Path) -> None:
    (two / "step_00000002" / "manifest.json").unlink()
    assert [entry.step for entry in list_complete(two)] == [1]
    with pytest.raises(CheckpointError, match=r"is not a complete checkpoint: it has no manifest\.json"):
        load(two / "step_00000002")
    assert newest_valid(two / "absent", pytest.fail) is None


def test_where_all_are_damaged_all_are_named(two: Path) -> None:
    for step in (1, 2):
        truncate(two / f"step_0000000{step}" / "rank_00000.safetensors")
    with pytest.raises(CheckpointError) as caught:
        newest_valid(two, print)
    first, *lines = str(caught.value).splitlines()
    assert first == "no checkpoint is undamaged:"
    assert ["step_00000002 is" in lines[0], "step_00000001 is" in lines[1]] == [True, True]


def test_a_checkpoint_of_a_newer_format_is_refused_not_passed_over(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("trainkit.trainer.manifest.FORMAT", 2)
        save(two, step=3, tensors={}, meta={})
    with pytest.raises(CheckpointError, match="has format 2; this version of trainkit reads format 1"):
        load(two / "step_00000003")
    with pytest.raises(CheckpointError, match="has format 2"):
        newest_valid(two, pytest.fail)


@pytest.mark.parametrize(
    ("metrics", "retention", "remaining", "best"),
    [
        ([0.1, 0.9, 0.3, 0.2, 0.4], Retention(keep_last=2, keep_best=1, mode="max"), [2, 4, 5], 2),
        ([0.1, 0.9, 0.3, 0.8, 0.4], Retention(keep_last=1, keep_best=2, mode="max"), [2, 4, 5], 2),
        ([3.0, 1.0, 2.0], Retention(keep_last=1, keep_best=1, mode="min"), [2, 3], 2),
        ([0.5, 0.5, 0.5], Retention(keep_last=3, mode="max"), [1, 2, 3], 1),  # of equals the earlier is best
        ([None, 1.0, math.nan, None], Retention(keep_last=1, keep_best=3, mode="min"), [2, 4], 2),
        ([None, None, None], Retention(keep_last=2), [2, 3], None),
        ([9.0, 1.0, 1.0], Retention(keep_last=1, keep_best=0, mode="max"), [3], 3),
    ],
)
def test_the_last_and_the_best_stay_and_no_other_folder(
    tmp_path: Path, metrics: Sequence[float | None], retention: Retention, remaining: list[int], best: int | None
) -> None:
    for step, metric in enumerate(metrics, start=1):
        save(tmp_path, step=step, tensors={}, meta={}, metric=metric, retention=retention)
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["index.json", *(f"step_0000000{step}" for step in remaining)]
    named = None if best is None else f"step_0000000{best}"
    assert json.loads((tmp_path / "index.json").read_text()) == {"last": folders[-1], "best": named}


def test_what_was_passed_over_for_damage_does_not_push_out_what_is_whole(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(tmp_path, step=step, tensors={"param/w": torch.ones(9)}, meta={}, retention=Retention(keep_last=3))
    damaged = tmp_path / "step_00000300" / "rank_00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")  # its size is right: only loading notices
    (tmp_path / "step_00000200" / "manifest.json").unlink()
    assert present(newest_valid(tmp_path, print)).checkpoint.step == 100
    save(tmp_path, step=150, tensors={}, meta={}, retention=Retention(keep_last=1))
    # without its manifest nobody knows who wrote the one of step 200
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == ["index.json", "step_00000150", "step_00000200", "step_00000300.aside"]
    assert json.loads((tmp_path / "index.json").read_text())["last"] == "step_00000150"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The `checkpoints` folder of a run with a token."""
    run = tmp_path / "run"
    run.mkdir()
    OwnershipToken().mark(run)
    (run / "checkpoints").mkdir()
    return run / "checkpoints"


def put(root: Path, step: int, *, keep: int | None = None, owner: OwnershipToken | None = None) -> None:
    tensors, retention = {"param/w": torch.full((4,), float(step))}, Retention(keep_last=keep)
    save(root, step=step, tensors=tensors, meta={"position": step}, retention=retention, owner=owner)


def steps(root: Path) -> list[int]:
    return [entry.step for entry in list_complete(root)]


def plant(root: Path) -> dict[str, bytes]:
    """Put what the run did not write between its checkpoints; returns the content of every file."""
    users = root.parent.parent / "users"
    (users / "deep").mkdir(parents=True)
    (users / "deep" / "thesis.tex").write_text("users")
    for name in ("step_00000098", "step_backup", ".tmp_x", ".tmp_step_00000007", "best", "last", "step_1", ".git"):
        (root / name).mkdir()
        (root / name / "notes.txt").write_text(name)
    for name in ("step_00000097", "index.json.bak", ".hidden", ".tmp_file", "step_00000098 (copy)", "Läufe-記録"):
        (root / name).write_text(name)
    (root / "step_00000096").symlink_to(users)
    (root / ".tmp_link").symlink_to(users)
    for step in (99, 999):
        put(root, step, owner=OwnershipToken())
    OwnershipToken().make(root / ".tmp_step_00000005")
    (root / "index.json").unlink()
    return files_below(root)


def files_below(root: Path) -> dict[str, bytes]:
    """Every file below a folder and behind its links."""
    paths = [Path(folder) / name for folder, _, names in os.walk(root, followlinks=True) for name in names]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_saves_resumes_and_retention_leave_alone_what_the_run_did_not_write(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power fails here
    planted, messages = plant(root), list[str]()
    for step in (*range(1, 10), *range(90, 105)):
        put(root, step, keep=2)
        assert present(newest_valid(root, messages.append)).checkpoint.step == step
    after = {name.replace(".aside", ""): content for name, content in files_below(root).items()}
    assert planted == {name: after[name] for name in planted}
    assert steps(root) == [104, 103]
    aside = [f"step_000000{number}.aside" for number in (96, 97, 98, 99)]
    assert sorted(path.name for path in root.glob("*.aside")) == aside
    (root / "step_00000096.aside" / "deep").rename(root / "still_a_link")


def test_a_path_in_the_place_of_a_checkpoint_is_renamed_and_both_names_are_shown(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "step_00000007").write_text("a file")
    put(root, 7)
    assert f"renamed to {root}/step_00000007.aside." in capsys.readouterr().err
    assert (root / "step_00000007.aside").read_text() == "a file"


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        put(root, step)
    with monkeypatch.context() as patched:
        refuse_reading(patched, root / "step_00000003")
        fallen_back = newest_valid(root, lambda _: None)
    assert present(fallen_back).checkpoint.step == 2
    put(root, 2, keep=1)
    assert load(root / "step_00000003.aside").tensors["param/w"].eq(3.0).all()
    assert "step_00000003 was skipped, and the run has continued to step 2 from an older" in capsys.readouterr().err


def refuse_reading(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Let every look at a file below a folder fail."""

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(str(folder)):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *args, **kwargs)

        return call

    for name in ("open", "stat", "lstat", "scandir"):
        patched.setattr(os, name, refusing(getattr(os, name)))
    patched.setattr(Path, "open", refusing(Path.open))


def test_a_file_of_the_users_in_a_checkpoint_outlives_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(root, 1)
    (root / "step_00000001" / "notes.txt").write_text("mine")
    put(root, 2, keep=1)
    assert [path.name for path in (root / "step_00000001.aside").iterdir()] == ["notes.txt"]
    assert "files of step_00000001 that this run did not write" in capsys.readouterr().err


def test_what_a_kill_leaves_of_this_run_is_deleted_by_the_next_save(root: Path) -> None:
    for draft in (".tmp_step_00000001", ".tmp_old_step_00000002"):
        present(OwnershipToken.find(root.parent)).make(root / draft)
        (root / draft / "rank_00000.safetensors").write_text("half")
    put(root, 3)
    assert sorted(path.name for path in root.iterdir()) == ["index.json", "step_00000003"]


def test_a_run_that_has_saved_nothing_starts_beside_a_folder_of_the_users(root: Path) -> None:
    (root / "step_00000099").mkdir()
    messages: list[str] = []
    assert newest_valid(root, messages.append) is None
    assert "step_00000099 is not a complete checkpoint" in messages[0]
    assert (root / "step_00000099").exists()


def test_a_newer_checkpoint_of_another_run_is_named_and_not_used(root: Path) -> None:
    put(root, 1)
    put(root, 99, owner=OwnershipToken())
    messages: list[str] = []
    assert present(newest_valid(root, messages.append)).checkpoint.step == 1
    note_foreign(root, 1, messages.append)
    assert "step_00000099 was not written by this run" in messages[0]
    assert f"resume={root}/step_00000099" in messages[0]


def test_a_link_to_a_folder_of_this_run_is_not_followed(root: Path, tmp_path: Path) -> None:
    present(OwnershipToken.find(root.parent)).make(tmp_path / "moved")
    (root / ".tmp_step_00000009").symlink_to(tmp_path / "moved")
    put(root, 1)
    assert (tmp_path / "moved" / MARK).exists()


def test_a_token_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text('{"token": "x"}')
    with pytest.raises(UnreadableError, match="it holds no token of a run"):
        OwnershipToken.read(tmp_path)
