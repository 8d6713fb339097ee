"""What ranks exchange: reducers and the memory that they share, cut layers and gathered blocks, checks of replicas.

A reducer that sums the gradients of a host twice, a chosen one that cannot compress, a rank that waits forever for a
dead one or reads gradients before they are summed, and a sum that an earlier step leaks into are caught here alone.
So are gradients that are exchanged once a shard instead of once a step, a plan that cuts a layer whose heads or rows do
not come out even, a block that fsdp gathers twice or too late, and a check of replicas that misses a changed bit.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as of_torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tests.contract.checks import alone, assert_close
from tests.contract.running import run
from tests.contract.stepping import Case, refusals_of, run_rank, train
from tests.launchers.launches import launch_of
from tests.support import zoo
from tests.support.counting import Counting
from tests.support.pool import Member, Pool
from tests.support.second_device import SecondDevice, send
from trainkit.cluster.host import ProcessId, host_id
from trainkit.cluster.tasks import Identity
from trainkit.errors import TrainingError
from trainkit.models.gpt import Gpt
from trainkit.models.resnet import ResNet
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import BlockKeys
from trainkit.run.process.error_report import write_error_report
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.collectives import GroupCollective, LocalCollective
from trainkit.strategies.core.replica import bits_hash, drifted_parameter
from trainkit.strategies.data_parallel.strategy import Mirrored, MultiWorkerMirrored
from trainkit.strategies.groups import process_group
from trainkit.strategies.mesh import sharding as fully
from trainkit.strategies.mesh.pipe.rank_stages import groups_alike
from trainkit.strategies.mesh.sharding import Axes, Sharding, blocks_of_model, fully_sharded, without_shared
from trainkit.strategies.mesh.step import unsharded_model_problems
from trainkit.strategies.mesh.strategy import Fsdp, Mesh, TensorParallel
from trainkit.strategies.mesh.tensor_plan import match_plan
from trainkit.strategies.reducers import shared_memory, vector
from trainkit.strategies.reducers.options import ReductionOptions
from trainkit.strategies.reducers.shared_memory import SharedMemoryReducer, SharedMemorySegment, shared_memory_obstacle
from trainkit.strategies.reducers.vector import BackendReducer, HierarchicalReducer, VectorReducer
from trainkit.strategies.tensors.layouts import FlatBuffer, local_part

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
    for settings, facts, expected in REFUSED:
        messages = [str(problem) for problem in MultiWorkerMirrored(**settings).validate(PlanContext(**facts))]
        for message, (key, word) in zip(messages, expected, strict=True):
            assert message.startswith(f"strategy.{key}: ")
            assert word in message


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


IDLE = Case(build=Idle, strategy="mirrored", settings={"replicas": 2}, global_size=16, micro_size=8, num_steps=3)


def test_parameters_without_a_gradient_are_named_with_the_setting_that_allows_them(pool: Pool) -> None:
    (message,) = refusals_of(pool, IDLE)
    assert "for spare.weight, spare.bias. " in message
    assert "strategy.allow_unused=true" in message


@pytest.mark.parametrize("reduce", ["backend", "shared_memory"])
def test_allowed_ones_are_left_as_they_are(reduce: str, pool: Pool) -> None:
    settings = {"replicas": 2, "allow_unused": True, "reduce": reduce, "bucket_mb": 1e-6 if reduce == "backend" else 25}
    assert_close(train(pool, replace(IDLE, settings=settings)), alone(IDLE), atol=0)


def sum_in_groups(member: Member, places: list[tuple[int, int]]) -> list[float]:
    packing = FlatBuffer([torch.Size([3])], torch.float64, CPU)
    reducer = HierarchicalReducer(places, rank=member.rank, timeout_s=60)
    reducer.begin(packing, num_shards=4)
    reducer.add(0, [torch.full((3,), 10.0**member.rank, dtype=torch.float64)])
    total: list[float] = reducer.finish()[0].tolist()  # type: ignore[union-attr]
    return total


@pytest.mark.parametrize(
    ("together", "hosts", "sums"),
    [([0] * 4, [7, 9, 7, 9], [1111.0] * 4), ([0] * 4, [7, 8, 9, 9], [1111.0] * 4),
     ([0, 1, 0, 1], [7, 7, 9, 9], [101.0, 1010.0] * 2), ([0, 0, 2, 2], [7, 7, 7, 7], [11.0, 11.0, 1100.0, 1100.0])],
)  # fmt: skip
def test_hosts_are_summed_one_by_one_and_then_together(
    together: list[int], hosts: list[int], sums: list[float], pool: Pool
) -> None:
    places = list(zip(together, hosts, strict=True))
    totals = pool.run("tests.strategies.test_exchanges.sum_in_groups", places, num_ranks=4, group=True)
    assert totals == [[value] * 3 for value in sums]


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
        obstacles = pool.run("tests.strategies.test_exchanges.obstacle", size, num_ranks=2, group=True)
        assert obstacles[0] == obstacles[1]
        assert obstacles[0].startswith(why)
    assert pool.run("tests.strategies.test_exchanges.obstacle", 8, num_ranks=2, group=True) == [None, None]


def obstacle(member: Member, size: int) -> str | None:
    """Look for an obstacle; with a size of 0 the system forbids rank 1 to open the memory of another process."""
    collective = GroupCollective(rank=member.rank, num_ranks=2, device=CPU)
    forbidden = member.rank == 1 and not size
    with patch.object(shared_memory, "_open", lambda _path: -1) if forbidden else nullcontext():
        return shared_memory_obstacle(collective, size)


def test_where_a_rule_meets_an_obstacle_the_other_reducer_is_used_and_a_line_says_why() -> None:
    for num_bytes, reduce, why in ((8, "auto", None), (1 << 60, "backend", "there are no 3298534883328 MiB of memory")):
        options, line = ReductionOptions().without_obstacle(
            Peer(THIS_PROCESS, opened=host_id()), on_gpus=False, num_bytes=num_bytes
        )
        assert options.reduce == reduce
        assert line == (why and f"strategy.reduce=auto: backend, because {why} to share gradients in.")


def test_the_plan_counts_what_reducers_and_compression_keep_beside_the_gradients() -> None:
    expected = {"backend": (0, 0), "ring": (0.5, 0), "shared_memory": (0.5, 0.5)}
    copies = {name: Mirrored(reduce=name, replicas=2).gradient_copies(PlanContext()) for name in expected}  # type: ignore[arg-type]
    assert copies == expected
    assert Mirrored(compression="powersgd", replicas=2).gradient_copies(PlanContext()) == (2, 1)
    assert Mirrored(replicas=1).gradient_copies(PlanContext()) == (0, 0)
    assert Mirrored(replicas=2).gradient_copies(PlanContext(num_gpus=2)) == (0, 0)


THIS_PROCESS = ProcessId.of(os.getpid())


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


def barrier_error(pid: int, timeout_s: float, *, earlier: int = 0) -> TrainingError:
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
    error = barrier_error(sleeper.pid, timeout_s=60)
    assert str(error) == "rank 1 ended while rank 0 waited for its gradients."
    words = write_error_report(tmp_path / "words.json", 0, error)
    assert (words.is_secondary, words.is_permanent) == (True, False)


def test_a_later_process_with_the_same_number_is_not_taken_for_the_peer(sleeper: subprocess.Popen[bytes]) -> None:
    assert str(barrier_error(sleeper.pid, timeout_s=60, earlier=1)).startswith("rank 1 ended")


def test_a_running_rank_that_sends_no_gradients_is_named_after_the_timeout(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    error = barrier_error(sleeper.pid, timeout_s=0.01)
    assert str(error) == "rank 1 sent no gradients to rank 0 in 0.01 s (strategy.timeout_s)."
    assert write_error_report(tmp_path / "words.json", 0, error).is_secondary


@pytest.mark.parametrize(("peer", "numel", "text"), [
    (Peer(THIS_PROCESS, host=7), 8, "rank 1 is not on the host of rank 0"),
    (Peer(THIS_PROCESS, opened=0), 8, "rank 1 may not open the memory"),
    (Peer(THIS_PROCESS), 1 << 50, "there are no 12884901888 MiB of memory"),
])  # fmt: skip
def test_memory_that_cannot_be_shared_is_refused_with_what_to_use(peer: Peer, numel: int, text: str) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(TrainingError, match=rf"^{text}.*Use strategy\.reduce=backend\.$"):
        SharedMemorySegment(peer, numel=numel, dtype=torch.float32)
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors  # those of earlier tests may go meanwhile


def sums_of_many_steps(member: Member) -> list[float]:
    collective = GroupCollective(rank=member.rank, num_ranks=member.num_ranks, device=CPU)
    reducer, sums = SharedMemoryReducer(collective, timeout_s=60), []
    packing = FlatBuffer([torch.Size([5])], torch.float64, CPU)
    for step in range(300):
        reducer.begin(packing, num_shards=3)
        reducer.add(0, [torch.full((5,), 10.0**member.rank * step, dtype=torch.float64)])
        (total,) = reducer.finish()
        assert total is not None
        sums.append(float(total[-1]))
        total.zero_()  # what an update does to gradients must reach no other rank
    reducer.close()
    return sums


def test_no_rank_overtakes_another_in_many_steps(pool: Pool) -> None:
    for sums in pool.run("tests.strategies.test_exchanges.sums_of_many_steps", num_ranks=3, group=True):
        assert sums == [111.0 * step for step in range(300)]


def close_early(member: Member) -> str:
    collective = GroupCollective(rank=member.rank, num_ranks=2, device=CPU)
    segment = SharedMemorySegment(collective, numel=8, dtype=torch.float32)
    if member.rank == 1:
        segment.close()
        return ""
    with pytest.raises(TrainingError) as caught:
        segment.barrier(60)
    return str(caught.value)


def test_a_rank_that_closes_its_reducer_early_ends_the_wait_of_the_other_ranks(pool: Pool) -> None:
    messages = pool.run("tests.strategies.test_exchanges.close_early", num_ranks=2, group=True)
    assert messages[0] == "rank 1 ended while rank 0 waited for its gradients."


def test_shared_memory_has_no_name_anywhere() -> None:
    before = sorted(Path("/dev/shm").iterdir())
    segment = SharedMemorySegment(Peer(THIS_PROCESS), numel=8, dtype=torch.float32)
    assert sorted(Path("/dev/shm").iterdir()) == before
    segment.close()


LAYER = 64 * 64


def layers(count: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(count)))


class Alone(VectorReducer):
    """A reducer of one rank."""

    def sum(self, flat: Tensor) -> None: ...


def packing_of(params: list[nn.Parameter]) -> FlatBuffer:
    return FlatBuffer.like(params, torch.float32, CPU)


def shard(reducer: VectorReducer, params: list[nn.Parameter], loss: Tensor, *, is_last: bool = False) -> None:
    reducer.begin_backward(params, is_last=is_last)
    loss.backward()  # type: ignore[no-untyped-call]
    reducer.end_backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_backward_the_gradients_are_alive_once(dtype: torch.dtype) -> None:
    model = layers(dtype=dtype)
    params, inputs = list(model.parameters()), torch.ones(1, 64, dtype=dtype)
    with Counting() as counting:
        for param in params:
            counting.see(param.untyped_storage())
        lasting = counting.bytes
        reducer = Alone(LAYER * 4)
        reducer.begin(packing_of(params), num_shards=3)
        for _ in range(3):
            shard(reducer, params, model(inputs).sum())
            assert counting.bytes - lasting == reducer.flat.nbytes == 8 * LAYER * 4
    assert counting.most - lasting < reducer.flat.nbytes + 2.5 * LAYER * dtype.itemsize, "two gradients, activations"
    reducer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [1, LAYER, 100 * LAYER])
def test_gradients_of_several_shards_have_the_bits_of_sums_in_float32(bucket: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, inputs = layers(3, dtype), torch.randn(3, 4, 64, dtype=dtype)
    params, expected = list(model.parameters()), [torch.zeros(64, 64) for _ in range(3)]
    for batch in inputs:
        for total, grad in zip(expected, torch.autograd.grad(model(batch).square().sum(), params), strict=True):
            total.add_(grad)
    reducer, packing = Alone(bucket * 4), packing_of(params)
    for _ in range(2):  # the second step finds the sums of the first in the vector
        model.zero_grad()
        reducer.begin(packing, num_shards=3)
        for batch in inputs:
            shard(reducer, params, model(batch).square().sum())
        reducer.finish()
        assert all(torch.equal(*pair) for pair in zip(reducer.views, expected, strict=True))
        are_views = [param.grad is view for param, view in zip(params, reducer.views, strict=True)]
        assert are_views == [dtype is torch.float32] * 3
    reducer.close()


def test_a_parameter_that_a_shard_does_not_use_keeps_its_sum_and_one_without_any_gets_zeros() -> None:
    model = layers(3)
    params = list(model.parameters())
    reducer, packing = Alone(LAYER * 4), packing_of(params)
    reducer.begin(packing, num_shards=2)
    reducer.flat.fill_(7.0)  # of an earlier step
    shard(reducer, params, params[0].sum())
    shard(reducer, params, params[1].sum())
    reducer.finish()
    assert [sorted(set(view.flatten().tolist())) for view in reducer.views] == [[1.0], [1.0], [0.0]]
    reducer.close()


def test_a_gradient_that_something_replaces_is_the_one_that_counts() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", param.grad * 10))  # type: ignore[no-untyped-call]
    reducer = Alone()
    reducer.begin(packing_of([weight]), num_shards=2)
    shard(reducer, [weight], weight.sum())
    shard(reducer, [weight], weight.sum())
    assert reducer.views[0].tolist() == [110.0] * 4


def test_new_gradients_of_the_last_pass_are_copied_together_with_the_buffers() -> None:
    weight = nn.Parameter(torch.ones(4))
    packing = FlatBuffer([torch.Size([4]), torch.Size([1])], torch.float32, CPU, num_grads=1)
    reducer = Alone(0)
    for shards in (1, 2):
        reducer.begin(packing, num_shards=shards)
        for number in range(shards):
            shard(reducer, [weight], weight.sum(), is_last=number == shards - 1)
        assert (weight.grad is reducer.views[0]) == (shards == 2), "the gradient of a single pass is copied once, later"
        reducer.add(0, [weight.grad, torch.full((1,), 9.0)])
        reducer.finish()
        assert reducer.flat.tolist() == [float(shards)] * 4 + [9.0]
        weight.grad = None


def test_an_interrupted_step_leaves_nothing_for_the_next() -> None:
    model, reducer = layers(2), Alone()
    params = list(model.parameters())
    packing = packing_of(params)
    reducer.begin(packing, num_shards=2)
    shard(reducer, params, sum(param.sum() for param in params))  # type: ignore[arg-type]
    reducer.begin_backward(params, is_last=True)  # the pass fails
    model.zero_grad()  # as `Replica.recover` does
    reducer.begin(packing, num_shards=2)
    for _ in range(2):
        shard(reducer, params, sum(param.sum() for param in params))  # type: ignore[arg-type]
    sums = reducer.finish()
    assert [sorted(set(total.flatten().tolist())) for total in sums if total is not None] == [[2.0], [2.0]]


SIGNS = {"exchange": "x", "first layer": "0", "layer": ".", "end": "|"}
DEEP = (
    "recipe=digits", f"model.hidden={[8] * 13}", "steps=2", "eval.every_epochs=null", "precision=bf16", "quiet=true",
    "strategy=mirrored", "strategy.replicas=1", "strategy.process_group=always", f"strategy.bucket_mb={200 / 2**20}",
    "objective.ignore_index=null",  # a counted weight is one more exchange, at the end
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("strategy.compression=bf16", "batch.micro_size=16")], ids=["", "compressed"])
def test_thirteen_of_fourteen_exchanges_begin_while_backward_computes(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    launch, arrive, end = BackendReducer.launch, BackendReducer._on_gradient, BackendReducer.end_backward

    def launched(self: Any, bucket: Any) -> None:
        events.append("exchange")
        launch(self, bucket)

    def arrived(self: Any, index: int, param: Tensor) -> None:
        events.append("first layer" if index < 2 else "layer")  # its bias may come first, or its weight
        arrive(self, index, param)

    def ended(self: Any) -> None:
        end(self)
        events.append("end")

    monkeypatch.setattr(BackendReducer, "launch", launched)
    monkeypatch.setattr(BackendReducer, "_on_gradient", arrived)
    monkeypatch.setattr(BackendReducer, "end_backward", ended)
    run(tmp_path, *DEEP, *more)
    last = "".join(map(SIGNS.__getitem__, events)).rstrip("|").rpartition("|")[2]  # the last pass of the last step
    assert last.count("x") == 14
    assert last.endswith("0x")
    assert last.count("x", 0, last.index("0")) == 13


PARAMETERS = sum(p.numel() for p in zoo.Net().parameters())


def all_reduce_sizes(member: Member, case: Case) -> list[int]:
    """The elements of every all-reduce of a case."""
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def count(tensor: Tensor, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, **options)

    with mock.patch.object(dist, "all_reduce", count):
        run_rank(member, case)
    return sizes


@pytest.mark.parametrize(("micro_size", "bucket_mb", "expected"), [
    (8, 25.0, [PARAMETERS]), (2, 25.0, [PARAMETERS]),
    # four parameters of 42, 7, 21 and 3 elements of 8 bytes; buckets of at least 160 bytes, from the last parameter on
    (4, 160 / 2**20, [24, 49]),
], ids=["one shard", "accumulated", "buckets"])  # fmt: skip
def test_a_step_is_one_exchange_or_one_a_bucket_however_many_shards_are_accumulated(
    micro_size: int, bucket_mb: float, expected: list[int], pool: Pool
) -> None:
    settings = {"replicas": 2, "reduce": "backend", "bucket_mb": bucket_mb}
    case = Case(strategy="mirrored", settings=settings, global_size=16, micro_size=micro_size, num_steps=3)
    assert pool.run("tests.strategies.test_exchanges.all_reduce_sizes", case, num_ranks=2) == [expected * 3] * 2


def reentrant_error(member: Member) -> str:
    """A layer that two reentrant checkpoints share: its gradient comes in two parts."""
    del member
    layer, last = nn.Linear(4, 4), nn.Linear(4, 4)
    params = [*layer.parameters(), *last.parameters()]
    reducer, hidden = BackendReducer(bucket_bytes=1), torch.ones(2, 4, requires_grad=True)
    reducer.begin(FlatBuffer([p.shape for p in params], torch.float32, CPU), num_shards=2)
    reducer.begin_backward(params, is_last=True)
    for _ in range(2):
        hidden = checkpoint(layer, hidden, use_reentrant=True)
    with pytest.raises(TrainingError) as caught:
        last(hidden).sum().backward()
    reducer.close()
    return str(caught.value)


def test_a_gradient_that_comes_in_two_parts_is_refused_with_what_to_do(pool: Pool) -> None:
    for message in pool.run("tests.strategies.test_exchanges.reentrant_error", num_ranks=2, group=True):
        assert "Use checkpoint(..., use_reentrant=False), or strategy.bucket_mb=0." in message


def sum_through_host(member: Member) -> list[float]:
    """The sum where tensors of a device do not travel to a single rank."""
    collective = GroupCollective(rank=member.rank, num_ranks=2, device=CPU)
    reducer, flat = vector.RingReducer(collective), torch.full((3,), 7.0 + member.rank)
    with mock.patch.object(vector, "sends_from_host", return_value=True):
        reducer.sum(flat)
    total: list[float] = flat.tolist()
    return total


def test_a_ring_of_tensors_that_gloo_cannot_send_goes_through_the_host(pool: Pool) -> None:
    totals = pool.run("tests.strategies.test_exchanges.sum_through_host", num_ranks=2, group=True)
    assert totals == [[15.0] * 3] * 2


def test_ranks_of_the_last_axis_are_neighbours_and_every_rank_has_coordinates_of_its_own() -> None:
    axes = Axes(replicate=2, shard=3, tensor=2)
    assert [axes.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]
    assert axes.coordinates(5) == {"replicate": 0, "shard": 2, "pipe": 0, "context": 0, "tensor": 1}
    coordinates = [tuple(axes.coordinates(rank).values()) for rank in range(axes.num_ranks)]
    assert coordinates == sorted(set(coordinates))
    assert len(coordinates) == 12
    (problem,) = axes.problems(6)
    assert "make 12 ranks, and the run has 6" in str(problem)
    assert axes.problems(12) == []


def timeouts(member: Member) -> list[float]:
    """The seconds that each group of some of four ranks waits for them in an exchange."""
    mesh = Axes(replicate=2, tensor=2).mesh("cpu", timeout_s=7)
    stage_groups = groups_alike([(0,), (0, 1)], Axes(replicate=2, pipe=2), rank=member.rank, timeout_s=8)
    groups = [mesh.get_group("replicate"), mesh.get_group("tensor"), stage_groups[0, 1]]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_groups_of_some_ranks_wait_as_long_as_the_group_of_all(pool: Pool) -> None:
    for seconds in pool.run("tests.strategies.test_exchanges.timeouts", num_ranks=4, group=True):
        assert seconds == [7.0, 7.0, 8.0]


def test_an_attempt_does_not_find_the_signal_of_a_failed_exchange_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    store.set("exception_dump", "0")
    monkeypatch.setattr(process_group, "HashStore", lambda: store)
    ranks = Mirrored(replicas=1, process_group="always").join(Identity.solo())
    ranks.close(failed=False)
    assert not store.check(["exception_dump"])


SIZES: dict[str, Any] = {"vocab_size": 12, "context": 4, "num_layers": 2, "num_heads": 2, "width": 8}


def gpt(**sizes: Any) -> Gpt:
    with torch.device("meta"):
        return Gpt(**{**SIZES, **sizes})


def test_the_plan_of_the_gpt_cuts_every_large_matrix_and_a_vocabulary_that_comes_out_even() -> None:
    fit = match_plan(gpt(), "auto", 2)
    uncut = {name for name, _ in gpt().named_parameters()} - fit.dims.keys()
    modules = {name.rpartition(".")[0].rpartition(".")[2] for name in uncut}
    assert modules == {"positions", "attention_norm", "mlp_norm", "norm"}
    assert fit.dims["embed.tokens.weight"] == 0
    assert not {name for name in match_plan(gpt(vocab_size=13), "auto", 2).dims if "tokens" in name}


@pytest.mark.parametrize("pattern", ["expand", "mlp.expand", "blocks.*.mlp.expand", "type:Li*r"])
def test_a_pattern_is_a_name_the_end_of_one_a_glob_or_a_class(pattern: str) -> None:
    names = {choice.name for choice in match_plan(gpt(), {pattern: "colwise_gathered", "tokens": "rowwise"}, 2).chosen}
    assert names >= {"blocks.0.mlp.expand", "blocks.1.mlp.expand"}


def test_the_first_pattern_that_names_a_module_has_it() -> None:
    fit = match_plan(gpt(), {"blocks.1.mlp.expand": "colwise_gathered", "expand": "colwise"}, 2)
    styles = {choice.name: choice.style.name for choice in fit.chosen}
    assert styles == {"blocks.0.mlp.expand": "colwise", "blocks.1.mlp.expand": "colwise_gathered"}


EXPAND = "blocks.0.mlp.expand"
UNFIT: list[tuple[nn.Module, Any, str, str]] = [
    (zoo.Net(), "auto", "plan=auto", "Net has no plan"),
    (gpt(), {}, "plan={}", "shards nothing"),
    (gpt(), {"expand": "colwize"}, "plan.expand=colwize", "Did you mean colwise?"),
    (gpt(), {"mlp.expnd": "colwise"}, "plan.mlp.expnd=colwise", "no such module. Did you mean mlp.expand?"),
    (gpt(), {"expand": "colwise", EXPAND: "rowwise"}, f"plan.{EXPAND}=rowwise", "is in expand already"),
    (gpt(), {"mlp_norm": "colwise"}, "plan.mlp_norm=colwise", "is for nn.Linear and nn.Embedding"),
    (zoo.Net(width=7), {"0": "colwise", "2": "rowwise"}, "degree=2", "does not divide the 7 rows of 0.weight"),
    (gpt(num_heads=1), {"queries_keys_values": "colwise"}, "degree=2", "does not divide the 1 heads"),
    (gpt(), {"head.output": "colwise_gathered"}, "plan.head.output=colwise_gathered", "are one parameter (tied)"),
    (gpt(), {"expand": "dropout"}, "plan.expand=dropout", "is for nn.Dropout"),
    (nn.Sequential(nn.MultiheadAttention(4, 2)), {"out_proj": "rowwise"}, "plan.out_proj=rowwise",
     "part of an nn.MultiheadAttention"),
    (nn.Sequential(nn.Embedding(4, 2, sparse=True)), {"0": "rowwise"}, "plan.0=rowwise", "need whole rows"),
    (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))), {"0": "rowwise_scattered"},
     "plan.0=rowwise_scattered", "0 computes its weight from other parameters, as weight_norm does"),
]  # fmt: skip


def test_a_plan_that_does_not_fit_the_model_is_refused() -> None:
    for model, plan, key, word in UNFIT:
        texts = [*map(str, TensorParallel(degree=2, plan=plan).validate_model(model, PlanContext()))]
        assert [text for text in texts if text.startswith(f"strategy.{key}: ") and word in text], (key, texts)


@pytest.mark.parametrize(("settings", "key", "word"), [
    ({"degree": 0}, "degree=0", "1 or more"),
    ({"plan": {"0": "colwise"}}, "plan={0:colwise}", "no effect with strategy.degree=1"),
    ({"degree": 2, "replicas": 2, "devices": ("cpu", "cpu")}, "devices=['cpu', 'cpu']", "need 4 devices"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], key: str, word: str) -> None:
    (problem,) = TensorParallel(**settings).validate(PlanContext())
    assert str(problem).startswith(f"strategy.{key}: ")
    assert word in str(problem)


def test_an_order_of_summation_cannot_be_kept() -> None:
    (problem,) = TensorParallel(degree=2).validate(PlanContext(numerics=Numerics(reproducible=True)))
    assert str(problem).startswith("numerics.reproducible=true: is not kept where strategy.degree=2 cuts layers")


def test_a_rank_holds_its_part_of_what_is_cut_and_of_all_rows_where_replicas_share_them_out() -> None:
    plain, sharing = TensorParallel(degree=2, replicas=2), Mesh(shard=2, tensor=2)
    numel = sum(param.numel() for param in gpt().parameters())
    context = PlanContext()
    whole_rows, shared_rows = plain.estimate_memory(gpt(), context), sharing.estimate_memory(gpt(), context)
    assert sum(whole_rows.resident.values()) == (numel - 72) // 2 + 72
    assert sum(shared_rows.resident.values()) == ((numel - 72) // 2 + 72) // 2
    assert whole_rows.transient == 0 < shared_rows.transient


PLAIN = PlanContext()


def deep_gpt(*, num_layers: int = 2) -> nn.Module:
    with torch.device("meta"):
        return Gpt(vocab_size=11, context=4, num_layers=num_layers, num_heads=2, width=8)


def refusals(facts: PlanContext = PLAIN, model: nn.Module | None = None, **settings: Any) -> list[str]:
    strategy = Fsdp(**settings)
    return [str(problem) for problem in strategy.validate(facts) or strategy.validate_model(model or deep_gpt(), facts)]


class Halving(torch.optim.SGD):
    """A user's own rule, which looks at whole parameters and says so."""

    elementwise = False


