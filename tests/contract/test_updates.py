"""Variables in one place, which threads or workers update, are the training of one device; sparse gradients too.

A gradient that a server applies twice, drops or divides by the wrong number, a copy that computes with variables of the
update before, and repeated rows of a sparse gradient that are clipped or averaged once are caught here alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract import stepping
from tests.contract.checks import alone, assert_bits, assert_close, assert_reference
from tests.contract.running import run, weights
from tests.contract.stepping import OPTIMIZERS, Case, Frozen, _Rank, oracle, train, train_in_threads
from tests.support import reference, zoo
from tests.support.pool import Member, Pool
from tests.support.present import present
from trainkit.numerics.batch import BatchPlan, SampleOrder
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.central_storage import AsyncCentralExecutor, CentralStorage
from trainkit.strategies.collectives import LocalCollective
from trainkit.strategies.core import copies
from trainkit.strategies.core.copies import ThreadWork
from trainkit.strategies.core.step import ShardStep, gather_sparse, sparse_figures, with_values
from trainkit.strategies.model_transforms import ModelTransforms
from trainkit.strategies.updates.scheduler import BOUNDED, PendingUpdate, Policy, Staleness, read_record
from trainkit.strategies.updates.server import ParameterServerClient
from trainkit.trainer.checkpoint.tensors import load

pytestmark = pytest.mark.pairwise

SPARSE_PLACES = [("one_device", 1), ("mirrored", 1), ("mirrored", 2), ("mirrored", 3)]


class Lookup(nn.Module):
    """An embedding and a head, not tied: one sparse gradient and two dense ones."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.TOKENS, 4, sparse=sparse)
        self.head = nn.Linear(4, zoo.TOKENS)
        zoo.fill(self)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.embed(tokens))
        return outputs


@dataclass(frozen=True, kw_only=True)
class Words(Case):
    task: str = "tokens"
    sparse: bool = True

    def make_model(self) -> nn.Module:
        return Lookup(sparse=self.sparse)


def placed(case: Case, strategy: str, replicas: int) -> Case:
    return replace(case, strategy=strategy, settings={} if strategy == "one_device" else {"replicas": replicas})


@pytest.mark.parametrize(("strategy", "replicas"), SPARSE_PLACES)
@pytest.mark.parametrize("optimizer", ["plain_sgd", "adagrad"])
def test_sparse_gradients_are_dense_ones_to_rounding(optimizer: str, strategy: str, replicas: int, pool: Pool) -> None:
    # batches of 8 and 5 sequences in shards of 2: accumulated, counted weights, and a clip that is felt
    case = Words(optimizer=optimizer, micro_size=2, max_norm=0.05)
    make = OPTIMIZERS[optimizer]
    ranks = train(pool, placed(case, strategy, replicas))
    assert_reference(ranks, replace(case, sparse=False), optimizer=lambda named: make([param for _, param in named]))


def of_the_table() -> nn.Module:
    """SparseAdam takes no dense gradient: the embedding alone is trained."""
    model = Lookup(sparse=True)
    model.head.requires_grad_(False)
    return model


def test_sparse_adam_is_the_same_on_any_number_of_replicas(pool: Pool) -> None:
    base = Case(task="tokens", build=of_the_table, optimizer="sparse_adam", micro_size=2)
    assert_close(train(pool, placed(base, "mirrored", 3)), alone(base))


# in bf16 a dense backward pass adds the rows of a word in 8 bits, a sparse one leaves them to be added in the masters'
@pytest.mark.parametrize(("precision", "tolerance"), [("fp16_mixed", 1e-5), ("bf16", 2.0**-8)])
def test_sparse_gradients_are_scaled_and_kept_in_masters_like_dense_ones(
    precision: str, tolerance: float, pool: Pool
) -> None:
    sparse = Words(precision=precision, optimizer="plain_sgd", micro_size=2, strategy="mirrored")
    sparse = replace(sparse, settings={"replicas": 2})
    expected = train(pool, replace(sparse, sparse=False))[0].weights
    for name, tensor in train(pool, sparse)[0].weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=0.1 * tolerance)


