"""A background save that holds numbers of a later step, or whose full disk nobody hears of, is caught here alone."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.present import present
from tests.support.saving import whole
from trainkit.errors import CheckpointError
from trainkit.trainer import failpoints
from trainkit.trainer.checkpoint import saving
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.checkpoint.tensors import load


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
