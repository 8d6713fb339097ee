"""A rank that waits forever for a dead one, or reads gradients before they are summed, is caught here alone."""

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
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def waiting(pid: int, timeout_s: float, *, earlier: int = 0) -> TrainingError:
    """What rank 0 says that waits for a process, or for one that began earlier with the same number."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    segment = SharedMemorySegment(Peer(ProcessId(pid, started - earlier)), numel=8, dtype=torch.float32)
    with pytest.raises(TrainingError) as caught:
        segment.barrier(timeout_s)
    return caught.value


def test_a_killed_rank_is_named_while_it_is_still_a_zombie_process(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # now a zombie
    error = waiting(sleeper.pid, timeout_s=60)
    assert str(error) == "rank 1 ended while rank 0 waited for its gradients."
    words = write_error_report(tmp_path / "words.json", 0, error)
    assert (words.is_secondary, words.is_permanent) == (True, False)


def test_a_later_process_with_the_same_number_is_not_taken_for_the_peer(sleeper: subprocess.Popen[bytes]) -> None:
    assert str(waiting(sleeper.pid, timeout_s=60, earlier=1)).startswith("rank 1 ended")


def test_a_running_rank_that_sends_no_gradients_is_named_after_the_timeout(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    error = waiting(sleeper.pid, timeout_s=0.01)
    assert str(error) == "rank 1 sent no gradients to rank 0 in 0.01 s (strategy.timeout_s)."
    assert write_error_report(tmp_path / "words.json", 0, error).is_secondary


@pytest.mark.parametrize(("peer", "numel", "text"), [
    (Peer(OWN, host=7), 8, "rank 1 is not on the host of rank 0"),
    (Peer(OWN, opened=0), 8, "rank 1 may not open the memory"),
    (Peer(OWN), 1 << 50, "there are no 12884901888 MiB of memory"),
])  # fmt: skip
def test_memory_that_cannot_be_shared_is_refused_with_what_to_use(peer: Peer, numel: int, text: str) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(TrainingError, match=rf"^{text}.*Use strategy\.reduce=backend\.$"):
        SharedMemorySegment(peer, numel=numel, dtype=torch.float32)
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors  # those of earlier tests may go meanwhile


def sums_of_many_steps(place: Place) -> list[float]:
    collective = GroupCollective(rank=place.rank, num_ranks=place.num_ranks, device=CPU)
    transport, found = SharedMemoryReducer(collective, timeout_s=60), []
    total = transport.allocate(FlatBuffer([torch.Size([5])], torch.float64, CPU))
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


def test_shared_memory_has_no_name_anywhere() -> None:
    before = sorted(Path("/dev/shm").iterdir())
    segment = SharedMemorySegment(Peer(OWN), numel=8, dtype=torch.float32)
    assert sorted(Path("/dev/shm").iterdir()) == before
    segment.close()