def test_a_reproducible_run_makes_them_dense_and_keeps_its_bits(pool: Pool) -> None:
    base = Words(precision="fp32", optimizer="plain_sgd", micro_size=2, reproducible=True)
    expected = train(pool, placed(replace(base, sparse=False), "one_device", 1))[0].state
    for count in (1, 3):
        for rank in train(pool, placed(base, "mirrored", count)):
            assert all(torch.equal(tensor, rank.state[key]) for key, tensor in expected.items())


def test_momentum_of_sparse_gradients_is_saved_as_a_dense_tensor(pool: Pool) -> None:
    case = replace(Words(optimizer="sgd", micro_size=2), num_steps=4)
    expected = train(pool, case)[0]
    assert expected.state["optimizer/momentum_buffer/embed.weight"].layout is torch.strided
    parts = train(pool, replace(case, resume_at=2))[0]
    torch.testing.assert_close(parts.weights["embed.weight"], expected.weights["embed.weight"], rtol=1e-12, atol=1e-14)


def test_what_is_spared_is_measured() -> None:
    grad = torch.sparse_coo_tensor(torch.tensor([[3, 3, 7]]), torch.ones(3, 4), (100, 4))
    total, sent_bytes = gather_sparse(grad, torch.zeros(100, 4), sparse_dim=1, collective=LocalCollective())
    assert total.coalesce().indices().tolist() == [[3, 7]]
    assert sent_bytes == 2 * (4 + 4 * 4)  # an index of 4 bytes and 4 floats a row
    figures = sparse_figures({0: total}, sent_bytes, num_ranks=2)
    assert figures == {"sparse_density": 0.02, "sparse_saved_mb": (100 * 4 * 4 - 40) / 2**20}


def test_numbers_of_sparse_gradients_are_changed_in_place() -> None:
    grads, values = with_values(
        [torch.ones(2), None, torch.sparse_coo_tensor(torch.tensor([[1, 1]]), [1.0, 2.0], (3,))]
    )
    torch._foreach_mul_(values, 2.0)
    assert present(grads[0]).tolist() == [2.0, 2.0]
    assert present(grads[2]).to_dense().tolist() == [0.0, 6.0, 0.0]


def figures_of(member: Member, case: Case) -> dict[str, float]:
    rank = _Rank(member, case)
    executor = rank.setup(0)
    rank.steps(executor, 1)
    executor.close()
    return executor.local.step_metrics


def test_a_step_says_how_dense_its_sparse_gradients_are_and_what_that_spares(pool: Pool) -> None:
    case = Words(strategy="mirrored", settings={"replicas": 2}, optimizer="plain_sgd", global_size=2, micro_size=1)
    words = {int(word) for index in reference.order(29, seed=3, epoch=0)[:2] for word in case.make_data()[index][0]}
    for figures in pool.run("tests.contract.test_updates.figures_of", case, num_ranks=2):
        assert figures["sparse_density"] == len(words) / zoo.TOKENS
        assert figures["sparse_saved_mb"] < zoo.TOKENS * 4 * 8 / 2**20


CENTRAL = Case(task="classes", global_size=16, micro_size=16)


def central(case: Case, threads: int) -> Case:
    return replace(case, strategy="central_storage", settings={"compute_devices": ["cpu"] * threads})


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_reproducible_runs_of_threads_have_the_bits_of_one_device(threads: int, pool: Pool) -> None:
    model = {"norm": True, "dropout": 0.3}
    base = Case(precision="fp32", optimizer="adamw", reproducible=True, model=model, global_size=20, max_norm=0.5)
    base = replace(base, micro_size=3)
    assert_bits(train(pool, central(base, threads)), alone(base))


@pytest.mark.parametrize(
    "base",
    [
        replace(CENTRAL, precision="bf16", optimizer="adamw", micro_size=5),
        replace(CENTRAL, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1, micro_size=8),
        replace(CENTRAL, precision="fp64", model={"norm": True, "dropout": 0.3}, micro_size=6, resume_at=4),
    ],
    ids=["masters", "scaled", "random"],
)
def test_precision_randomness_and_resume_are_those_of_one_device(base: Case, pool: Pool) -> None:
    (expected,), (rank,) = train(pool, base), train(pool, central(base, 2))
    assert rank.scale == expected.scale
    # the order of summation differs; what is summed was rounded to 8, 11 and 53 bits
    rtol = {"bf16": 2.0**-7, "fp16_mixed": 2.0**-10, "fp64": 1e-12}[base.precision]
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(rank.weights[name], tensor, rtol=rtol, atol=rtol * float(tensor.abs().max()))


