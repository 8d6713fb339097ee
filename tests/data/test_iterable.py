"""An item of a stream at another position after a resume or a step back, or a file that two ranks or none read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.samples import CPU, Numbered, all_batches, make_loader
from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import Reading
from trainkit.data.reading.iterable import DealtOrder, Stream
from trainkit.data.reading.loader import EvalBatches, Loader
from trainkit.data.sets.json_lines import JsonLines
from trainkit.errors import ConfigError, DataError, MissingExtraError
from trainkit.numerics.batch import BatchPlan, SampleOrder, Ticket, shards_of_rank

READING = Reading(device=CPU, settings=LoaderSettings())


class Lines:
    """Gives (epoch * 100 + i, 0); counts what is read."""

    def __init__(self, count: int = 10) -> None:
        self.count, self.epoch, self.reads = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for index in range(self.count):
            self.reads += 1
            yield self.epoch * 100 + index, 0


class SavedLines(Lines):
    """The same with a place it can return to."""

    def __init__(self, count: int = 10) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.at < self.count:
            self.at += 1
            self.reads += 1
            yield self.epoch * 100 + self.at - 1, 0
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def numbers(loader: Loader, step: int, shards: tuple[int, ...] = (0, 1)) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader.fetch(Ticket(step, shards))]


def test_a_source_that_goes_on_where_it_stands_is_read_from_its_begin_where_an_epoch_or_an_evaluation_begins() -> None:
    stream = Stream(source=SavedLines(12), num_samples=10)
    stream[3]  # to look at one sample
    batches = EvalBatches(stream, READING, batch_size=5, rank=0, num_ranks=1)
    for _ in range(2):
        assert [batch[0].tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    read = [int(number) for batches in all_batches(make_loader(stream), range(6)) for number in batches]
    assert [number for number in read if number] == [*range(1, 10), *range(100, 110)]  # a label is 0


def test_each_shard_is_read_by_position_and_going_back_starts_the_epoch_again() -> None:
    loader = make_loader(Stream(source=Lines(), num_samples=10))
    assert numbers(loader, 0) == [[0, 1], [2, 3]]
    assert numbers(loader, 1, (1,)) == [[6, 7]]
    assert numbers(loader, 0) == [[0, 1], [2, 3]]
    assert numbers(loader, 2, (0,)) == [[8, 9]]
    assert numbers(loader, 3, (1, 0)) == [[102, 103], [100, 101]]


@pytest.mark.parametrize(
    ("source", "reads", "way"),
    [(SavedLines, 4, "from its own state, at sample 4 of epoch 0"), (Lines, 8, "found by skipping from the start of")],
)
def test_a_source_resumes_from_its_state_or_by_skipping_and_says_so(source: type[Lines], reads: int, way: str) -> None:
    first = make_loader(Stream(source=source(), num_samples=10))
    numbers(first, 0)
    second = make_loader(Stream(source=(resumed := source()), num_samples=10))
    assert way in str(second.load_state(first.state()))
    assert numbers(second, 1) == [[4, 5], [6, 7]]
    assert resumed.reads == reads


def test_a_source_that_ends_early_and_worker_processes_are_refused() -> None:
    with pytest.raises(DataError, match=r"^Lines ended after 3 samples, but num_samples=10\.$"):
        numbers(make_loader(Stream(source=Lines(3), num_samples=10)), 0)
    with pytest.raises(ConfigError, match=r"loader.num_workers=2: an iterable dataset is read by the training process"):
        make_loader(Stream(source=Lines(), num_samples=10), num_workers=2)


def test_validation_has_its_own_source_and_is_shared_by_ranks() -> None:
    stream = Stream(source=Lines(), num_samples=10, val_source=Lines(5), val_num_samples=5, split="val")
    shared = [
        [numbers.tolist() for numbers, _ in EvalBatches(stream, READING, batch_size=2, rank=rank, num_ranks=2)]
        for rank in (0, 1)
    ]

    assert shared == [[[0, 1], [4]], [[2, 3]]]
    assert Stream.splits({"val_source": None}) == ("train",)


class Drawn:
    """Gives random numbers."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for _ in range(5):
            yield torch.rand(2), 0


def test_an_evaluation_draws_the_same_numbers_on_any_number_of_ranks() -> None:
    stream = Stream(source=Drawn(), num_samples=5)

    def drawn(rank: int, num_ranks: int) -> list[list[list[float]]]:
        batches = EvalBatches(stream, READING, batch_size=2, rank=rank, num_ranks=num_ranks)
        return [numbers.tolist() for numbers, _ in batches]

    alone = drawn(0, 1)
    assert [drawn(0, 2), drawn(1, 2)] == [alone[::2], alone[1::2]]


