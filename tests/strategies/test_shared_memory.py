"""The memory that ranks share: who may, how they meet in it, and what a rank that waits in vain says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.pool import Place, Pool
from trainkit.cluster.host import ProcessId
from trainkit.errors import TrainingError
from trainkit.run.process.error_report import write_error_report
from trainkit.strategies.groups.process_group import GroupCollective
from trainkit.strategies.reducers.shared_memory import SharedMemoryReducer, SharedMemorySegment
from trainkit.strategies.tensors.layouts import FlatBuffer

CPU = torch.device("cpu")
OWN = ProcessId.of(os.getpid())


@dataclass
class Peer:
    """Rank 0 of two, whose other rank is the process given: it answers a gather as that process would."""

    other: ProcessId
    host: int | None = None
    opened: int = 1
    rank: int = 0
    num_ranks: int = 2

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        if tensor.dim() == 1:
            return [tensor, torch.tensor([self.opened])]
        row = tensor.clone()
        row[0, 1], row[0, 2] = self.other.pid, self.other.started
        if self.host is not None:
            row[0, 0] = self.host
        return [tensor, row]


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], ProcessId]]:
    process = subprocess.Popen(["sleep", "60"])
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    yield process, ProcessId(process.pid, int(started))
    process.kill()
    process.wait()


def waiting(peer: Peer, timeout_s: float) -> TrainingError:
    segment = SharedMemorySegment(peer, numel=8, dtype=torch.float32)
    with pytest.raises(TrainingError) as caught:
        segment.barrier(timeout_s)
    return caught.value


def test_a_killed_rank_is_named_while_it_is_still_a_zombie_process(
    sleeper: tuple[subprocess.Popen[bytes], ProcessId], tmp_path: Path
) -> None:
    process, mark = sleeper
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # now a zombie
    error = waiting(Peer(mark), timeout_s=60)
    assert str(error) == "rank 1 ended while rank 0 waited for its gradients."
    words = write_error_report(tmp_path / "words.json", 0, error)
    assert words.is_secondary
    assert not words.is_permanent


def test_a_later_process_with_the_same_number_is_not_taken_for_the_peer(
    sleeper: tuple[subprocess.Popen[bytes], ProcessId],
) -> None:
    _, mark = sleeper
    error = waiting(Peer(ProcessId(mark.pid, mark.started - 1)), timeout_s=60)
    assert str(error).startswith("rank 1 ended")


def test_a_running_rank_that_sends_no_gradients_is_named_after_the_timeout(
    sleeper: tuple[subprocess.Popen[bytes], ProcessId], tmp_path: Path
) -> None:
    error = waiting(Peer(sleeper[1]), timeout_s=0.01)
    assert str(error) == "rank 1 sent no gradients to rank 0 in 0.01 s (strategy.timeout_s)."
    assert write_error_report(tmp_path / "words.json", 0, error).is_secondary


@pytest.mark.parametrize(
    ("peer", "numel", "text"),
    [
        (
            Peer(OWN, host=7),
            8,
            "rank 1 is not on the host of rank 0, whose memory it would share.",
        ),
        (Peer(OWN, opened=0), 8, "rank 1 may not open the memory that rank 0 would share."),
        (Peer(OWN), 1 << 50, "there are no 12884901888 MiB of memory to share gradients in."),
    ],
)
def test_memory_that_cannot_be_shared_is_refused_with_what_to_use(peer: Peer, numel: int, text: str) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(TrainingError) as caught:
        SharedMemorySegment(peer, numel=numel, dtype=torch.float32)
    assert str(caught.value).startswith(text)
    assert str(caught.value).endswith("Use strategy.reduce=backend.")
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors  # those of earlier tests may go meanwhile


def sums_of_many_steps(place: Place) -> list[float]:
    collective = GroupCollective(rank=place.rank, num_ranks=place.num_ranks, device=CPU)
    transport, packing = (
        SharedMemoryReducer(collective, timeout_s=60),
        FlatBuffer([torch.Size([5])], torch.float64, CPU),
    )
    found = []
    total = transport.allocate(packing)
    for step in range(300):
        total.fill_(10.0**place.rank * step)
        transport.sum(total)
        found.append(float(total[-1]))
        total.zero_()  # what an update does to gradients must reach no other rank
    transport.close()
    return found


def test_no_rank_overtakes_another_in_many_steps(pool: Pool) -> None:
    for found in pool.run("tests.strategies.test_shared_memory.sums_of_many_steps", num_ranks=3, group=True):
        assert found == [111.0 * step for step in range(300)]


def let_go_early(place: Place) -> str:
    collective = GroupCollective(rank=place.rank, num_ranks=2, device=CPU)
    segment = SharedMemorySegment(collective, numel=8, dtype=torch.float32)
    if place.rank == 1:
        segment.close()
        return ""
    with pytest.raises(TrainingError) as caught:
        segment.barrier(60)
    return str(caught.value)


def test_a_rank_that_closes_its_reducer_early_ends_the_wait_of_the_other_ranks(pool: Pool) -> None:
    said = pool.run("tests.strategies.test_shared_memory.let_go_early", num_ranks=2, group=True)
    assert said[0] == "rank 1 ended while rank 0 waited for its gradients."


def test_shared_memory_has_no_name_anywhere(pool: Pool) -> None:
    before = sorted(Path("/dev/shm").iterdir())
    segment = SharedMemorySegment(Peer(OWN), numel=8, dtype=torch.float32)
    assert sorted(Path("/dev/shm").iterdir()) == before
    segment.close()
