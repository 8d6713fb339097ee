"""Transforms of batches: what they make, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.data.samples import CPU, Copied, InMemorySquares
from trainkit.config.sections import LoaderConfig
from trainkit.data.batch_transforms import CropAndFlip, CutMix, MixUp
from trainkit.data.hooks import DataHooks, Reading, UserTransform
from trainkit.data.reading.loader import Loader
from trainkit.errors import DataError
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.generators import seed_host
from trainkit.objectives.classification import Classification


def loader_of(function: Any) -> Loader:
    plan = BatchPlan(num_samples=10, global_size=4, micro_size=2)
    return Loader(
        InMemorySquares(), plan=plan, shards_at=lambda step: range(plan.num_shards(step)), num_steps=6,
        reading=Reading(
            device=CPU,
            settings=LoaderConfig(),
            seed=7,
            hooks=DataHooks(transform=UserTransform(function=function, name="mine.mix")),
        ),
    )  # fmt: skip


def noise(batch: Any) -> Any:
    return batch[0] + torch.rand(len(batch[0]), 1), batch[1]


def test_what_is_drawn_depends_on_step_and_shard_alone_and_a_retry_is_transformed_once() -> None:
    whole = loader_of(noise)
    torch.manual_seed(3)
    first = whole.fetch(Ticket(1, (0, 1)))
    assert whole.fetch(Ticket(1, (0, 1))) is first
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(3)))
    alone = loader_of(noise).fetch(Ticket(1, (1,)))[0]
    assert torch.equal(alone[0], first[1][0])
    assert not torch.equal((first[0][0] - first[0][0].floor()), (first[1][0] - first[1][0].floor()))


def test_a_transform_that_loses_a_sample_or_fails_is_named_with_its_shapes() -> None:
    with pytest.raises(
        DataError, match=r"^data\.batch_transform=mine\.mix makes \(float32 \(1, 1\), .* of the 2 samples"
    ):
        loader_of(lambda batch: (batch[0][1:], batch[1][1:])).fetch(Ticket(0, (0, 1)))
    with pytest.raises(
        DataError, match=r"fails on shard 0 of step 2: KeyError: 'x'\. The batch is \(float32 \(2, 1\), int"
    ):
        loader_of(lambda batch: {"y": batch}["x"]).fetch(Ticket(2, (0,)))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_without_memory_is_no_error_of_the_data(kind: type[Exception]) -> None:
    def fails(batch: Any) -> Any:
        raise kind(f"CUDA out of memory for {len(batch)}")

    with pytest.raises(kind, match=r"^CUDA out of memory"):
        loader_of(fails).fetch(Ticket(0, (0,)))


@pytest.mark.parametrize("transform", [MixUp(num_classes=3), CutMix(num_classes=3)], ids=["mixup", "cutmix"])
def test_images_and_classes_are_mixed_in_the_same_shares(transform: Any) -> None:
    labels = torch.tensor([0, 1, 2])
    images = torch.nn.functional.one_hot(labels, 3).float()[:, :, None, None].expand(3, 3, 6, 6)
    before = images.clone()
    for seed in range(5):
        torch.manual_seed(seed)
        mixed, classes = transform((images, labels))
        assert torch.allclose(mixed.mean(dim=(2, 3)), classes, atol=1e-6)
    assert torch.equal(images, before)


@pytest.mark.parametrize("transform", [MixUp(num_classes=3), CutMix(num_classes=3), CropAndFlip()])
def test_drawn_numbers_are_sent_to_the_device_in_one_copy(transform: Any) -> None:
    batch = (torch.ones(4, 2, 8, 8, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"))
    with Copied() as copied:
        assert transform(batch)[0].is_meta
    assert copied.copies == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("transform", [MixUp(num_classes=3), CutMix(num_classes=3), CropAndFlip()])
def test_on_a_gpu_a_transform_does_not_wait_and_gives_the_batch_of_the_host(transform: Any) -> None:
    batch = (torch.rand(4, 2, 8, 8), torch.tensor([0, 1, 2, 0]))
    there = tuple(part.to("cuda") for part in batch)
    seed_host(3)
    wanted = transform(batch)
    seed_host(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = transform(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close([part.cpu() for part in found], list(wanted), rtol=1e-6, atol=1e-6)


def test_class_weights_of_mixed_classes_are_those_of_torch() -> None:
    scores, objective = torch.randn(2, 3), Classification(class_weights=[1.0, 2.0, 4.0])
    hard = objective.score(scores, torch.tensor([0, 2]))
    soft = objective.score(scores, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    assert torch.allclose(soft.loss_sum, hard.loss_sum)
    assert (float(hard.weight), soft.weight) == (5.0, 2.0)  # torch divides the sum of probabilities by samples


def test_masks_are_mixed_pixel_by_pixel_and_never_cut() -> None:
    images, masks = torch.randn(4, 3, 3, 3), torch.arange(36).reshape(4, 3, 3) % 3
    _, soft = MixUp(num_classes=3, share=0.0)((images, masks))  # as many classes as rows and columns
    assert torch.equal(soft.argmax(1), masks)
    with pytest.raises(DataError, match=r"^CutMix mixes one class of each image, and the targets are masks"):
        CutMix(num_classes=3)((images, masks))


def test_a_target_that_is_ignored_is_not_mixed() -> None:
    with pytest.raises(DataError, match=r"^MixUp mixes the classes 0 to 2, and .*ignore_index"):
        MixUp(num_classes=3)((torch.randn(2, 4), torch.tensor([1, -100])))
