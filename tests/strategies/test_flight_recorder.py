"""A wrong rank or call named where ranks call different collectives, or a false alarm, is caught here alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainkit.errors import CollectiveMismatchError
from trainkit.strategies import collectives, flight_recorder
from trainkit.strategies.collectives import GroupCollective
from trainkit.strategies.flight_recorder import FlightRecorder, read_collectives, waited_for

WORLD: Any = SimpleNamespace(group_name="0")
HALF: Any = SimpleNamespace(group_name="1")


@pytest.fixture
def file_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _group: [0, 1])
    return lambda rank: tmp_path / f"rank_{rank}.collectives"


@pytest.fixture
def ranks(file_of: Callable[[int], Path]) -> Iterator[tuple[FlightRecorder, FlightRecorder]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(FlightRecorder(file_of, rank, lambda: 3)) for rank in (0, 1))  # type: ignore[misc]


Ranks = tuple[FlightRecorder, FlightRecorder]


def test_the_last_collectives_are_read_in_order_also_when_the_rank_is_gone(
    ranks: Ranks, file_of: Callable[[int], Path]
) -> None:
    for number in range(100):
        ranks[0].record(WORLD, "all_reduce", torch.ones(number))
    entries = read_collectives(file_of(0))
    assert [entry.sequence for entry in entries] == list(range(37, 101))
    assert str(entries[-1]).startswith(f"all_reduce of (99,) float32 at {__file__}:")
    assert str(entries[-1]).endswith(", in step 3")


def test_the_rank_that_comes_second_finds_another_collective_in_its_place(ranks: Ranks) -> None:
    ranks[0].record(WORLD, "broadcast", torch.ones(2))
    ranks[1].record(WORLD, "broadcast", torch.ones(2))
    ranks[0].record(WORLD, "all_reduce", torch.ones(5))
    with pytest.raises(CollectiveMismatchError) as caught:
        ranks[1].record(WORLD, "all_gather", torch.ones(2))
    process = f"(pid {os.getpid()} on {socket.gethostname()})"
    first, *rest = str(caught.value).splitlines()
    expected = f"the ranks call different collectives: rank 1 {process} calls all_gather of (2,) float32 at {__file__}:"
    assert first.startswith(expected)
    assert f"; rank 0 {process} calls all_reduce of (5,) float32 at " in first
    assert [line.split(" at ")[0] for line in rest[:3]] == [
        "The last collectives of rank 0:", "  broadcast of (2,) float32", "  all_reduce of (5,) float32",
    ]  # fmt: skip
    assert len(rest) == 6


@pytest.mark.parametrize(("name", "first", "second", "alike"), [
    ("all_reduce", torch.ones(2, 3), torch.ones(6), True),
    ("all_reduce", torch.ones(6), torch.ones(5), False),
    ("all_reduce", torch.ones(6), torch.ones(6).double(), False),
    ("all_gather", torch.ones(6), torch.ones(5), True),  # NCCL takes uneven ones
    ("scatter", torch.ones(6), None, True),
])  # fmt: skip
def test_sizes_and_dtypes_are_compared_where_they_have_to_be_equal(
    ranks: Ranks, name: str, first: torch.Tensor, second: torch.Tensor | None, alike: bool
) -> None:
    ranks[0].record(WORLD, name, first)
    with nullcontext() if alike else pytest.raises(CollectiveMismatchError):
        ranks[1].record(WORLD, name, second)


def test_a_call_of_user_code_is_none_of_trainkits(ranks: Ranks) -> None:
    ranks[0].record(WORLD, "all_reduce", torch.ones(5))
    ours = {"__name__": "trainkit.strategies.groups.process_group", "rank": ranks[1], "group": WORLD}
    with pytest.raises(CollectiveMismatchError):
        exec("rank.record(group, 'all_reduce', ones)", {**ours, "ones": torch.ones(5)})


def test_a_callback_in_a_thread_of_torch_is_one_of_trainkits(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = iter(["trainkit.strategies.reducers.vector", "torch.distributed.algorithms"])
    monkeypatch.setattr(flight_recorder, "_caller", lambda: (next(callers), "a.py:1"))
    for rank in ranks:
        rank.record(WORLD, "all_reduce", torch.ones(5))


def test_each_group_counts_for_itself(ranks: Ranks) -> None:
    ranks[0].record(WORLD, "all_reduce", torch.ones(5))
    ranks[0].record(HALF, "broadcast", torch.ones(2))
    ranks[1].record(HALF, "broadcast", torch.ones(2))
    ranks[1].record(WORLD, "all_reduce", torch.ones(5))


def test_a_sum_over_some_ranks_is_recorded_as_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[object] = []
    monkeypatch.setattr(collectives, "note_exchange", lambda *_, group: groups.append(group))
    monkeypatch.setattr(GroupCollective, "_exchange_all", lambda _, tensor: [tensor])
    some: Any = object()
    GroupCollective(rank=0, num_ranks=1, device=torch.device("cpu"), group=some).sum(torch.ones(1))
    assert groups == [some]


def test_an_entry_that_is_half_written_and_one_of_another_host_are_not_compared(
    ranks: Ranks, file_of: Callable[[int], Path]
) -> None:
    ranks[0].record(WORLD, "all_reduce", torch.ones(5))
    content = file_of(0).read_bytes()
    offset = content.index(b"all_reduce")
    with file_of(0).open("r+b") as file:
        file.seek(offset)
        file.write(b"X")
    ranks[1].record(WORLD, "broadcast", torch.ones(2))
    with file_of(0).open("r+b") as file:
        file.write(b"another!")
        file.seek(offset)
        file.write(b"a")
    with FlightRecorder(file_of, 1, lambda: 3) as other_host:
        other_host.record(WORLD, "broadcast", torch.ones(2))


def test_a_rank_that_begins_to_record_later_is_compared_with(file_of: Callable[[int], Path]) -> None:
    with FlightRecorder(file_of, 0, lambda: -1) as early:
        early.record(WORLD, "broadcast", torch.ones(2))
        file_of(1).touch()  # its file is made, and not filled yet
        early.record(WORLD, "broadcast", torch.ones(2))
        with FlightRecorder(file_of, 1, lambda: -1) as late:
            for name in ("broadcast", "broadcast", "all_reduce"):
                late.record(WORLD, name, torch.ones(2))
            with pytest.raises(CollectiveMismatchError):
                early.record(WORLD, "broadcast", torch.ones(2))


def test_of_ranks_in_one_phase_the_one_that_has_not_called_is_waited_for(
    ranks: Ranks, file_of: Callable[[int], Path]
) -> None:
    for rank in (0, 1, 0):
        ranks[rank].record(WORLD, "all_gather", torch.ones(2))
    assert waited_for([0, 1], file_of) == {1}
    ranks[1].record(WORLD, "all_gather", torch.ones(2))
    assert waited_for([0, 1], file_of) == frozenset()


def test_process_groups_are_as_they_were_afterwards(file_of: Callable[[int], Path]) -> None:
    before = vars(dist.ProcessGroup)["allreduce"]
    with FlightRecorder(file_of, 0, lambda: -1):
        assert vars(dist.ProcessGroup)["allreduce"] is not before
    assert vars(dist.ProcessGroup)["allreduce"] is before


def test_a_damaged_file_holds_none(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    assert [read_collectives(tmp_path / name) for name in ("short", "absent")] == [[], []]
