from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.data.samples import CPU, Copied, Squares, make_loader
from trainkit.data.reading.collate import collate, immovable_in, narrow, shards_of, tensors_in, to_device
from trainkit.errors import DataError
from trainkit.models.ensemble import Ensemble
from trainkit.numerics.batch import Ticket
from trainkit.objectives.fields import input_of, split_batch, with_fields


def test_numbers_arrays_and_tensors_become_tensors_and_text_stays() -> None:
    samples = [
        {"x": np.array([i, i], dtype=np.float32), "n": i, "f": i / 2, "ok": True, "t": f"s{i}"} for i in range(2)
    ]

    batch = collate(samples, [0, 1])

    assert batch["x"].tolist() == [[0, 0], [1, 1]]
    assert batch["n"].dtype == torch.int64
    assert batch["f"].dtype == torch.float32
    assert batch["ok"].dtype == torch.bool
    assert batch["t"] == ["s0", "s1"]


def test_nesting_is_kept() -> None:
    assert collate([((1, 2), {"a": 3})], [0])[0][1].tolist() == [2]


class Sample(NamedTuple):
    label: int
    image: torch.Tensor


@dataclass(frozen=True)
class Box:
    corners: torch.Tensor
    name: str = "box"


class Named(Squares):
    def __getitem__(self, index: int) -> Any:
        number, square = super().__getitem__(index)
        return Sample(int(square), number)


@pytest.mark.parametrize("cache", [False, True])
def test_a_named_tuple_keeps_its_names_from_the_sample_to_the_shards(cache: bool) -> None:
    dataset = Named(8)
    batches = make_loader(dataset, cache=cache).fetch(Ticket(0, (0, 1)))
    assert [type(batch) for batch in batches] == [Sample, Sample]
    assert batches[1].label.tolist() == [int(value) ** 2 for value in batches[1].image.flatten()]
    images, labels = split_batch(batches[0])  # by their names, not by their order
    assert images is batches[0].image
    assert labels is batches[0].label
    assert split_batch(batches[0], "label", 1)[0] is labels
    assert input_of(batches[0]) is images
    changed = with_fields(batches[0], {"label": 3})
    assert (changed.label, changed.image) == (3, images)


def test_tensors_of_dataclasses_and_mappings_are_moved_and_the_given_batch_stays() -> None:
    given: list[Any] = [Box(torch.ones(2)), UserDict(x=torch.ones(3)), SimpleNamespace(x=torch.ones(4))]
    box, mapping, other = to_device(given, torch.device("meta"))
    assert (type(box), box.corners.device.type, box.name) == (Box, "meta", "box")
    assert {name: part.device.type for name, part in mapping.items()} == {"x": "meta"}
    assert given[0].corners.device.type == "cpu"
    assert [*map(len, tensors_in(given))] == [2, 3]
    assert [*immovable_in(given)] == [other]


def test_only_copies_to_a_device_are_asynchronous() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Copied() as copied:
        on_gpu = torch.ones(2, 2, device="cuda:0")
        to_device([on_gpu], CPU)
        Ensemble(members=[torch.nn.Linear(2, 2)], combine="outputs")(on_gpu)
        assert not copied.beside  # the host would read numbers that have not arrived
        to_device([torch.ones(2)], torch.device("cuda:0"))
    assert copied.beside == ["cuda"]


def test_a_sample_of_another_shape_is_named() -> None:
    samples = [(torch.zeros(2), 0), (torch.zeros(2), 0), (torch.zeros(3), 0)]

    with pytest.raises(DataError) as caught:
        collate(samples, [11, 4, 8])

    assert str(caught.value) == (
        "sample 8 cannot be in a batch with sample 11: (float32 (3,), int) differs from (float32 (2,), int). "
        "Samples of several sizes need a collate: data.collate=PACKAGE.FUNCTION (docs/data.md)."
    )


def test_a_sample_of_a_foreign_type_is_named() -> None:
    with pytest.raises(DataError, match=r"^sample 3 cannot be part of a batch: a object cannot become part"):
        collate([(1, 2), (1, object())], [2, 3])


def test_a_sample_with_other_keys_is_named() -> None:
    with pytest.raises(DataError, match=r"^sample 1 cannot be in a batch with sample 0: \{b: int\} differs from"):
        collate([{"a": 1}, {"b": 1}], [0, 1])


def test_a_shard_is_a_view() -> None:
    batch = torch.arange(6)

    assert narrow(batch, 2, 3).data_ptr() == batch[2:].data_ptr()


def test_shards_of_a_batch_are_tensors_of_their_own_to_autograd() -> None:
    shift = torch.zeros(2, requires_grad=True)
    for shard in shards_of(torch.ones(4, 2), [2, 2]):
        squares = shard.mul_(2).add_(shift).square()  # a model that writes into its inputs
        squares.sum().backward()
    assert shift.grad is not None
    assert shift.grad.tolist() == [16, 16]