def loader_of(
    source: Any, *, rank: int = 0, num_ranks: int = 1, micro_size: int = 2, count: int | None = None
) -> Loader:
    """A loader of steps of 4 samples."""
    stream = Stream(source=source, num_samples=count or sum(source.sizes), distribute="files")
    plan = BatchPlan(num_samples=len(stream), global_size=4, micro_size=micro_size)
    return Loader(
        stream, plan=plan, shards_at=lambda step: own(plan, step, rank, num_ranks),
        num_steps=3 * plan.steps_per_epoch, reading=Reading(device=CPU, settings=LoaderSettings(), seed=7),
    )  # fmt: skip


def own(plan: BatchPlan, step: int, rank: int, num_ranks: int) -> tuple[int, ...]:
    return shards_of_rank(plan.num_shards(step), rank=rank, num_ranks=num_ranks, lanes=None)


def dealt(loader: Loader, step: int, shards: tuple[int, ...]) -> list[int]:
    return [number for batch in loader.fetch(Ticket(step, shards)) for number in batch[0].tolist()]


@pytest.mark.parametrize("sizes", [(6, 4), (1, 2, 3, 4), (13,), (5, 0, 6), (2, 2, 2, 2, 2, 2, 2, 3)])
@pytest.mark.parametrize(("num_ranks", "micro_size"), [(1, 4), (2, 2), (3, 1), (4, 1)])
def test_each_sample_is_read_once_an_epoch(sizes: tuple[int, ...], num_ranks: int, micro_size: int) -> None:
    plan = BatchPlan(num_samples=sum(sizes), global_size=4, micro_size=micro_size)
    found = []
    for rank in range(num_ranks):
        loader = loader_of(Numbered(*sizes), rank=rank, num_ranks=num_ranks, micro_size=micro_size)
        for step in range(plan.steps_per_epoch, 2 * plan.steps_per_epoch):
            found += dealt(loader, step, own(plan, step, rank, num_ranks))
    assert sorted(found) == list(range(sum(sizes)))


def test_a_rank_opens_the_files_of_its_shards_alone_and_each_once_an_epoch() -> None:
    opened = []
    for rank in (0, 1):
        source = Numbered(4, 4, 4, 4)
        loader = loader_of(source, rank=rank, num_ranks=2)
        for step in range(4):
            dealt(loader, step, (rank,))
        opened.append(source.opened)
    assert opened == [["part-0", "part-1"], ["part-2", "part-3"]]


def test_a_shard_holds_the_same_samples_on_any_number_of_ranks() -> None:
    alone = loader_of(Numbered(5, 3, 9), micro_size=1)
    apart = [loader_of(Numbered(5, 3, 9), rank=rank, num_ranks=4, micro_size=1) for rank in range(4)]
    for step in range(4):
        shards = (0, 1, 2, 3)
        expected = dealt(alone, step, shards)
        assert [number for rank in shards for number in dealt(apart[rank], step, (rank,))] == expected


def test_a_run_resumes_in_the_middle_on_another_number_of_ranks() -> None:
    found = []
    for step in range(2):
        for rank in (0, 1):
            found += dealt(loader_of(Numbered(7, 9), rank=rank, num_ranks=2, micro_size=1), step, (rank, rank + 2))
    first = loader_of(Numbered(7, 9), micro_size=1)
    dealt(first, 1, (0,))
    for rank in range(4):
        loader = loader_of(Numbered(7, 9), rank=rank, num_ranks=4, micro_size=1)
        assert loader.load_state(first.state()) == (
            "each shard reads the same files of the stream as before; each part continues inside its file"
        )
        for step in (2, 3):
            found += dealt(loader, step, (rank,))
    assert sorted(found) == list(range(16))


def test_another_cut_inside_an_epoch_is_refused_and_at_its_end_accepted() -> None:
    first = loader_of(Numbered(8, 8), micro_size=2)
    dealt(first, 1, (0, 1))
    inside = first.state()
    with pytest.raises(ConfigError, match=r"into 4 shards, .* began with 2\. .* Give batch\.micro_size=2"):
        loader_of(Numbered(8, 8), micro_size=1).load_state(inside)
    dealt(first, 3, (0, 1))
    loader_of(Numbered(8, 8), micro_size=1).load_state(first.state())