REPRODUCIBLY = PlanContext(numerics=Numerics(reproducible=True))
FUSED = replace(REPRODUCIBLY, optimizer_makers={"optimizer._target_": [partial(torch.optim.AdamW, fused=True)]})
REFUSED_BY_FSDP: list[tuple[dict[str, Any], PlanContext, str, str]] = [
    ({"replicas": 4, "replicate": 3}, PLAIN, "strategy.replicate=3", "must divide the 4 replicas."),
    ({"replicas": 4, "replicate": 4}, PLAIN, "strategy.replicate=4", "Use at most 2, or strategy=mirrored"),
    ({"wrap": ()}, PLAIN, "strategy.wrap=[]", "names no class"),
    ({"offload": True}, PLAIN, "strategy.offload=true", "the replicas are on the CPU"),
    ({"wrap": ("_Bloc",)}, PLAIN, "strategy.wrap=_Bloc", "Did you mean _Block?"),
    ({"replicas": 16}, REPRODUCIBLY, "strategy.replicas=16", "more replicas than numerics.lanes=8"),
    ({"replicas": 2}, FUSED, "numerics.reproducible=true", "Use optimizer.fused=false, here and on one device"),
    ({}, PlanContext(optimizer=torch.optim.Adafactor), "optimizer._target_=", "Adafactor uses whole parameters"),
    ({}, PlanContext(optimizer=Halving), "optimizer._target_=", "Halving uses whole parameters"),
]


