"""A batch of other samples, on the wrong device, filled again too early or changed by an earlier pass is caught.

So is a mixture whose targets have other shares than its images, a crop that misses a shift, and a sample that arrives
with other numbers than its class documents, since it travels as it is stored.
"""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.data.samples import CPU, NO_HOOKS, Copied, InMemorySquares, Noisy, Numbered, Squares, make_loader
from trainkit.config.sections import CvConfig, LoaderConfig
from trainkit.data.batch_transforms import CropAndFlip, CutMix, MixUp
from trainkit.data.collates import Dicts, PadImages, PadSequences
from trainkit.data.hooks import DataHooks, Reading, UserCollate, UserTransform
from trainkit.data.reading.collate import (
    BatchesAsRead,
    CopyStream,
    PinnedRing,
    collate,
    immovable_in,
    shards_of,
    tensors_in,
    to_device,
)
from trainkit.data.reading.iterable import Stream
from trainkit.data.reading.loader import EvalBatches, Loader
from trainkit.data.sets.images import ImageFiles, ImageFolder, _HeldOut
from trainkit.data.sets.text import PythonSource, TextLines, TokenMemmap
from trainkit.data.splits import Subset, declared_data
from trainkit.data.stored import Normalisation, Samples, Stored, stored_of, travelling_bytes
from trainkit.errors import DataError
from trainkit.models.ensemble import Ensemble
from trainkit.numerics.batch import BatchPlan, SampleOrder, Ticket
from trainkit.numerics.generators import seed_host
from trainkit.objectives.fields import split_batch


def test_numbers_arrays_and_tensors_become_tensors_and_text_and_nesting_stay() -> None:
    samples = [
        {"x": (np.array([i, i], dtype=np.float32), {"n": i}), "f": i / 2, "ok": True, "t": f"s{i}"} for i in range(2)
    ]
    batch = collate(samples, [0, 1])
    assert batch["x"][0].tolist() == [[0, 0], [1, 1]]
    assert batch["x"][1]["n"].dtype == torch.int64
    assert batch["f"].dtype == torch.float32
    assert batch["ok"].dtype == torch.bool
    assert batch["t"] == ["s0", "s1"]


class Sample(NamedTuple):
    label: int
    image: torch.Tensor


class Named(Squares):
    def __getitem__(self, index: int) -> Any:
        number, square = super().__getitem__(index)
        return Sample(int(square), number)


@pytest.mark.parametrize("cache", [False, True])
def test_a_named_tuple_keeps_its_names_from_the_sample_to_the_shards(cache: bool) -> None:
    batch: Any = make_loader(Named(8), cache=cache).fetch(Ticket(0, (0, 1)))[1]
    assert batch.label.tolist() == [int(value) ** 2 for value in batch.image.flatten()]
    images, labels = split_batch(batch)  # by their names, not by their order
    assert (type(batch), images is batch.image, labels is batch.label) == (Sample, True, True)


@dataclass(frozen=True)
class Box:
    corners: torch.Tensor
    name: str = "box"


def test_tensors_of_dataclasses_and_mappings_are_moved_and_the_given_batch_stays() -> None:
    batch: list[Any] = [Box(torch.ones(2)), UserDict(x=torch.ones(3)), SimpleNamespace(x=torch.ones(4))]
    box, mapping, other = to_device(batch, torch.device("meta"))
    assert (type(box), box.corners.device.type, box.name) == (Box, "meta", "box")
    assert {name: part.device.type for name, part in mapping.items()} == {"x": "meta"}
    assert batch[0].corners.device.type == "cpu"
    assert [*map(len, tensors_in(batch))] == [2, 3]
    assert [*immovable_in(batch)] == [other]


