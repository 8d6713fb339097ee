"""A sample that arrives with other numbers than its class documents, since it travels as it is stored, is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.samples import CPU, NO_HOOKS, Copied
from trainkit.config.sections import CvConfig, LoaderConfig
from trainkit.data.hooks import DataHooks, Reading, UserCollate
from trainkit.data.reading.collate import collate
from trainkit.data.reading.loader import EvalBatches, Loader
from trainkit.data.sets.images import ImageFiles, ImageFolder, _HeldOut
from trainkit.data.sets.text import PythonSource, TextLines, TokenMemmap
from trainkit.data.splits import Subset, declared_data
from trainkit.data.stored import Normalisation, Samples, Stored, stored_of, travelling_bytes
from trainkit.errors import DataError
from trainkit.numerics.batch import BatchPlan, SampleOrder, Ticket

META = torch.device("meta")
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, kw_only=True)
class Pictures(_HeldOut):
    """Six small images, one in each class."""

    _shape: ClassVar[tuple[int, int, int]] = (3, 4, 4)
    _standard: ClassVar[Normalisation] = Normalisation(MEAN, DEVIATION)
    split: Literal["train", "val", "test"] = "test"

    def __post_init__(self) -> None:
        self._keep_split(np.arange(6 * 3 * 4 * 4).astype(np.uint8).reshape(6, 48), np.arange(6, dtype=np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files, a text and images."""
    root, numbers = tmp_path_factory.mktemp("stored"), np.random.RandomState(0)
    for name in ("train", "val"):
        numbers.randint(0, 60_000, 300).astype("<u2").tofile(root / f"{name}.bin")
    (root / "lines.txt").write_text("one\ntwo\nthree\n4\n5\n6\n")
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            for place in range(3):
                pixels = numbers.randint(0, 256, (20 + place, 24, 3)).astype(np.uint8)
                image.fromarray(pixels).save(root / split / name / f"{place}.png")
    return root


SMALL = {"image_size": 8, "resize": 10}
DATASETS: dict[str, Callable[[Path], Any]] = {
    "memmap": lambda folder: TokenMemmap(path=folder, split="train", context=16),
    "memmap_wide": lambda folder: TokenMemmap(path=folder, split="train", context=16, dtype="uint32"),
    "text_padded": lambda _: PythonSource(split="val", context=16, max_bytes=2000),
    "lines": lambda folder: TextLines(path=folder / "lines.txt", context=8),
    "in_memory": lambda _: Pictures(),
    "fold": lambda _: Subset(Pictures(), np.array([4, 1, 2, 5])),
    "images": lambda folder: ImageFolder(path=folder, split="train", augment=False, **SMALL),  # type: ignore[arg-type]
    "files": lambda folder: ImageFiles(path=folder, **SMALL),  # type: ignore[arg-type]
}
SOURCES = {"auto": LoaderConfig(), "single": LoaderConfig(cache=False), "cached": LoaderConfig(cache=True)}


CASES = [(name, source) for name in DATASETS for source in SOURCES if (name, source) != ("files", "cached")]
"""A cache takes tuples and dicts alone."""


def loader_of(dataset: Any, settings: LoaderConfig, device: torch.device = CPU, hooks: DataHooks = NO_HOOKS) -> Loader:
    plan = BatchPlan(num_samples=len(dataset), global_size=4, micro_size=2)
    reading = Reading(device=device, settings=settings, seed=7, hooks=hooks)
    return Loader(dataset, plan=plan, shards_at=lambda _: (0, 1), num_steps=2, reading=reading)


def flat(batch: Any) -> list[Tensor]:
    return [batch] if isinstance(batch, Tensor) else list(batch)


def are_equal(one: Any, other: Any) -> bool:
    pairs = list(zip(flat(one), flat(other), strict=True))
    return all(a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("name", "source"), CASES)
def test_batches_of_training_and_evaluation_are_those_of_the_class(name: str, source: str, folder: Path) -> None:
    dataset = DATASETS[name](folder)
    assert stored_of(dataset) is not None
    loader = loader_of(dataset, SOURCES[source])
    order = SampleOrder(num_samples=len(dataset), seed=7).indices(0, 0, 4).tolist()
    for shard, batch in enumerate(loader.fetch(Ticket(0, (0, 1)))):
        places = order[2 * shard : 2 * shard + 2]
        assert are_equal(batch, collate([dataset[place] for place in places], places))
    loader.close()
    reading = Reading(device=CPU, settings=SOURCES[source])
    batches = EvalBatches(dataset, reading, batch_size=3, rank=0, num_ranks=1)
    found = [[part.clone() for part in flat(batch)] for batch in batches]
    whole = collate([dataset[place] for place in range(len(dataset))], range(len(dataset)))
    assert are_equal(tuple(map(torch.cat, zip(*found, strict=True))), whole)


