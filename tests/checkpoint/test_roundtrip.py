"""A tensor that comes back with other bits, another layout or from the wrong piece is caught here alone."""

import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.support.saving import save
from trainkit.errors import CheckpointError
from trainkit.strategies.tensor_shards import TensorShard
from trainkit.strategies.tensors.lazy_state import read_slice, shape_of
from trainkit.trainer.checkpoint.saving import Draft, begin, commit, write_part
from trainkit.trainer.checkpoint.tensors import DTYPES, load, weights_sha256
from trainkit.trainer.manifest import list_complete
from trainkit.trainer.ownership import OwnershipToken


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
    found = load(tmp_path / "step_00000000").tensors["param/x"]
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


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
    whole, owner = torch.arange(20.0).reshape(5, 4), OwnershipToken()
    draft = Draft(folder=begin(tmp_path, 8, owner), step=8)
    cuts = [(slice(0, 2), slice(0, 4)), (slice(2, 5), slice(0, 1)), (slice(2, 5), slice(1, 4))]
    pieces = [TensorShard(tensor=whole[a, b], offset=(a.start, b.start), shape=(5, 4)) for a, b in cuts]
    parts = [write_part(draft.folder, {"param/w": [piece]}, rank=rank) for rank, piece in enumerate(pieces)]
    commit(draft, parts, owner)
    tensors = load(tmp_path / "step_00000008").tensors
    assert torch.equal(tensors["param/w"], whole)
    for number in (0, 2):  # what is read first needs neither
        os.truncate(tmp_path / "step_00000008" / f"rank_0000{number}.safetensors", 0)
    assert shape_of(tensors, "param/w") == (5, 4)
    region = (slice(3, 5), slice(0, 1))
    assert torch.equal(read_slice(tensors, "param/w", region), whole[region])
    with pytest.raises(CheckpointError, match="was cut short"):
        tensors["param/w"]


@pytest.mark.parametrize(
    ("cuts", "wrong"),
    [([(0, 2), (3, 5)], "pieces hold 8 of 10 numbers"), ([(0, 3), (2, 4)], "pieces overlap")],
)
def test_pieces_that_do_not_make_up_a_tensor_are_never_written(
    tmp_path: Path, cuts: list[tuple[int, int]], wrong: str
) -> None:
    whole, owner = torch.arange(10.0).reshape(5, 2), OwnershipToken()
    draft = Draft(folder=begin(tmp_path, 8, owner), step=8)
    pieces = [TensorShard(tensor=whole[a:b], offset=(a, 0), shape=(5, 2)) for a, b in cuts]
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
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    same = weights_sha256({"param/b": one, "buffer/a": two})
    assert same == weights_sha256({"buffer/a": two, "param/b": one, "optimizer/exp_avg/b": two})
    assert same != weights_sha256({"param/a": one, "buffer/b": two})
