"""A reducer that sums the gradients of a host twice, or a chosen one that cannot compress, is caught here alone.

What mirrored strategies refuse, choose and check about their exchange; a rank that waits forever for a dead one in the
memory that ranks share, or reads gradients before they are summed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.contract.stepping import Case, train
from tests.launchers.launches import launch_of
from tests.support import zoo
from tests.support.pool import Place, Pool, TaskError
from trainkit.cluster.host import ProcessId, host_id
from trainkit.errors import TrainingError
from trainkit.run.process.error_report import write_error_report
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.collectives import GroupCollective
from trainkit.strategies.data_parallel.strategy import Mirrored, MultiWorkerMirrored
from trainkit.strategies.reducers import shared_memory
from trainkit.strategies.reducers.options import ReductionOptions
from trainkit.strategies.reducers.shared_memory import SharedMemoryReducer, SharedMemorySegment, shared_memory_obstacle
from trainkit.strategies.reducers.vector import HierarchicalReducer
from trainkit.strategies.tensors.layouts import FlatBuffer

CPU = torch.device("cpu")
TWO_HOSTS = launch_of(2, local_rank=0, num_local=1, num_hosts=2)
REPRODUCIBLE = Numerics(reproducible=True)
REFUSED: list[tuple[Any, Any, list[tuple[str, str]]]] = [
    ({"reduce": "ring", "compression": "bf16"}, {"numerics": REPRODUCIBLE},
     [("reduce=ring", "whose order of summation is fixed"), ("compression=bf16", "whose order of summation is fixed")]),
    ({"reduce": "shared_memory"}, {"num_gpus": 2}, [("reduce=shared_memory", "on GPUs. Use backend.")]),
    ({"reduce": "shared_memory"}, {"launch": TWO_HOSTS}, [("reduce=shared_memory", "one host, and there are 2")]),
    ({"reduce": "ring", "bucket_mb": 1.0, "compression": "fp16"}, {},
     [("bucket_mb=1.0", "no effect with strategy.reduce=ring"), ("compression=fp16", "Use strategy.reduce=backend.")]),
    ({"powersgd_rank": 2, "powersgd_after": 5}, {},
     [("powersgd_rank=2", "without strategy.compression=powersgd"), ("powersgd_after=5", "has no effect")]),
    ({"compression": "powersgd"}, {"precision": "fp16_mixed", "numerics": Numerics(on_nonfinite="skip")},
     [("compression=powersgd", "as precision=fp16_mixed does"), ("compression=powersgd", "on_nonfinite=skip does")]),
    ({"reduce": "hierarchical", "bucket_mb": 25.0, "allow_unused": True}, {"launch": TWO_HOSTS}, []),
]  # fmt: skip


def test_what_cannot_go_together_is_refused() -> None:
    for settings, facts, wanted in REFUSED:
        found = [str(problem) for problem in MultiWorkerMirrored(**settings).validate(PlanContext(**facts))]
        for said, (key, word) in zip(found, wanted, strict=True):
            assert said.startswith(f"strategy.{key}: ")
            assert word in said


def test_a_subset_of_the_devices_is_named_in_either_spelling() -> None:
    for name in ("/gpu:0", "gpu:0", 0, "cuda:0", "/device:GPU:0"):
        strategy = Mirrored(devices=(name, "/gpu:2"))
        assert strategy.validate(PlanContext(num_gpus=3)) == []
        assert [task.device for task in strategy.tasks(PlanContext(num_gpus=3))] == ["cuda:0", "cuda:2"]


class Idle(zoo.Net):
    """A layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        zoo.fill(self)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self[2](self[1](self[0](inputs)))
        return outputs


class IdleCase(Case):
    def make_model(self) -> nn.Module:
        return Idle()


IDLE = IdleCase(strategy="mirrored", settings={"replicas": 2}, global_size=16, micro_size=8, num_steps=3)


def test_parameters_without_a_gradient_are_named_with_the_setting_that_allows_them(pool: Pool) -> None:
    with pytest.raises(TaskError, match=r"for spare.weight, spare.bias\. .* strategy\.allow_unused=true"):
        train(pool, IDLE)


@pytest.mark.parametrize("reduce", ["backend", "shared_memory"])
def test_allowed_ones_are_left_as_they_are(reduce: str, pool: Pool) -> None:
    expected = train(pool, replace(IDLE, strategy="one_device", settings={}))[0].weights
    settings = {"replicas": 2, "allow_unused": True, "reduce": reduce, "bucket_mb": 1e-6 if reduce == "backend" else 25}
    for rank in train(pool, replace(IDLE, settings=settings)):
        for name, tensor in expected.items():
            torch.testing.assert_close(rank.weights[name], tensor, rtol=1e-12, atol=0)


