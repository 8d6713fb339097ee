"""A mixture whose targets have other shares than its images, or a crop that misses a shift, is caught here alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.samples import InMemorySquares, make_loader
from trainkit.data.batch_transforms import CropAndFlip, CutMix, MixUp
from trainkit.data.hooks import DataHooks, UserTransform
from trainkit.data.reading.loader import Loader
from trainkit.errors import DataError
from trainkit.numerics.batch import Ticket
from trainkit.numerics.generators import seed_host


def loader_of(function: Any) -> Loader:
    hooks = DataHooks(transform=UserTransform(function=function, name="mine.mix"))
    return make_loader(InMemorySquares(), hooks=hooks)


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
    with pytest.raises(DataError, match=r"^data\.batch_transform=mine\.mix makes .* of the 2 samples"):
        loader_of(lambda batch: (batch[0][1:], batch[1][1:])).fetch(Ticket(0, (0, 1)))
    with pytest.raises(DataError, match=r"fails on shard 0 of step 2: KeyError: 'x'\. The batch is "):
        loader_of(lambda batch: {"y": batch}["x"]).fetch(Ticket(2, (0,)))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_without_memory_is_no_error_of_the_data(kind: type[Exception]) -> None:
    def fails(batch: Any) -> Any:
        raise kind(f"CUDA out of memory for {len(batch)}")

    with pytest.raises(kind, match=r"^CUDA out of memory"):
        loader_of(fails).fetch(Ticket(0, (0,)))


@pytest.mark.parametrize("transform", [MixUp(num_classes=3), CutMix(num_classes=3)], ids=["mixup", "cutmix"])
def test_images_and_classes_are_mixed_in_the_same_shares(transform: Any) -> None:
    shares = set()
    labels = torch.tensor([0, 1, 2])
    images = torch.nn.functional.one_hot(labels, 3).float()[:, :, None, None].expand(3, 3, 6, 6)
    before = images.clone()
    for seed in range(5):
        torch.manual_seed(seed)
        mixed, classes = transform((images, labels))
        assert torch.allclose(mixed.mean(dim=(2, 3)), classes, atol=1e-6)
        shares |= set(classes.flatten().tolist())
    assert len(shares) > 3  # some were mixed
    assert torch.equal(images, before)


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


def test_masks_are_mixed_pixel_by_pixel_and_never_cut() -> None:
    images, masks = torch.randn(4, 3, 3, 3), torch.arange(36).reshape(4, 3, 3) % 3
    _, soft = MixUp(num_classes=3, share=0.0)((images, masks))  # as many classes as rows and columns
    assert torch.equal(soft.argmax(1), masks)
    with pytest.raises(DataError, match=r"^CutMix mixes one class of each image, and the targets are masks"):
        CutMix(num_classes=3)((images, masks))


def test_a_target_that_is_ignored_is_not_mixed() -> None:
    with pytest.raises(DataError, match=r"^MixUp mixes the classes 0 to 2, and .*ignore_index"):
        MixUp(num_classes=3)((torch.randn(2, 4), torch.tensor([1, -100])))


def test_each_image_is_shifted_by_up_to_the_padding_and_mirrored_on_its_own() -> None:
    images = torch.arange(60 * 2 * 5 * 7, dtype=torch.float32).view(60, 2, 5, 7) + 1
    np.random.seed(0)  # noqa: NPY002 - as the loader keys it
    moved, _ = CropAndFlip(padding=2)((images, torch.zeros(60)))
    seen = []
    for image, big in zip(moved, torch.nn.functional.pad(images, [2] * 4), strict=True):
        for row, column, flips in itertools.product(range(5), range(5), (False, True)):
            if torch.equal(image.flip(-1) if flips else image, big[:, row : row + 5, column : column + 7]):
                seen.append((row, column, flips))
    assert len(seen) == 60
    assert [sorted(set(drawn)) for drawn in zip(*seen, strict=True)] == [[*range(5)], [*range(5)], [False, True]]
