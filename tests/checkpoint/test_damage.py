"""A checkpoint with one flipped bit, or cut short, that is loaded instead of the one before it is caught here alone."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.present import present
from tests.support.saving import save
from trainkit.errors import CheckpointError
from trainkit.trainer.checkpoint.tensors import load, newest_valid
from trainkit.trainer.manifest import list_complete, read_manifest


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2; every value is the step."""
    for step in (1, 2):
        save(tmp_path, step=step, tensors={"param/w": torch.full((4096,), float(step))}, meta={"position": step})
    return tmp_path


def flipped(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= 1
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
    "a flipped bit in the length": (flipped(3), CHANGED),
    "a zeroed page": (zeroed(8192, 12288), CHANGED),
    "half the file": (truncate, "has 8248 bytes instead of 16496"),
    "a byte more": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 16497 bytes instead of 16496"),
    "no file": (Path.unlink, "is absent"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_tensor_file_is_named_and_the_one_before_is_used(two: Path, kind: str) -> None:
    damage, what = DAMAGE[kind]
    damage(two / "step_00000002" / "rank_00000.safetensors")
    said: list[str] = []
    loaded = present(newest_valid(two, said.append))
    assert loaded.checkpoint.step == 1
    assert loaded.tensors["param/w"].eq(1.0).all()
    folder = two / "step_00000002"
    assert said == [f"checkpoint {folder} is damaged: rank_00000.safetensors {what}. Using step_00000001 instead."]


@pytest.mark.parametrize("name", ["index.json", "meta.json", "manifest.json"])
@pytest.mark.parametrize("damage", [flipped(20), truncate, zeroed(0, 9999)], ids=["flipped", "half", "zeros"])
def test_a_damaged_json_file_is_named_and_the_one_before_is_used(
    two: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(two / "step_00000002" / name)
    said: list[str] = []
    assert present(newest_valid(two, said.append)).checkpoint.step == 1
    assert f"damaged: {name} " in said[0]


def test_every_single_flipped_bit_of_a_manifest_is_noticed(two: Path) -> None:
    manifest = two / "step_00000002" / "manifest.json"
    original, whole = manifest.read_bytes(), read_manifest(two / "step_00000002")
    for at in range(len(original)):
        manifest.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        try:
            found = read_manifest(two / "step_00000002")
            assert found == whole, at  # white space may change, nothing else
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
