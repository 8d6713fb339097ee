import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.present import present
from trainkit.errors import CheckpointError
from trainkit.trainer.checkpoint import list_complete, load, newest_valid, read_manifest, save


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2; every value is the step."""
    for step in (1, 2):
        save(tmp_path, step=step, tensors={"param/w": torch.full((4096,), float(step))}, meta={"position": step})
    return tmp_path


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def zero_page(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:8192] + bytes(4096) + content[12288:])


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zero_all(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (lambda path: flip_bit(path, 10_000), "has changed since it was written (SHA-256 differs)"),
    "a flipped bit in the header": (
        lambda path: flip_bit(path, 20),
        "has changed since it was written (SHA-256 differs)",
    ),
    "a flipped bit in the length": (
        lambda path: flip_bit(path, 3),
        "has changed since it was written (SHA-256 differs)",
    ),
    "a zeroed page": (zero_page, "has changed since it was written (SHA-256 differs)"),
    "zeros": (zero_all, "has changed since it was written (SHA-256 differs)"),
    "half the file": (truncate, "has 8248 bytes instead of 16496"),
    "no file": (lambda path: path.unlink(), "is absent"),
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
@pytest.mark.parametrize("damage", [lambda path: flip_bit(path, path.stat().st_size // 2), truncate, zero_all])
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
        manifest.write_bytes(original)


def test_a_folder_without_manifest_is_no_checkpoint(two: Path) -> None:
    (two / "step_00000002" / "manifest.json").unlink()
    assert [entry.step for entry in list_complete(two)] == [1]
    with pytest.raises(CheckpointError, match=r"is not a complete checkpoint: it has no manifest\.json"):
        load(two / "step_00000002")


def test_where_all_are_damaged_all_are_named(two: Path) -> None:
    for step in (1, 2):
        zero_page(two / f"step_0000000{step}" / "rank_00000.safetensors")
    with pytest.raises(CheckpointError) as caught:
        newest_valid(two, print)
    assert [line.split("/")[-1] for line in str(caught.value).splitlines()] == [
        "no checkpoint is undamaged:",
        "step_00000002 is damaged: rank_00000.safetensors has changed since it was written (SHA-256 differs).",
        "step_00000001 is damaged: rank_00000.safetensors has changed since it was written (SHA-256 differs).",
    ]


def test_without_checkpoints_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "absent", print) is None


def test_a_checkpoint_of_a_newer_format_is_refused_not_guessed(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.trainer.manifest.FORMAT", 2)
    save(two, step=3, tensors={}, meta={})
    monkeypatch.setattr("trainkit.trainer.manifest.FORMAT", 1)
    readers: tuple[Callable[[], object], ...] = (
        lambda: load(two / "step_00000003"),
        lambda: newest_valid(two, pytest.fail),
    )
    for read in readers:
        with pytest.raises(CheckpointError, match="has format 2; this version of trainkit reads format 1"):
            read()


def test_a_crafted_manifest_cannot_leave_its_folder(two: Path) -> None:
    folder = two / "step_00000002"
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    content["files"]["../outside.json"] = content["files"]["meta.json"]
    signed = {**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(signed))
    with pytest.raises(CheckpointError, match=r"names a file outside itself: '../outside\.json'"):
        load(folder)
