"""An input and a target that change places, or a guess between two inputs, is caught here alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from trainkit.errors import ConfigError, DataError, TrainingError
from trainkit.objectives.classification import Classification
from trainkit.objectives.fields import scores_of, split_batch, unused_fields


@dataclass
class Scan:
    voxels: int
    diagnosis: int


class Pair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize(("batch", "fields"), [
    ((1, 2), (None, None)), (Pair(1, 2), (None, None)), (Pair(2, 1), (1, 0)), ((0, 1, 2), (1, 2)),
    ({"input": 1, "target": 2, "label": 3}, (None, None)), ({"image": 1, "label": 2, "path": "a.png"}, (None, None)),
    ({"input_ids": 1, "labels": 2}, (None, None)), ({"x": 1, "z": 2}, (None, "z")),
    (Scan(1, 2), ("voxels", "diagnosis")),
])  # fmt: skip
def test_fields_are_found_by_name_by_place_or_by_common_names(batch: Any, fields: tuple[Any, Any]) -> None:
    assert split_batch(batch, *fields) == (1, 2)


def test_several_inputs_reach_the_model_by_position() -> None:
    def model(image: Tensor, scale: Tensor) -> Tensor:
        return image * scale

    batch = {"image": torch.tensor([[1.0, 0.0]]), "scale": torch.tensor([[2.0]]), "y": torch.tensor([0])}
    loss = Classification(input=["image", "scale"]).loss(model, batch)
    assert torch.equal(loss.outputs, torch.tensor([[2.0, 0.0]]))


@pytest.mark.parametrize(("batch", "why"), [
    ({"x": 1, "image": 1, "y": 2}, "has the fields x, image, y, and x and image may both be the input"),
    ({"voxels": 1, "y": 2}, "has the fields voxels, y, and none is known as the input"),
    ((1, 2, 3), "has the fields 0, 1, 2"), (3, "is one int"),
])  # fmt: skip
def test_a_structure_that_leaves_the_fields_open_is_refused_with_the_keys_that_name_them(batch: Any, why: str) -> None:
    with pytest.raises(DataError, match=r"objective\.input=NAME objective\.target=NAME") as caught:
        split_batch(batch)
    assert f"a sample {why}" in str(caught.value)
    with pytest.raises(ConfigError, match=r"objective\.input=picture: .*: a sample has image, label\."):
        split_batch({"image": 1, "label": 2}, "picture", None)


def test_an_output_is_named_by_key_or_place() -> None:
    one, other = torch.zeros(1), torch.ones(1)
    assert scores_of({"a": one, "b": other}, "b") is scores_of((one, other), 1) is other
    with pytest.raises(ConfigError, match=r"objective\.output=c: there is no such output: the model returns"):
        scores_of({"a": one, "b": other}, "c")
    with pytest.raises(TrainingError, match=r"Name the output: objective\.output=NAME"):
        scores_of((one, other))


def test_fields_that_nothing_reads_are_listed() -> None:
    sample = {"input_ids": [1], "attention_mask": [1], "labels": 0}
    assert unused_fields(sample, None, None) == ["attention_mask"]
    assert unused_fields(sample, ["input_ids", "attention_mask"], None) == []
