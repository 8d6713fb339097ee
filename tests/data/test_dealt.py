"""A file that two ranks read, or a sample that none reads in an epoch, is caught here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.samples import CPU, Numbered
from trainkit.config.sections import LoaderConfig as LoaderSettings
from trainkit.data.hooks import Reading
from trainkit.data.reading.iterable import DealtOrder, Stream
from trainkit.data.reading.loader import Loader
from trainkit.data.sets.json_lines import JsonLines
from trainkit.errors import ConfigError, DataError
from trainkit.numerics.batch import BatchPlan, SampleOrder, Ticket, shards_of_rank


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


def numbers(loader: Loader, step: int, shards: tuple[int, ...]) -> list[int]:
    return [number for batch in loader.fetch(Ticket(step, shards)) for number in batch[0].tolist()]


@pytest.mark.parametrize("sizes", [(6, 4), (1, 2, 3, 4), (13,), (5, 0, 6), (2, 2, 2, 2, 2, 2, 2, 3)])
@pytest.mark.parametrize(("num_ranks", "micro_size"), [(1, 4), (2, 2), (3, 1), (4, 1)])
def test_each_sample_is_read_once_an_epoch(sizes: tuple[int, ...], num_ranks: int, micro_size: int) -> None:
    plan = BatchPlan(num_samples=sum(sizes), global_size=4, micro_size=micro_size)
    found = []
    for rank in range(num_ranks):
        loader = loader_of(Numbered(*sizes), rank=rank, num_ranks=num_ranks, micro_size=micro_size)
        for step in range(plan.steps_per_epoch, 2 * plan.steps_per_epoch):
            found += numbers(loader, step, own(plan, step, rank, num_ranks))
    assert sorted(found) == list(range(sum(sizes)))


def test_a_rank_opens_the_files_of_its_shards_alone_and_each_once_an_epoch() -> None:
    opened = []
    for rank in (0, 1):
        source = Numbered(4, 4, 4, 4)
        loader = loader_of(source, rank=rank, num_ranks=2)
        for step in range(4):
            numbers(loader, step, (rank,))
        opened.append(source.opened)
    assert opened == [["part-0", "part-1"], ["part-2", "part-3"]]


def test_a_shard_holds_the_same_samples_on_any_number_of_ranks() -> None:
    alone = loader_of(Numbered(5, 3, 9), micro_size=1)
    apart = [loader_of(Numbered(5, 3, 9), rank=rank, num_ranks=4, micro_size=1) for rank in range(4)]
    for step in range(4):
        shards = (0, 1, 2, 3)
        expected = numbers(alone, step, shards)
        assert [number for rank in shards for number in numbers(apart[rank], step, (rank,))] == expected


def test_a_run_resumes_in_the_middle_on_another_number_of_ranks() -> None:
    found = []
    for step in range(2):
        for rank in (0, 1):
            found += numbers(loader_of(Numbered(7, 9), rank=rank, num_ranks=2, micro_size=1), step, (rank, rank + 2))
    first = loader_of(Numbered(7, 9), micro_size=1)
    numbers(first, 1, (0,))
    for rank in range(4):
        loader = loader_of(Numbered(7, 9), rank=rank, num_ranks=4, micro_size=1)
        assert loader.load_state(first.state()) == (
            "each shard reads the same files of the stream as before; each part continues inside its file"
        )
        for step in (2, 3):
            found += numbers(loader, step, (rank,))
    assert sorted(found) == list(range(16))


def test_another_cut_inside_an_epoch_is_refused_and_at_its_end_accepted() -> None:
    first = loader_of(Numbered(8, 8), micro_size=2)
    numbers(first, 1, (0, 1))
    inside = first.state()
    with pytest.raises(ConfigError, match=r"into 4 shards, .* began with 2\. .* Give batch\.micro_size=2"):
        loader_of(Numbered(8, 8), micro_size=1).load_state(inside)
    numbers(first, 3, (0, 1))
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