BYTES = {
    "memmap": 4 * 17 * 2, "memmap_wide": 4 * 17 * 4, "text_padded": 4 * (17 + 4), "lines": 4 * 8,
    "in_memory": 4 * (48 + 1), "fold": 4 * (48 + 1), "images": 4 * (192 + 4), "files": 4 * 192,
}  # fmt: skip
"""Bytes of a step of four samples; tokens of 16 took 4 * 256, and images four bytes a number and eight a class."""


@pytest.mark.parametrize(
    ("name", "source"), [*((name, "single") for name in BYTES), ("in_memory", "auto"), ("images", "workers")]
)
def test_a_step_copies_what_is_stored(name: str, source: str, folder: Path) -> None:
    dataset, settings = DATASETS[name](folder), SOURCES.get(source, LoaderConfig(num_workers=1))
    loader = loader_of(dataset, settings, META)
    loader.fetch(Ticket(0, (1,)))  # means and deviations are copied once
    with Copied() as copied:
        batches = loader.fetch(Ticket(0, (0, 1)))
    loader.close()
    assert copied.num_bytes == BYTES[name]
    assert {part.dtype for batch in batches for part in flat(batch)} <= {torch.int64, torch.float32}


def test_every_byte_is_normalised_as_numpy_does() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).expand(2, 3, 1, 256)
    mean, deviation = (np.array(values, np.float32).reshape(3, 1, 1) for values in (MEAN, DEVIATION))
    expected = (pixels.numpy().astype(np.float32) / np.float32(255) - mean) / deviation
    assert (Normalisation(MEAN, DEVIATION)(pixels).numpy() == expected).all()


@pytest.mark.gpu
def test_on_a_gpu_batches_have_the_bits_of_the_host(folder: Path) -> None:
    pixels, cuda = torch.arange(256, dtype=torch.uint8).expand(2, 3, 1, 256), torch.device("cuda")
    scale = Normalisation(MEAN, DEVIATION)
    assert torch.equal(scale(pixels.to(cuda)).cpu(), scale(pixels))
    for name, make in DATASETS.items():
        dataset = make(folder)
        for settings in (SOURCES["auto"], SOURCES["single"]):
            here, there = (loader_of(dataset, settings, device).fetch(Ticket(0, (0, 1))) for device in (CPU, cuda))
            for one, other in zip(here, there, strict=True):
                assert are_equal(one, tuple(part.cpu() for part in flat(other))), name


def test_random_crops_are_drawn_as_before(folder: Path) -> None:
    dataset = ImageFolder(path=folder, split="train", **SMALL)  # type: ignore[arg-type]
    here, workers = (loader_of(dataset, one) for one in (LoaderConfig(), LoaderConfig(num_workers=1)))
    first, second = (one.fetch(Ticket(0, (0, 1))) for one in (here, workers))
    workers.close()
    hooks = DataHooks(collate=UserCollate(function=paired, name="paired"))
    plain = loader_of(dataset, LoaderConfig(), hooks=hooks)
    for one, other, third in zip(first, second, plain.fetch(Ticket(0, (0, 1))), strict=True):
        assert are_equal(one, other)
        assert are_equal(one, third)


def paired(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Stack what the class documents."""
    images, classes = zip(*samples, strict=True)
    assert images[0].dtype == torch.float32
    return torch.stack(images), torch.tensor(classes)


class Mirrored(Pictures):
    """It reads samples in its own way."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """A mirrored image."""
        image, label = super().__getitem__(index)
        return image.flip(-1), label


def test_a_class_that_reads_otherwise_is_read_by_its_own_method() -> None:
    dataset = Mirrored()
    assert stored_of(dataset) is None
    (batch, _) = loader_of(dataset, LoaderConfig(cache=False)).fetch(Ticket(0, (0, 1)))
    order = SampleOrder(num_samples=len(dataset), seed=7).indices(0, 0, 2).tolist()
    assert torch.equal(batch[0], torch.stack([dataset[place][0] for place in order]))


class Wrong(Pictures):
    """Its stored samples are other ones."""

    def as_stored(self) -> Any:
        """Another image at each place."""
        return Stored(samples=Samples(6, lambda index: super(Wrong, self).__getitem__(5 - index)), widened=tuple)


def test_other_samples_are_refused() -> None:
    with pytest.raises(DataError, match=r"^Wrong\.as_stored\(\) gives .* for sample"):
        loader_of(Wrong(), LoaderConfig())


def test_a_plan_counts_the_stored_bytes_as_input_with_and_without_the_data(folder: Path) -> None:
    node = {"_target_": "trainkit.data.ImageFolder", "image_size": 8}
    declared, dataset = declared_data(node, CvConfig()).splits["train"], DATASETS["images"](folder)
    for train in (declared, dataset):
        assert travelling_bytes(train, train[0], collates=False) == 3 * 8 * 8 + 4
    assert travelling_bytes(dataset, dataset[0], collates=True) == 3 * 8 * 8 * 4