def test_what_cannot_work_is_refused_with_the_remedy() -> None:
    for settings, facts, key, word in REFUSED_BY_FSDP:
        (message,) = refusals(facts, **settings)
        assert message.startswith(key)
        assert word in message
    assert refusals(PlanContext(num_gpus=4), offload=True, replicas=4) == []


def test_parameters_that_cannot_be_cut_are_named() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    model[1].scale = nn.Parameter(torch.tensor(1.0))
    model[1].empty = nn.Parameter(torch.empty(0))
    sparse, scale, empty = refusals(model=model)
    assert "0 has sparse gradients" in sparse
    assert "1.scale has no dims" in scale
    assert "1.empty has no elements" in empty
    replicated = TensorParallel(degree=1, replicas=2)  # which shards nothing
    assert replicated.validate_model(model, PLAIN) == []


def test_blocks_are_gathered_by_themselves_and_tied_weights_with_the_model() -> None:
    model = deep_gpt()
    assert list(without_shared(model, blocks_of_model(model))) == ["blocks.0", "blocks.1"]
    with torch.device("meta"):
        resnet = ResNet(depth=18)
    assert [*without_shared(resnet, blocks_of_model(resnet))][:4] == ["stem.0", "stem.1", "blocks.0", "blocks.1"]


def test_parameters_in_a_list_are_gathered_with_the_model_that_reads_them() -> None:
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "list": nn.ParameterList([torch.ones(2)])})
    assert list(blocks_of_model(model)) == ["layer"]


