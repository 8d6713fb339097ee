"""A copy to a checkpoint that has not arrived when the training changes the tensor is caught here alone.

The memory of background saves is allocated while the training goes on, and nothing of a save depends on it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.contract.running import run
from tests.support.present import present
from tests.support.saving import whole
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.checkpoint.snapshot import CopyStream, Pairs, Snapshot, blocks_of
from trainkit.trainer.checkpoint.tensors import load


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


def test_closing_waits_for_what_is_being_prepared(tmp_path: Path) -> None:
    saver = Saver(tmp_path, snapshot=(snapshot := Snapshot()))
    saver.prepare(whole({"param/w": torch.ones(1 << 20)}))
    saver.close()
    assert snapshot.buffers == {}


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
