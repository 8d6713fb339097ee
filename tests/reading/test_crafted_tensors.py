"""Tensors of a checkpoint that fit the model and not the optimizer, and pieces that take long to compare."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.crafted import within
from trainkit.bounded import whole_numbers
from trainkit.errors import CheckpointError
from trainkit.strategies.core.replica import refuse_mismatch
from trainkit.strategies.tensors.sharded import coverage_error


@pytest.mark.parametrize(
    ("key", "size", "reason"),
    [
        ("optimizer/exp_avg/w", (1,), "optimizer/exp_avg/w is (1,) there and (4, 2) here"),
        ("optimizer/exp_avg_sq@1/w", (8,), "optimizer/exp_avg_sq@1/w is (8,) there and (4, 2) here"),
        ("optimizer/step/w", (4, 2), "optimizer/step/w is (4, 2) there, and one number was expected"),
    ],
)
def test_state_of_an_optimizer_in_another_shape_is_refused(key: str, size: tuple[int, ...], reason: str) -> None:
    # the fused kernels take the number of elements from the parameter, and read past the end of a shorter state
    tensors = {"param/w": torch.zeros(4, 2), key: torch.zeros(size)}
    with pytest.raises(CheckpointError) as caught:
        refuse_mismatch({"param/w": (4, 2)}, tensors)
    assert str(caught.value) == f"the checkpoint is of another model: {reason}."


def test_state_of_an_optimizer_of_ones_own_may_have_any_shape() -> None:
    tensors = {"param/w": torch.zeros(4, 2), "optimizer/row_var/w": torch.zeros(4), "optimizer/step/w": torch.zeros(())}
    refuse_mismatch({"param/w": (4, 2)}, tensors)


@pytest.mark.parametrize("axis", [0, 1])
def test_thousands_of_pieces_are_compared_in_no_time(axis: int) -> None:
    count = 8000
    shape = [count, 2] if axis == 0 else [2, count]
    cuts = [([place, 0], [1, 2]) if axis == 0 else ([0, place], [2, 1]) for place in range(count)]
    random.Random(0).shuffle(cuts)
    with within(20):  # all pairs took minutes
        assert coverage_error(shape, cuts) is None
        assert coverage_error(shape, [*cuts[:-1], cuts[0]]) == "its pieces overlap"


@pytest.mark.parametrize("content", [None, 3, "12", {}, [True], [-1], [1.0], ["1"], [[1]]])
def test_steps_that_were_handed_out_are_whole_numbers(content: object) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        whole_numbers(content)