def test_modules_of_torch_jit_are_refused_and_take_no_keys() -> None:
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Dropout(0.5)))
    BlockKeys(model, seed=0, devices=[])
    assert "1 is a module of torch.jit" in unsharded_model_problems(model)[0].rule


def test_a_rank_holds_rows_and_gathers_a_block_and_the_next_one() -> None:
    model, strategy = deep_gpt(num_layers=3), Fsdp(replicas=4)
    memory = strategy.estimate_memory(model, PLAIN)
    resident = memory.resident
    assert resident["embed.tokens.weight"] == 3 * 8
    assert resident["blocks.0.mlp.expand.weight"] == 32 * 8 // 4
    block, rest = 12 * 8 * 8 + 2 * 8, 11 * 8 + 4 * 8 + 8
    assert memory.transient == rest + 4 * block
    halves = Fsdp(replicas=4, replicate=2).estimate_memory(model, PLAIN).resident
    assert halves["blocks.0.mlp.expand.weight"] == 32 * 8 // 2
    assert Fsdp(replicas=1).estimate_memory(model, PLAIN).transient == 0


class Deep(nn.Module):
    """A layer, eight blocks, and a head; the blocks are called in an order."""

    def __init__(self, order: list[int], events: list[str]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(8))
        self.order, self.events = order, events

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for number in self.order:
            hidden = self.blocks[number](hidden)
            hidden.register_hook(lambda _grad, number=number: self.events.append(f"backward {number}"))
            self.events.append(f"forward {number}")
        outputs: Tensor = self.head(hidden)
        return outputs