def grouped(place: Place, places: list[tuple[int, int]]) -> list[float]:
    packing = FlatBuffer([torch.Size([3])], torch.float64, CPU)
    reducer = HierarchicalReducer(places, rank=place.rank, timeout_s=60)
    reducer.begin(packing, num_shards=4)
    reducer.add(0, [torch.full((3,), 10.0**place.rank, dtype=torch.float64)])
    found: list[float] = reducer.finish()[0].tolist()  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    ("together", "hosts", "sums"),
    [([0] * 4, [7, 9, 7, 9], [1111.0] * 4), ([0] * 4, [7, 8, 9, 9], [1111.0] * 4),
     ([0, 1, 0, 1], [7, 7, 9, 9], [101.0, 1010.0] * 2), ([0, 0, 2, 2], [7, 7, 7, 7], [11.0, 11.0, 1100.0, 1100.0])],
)  # fmt: skip
def test_hosts_are_summed_one_by_one_and_then_together(
    together: list[int], hosts: list[int], sums: list[float], pool: Pool
) -> None:
    places = list(zip(together, hosts, strict=True))
    found = pool.run("tests.strategies.test_reducing.grouped", places, num_ranks=4, group=True)
    assert found == [[one] * 3 for one in sums]


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [({}, (2, 1, False), ("shared_memory", "CPU processes of one host")), ({}, (2, 1, True), ("backend", "GPUs")),
     ({}, (1, 1, False), ("backend", "one replica")), ({}, (4, 2, False), ("backend", "several hosts")),
     ({"bucket_mb": 1.0}, (2, 1, False), ("backend", "bucket_mb")),
     ({"compression": "bf16"}, (2, 1, False), ("backend", "compression")),
     ({"reduce": "ring"}, (2, 1, True), ("ring", ""))],
)  # fmt: skip
def test_auto_is_a_rule_that_says_why(settings: Any, ranks: tuple[int, int, bool], expected: tuple[str, str]) -> None:
    num_ranks, num_hosts, on_gpus = ranks
    options = ReductionOptions(**settings)
    assert options.rule(num_ranks=num_ranks, num_hosts=num_hosts, on_gpus=on_gpus) == expected


def test_ranks_that_cannot_share_memory_all_see_why(pool: Pool) -> None:
    for size, why in ((0, "rank 1 may not open the memory"), (1 << 60, "there are no 3298534883328 MiB of memory")):
        found = pool.run("tests.strategies.test_reducing.hindered", size, num_ranks=2, group=True)
        assert found[0] == found[1]
        assert found[0].startswith(why)
    assert pool.run("tests.strategies.test_reducing.hindered", 8, num_ranks=2, group=True) == [None, None]


def hindered(place: Place, size: int) -> str | None:
    """Look for an obstacle; with a size of 0 the system forbids rank 1 to open the memory of another process."""
    collective = GroupCollective(rank=place.rank, num_ranks=2, device=CPU)
    forbidden = place.rank == 1 and not size
    with patch.object(shared_memory, "_open", lambda _path: -1) if forbidden else nullcontext():
        return shared_memory_obstacle(collective, size)


def test_where_a_rule_meets_an_obstacle_the_other_reducer_is_used_and_a_line_says_why() -> None:
    for num_bytes, reduce, why in ((8, "auto", None), (1 << 60, "backend", "there are no 3298534883328 MiB of memory")):
        found, line = ReductionOptions().without_obstacle(
            Peer(OWN, opened=host_id()), on_gpus=False, num_bytes=num_bytes
        )
        assert found.reduce == reduce
        assert line == (why and f"strategy.reduce=auto: backend, because {why} to share gradients in.")


def test_the_plan_counts_what_reducers_and_compression_keep_beside_the_gradients() -> None:
    kept = {"backend": 0, "ring": 0.5, "shared_memory": 0.5}
    found = {name: Mirrored(reduce=name, replicas=2).gradient_copies(PlanContext()) for name in kept}  # type: ignore[arg-type]
    assert found == kept
    assert Mirrored(compression="powersgd", replicas=2).gradient_copies(PlanContext()) == 2
    assert Mirrored(replicas=1).gradient_copies(PlanContext()) == 0
    assert Mirrored(replicas=2).gradient_copies(PlanContext(num_gpus=2)) == 0


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
    reducer, found = SharedMemoryReducer(collective, timeout_s=60), []
    packing = FlatBuffer([torch.Size([5])], torch.float64, CPU)
    for step in range(300):
        reducer.begin(packing, num_shards=3)
        reducer.add(0, [torch.full((5,), 10.0**place.rank * step, dtype=torch.float64)])
        (total,) = reducer.finish()
        assert total is not None
        found.append(float(total[-1]))
        total.zero_()  # what an update does to gradients must reach no other rank
    reducer.close()
    return found


def test_no_rank_overtakes_another_in_many_steps(pool: Pool) -> None:
    for found in pool.run("tests.strategies.test_reducing.sums_of_many_steps", num_ranks=3, group=True):
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
    said = pool.run("tests.strategies.test_reducing.let_go_early", num_ranks=2, group=True)
    assert said[0] == "rank 1 ended while rank 0 waited for its gradients."


def test_shared_memory_has_no_name_anywhere() -> None:
    before = sorted(Path("/dev/shm").iterdir())
    segment = SharedMemorySegment(Peer(OWN), numel=8, dtype=torch.float32)
    assert sorted(Path("/dev/shm").iterdir()) == before
    segment.close()
