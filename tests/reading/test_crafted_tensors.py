"""State of an optimizer in another shape, past whose end a fused kernel would read, is caught here alone.

Also pieces that take long to compare, and the header of a file beyond 2^63.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.crafted import within
from trainkit.errors import CheckpointError
from trainkit.strategies.core.replica import refuse_mismatch
from trainkit.strategies.tensor_shards import coverage_error
from trainkit.trainer.checkpoint.tensors import header_of, listed


@pytest.mark.parametrize(
    ("key", "size"),
    [("optimizer/exp_avg/w", (1,)), ("optimizer/exp_avg_sq@1/w", (8,)), ("optimizer/step/w", (4, 2))],
)
def test_state_of_an_optimizer_in_another_shape_is_refused(key: str, size: tuple[int, ...]) -> None:
    # the fused kernels take the number of elements from the parameter, and read past the end of a shorter state
    tensors = {"param/w": torch.zeros(4, 2), key: torch.zeros(size)}
    with pytest.raises(CheckpointError, match=f"of another model: {key} is "):
        refuse_mismatch({"param/w": (4, 2)}, tensors)


def test_state_of_an_optimizer_of_ones_own_may_have_any_shape() -> None:
    tensors = {"param/w": torch.zeros(4, 2), "optimizer/row_var/w": torch.zeros(4), "optimizer/step/w": torch.zeros(())}
    refuse_mismatch({"param/w": (4, 2)}, tensors)


def test_the_header_of_a_file_of_any_size_is_read() -> None:
    # begin x end of a tensor is no number of elements: it passes 2^63 in files of 3 GB
    names, text = header_of(dict.fromkeys(("a", "b", "c"), (torch.float32, (2**30, 3))))
    found = {name: entry.start for name, entry in listed(text, 0, 36 << 30).items()}
    assert found == {name: place * (12 << 30) for place, name in enumerate(names)}


@pytest.mark.parametrize("axis", [0, 1])
def test_thousands_of_pieces_are_compared_in_no_time(axis: int) -> None:
    count = 8000
    shape = [count, 2] if axis == 0 else [2, count]
    cuts = [([place, 0], [1, 2]) if axis == 0 else ([0, place], [2, 1]) for place in range(count)]
    random.Random(0).shuffle(cuts)
    with within(20):  # all pairs took minutes
        assert coverage_error(shape, cuts) is None
        assert coverage_error(shape, [*cuts[:-1], cuts[0]]) == "its pieces overlap"