@pytest.mark.parametrize(("surplus", "said"), [(-1, "ended after 3 samples, but .* 4"), (1, "more than the 4 samples")])
def test_a_file_of_another_size_is_an_error(surplus: int, said: str) -> None:
    with pytest.raises(DataError, match=f"part-0 .*{said}"):
        loader_of(Numbered(4, 4, surplus=surplus), micro_size=4).fetch(Ticket(0, (0,)))


def test_more_samples_than_the_files_have_and_a_source_without_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.num_samples=9: is more than the 8 samples"):
        loader_of(Numbered(4, 4), count=9)
    with pytest.raises(ConfigError, match=r"data\.distribute=files: needs a source with files"):
        Stream(source=[1, 2], num_samples=2, distribute="files")


@pytest.mark.parametrize(
    ("distribute", "sizes", "kind"),
    [
        ("samples", (4, 4, 4, 4), SampleOrder),
        ("files", (16,), DealtOrder),
        ("auto", (8, 8), DealtOrder),
        ("auto", (16,), SampleOrder),
    ],
)
def test_auto_deals_files_where_each_shard_can_have_one(distribute: Any, sizes: tuple[int, ...], kind: type) -> None:
    stream = Stream(source=Numbered(*sizes), num_samples=16, distribute=distribute)
    plan = BatchPlan(num_samples=16, global_size=4, micro_size=2)
    assert type(stream.order(plan)) is kind


def test_looking_for_files_counts_no_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"broken")
    stream = Stream(source=JsonLines(path=str(tmp_path / "a.jsonl")), num_samples=1, distribute="auto")
    assert stream.files_for(1) is stream.source
    assert "sizes" not in vars(stream.source)


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def source(path: Path, *lines: str) -> JsonLines:
    path.write_text("\n".join(lines), encoding="utf-8")
    return JsonLines(path=str(path))


def test_a_field_has_the_dtype_of_its_first_line(tmp_path: Path) -> None:
    lines = ('\ufeff{"x": [1.5], "y": 1, "z": [[1]], "w": 2.0}', "", '{"x": [1, 2], "y": 2, "z": [], "w": 3}')
    first, second = source(tmp_path / "a.jsonl", *lines)
    assert [sample["x"].dtype for sample in (first, second)] == [np.float32, np.float32]
    assert [sample["z"].dtype for sample in (first, second)] == [np.int64, np.int64]
    assert [sample["w"] for sample in (first, second)] == [2.0, 3.0]
    assert isinstance(second["w"], float)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"x": [1.5]}', "line 3 of FILE: x holds decimal places, and the first line of all files has whole numbers"),
        ('{"x": [[1], [1, 2]]}', "line 3 of FILE: x holds lists of several lengths."),
        ("[1]", "line 3 of FILE is not a JSON object."),
        ("{", "line 3 of FILE is not JSON: "),
    ],
)
def test_a_line_that_differs_is_refused_by_its_number_in_the_file(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(source(tmp_path / "a.jsonl", '{"x": [1]}', "", line))
    assert message.replace("FILE", str(tmp_path / "a.jsonl")) in str(caught.value)


def test_json_lines_reads_local_files_by_pattern(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines({"x": [3, 4], "y": 1}) + b"\n")
    (tmp_path / "a.jsonl").write_bytes(lines({"x": [0.5, 2], "y": 0}, {"x": [1.0, 2], "y": 1}).rstrip())
    source = JsonLines(path=str(tmp_path / "*.jsonl"))
    assert [Path(file).name for file in source.files] == ["a.jsonl", "b.jsonl"]
    assert source.sizes == (2, 1)
    samples = list(source)
    assert [sample["y"] for sample in samples] == [0, 1, 1]
    assert [sample["x"].dtype.name for sample in samples] == ["float32", "float32", "float32"]


def test_json_lines_reads_the_memory_of_fsspec() -> None:
    fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")
    with fsspec.open("memory://dealt/a.jsonl", "wb") as file:
        file.write(lines({"y": 1}, {"y": 2}))
    source = JsonLines(path="memory://dealt/*.jsonl", num_samples=[2])
    assert [sample["y"] for file in source.files for sample in source.read(file)] == [1, 2]


def test_without_fsspec_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match=r"data\.source\.path: needs the package fsspec\. Install it:"):
        next(iter(JsonLines(path="s3://bucket/a.jsonl")))
