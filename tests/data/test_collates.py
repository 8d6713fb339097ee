"""The collates that ship, and how a collate of the user's is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.data.samples import CPU, Noisy
from trainkit.config.sections import LoaderConfig
from trainkit.data.collates import Dicts, Lists, PadImages, PadSequences
from trainkit.data.hooks import DataHooks, Reading, UserCollate, class_node
from trainkit.data.reading.collate import to_device
from trainkit.data.reading.loader import Loader
from trainkit.errors import DataError
from trainkit.numerics.batch import BatchPlan, Ticket


def hooks(function: Any) -> DataHooks:
    return DataHooks(collate=UserCollate(function=function, name="mine.collate"))


def loader_of(dataset: Any, function: Any, **settings: Any) -> Loader:
    plan = BatchPlan(num_samples=len(dataset), global_size=4, micro_size=2)
    return Loader(
        dataset, plan=plan, shards_at=lambda step: range(plan.num_shards(step)), num_steps=6,
        reading=Reading(device=CPU, settings=LoaderConfig(**settings), seed=7, hooks=hooks(function)),
    )  # fmt: skip


def test_dicts_are_padded_with_a_mask_to_a_multiple() -> None:
    samples = [{"ids": [5, 6, 7], "labels": [1, 2, 3], "n": 3}, {"ids": [8], "labels": [4], "n": 1}]
    batch = PadSequences(multiple_of=2, mask="attention_mask")(samples)
    assert batch["ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100], [4, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["n"].tolist() == [3, 1]


def test_a_sequence_that_is_longer_than_the_given_length_is_refused() -> None:
    assert PadSequences(length=4)([(torch.ones(2), 1)])[0].shape == (1, 4)
    with pytest.raises(DataError, match=r"^a sequence of length 5 is longer than data\.collate\.length=4\.$"):
        PadSequences(length=4)([(torch.ones(5), 1)])


def test_images_and_masks_of_classes_are_padded_to_a_multiple() -> None:
    samples = [(torch.ones(1, 2, 3), torch.ones(2, 3).long()), (torch.ones(1, 3, 1), torch.zeros(3, 1).long())]
    images, classes = PadImages(multiple_of=4)(samples)
    assert images.shape == (2, 1, 4, 4)
    assert images.sum() == 9
    assert int((classes == -100).sum()) == 32 - 9


def test_lists_reach_the_device_as_they_are() -> None:
    batch = to_device(Lists(stacked=[1])([(torch.ones(2), 1), (torch.ones(3), 0)]), torch.device("meta"))
    assert [one.device.type for one in batch[0]] == ["meta", "meta"]
    assert batch[1].shape == (2,)


def test_fields_of_dicts_are_dropped_kept_or_padded_and_a_wrong_name_is_refused() -> None:
    samples = [{"a": 1, "text": "x", "id": object()}, {"a": 2, "text": "yy", "id": object()}]
    assert Dicts(keep=["text"], drop=["id"])(samples)["text"] == ["x", "yy"]
    with pytest.raises(DataError, match=r"^data\.collate names ids, and a sample has a, text, id\.$"):
        Dicts(drop=["ids"])(samples)


def test_a_collate_is_called_with_the_samples_of_one_shard() -> None:
    called: list[int] = []

    def count(samples: list[Any]) -> Any:
        called.append(len(samples))
        return torch.stack([inputs for inputs, _ in samples])

    loader = loader_of(Noisy(7), count)
    assert [len(batch) for batch in loader.fetch(Ticket(1, (0, 1)))] == [2, 1]
    assert set(called) <= {1, 2}


@pytest.mark.parametrize(
    "function",
    [
        lambda samples: torch.stack([inputs for inputs, _ in samples[1:]]),
        lambda samples: {"x": torch.zeros(len(samples), 5), "y": torch.zeros(len(samples) + 1)},
        lambda samples: samples[1:],
    ],
)
def test_a_batch_of_another_number_of_samples_is_refused_with_its_shapes(function: Any) -> None:
    with pytest.raises(DataError, match=r"^data\.collate=mine\.collate makes .* of the 4 samples 0, 1, 2, 3: every"):
        hooks(function).collate_function([(torch.ones(5), 1)] * 4, range(4))


def test_batches_with_another_order_of_dims_and_without_tensors_are_taken() -> None:
    for batch in (torch.zeros(9, 4), {"length_first": torch.zeros(9, 4, 2), "y": torch.zeros(4)}, object()):
        assert hooks(lambda _samples, batch=batch: batch).collate_function([0] * 4, range(4)) is batch


def test_a_collate_that_fails_is_named_with_the_samples_and_their_shapes() -> None:
    shapes = r"They are \(float32 \(2,\), int\)\.$"
    with pytest.raises(DataError, match=rf"fails on the samples 4, 9: IndexError: list index out of range\. {shapes}"):
        hooks(lambda samples: samples[2]).collate_function([(torch.ones(2), 1)] * 2, [4, 9])


def test_a_key_that_is_a_parameter_of_the_class_belongs_to_the_class() -> None:
    node = {"_target_": f"{__name__}.Sampled", "sampler": "own", "collate": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainkit.config.targets.build.allowed_packages", lambda: ("tests",))
        assert class_node(node) == {"_target_": f"{__name__}.Sampled", "sampler": "own"}


class Sampled(Noisy):
    """A dataset that has a sampler of its own."""

    def __init__(self, sampler: str) -> None:
        super().__init__(4)
        self.sampler = sampler
