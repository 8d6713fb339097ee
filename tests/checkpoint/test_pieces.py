"""A rank whose piece lands in the wrong rows, or whose failed write the others do not hear of, is caught here alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.ranks import state
from tests.support.pool import Pool
from trainkit.trainer.checkpoint.tensors import load, weights_sha256
from trainkit.trainer.manifest import list_complete

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


def test_an_error_of_one_rank_is_raised_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(f"{HERE}.fail", tmp_path, 1, "raise", num_ranks=2, group=True)
    assert told == ["CheckpointError: failpoint in save of step 2", "RuntimeError: failpoint in save of step 2"]
    assert [one.step for one in list_complete(tmp_path)] == [1]