def own_memory(param: nn.Parameter, _device: torch.device, *, shares: bool) -> nn.Parameter:
    """As on another device."""
    del shares
    return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)


def test_copies_elsewhere_are_brought_up_to_date_after_every_update(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CENTRAL, micro_size=3, model={"norm": True}, resume_at=4)
    (expected,) = train(pool, central(case, 2))
    monkeypatch.setattr(copies, "_on", own_memory)
    assert_bits(train(pool, central(case, 2)), expected)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_copies_elsewhere_get_what_is_not_trained_from_a_checkpoint(
    mode: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Frozen(task="classes").from_a_checkpoint()
    expected = alone(case)
    monkeypatch.setattr(copies, "_on", own_memory)
    settings = {"compute_devices": ["cpu"] * (2 if mode == "sync" else 1), "mode": mode}
    assert_close(train(pool, replace(case, micro_size=3, strategy="central_storage", settings=settings)), expected)


@pytest.mark.gpu
def test_a_gpu_and_the_cpu_compute_with_variables_of_the_cpu(pool: Pool) -> None:
    # adamw would turn the rounding of the bias before the norm, whose gradient is zero, into whole steps of it
    case = replace(CENTRAL, micro_size=4, model={"norm": True})
    (rank,) = train(pool, replace(case, strategy="central_storage", settings={"compute_devices": [0, "cpu"]}))
    assert {tensor.device.type for tensor in rank.state.values()} == {"cpu"}
    assert reference.differences(rank.weights, oracle(case)) == []


def test_every_compute_device_has_a_thread(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def counted(work: ThreadWork, shard: int, batch: object) -> object:
        threads.add((current_thread().name, work.replica.model))
        return ShardStep._shard(work, shard, batch)

    monkeypatch.setattr(ThreadWork, "_shard", counted)
    train(pool, central(replace(CENTRAL, micro_size=4, num_steps=1), 3))
    assert len({model for _, model in threads}) == 3
    assert {name.rpartition("_")[0] for name, _ in threads} == {"compute"}


@pytest.mark.slow
def test_ending_it_ends_its_threads_and_gives_torch_its_own_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    overrides = ("data=points", "model=net", "epochs=2", "batch.global_size=8", "batch.micro_size=2")
    expected = run(tmp_path / "one", *overrides)
    result = run(tmp_path / "central", "strategy=central_storage", *overrides)
    assert torch.get_num_threads() == before
    assert result["metrics"]["val/loss"] == pytest.approx(expected["metrics"]["val/loss"], rel=1e-12)
    torch.testing.assert_close(weights(result), weights(expected), rtol=1e-12, atol=1e-14)


ASYNC = (
    "strategy=central_storage", "strategy.mode=async", "data=points", "model=net", "epochs=3", "batch.global_size=4",
)  # fmt: skip


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose gradients were applied, in that order."""
    steps, apply = [], AsyncCentralExecutor._apply

    def noted(executor: AsyncCentralExecutor, update: PendingUpdate, work: ThreadWork) -> Any:
        steps.append(update.items[0].ticket.step)
        return apply(executor, update, work)

    monkeypatch.setattr(AsyncCentralExecutor, "_apply", noted)
    return steps


@pytest.mark.slow
def test_one_thread_that_updates_as_it_comes_is_one_device_to_the_bit(tmp_path: Path, applied: list[int]) -> None:
    expected = run(tmp_path / "one", *ASYNC[2:], "clip.max_norm=0.1")
    result = run(tmp_path / "async", *ASYNC, "strategy.compute_devices=[cpu]", "clip.max_norm=0.1")
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert applied == list(range(30))


@pytest.mark.slow
def test_asynchronous_threads_use_every_batch_once_and_say_how_stale_they_are(
    tmp_path: Path, applied: list[int]
) -> None:
    result = run(tmp_path / "run", *ASYNC, "strategy.compute_devices=[cpu,cpu,cpu]", "log_every_steps=1")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    stale = [row["staleness"] for row in rows if "staleness" in row]
    assert (result["steps"], sorted(applied), len(stale)) == (30, list(range(30)), 30)
    assert stale[0] == 0
    assert 0 < max(stale) <= 29


@pytest.mark.slow
def test_steps_that_were_unfinished_at_a_checkpoint_are_repeated_after_a_resume(
    tmp_path: Path, applied: list[int]
) -> None:
    threads = ("strategy.compute_devices=[cpu,cpu,cpu]", "checkpoint.every_steps=7", "checkpoint.keep_last=9")
    run(tmp_path / "first", *ASYNC, *threads)
    before = applied[:7]
    applied.clear()
    run(tmp_path / "second", *ASYNC, *threads, f"resume={tmp_path}/first/checkpoints/step_00000007")
    assert sorted([*before, *applied]) == list(range(30))
    assert len(applied) == 23


@pytest.mark.slow
def test_each_threads_optimizer_continues_its_own_state(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", *ASYNC, "strategy.compute_devices=[cpu,cpu]")
    tensors = load(Path(ended["last"])).tensors
    counts = [float(tensors[f"optimizer/{slot}/0.weight"]) for slot in ("step", "step@1")]
    assert sum(counts) == 30
    assert min(counts) > 0


def test_copies_that_start_from_one_state_have_slots_of_their_own() -> None:
    case = replace(CENTRAL, optimizer="adamw", num_steps=2)
    settings = {"compute_devices": ["cpu"] * 3, "mode": "async"}
    executor = _Rank(None, replace(case, strategy="central_storage", settings=settings)).setup(0)
    executor.load_state_dict(alone(case).state)
    tensors = [tensor for key, tensor in executor.state_dict().items() if key.startswith("optimizer/")]
    executor.close()
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors) > 3


@pytest.mark.parametrize("threads", [1, 3])
def test_overflows_of_asynchronous_threads_lower_one_loss_scale(threads: int, pool: Pool) -> None:
    base = replace(CENTRAL, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1, initial_scale=2.0**24)
    expected, settings = alone(base), {"compute_devices": ["cpu"] * threads, "mode": "async"}
    (rank,) = train(pool, replace(base, strategy="central_storage", settings=settings))
    assert rank.scale < 2.0**24
    equal = [key for key, tensor in expected.state.items() if torch.equal(tensor, rank.state[key])]
    assert threads > 1 or (rank.scale, len(equal)) == (expected.scale, len(expected.state))
    assert all(tensor.isfinite().all() for tensor in rank.weights.values())


def test_variables_are_on_the_cpu_unless_one_device_computes_alone() -> None:
    def home(**settings: object) -> str:
        return CentralStorage(**settings).tasks(PlanContext(num_gpus=2))[0].device  # type: ignore[arg-type]

    assert home() == "cpu"
    assert home(compute_devices=(1,)) == "cuda:1"
    assert home(parameter_device="/gpu:1") == "cuda:1"


@pytest.mark.parametrize(("settings", "key", "word"), [
    ({"compute_devices": ()}, "compute_devices=[]", "names no device"),
    ({"compute_devices": (0, 0)}, "compute_devices=[0, 0]", "names cuda:0 twice. A GPU computes one copy."),
    ({"compute_devices": (3,)}, "compute_devices=3", "this host has 2"),
    ({"parameter_device": "gpu:x"}, "parameter_device=gpu:x", "not the name of a device"),
    ({"compute_devices": ("cpu",) * 9}, "compute_devices=9", "more devices than numerics.lanes=8"),
])  # fmt: skip
def test_devices_that_cannot_be_are_refused(settings: dict[str, object], key: str, word: str) -> None:
    facts = PlanContext(num_gpus=2, numerics=Numerics(reproducible=True))
    (problem,) = CentralStorage(**settings).validate(facts)  # type: ignore[arg-type]
    assert str(problem).startswith(f"strategy.{key}: ")
    assert word in str(problem)


CLASSES = Case(task="classes", global_size=16, micro_size=3)
TOKENS = Case(task="tokens", global_size=8, micro_size=2)


def served(case: Case, workers: int, servers: int, **settings: object) -> Case:
    chosen = {"workers": workers, "servers": servers, "timeout_s": 60.0, **settings}
    return replace(case, strategy="parameter_server", settings=chosen)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_graphs")
def test_two_devices_of_a_compiled_worker_train_as_the_reference(pool: Pool) -> None:
    compiled = ModelTransforms(compile_mode="default", backend="aot_eager")
    case = Case(micro_size=4, optimizer="adamw", max_norm=0.5, num_steps=3, resume_at=2, shaping=compiled)
    assert_reference(train_in_threads(pool, served(case, 1, 1, devices_per_worker=2)), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "servers", "devices"),
    [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 3, 1), (2, 3, 1), (4, 3, 1), (1, 1, 4), (2, 1, 2), (2, 3, 3)],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("base", [CLASSES, TOKENS], ids=["classes", "tokens"])
def test_six_steps_are_those_of_the_reference(
    base: Case, optimizer: str, workers: int, servers: int, devices: int, pool: Pool
) -> None:
    chosen = replace(base, optimizer=optimizer, max_norm=0.05)
    case = served(chosen, workers, servers, devices_per_worker=devices)
    assert_reference(train_in_threads(pool, case), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "servers", "devices"), [(1, 3, 1), (2, 1, 1), (4, 3, 1), (1, 1, 3), (2, 1, 2), (3, 2, 2)]
)
@pytest.mark.parametrize("base", [CLASSES, TOKENS], ids=["classes", "tokens"])
def test_reproducible_runs_have_the_bits_of_one_device(
    base: Case, workers: int, servers: int, devices: int, pool: Pool
) -> None:
    model = {"norm": True} if base is CLASSES else {}
    lanes = replace(base, precision="fp32", optimizer="adamw", reproducible=True, max_norm=0.5, model=model)
    assert_bits(train_in_threads(pool, served(lanes, workers, servers, devices_per_worker=devices)), alone(lanes))


@pytest.mark.parametrize(
    "base",
    [
        replace(CLASSES, optimizer="adamw", model={"norm": True, "dropout": 0.3}, max_norm=0.5),
        replace(TOKENS, optimizer="sgd", max_norm=0.05),
        replace(CLASSES, precision="bf16", optimizer="adamw"),
    ],
    ids=["random", "tokens", "masters"],
)
def test_async_with_one_worker_is_one_device_to_the_bit(base: Case, pool: Pool) -> None:
    case = base if base.precision == "bf16" else replace(base, precision="fp32")
    assert_bits(train_in_threads(pool, served(case, 1, 2, mode="async")), alone(case))


@pytest.mark.parametrize("base", [CLASSES, TOKENS], ids=["classes", "tokens"])
def test_the_devices_of_an_asynchronous_worker_make_one_update_together(base: Case, pool: Pool) -> None:
    model = {"norm": True} if base is CLASSES else {}
    case = replace(base, max_norm=0.05, model=model)
    assert_close(train_in_threads(pool, served(case, 1, 1, mode="async", devices_per_worker=3)), alone(case))


class WithoutElements(zoo.Net):
    """A layer whose weight has no elements, and a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        return super().forward(inputs) + self.empty.sum()


def test_a_parameter_without_elements_counts_nothing_in_the_norm_of_gradients(pool: Pool) -> None:
    case = served(Case(build=WithoutElements, micro_size=4, max_norm=0.05), 1, 2)
    assert_reference(train_in_threads(pool, case), case)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_devices_of_a_worker_have_what_it_has_read(mode: str, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Frozen(task="classes", micro_size=3).from_a_checkpoint()
    expected, workers = alone(case), 2 if mode == "sync" else 1
    monkeypatch.setattr(copies, "_on", own_memory)
    assert_close(train_in_threads(pool, served(case, workers, 1, mode=mode, devices_per_worker=2)), expected)


def test_a_slow_worker_of_several_devices_and_spares_change_no_bit(pool: Pool) -> None:
    base = replace(CLASSES, precision="fp32", reproducible=True, model={"norm": True})
    spared = served(base, 3, 1, spare_replicas=1, devices_per_worker=2)
    assert_bits(train_in_threads(pool, replace(spared, slowed={1: 0.1})), alone(base))


def test_the_warmup_of_many_workers_is_one_device_to_the_bit(pool: Pool) -> None:
    case = replace(CLASSES, precision="fp32", optimizer="adamw", model={"norm": True})
    assert_bits(train_in_threads(pool, served(case, 3, 1, mode="async", warmup_steps=10)), alone(case))


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.slow
def test_a_replay_has_the_bits_of_the_run_it_follows(mode: str, tmp_path: Path, pool: Pool) -> None:
    case = replace(CLASSES, precision="fp32", optimizer="adamw", model={"norm": True}, num_steps=9, slowed={1: 0.05})
    stale: dict[str, object] = {"mode": "async", "staleness": Staleness(policy="scale")}
    chosen = stale if mode == "async" else {"spare_replicas": 1, "spare_mode": "replace"}
    first = served(case, 4, 2, **chosen)
    (recorded,) = train_in_threads(pool, replace(first, folder=tmp_path))
    again = served(replace(case, slowed={2: 0.05}), 3, 1, **chosen, replay=str(tmp_path))
    (replayed,) = train_in_threads(pool, again)
    reads = [line.version - part.version for line in read_record(tmp_path / "updates.jsonl") for part in line.items]
    assert mode == "sync" or max(reads) > 0
    assert [key for key, tensor in recorded.state.items() if not torch.equal(tensor, replayed.state[key])] == []


@pytest.mark.parametrize("policy", ["drop", "scale", "lr", "bound"])
def test_every_policy_uses_every_step_once(policy: Policy, tmp_path: Path, pool: Pool) -> None:
    staleness = Staleness(policy=policy, bound=1 if policy in BOUNDED else None)
    case = replace(CLASSES, num_steps=12, folder=tmp_path, slowed={2: 0.05})
    (chief,) = train_in_threads(pool, served(case, 3, 1, mode="async", staleness=staleness))
    lines = list(read_record(tmp_path / "updates.jsonl"))
    assert sorted(part.ticket.step for line in lines for part in line.items) == list(range(12))
    assert policy != "drop" or max(line.staleness for line in lines) <= 1
    assert len(chief.losses) == 12


def test_a_training_continued_in_async_mode_repeats_unfinished_steps(tmp_path: Path, pool: Pool) -> None:
    case = replace(CLASSES, num_steps=12, resume_at=5, folder=tmp_path)
    (chief,) = train_in_threads(pool, served(case, 3, 1, mode="async"))
    assert len(chief.losses) == 12
    lines = list(read_record(tmp_path / "updates.jsonl"))
    assert [line.version for line in lines] == list(range(12))
    assert sorted(part.ticket.step for line in lines for part in line.items) == list(range(12))


@pytest.mark.parametrize("spares", [1, 2])
@pytest.mark.parametrize("mode", ["duplicate", "replace"])
@pytest.mark.slow
def test_with_slow_workers_and_spares_every_sample_is_used_once_an_epoch(
    mode: str, spares: int, tmp_path: Path, pool: Pool
) -> None:
    base = replace(CLASSES, precision="fp32", num_steps=9, model={"norm": True})  # 3 epochs of 37
    spared = served(base, 5, 1, spare_replicas=spares, spare_mode=mode)
    (chief,) = train_in_threads(pool, replace(spared, slowed={1: 0.1, 3: 0.1}, folder=tmp_path))
    plan = BatchPlan(num_samples=37, global_size=base.global_size, micro_size=base.micro_size)
    order = SampleOrder(num_samples=37, seed=base.seed)
    lines = list(read_record(tmp_path / "updates.jsonl"))
    for epoch in range(3):
        tickets = [part.ticket for line in lines[3 * epoch : 3 * epoch + 3] for part in line.items]
        spans = [plan.shard_range(ticket.step, ticket.shards[0]) for ticket in tickets]
        assert sorted(index for span in spans for index in order.indices(*span).tolist()) == list(range(37))
    if mode == "duplicate":
        (undisturbed,) = train_in_threads(pool, served(base, 5, 1))
        assert [key for key, tensor in undisturbed.state.items() if not torch.equal(tensor, chief.state[key])] == []


@pytest.mark.parametrize("devices", [1, 2])
def test_masks_and_statistics_are_those_of_one_device_in_processes_too(devices: int, pool: Pool) -> None:
    base = replace(
        CLASSES, precision="fp32", optimizer="adamw", reproducible=True, model={"norm": True, "dropout": 0.3}
    )
    assert_bits(train(pool, served(base, 2, 1, devices_per_worker=devices)), *train(pool, base))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "workers", "devices"), [("sync", 2, 1), ("async", 1, 1), ("sync", 2, 2)])
@pytest.mark.parametrize("optimizer", ["plain_sgd", "adagrad"])
def test_only_the_rows_that_are_looked_up_are_pulled_and_the_numbers_are_those_of_one_device(
    mode: str, workers: int, devices: int, optimizer: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Words(optimizer=optimizer, micro_size=2, max_norm=0.05)
    pulled: list[list[bool]] = []
    pull = ParameterServerClient.pull

    def noted(servers: ParameterServerClient, into: Sequence[Tensor | None]) -> int:
        pulled.append([tensor is None for tensor in into])
        return pull(servers, into)

    monkeypatch.setattr(ParameterServerClient, "pull", noted)
    ranks = train_in_threads(pool, served(case, workers, 2, mode=mode, devices_per_worker=devices))
    assert_close(ranks, alone(case))
    assert {tuple(flags) for flags in pulled} == {(True, False, False)}


def test_numbers_that_travel_as_bfloat16_train_nearly_the_same(pool: Pool) -> None:
    case = replace(CLASSES, precision="fp32", rate_scale=0.1)
    expected = alone(case)
    (rank,) = train_in_threads(pool, served(case, 2, 2, transfer="bf16"))
    for name, tensor in expected.weights.items():
        assert not torch.equal(rank.weights[name], tensor)
        torch.testing.assert_close(rank.weights[name], tensor, rtol=2.0**-6, atol=2.0**-6 * float(tensor.abs().max()))


@pytest.mark.parametrize(("mode", "workers"), [("sync", 3), ("async", 1)])
def test_an_overflowed_step_is_tried_again_by_all(mode: str, workers: int, pool: Pool) -> None:
    case = replace(CLASSES, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1, micro_size=8, initial_scale=2.0**24)
    expected = alone(case)
    (rank,) = train_in_threads(pool, served(case, workers, 1, mode=mode))
    assert rank.scale == expected.scale < 2.0**24
    rtol = 2.0**-10  # the same products of 11 bits; the order of summation differs
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(rank.weights[name], tensor, rtol=rtol, atol=rtol * float(tensor.abs().max()))


def test_overflows_of_many_workers_lower_one_loss_scale_and_each_step_is_used_once(tmp_path: Path, pool: Pool) -> None:
    case = replace(CLASSES, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1, num_steps=12, initial_scale=2.0**24)
    case = replace(case, folder=tmp_path, slowed={2: 0.05})
    (rank,) = train_in_threads(pool, served(case, 3, 1, mode="async"))
    lines = list(read_record(tmp_path / "updates.jsonl"))
    assert sorted(part.ticket.step for line in lines for part in line.items) == list(range(12))
    assert rank.scale < 2.0**24
    assert all(tensor.isfinite().all() for tensor in rank.weights.values())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_is_not_finite_is_left_out_by_policy(
    mode: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "Numerics", partial(Numerics, on_nonfinite="skip"))
    batch = stepping._Rank._batch

    def poisoned(rank: Any, indices: list[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(rank, indices)
        return (inputs * torch.nan if 11 in indices else inputs), targets

    monkeypatch.setattr(stepping._Rank, "_batch", poisoned)
    (trained,) = train_in_threads(pool, served(CLASSES, 2 if mode == "sync" else 1, 1, mode=mode))
    assert all(tensor.isfinite().all() for tensor in trained.weights.values())
    torch.testing.assert_close(trained.weights, alone(CLASSES).weights, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_whole_run_tells_its_staleness_and_evaluates_the_model_that_the_servers_hold(tmp_path: Path) -> None:
    overrides = ("data=points", "model=net", "epochs=2", "batch.global_size=4", "logger=[tensorboard]")
    result = run(tmp_path / "run", "strategy=parameter_server", "strategy.mode=async", *overrides)
    assert sum(result["staleness"]["counts"].values()) == result["steps"] == 20
    lines = list(read_record(tmp_path / "run" / "updates.jsonl"))
    assert sorted(part.ticket.step for line in lines for part in line.items) == list(range(20))
    model, points = zoo.Net().double(), zoo.Points("val")
    model.load_state_dict(weights(result))
    loss_sum, weight = zoo.classes_sum(model, (points.inputs.double(), points.targets))
    assert result["metrics"]["val/loss"] == pytest.approx(float(loss_sum.detach()) / weight, rel=1e-12)
    assert [path for path in (tmp_path / "run" / "tensorboard").iterdir() if b"staleness" in path.read_bytes()]