@pytest.fixture
def eight() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


class Noting(Alone):
    """A reducer of one rank, which notes the buckets that it would exchange in backward."""

    overlaps = True

    def __init__(self, bucket_bytes: int) -> None:
        super().__init__(bucket_bytes)
        self.full: list[int] = []

    def on_full(self, number: int) -> None:
        self.full.append(number)


def test_parts_of_gradients_go_into_the_vector_bucket_by_bucket(eight: None) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    sharding = Sharding(mesh=mesh, device=torch.device("cpu"), precision=Precision(value="fp32"))
    fully_sharded(model, list(model)[:3], sharding)
    params = list(model.parameters())
    reducer = Noting(8 * 8 * 4)
    reducer.begin(FlatBuffer([param.shape for param in params], torch.float32, torch.device("cpu")), num_shards=2)
    for is_last in (False, True):
        reducer.begin_backward(params, is_last=is_last)
        model(torch.eye(8)).sum().backward()
        assert sorted(reducer.full) == ([0, 1, 2, 3] if is_last else [])
        reducer.end_backward()
    assert all(reducer.has_taken(index) and param.grad is None for index, param in enumerate(params))
    unsharded = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    unsharded.load_state_dict({key: local_part(value) for key, value in model.state_dict().items()})
    unsharded(torch.eye(8)).sum().backward()
    for sum_, param in zip(reducer.finish(), unsharded.parameters(), strict=True):
        assert sum_ is not None
        assert param.grad is not None
        torch.testing.assert_close(sum_, 2 * param.grad)