def test_only_copies_to_a_device_are_asynchronous() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Copied() as copied:
        on_gpu = torch.ones(2, 2, device="cuda:0")
        to_device([on_gpu], CPU)
        Ensemble(members=[torch.nn.Linear(2, 2)], combine="outputs")(on_gpu)
        assert not copied.async_devices  # the host would read numbers that have not arrived
        to_device([torch.ones(2)], torch.device("cuda:0"))
    assert copied.async_devices == ["cuda"]


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (
            [(torch.zeros(2), 0), (torch.zeros(2), 0), (torch.zeros(3), 0)],
            "sample 8 cannot .* sample 11: .*data.collate",
        ),
        ([(1, 2), (1, object())], "sample 4 cannot be part of a batch: a object"),
        ([{"a": 1}, {"b": 1}], r"sample 4 cannot be in a batch with sample 11: \{b: int\}"),
    ],
    ids=["shape", "type", "keys"],
)
def test_a_sample_that_differs_is_named(samples: list[Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        collate(samples, [11, 4, 8][: len(samples)])


def test_shards_of_a_batch_are_tensors_of_their_own_to_autograd() -> None:
    shift = torch.zeros(2, requires_grad=True)
    for shard in shards_of(torch.ones(4, 2), [2, 2]):
        squares = shard.mul_(2).add_(shift).square()  # a model that writes into its inputs
        squares.sum().backward()
    assert shift.grad is not None
    assert shift.grad.tolist() == [16, 16]


def test_dicts_are_padded_with_a_mask_to_a_multiple() -> None:
    samples = [{"ids": [5, 6, 7], "labels": [1, 2, 3], "n": 3}, {"ids": [8], "labels": [4], "n": 1}]
    batch = PadSequences(multiple_of=2, mask="attention_mask")(samples)
    assert batch["ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100], [4, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["n"].tolist() == [3, 1]
    with pytest.raises(DataError, match=r"length 3 is longer than data\.collate\.length=2"):
        PadSequences(length=2)(samples)


def test_images_and_masks_of_classes_are_padded_to_a_multiple() -> None:
    samples = [(torch.ones(1, 2, 3), torch.ones(2, 3).long()), (torch.ones(1, 3, 1), torch.zeros(3, 1).long())]
    images, classes = PadImages(multiple_of=4)(samples)
    assert images.shape == (2, 1, 4, 4)
    assert images.sum() == 9
    assert int((classes == -100).sum()) == 32 - 9


def test_fields_of_dicts_are_dropped_kept_or_padded_and_a_wrong_name_is_refused() -> None:
    samples = [{"a": [1], "text": "x", "id": object()}, {"a": [2, 3], "text": "yy", "id": object()}]
    batch = Dicts(keep=["text"], drop=["id"], pad={"a": 7})(samples)
    assert (batch["a"].tolist(), batch["text"], len(batch)) == ([[1, 7], [2, 3]], ["x", "yy"], 2)
    with pytest.raises(DataError, match=r"^data\.collate names ids, and a sample has a, text, id\.$"):
        Dicts(drop=["ids"])(samples)


def hooks_of(function: Any) -> DataHooks:
    return DataHooks(collate=UserCollate(function=function, name="mine.collate"))


def test_a_collate_is_called_with_the_samples_of_one_shard() -> None:
    loader = make_loader(Noisy(7), hooks=hooks_of(lambda samples: torch.stack([inputs for inputs, _ in samples])))
    assert [len(batch) for batch in loader.fetch(Ticket(1, (0, 1)))] == [2, 1]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda samples: torch.stack([inputs for inputs, _ in samples[1:]]), "makes .* of the 4 samples 0, 1, 2, 3:"),
        (lambda samples: {"x": torch.zeros(4, 5), "y": torch.zeros(5)}, "makes .* of the 4 samples 0, 1, 2, 3:"),
        (lambda samples: samples[1:], "makes .* of the 4 samples 0, 1, 2, 3:"),
        (lambda samples: samples[4], r"fails on the samples 0, 1, 2, 3: IndexError: .* \(float32 \(5,\), int\)\.$"),
    ],
    ids=["tensor", "one field", "list", "fails"],
)
def test_a_collate_that_loses_a_sample_or_fails_is_named(function: Any, text: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.collate=mine\.collate {text}"):
        hooks_of(function).collate_function([(torch.ones(5), 1)] * 4, range(4))


def test_batches_with_another_order_of_dims_and_without_tensors_are_taken() -> None:
    for batch in (torch.zeros(9, 4), {"length_first": torch.zeros(9, 4, 2), "y": torch.zeros(4)}, object()):
        assert hooks_of(lambda _samples, batch=batch: batch).collate_function([0] * 4, range(4)) is batch


@dataclass
class Pair:
    x: torch.Tensor
    y: int


def test_a_later_pass_gets_the_fields_that_an_earlier_one_took_out_or_replaced() -> None:
    batches = BatchesAsRead([{"x": torch.zeros(2), "pair": Pair(torch.ones(1), 3)}])
    first = batches[0]
    first["pair"].x, first["pair"].y = torch.zeros(7), 4
    first["x"].requires_grad_().sum().backward()
    del first["x"]
    again = batches[0]
    assert (again["x"].tolist(), again["x"].requires_grad) == ([0.0, 0.0], False)
    assert (again["pair"].x.tolist(), again["pair"].y) == ([1.0], 3)


@pytest.mark.parametrize("keeps", [False, True])
def test_every_pass_gets_what_was_read_however_often_it_writes(keeps: bool) -> None:
    def read() -> list[Any]:
        return [(torch.zeros(2), pack_sequence([torch.ones(2)])), torch.ones(1)]

    batches = BatchesAsRead(read(), read_again=read, keeps=keeps)
    for _ in range(3):
        x, packed = batches[0]
        assert isinstance(packed, PackedSequence)
        assert (x.tolist(), packed.data.tolist(), batches[1].tolist()) == ([0.0, 0.0], [1.0, 1.0], [1.0])
        x.view(1, 2)[0].add_(1.0)
        packed.data.mul_(2.0)
        batches[1].zero_()


class Device(CopyStream):
    """A device whose copies end when the host waits for them, and not before."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: set[int] = set()
        self._copies = 0

    def buffer(self, size: int) -> Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)

    def is_pinned(self, tensor: Tensor) -> bool:
        return id(tensor) in self.pinned

    def copy(self, host: Tensor) -> tuple[Tensor, Any]:
        moved, number, log = torch.empty_like(host), self._copies, self.log
        self._copies += 1
        log.append(f"copy {number}")

        class Ended:
            done = False

            def synchronize(self) -> None:
                if not self.done:
                    moved.copy_(host)  # as late as possible: a buffer that was filled again would show
                    log.append(f"host waits for {number}")
                self.done = True

        return moved, Ended()

    def join(self, moved: Tensor, event: Any) -> None:
        del moved
        self.log.append("kernels wait")
        self.last = event


def test_copies_begin_at_once_and_a_buffer_is_filled_again_when_its_copy_has_ended() -> None:
    device = Device()
    ring = PinnedRing(device, CPU, depth=2)
    batches = [ring.move(torch.full((3,), float(step))) for step in range(4)]
    assert device.log == [
        "copy 0", "kernels wait", "copy 1", "kernels wait",
        "host waits for 0", "copy 2", "kernels wait", "host waits for 1", "copy 3", "kernels wait",
    ]  # fmt: skip
    assert [batch.tolist() for batch in batches[:2]] == [[0.0] * 3, [1.0] * 3]


def test_a_batch_of_any_structure_is_one_copy_with_equal_bits() -> None:
    device = Device()
    batch = {
        "image": torch.arange(10, dtype=torch.uint8).reshape(5, 2).t(),
        "rest": [torch.arange(3), (torch.tensor(True), torch.zeros(0), "text", torch.ones(2, requires_grad=True))],
    }
    moved = PinnedRing(device, CPU).move(batch)
    device.last.synchronize()
    assert device.log[0] == "copy 0"
    assert device.log.count("kernels wait") == 1
    assert torch.equal(moved["image"], batch["image"])  # type: ignore[arg-type]
    assert torch.equal(moved["rest"][0], torch.arange(3))
    flag, empty, text, leaf = moved["rest"][1]
    assert (bool(flag), empty.shape, text, leaf.is_leaf) == (True, (0,), "text", True)


def test_what_workers_have_pinned_is_copied_from_where_it_is() -> None:
    device, batch = Device(), torch.ones(4)
    device.pinned.add(id(batch))
    moved = PinnedRing(device, CPU).move((batch, torch.zeros(2)))
    assert device.log == ["copy 0", "kernels wait", "copy 1", "kernels wait"]
    assert moved[0] is not batch


class Gathering(Squares):
    """Samples that are gathered many at a time."""

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return indices.float().unsqueeze(1), indices * indices


SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "memory": (InMemorySquares(9), {}),
    "cached": (Squares(9), {"cache": True}),
    "gathered": (Gathering(9), {}),
    "direct": (Squares(9), {}),
    "workers": (Squares(9), {"num_workers": 1, "rank": 1, "num_ranks": 2}),  # of other ranks: no process is started
    "stream": (Stream(source=[(number, 0.0) for number in range(9)], num_samples=9), {}),
    "files": (Stream(source=Numbered(4, 5), num_samples=9, distribute="files"), {}),
}


@pytest.mark.parametrize(("dataset", "settings"), SOURCES.values(), ids=SOURCES)
def test_batches_of_every_source_go_through_the_ring_of_a_cuda_device(
    dataset: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr("trainkit.data.reading.collate.CopyStream", lambda _: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))  # the dataset does not fit there
    batches = make_loader(dataset, device=torch.device("cuda"), **settings)
    for step in range(2):
        assert len(batches.fetch(Ticket(step, (0, 1)))) == 2
    batches.close()
    assert device.log == ["copy 0", "kernels wait", "copy 1", "kernels wait"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(("dataset", "settings"), [*SOURCES.values(), (Squares(9), {"num_workers": 1})])
def test_on_a_gpu_no_batch_waits_and_all_are_those_of_the_host(dataset: Any, settings: dict[str, Any]) -> None:
    host, on_gpu = (make_loader(dataset, device=device, **settings) for device in (CPU, torch.device("cuda", 0)))
    for step in (0, 1, 3, 4, 6):  # step 3 begins an epoch
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            batches = on_gpu.fetch(Ticket(step, (0, 1)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for batch, expected in zip(batches, host.fetch(Ticket(step, (0, 1))), strict=True):
            assert all(torch.equal(part.cpu(), true) for part, true in zip(batch, expected, strict=True))
    host.close()
    on_gpu.close()


def transforming(function: Any) -> Loader:
    hooks = DataHooks(transform=UserTransform(function=function, name="mine.mix"))
    return make_loader(InMemorySquares(), hooks=hooks)


def noise(batch: Any) -> Any:
    return batch[0] + torch.rand(len(batch[0]), 1), batch[1]


def test_what_is_drawn_depends_on_step_and_shard_alone_and_a_retry_is_transformed_once() -> None:
    loader = transforming(noise)
    torch.manual_seed(3)
    first = loader.fetch(Ticket(1, (0, 1)))
    assert loader.fetch(Ticket(1, (0, 1))) is first
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(3)))
    alone = transforming(noise).fetch(Ticket(1, (1,)))[0]
    assert torch.equal(alone[0], first[1][0])
    assert not torch.equal((first[0][0] - first[0][0].floor()), (first[1][0] - first[1][0].floor()))


def test_a_transform_that_loses_a_sample_or_fails_is_named_with_its_shapes() -> None:
    with pytest.raises(DataError, match=r"^data\.batch_transform=mine\.mix makes .* of the 2 samples"):
        transforming(lambda batch: (batch[0][1:], batch[1][1:])).fetch(Ticket(0, (0, 1)))
    with pytest.raises(DataError, match=r"fails on shard 0 of step 2: KeyError: 'x'\. The batch is "):
        transforming(lambda batch: {"y": batch}["x"]).fetch(Ticket(2, (0,)))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_without_memory_is_no_error_of_the_data(kind: type[Exception]) -> None:
    def fails(batch: Any) -> Any:
        raise kind(f"CUDA out of memory for {len(batch)}")

    with pytest.raises(kind, match=r"^CUDA out of memory"):
        transforming(fails).fetch(Ticket(0, (0,)))


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
    on_gpu = tuple(part.to("cuda") for part in batch)
    seed_host(3)
    expected = transform(batch)
    seed_host(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = transform(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close([part.cpu() for part in actual], list(expected), rtol=1e-6, atol=1e-6)


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
    shifts = []
    for image, big in zip(moved, torch.nn.functional.pad(images, [2] * 4), strict=True):
        for row, column, flips in itertools.product(range(5), range(5), (False, True)):
            if torch.equal(image.flip(-1) if flips else image, big[:, row : row + 5, column : column + 7]):
                shifts.append((row, column, flips))
    assert len(shifts) == 60
    assert [sorted(set(drawn)) for drawn in zip(*shifts, strict=True)] == [[*range(5)], [*range(5)], [False, True]]


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
            for index in range(3):
                pixels = numbers.randint(0, 256, (20 + index, 24, 3)).astype(np.uint8)
                image.fromarray(pixels).save(root / split / name / f"{index}.png")
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
READ_FROM = {"auto": LoaderConfig(), "single": LoaderConfig(cache=False), "cached": LoaderConfig(cache=True)}


CASES = [(name, source) for name in DATASETS for source in READ_FROM if (name, source) != ("files", "cached")]
"""A cache takes tuples and dicts alone."""


def loader_of(dataset: Any, settings: LoaderConfig, device: torch.device = CPU, hooks: DataHooks = NO_HOOKS) -> Loader:
    plan = BatchPlan(num_samples=len(dataset), global_size=4, micro_size=2)
    reading = Reading(device=device, settings=settings, seed=7, hooks=hooks)
    return Loader(dataset, plan=plan, shards_at=lambda step: range(plan.num_shards(step)), num_steps=2, reading=reading)


def flat(batch: Any) -> list[Tensor]:
    return [batch] if isinstance(batch, Tensor) else list(batch)


def are_equal(first: Any, second: Any) -> bool:
    pairs = list(zip(flat(first), flat(second), strict=True))
    return all(a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("name", "source"), CASES)
def test_batches_of_training_and_evaluation_are_those_of_the_class(name: str, source: str, folder: Path) -> None:
    dataset = DATASETS[name](folder)
    assert stored_of(dataset) is not None
    loader = loader_of(dataset, READ_FROM[source])
    order = SampleOrder(num_samples=len(dataset), seed=7).indices(0, 0, 4).tolist()
    for shard, batch in enumerate(loader.fetch(Ticket(0, (0, 1)))):
        indices = order[2 * shard : 2 * shard + 2]
        assert are_equal(batch, collate([dataset[index] for index in indices], indices))
    loader.close()
    reading = Reading(device=CPU, settings=READ_FROM[source])
    batches = EvalBatches(dataset, reading, batch_size=3, rank=0, num_ranks=1)
    copies = [[part.clone() for part in flat(batch)] for batch in batches]
    expected = collate([dataset[index] for index in range(len(dataset))], range(len(dataset)))
    assert are_equal(tuple(map(torch.cat, zip(*copies, strict=True))), expected)


BYTES = {
    "memmap": 4 * 17 * 2, "memmap_wide": 4 * 17 * 4, "text_padded": 4 * (17 + 4), "lines": 4 * 8,
    "in_memory": 4 * (48 + 1), "fold": 4 * (48 + 1), "images": 4 * (192 + 4), "files": 4 * 192,
}  # fmt: skip
"""Bytes of a step of four samples; tokens of 16 took 4 * 256, and images four bytes a number and eight a class."""


@pytest.mark.parametrize(
    ("name", "source"), [*((name, "single") for name in BYTES), ("in_memory", "auto"), ("images", "workers")]
)
def test_a_step_copies_what_is_stored(name: str, source: str, folder: Path) -> None:
    dataset, settings = DATASETS[name](folder), READ_FROM.get(source, LoaderConfig(num_workers=1))
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
        for settings in (READ_FROM["auto"], READ_FROM["single"]):
            host, on_gpu = (loader_of(dataset, settings, device).fetch(Ticket(0, (0, 1))) for device in (CPU, cuda))
            for batch, moved in zip(host, on_gpu, strict=True):
                assert are_equal(batch, tuple(part.cpu() for part in flat(moved))), name


def test_random_crops_are_drawn_as_before(folder: Path) -> None:
    dataset = ImageFolder(path=folder, split="train", **SMALL)  # type: ignore[arg-type]
    direct, workers = (loader_of(dataset, config) for config in (LoaderConfig(), LoaderConfig(num_workers=1)))
    first, second = (loader.fetch(Ticket(0, (0, 1))) for loader in (direct, workers))
    workers.close()
    hooks = DataHooks(collate=UserCollate(function=paired, name="paired"))
    plain = loader_of(dataset, LoaderConfig(), hooks=hooks)
    for batch, by_worker, collated in zip(first, second, plain.fetch(Ticket(0, (0, 1))), strict=True):
        assert are_equal(batch, by_worker)
        assert are_equal(batch, collated)


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
    assert torch.equal(batch[0], torch.stack([dataset[index][0] for index in order]))


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
