"""The memory of background saves is allocated while the training goes on, and nothing of a save depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.contract.running import run
from tests.support.present import present
from trainkit.trainer.checkpoint import BackgroundSaver, load
from trainkit.trainer.checkpoint.snapshot import Snapshot


def test_a_prepared_save_allocates_nothing() -> None:
    snapshot, tensors = Snapshot(), {"a": torch.ones(5000), "b": torch.tensor(3), "c": torch.ones(0)}
    snapshot.prepare(tensors)
    snapshot._wait()
    prepared = {name: buffer.data_ptr() for name, buffer in snapshot.buffers.items()}
    taken = snapshot.take(tensors)
    assert {name: buffer.data_ptr() for name, buffer in taken.items()} == prepared
    assert all(torch.equal(taken[name], tensor) for name, tensor in tensors.items())


def test_tensors_that_have_changed_since_are_saved_as_they_are(tmp_path: Path) -> None:
    saver = BackgroundSaver(tmp_path)
    saver.prepare({"param/w": torch.zeros(3), "param/gone": torch.zeros(2)})
    wide = torch.arange(6.0)
    saver.save(step=1, tensors={"param/w": wide, "param/tied": wide, "param/new": torch.ones(1)}, meta={})
    wide.zero_()
    saver.close()
    loaded = load(tmp_path / "step_00000001")
    assert loaded.tensors["param/w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded.tensors["param/new"].tolist() == [1]
    assert "param/gone" not in loaded.tensors
    assert loaded.aliases == {"param/tied": "param/w"}


def test_no_memory_to_prepare_is_left_to_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, empty = Snapshot(), torch.empty

    def refuse(*_args: object, **_settings: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    snapshot.prepare({"a": torch.ones(3)})
    snapshot._wait()
    monkeypatch.setattr(torch, "empty", empty)
    assert snapshot.take({"a": torch.ones(3)})["a"].tolist() == [1, 1, 1]


def test_closing_waits_for_what_is_being_prepared(tmp_path: Path) -> None:
    saver = BackgroundSaver(tmp_path)
    saver.prepare({"param/w": torch.ones(1 << 20)})
    saver.close()
    assert saver._snapshot.buffers == {}
    assert saver._snapshot._preparing is None


def test_a_run_prepares_its_whole_state_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[str]] = []
    prepare = BackgroundSaver.prepare

    def recorded(saver: BackgroundSaver, tensors: Mapping[str, Tensor]) -> None:
        found.append(set(tensors))
        prepare(saver, tensors)

    monkeypatch.setattr(BackgroundSaver, "prepare", recorded)
    result = run(tmp_path, "model=net", "data=points", "steps=4", "log_every_steps=1")
    saved = load(Path(present(result["last"]))).tensors
    assert found == [set(saved)]