def events_of_a_step(order: list[int], monkeypatch: pytest.MonkeyPatch, *, prefetches: bool = False) -> list[str]:
    """What the second step gathers and computes."""
    events: list[str] = []
    model = Deep(order, events)
    gather, in_order = of_torch.foreach_all_gather, fully.gather_in_order  # type: ignore[attr-defined]

    def recorded(params: Any, *args: Any, **options: Any) -> Any:
        events.append("gather " + params[0]._param_fqn.rpartition(".0.")[0].removeprefix("blocks."))
        return gather(params, *args, **options)

    monkeypatch.setattr(fully, "gather_in_order", lambda model, **_: in_order(model, prefetches=prefetches))
    mesh, device = init_device_mesh("cpu", (8,)), torch.device("cpu")
    sharding = Sharding(mesh=mesh, device=device, precision=Precision(value="fp32"))
    fully_sharded(model, model.blocks, sharding)
    monkeypatch.setattr(of_torch, "foreach_all_gather", recorded)
    for _ in range(2):
        events.clear()
        model(torch.ones(2, 8)).sum().backward()
    return events


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("prefetches", [False, True])
def test_each_block_is_gathered_once_a_direction_in_the_order_of_the_calls(
    prefetches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [3, 1, 0, 2, 7, 5, 4, 6]
    events = events_of_a_step(order, monkeypatch, prefetches=prefetches)
    gathers = [event for event in events if event.startswith("gather")]
    names = ["gather ", *(f"gather {number}" for number in order)]
    assert gathers == [*names, *names[-2:0:-1]], "the rest and the last block stay gathered"


@pytest.mark.usefixtures("eight")
def test_with_streams_a_gather_begins_while_the_block_before_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of_a_step([*range(8)], monkeypatch, prefetches=True)
    for number in range(1, 8):
        assert events.index(f"gather {number}") < events.index(f"forward {number - 1}")
    backward = events[events.index("backward 7") :]
    assert "gather 6" in events[events.index("forward 7") : events.index("backward 7")], "begun by the head"
    for number in range(6):
        assert backward.index(f"gather {number}") < backward.index(f"backward {number + 1}") + 2


def replica_of(model: nn.Module, ranks: GroupCollective | LocalCollective) -> Any:
    """What the check reads of a whole replica."""
    owners, device = dict(model.named_parameters()), torch.device("cpu")
    return SimpleNamespace(owners=owners, parts={}, cuts={}, masters_apart=False, data_ranks=ranks, device=device)


def drift(member: Member, wrong: tuple[int, ...], name: str) -> str | None:
    """What the check of a replica says, once some ranks have changed one bit of a parameter."""
    model = zoo.Net()
    if member.rank in wrong:
        with torch.no_grad():
            dict(model.named_parameters())[name].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    collective = GroupCollective(rank=member.rank, num_ranks=member.num_ranks, device=torch.device("cpu"))
    return drifted_parameter(replica_of(model, collective))


@pytest.mark.parametrize(("wrong", "name", "text"), [
    ((), "0.weight", None), ((1,), "2.bias", "the parameter 2.bias differs on rank 1 from rank 0."),
    ((0,), "0.weight", "the parameter 0.weight differs on rank 0 from rank 1."),
    ((0, 1), "0.bias", "the parameter 0.bias differs on rank 2 from rank 0."),
])  # fmt: skip
def test_one_changed_bit_of_a_replica_is_found_and_named(wrong: Any, name: str, text: str | None, pool: Pool) -> None:
    texts = pool.run("tests.strategies.test_exchanges.drift", wrong, name, num_ranks=3, group=True)
    assert texts == [text] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_bits_of_every_dtype_are_hashed_by_their_place(dtype: torch.dtype) -> None:
    first, second = torch.tensor([1, 0, 0]).to(dtype), torch.tensor([0, 1, 0]).to(dtype)
    assert int(bits_hash(first)) != int(bits_hash(second))
    assert (first.tolist(), second.tolist()) == ([1, 0, 0], [0, 1, 0])  # the bits of float64 are int64, without a copy


def test_parameters_on_two_devices_are_compared() -> None:
    model = zoo.Net()
    with SecondDevice():
        send(model.get_submodule("2"))
        assert drifted_parameter(replica_of(model, LocalCollective())) is None
