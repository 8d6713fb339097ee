"""A synchronous parameter server is the training of one device, and so is an asynchronous one with one worker.

A gradient that a server applies twice, drops or divides by the wrong number of workers is caught here alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract import stepping
from tests.contract.checks import alone, assert_bits, assert_close, assert_reference
from tests.contract.running import run, weights
from tests.contract.stepping import Case, Frozen, train, train_in_threads
from tests.contract.test_central_storage import own_memory
from tests.contract.test_sparse import Words
from tests.support import zoo
from tests.support.pool import Pool
from trainkit.numerics.batch import BatchPlan, SampleOrder
from trainkit.strategies.base import Numerics
from trainkit.strategies.core import copies
from trainkit.strategies.model_transforms import ModelTransforms
from trainkit.strategies.updates.scheduler import BOUNDED, Policy, Staleness, read_record
from trainkit.strategies.updates.server import ParameterServerClient

pytestmark = pytest.mark.pairwise

CLASSES = Case(task="classes", global_size=16, micro_size=3)
TOKENS = Case(task="tokens", global_size=8, micro_size=2)


def served(case: Case, workers: int, servers: int, **settings: object) -> Case:
    chosen = {"workers": workers, "servers": servers, "timeout_s": 60.0, **settings}
    return replace(case, strategy="parameter_server", settings=chosen)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_graphs")
def test_two_devices_of_a_compiled_worker_train_as_the_reference(store: tuple[str, int]) -> None:
    compiled = ModelTransforms(compile_mode="default", backend="aot_eager")
    case = Case(micro_size=4, optimizer="adamw", max_norm=0.5, num_steps=3, resume_at=2, shaping=compiled)
    assert_reference(train_in_threads(store, served(case, 1, 1, devices_per_worker=2)), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "servers", "devices"),
    [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 3, 1), (2, 3, 1), (4, 3, 1), (1, 1, 4), (2, 1, 2), (2, 3, 3)],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("base", [CLASSES, TOKENS], ids=["classes", "tokens"])
def test_six_steps_are_those_of_the_reference(
    base: Case, optimizer: str, workers: int, servers: int, devices: int, store: tuple[str, int]
) -> None:
    chosen = replace(base, optimizer=optimizer, max_norm=0.05)
    case = served(chosen, workers, servers, devices_per_worker=devices)
    assert_reference(train_in_threads(store, case), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "servers", "devices"), [(1, 3, 1), (2, 1, 1), (4, 3, 1), (1, 1, 3), (2, 1, 2), (3, 2, 2)]
)
@pytest.mark.parametrize("base", [CLASSES, TOKENS], ids=["classes", "tokens"])
def test_reproducible_runs_have_the_bits_of_one_device(
    base: Case, workers: int, servers: int, devices: int, store: tuple[str, int]
) -> None:
    model = {"norm": True} if base is CLASSES else {}
    lanes = replace(base, precision="fp32", optimizer="adamw", reproducible=True, max_norm=0.5, model=model)
    assert_bits(train_in_threads(store, served(lanes, workers, servers, devices_per_worker=devices)), alone(lanes))


@pytest.mark.parametrize(
    "base",
    [
        replace(CLASSES, optimizer="adamw", model={"norm": True, "dropout": 0.3}, max_norm=0.5),
        replace(TOKENS, optimizer="sgd", max_norm=0.05),
        replace(CLASSES, precision="bf16", optimizer="adamw"),
    ],
    ids=["random", "tokens", "masters"],
)
def test_async_with_one_worker_is_one_device_to_the_bit(base: Case, store: tuple[str, int]) -> None:
    case = base if base.precision == "bf16" else replace(base, precision="fp32")
    assert_bits(train_in_threads(store, served(case, 1, 2, mode="async")), alone(case))


@pytest.mark.parametrize("base", [CLASSES, TOKENS], ids=["classes", "tokens"])
def test_the_devices_of_an_asynchronous_worker_make_one_update_together(base: Case, store: tuple[str, int]) -> None:
    model = {"norm": True} if base is CLASSES else {}
    case = replace(base, max_norm=0.05, model=model)
    assert_close(train_in_threads(store, served(case, 1, 1, mode="async", devices_per_worker=3)), alone(case))


class WithoutElements(zoo.Net):
    """A layer whose weight has no elements, and a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, features) -> (samples, classes)."""
        outputs: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs + self.empty.sum()


def test_a_parameter_without_elements_counts_nothing_in_the_norm_of_gradients(store: tuple[str, int]) -> None:
    case = served(Case(build=WithoutElements, micro_size=4, max_norm=0.05), 1, 2)
    assert_reference(train_in_threads(store, case), case)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_devices_of_a_worker_have_what_it_has_read(
    mode: str, store: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Frozen(task="classes", micro_size=3).from_a_checkpoint()
    expected, workers = alone(case), 2 if mode == "sync" else 1
    monkeypatch.setattr(copies, "_on", own_memory)
    assert_close(train_in_threads(store, served(case, workers, 1, mode=mode, devices_per_worker=2)), expected)


def test_a_slow_worker_of_several_devices_and_spares_change_no_bit(store: tuple[str, int]) -> None:
    base = replace(CLASSES, precision="fp32", reproducible=True, model={"norm": True})
    spared = served(base, 3, 1, spare_replicas=1, devices_per_worker=2)
    assert_bits(train_in_threads(store, replace(spared, slowed={1: 0.1})), alone(base))


def test_the_warmup_of_many_workers_is_one_device_to_the_bit(store: tuple[str, int]) -> None:
    case = replace(CLASSES, precision="fp32", optimizer="adamw", model={"norm": True})
    assert_bits(train_in_threads(store, served(case, 3, 1, mode="async", warmup_steps=10)), alone(case))


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.slow
def test_a_replay_has_the_bits_of_the_run_it_follows(mode: str, tmp_path: Path, store: tuple[str, int]) -> None:
    case = replace(CLASSES, precision="fp32", optimizer="adamw", model={"norm": True}, num_steps=9, slowed={1: 0.05})
    stale: dict[str, object] = {"mode": "async", "staleness": Staleness(policy="scale")}
    chosen = stale if mode == "async" else {"spare_replicas": 1, "spare_mode": "replace"}
    first = served(case, 4, 2, **chosen)
    (recorded,) = train_in_threads(store, replace(first, folder=tmp_path))
    again = served(replace(case, slowed={2: 0.05}), 3, 1, **chosen, replay=str(tmp_path))
    (replayed,) = train_in_threads(store, again)
    reads = [line.version - part.version for line in read_record(tmp_path / "updates.jsonl") for part in line.items]
    assert mode == "sync" or max(reads) > 0
    assert [key for key, tensor in recorded.state.items() if not torch.equal(tensor, replayed.state[key])] == []


@pytest.mark.parametrize("policy", ["drop", "scale", "lr", "bound"])
def test_every_policy_uses_every_step_once(policy: Policy, tmp_path: Path, store: tuple[str, int]) -> None:
    staleness = Staleness(policy=policy, bound=1 if policy in BOUNDED else None)
    case = replace(CLASSES, num_steps=12, folder=tmp_path, slowed={2: 0.05})
    (chief,) = train_in_threads(store, served(case, 3, 1, mode="async", staleness=staleness))
    lines = list(read_record(tmp_path / "updates.jsonl"))
    assert sorted(part.ticket.step for line in lines for part in line.items) == list(range(12))
    assert policy != "drop" or max(line.staleness for line in lines) <= 1
    assert len(chief.losses) == 12


def test_a_training_continued_in_async_mode_repeats_unfinished_steps(tmp_path: Path, store: tuple[str, int]) -> None:
    case = replace(CLASSES, num_steps=12, resume_at=5, folder=tmp_path)
    (chief,) = train_in_threads(store, served(case, 3, 1, mode="async"))
    assert len(chief.losses) == 12
    lines = list(read_record(tmp_path / "updates.jsonl"))
    assert [line.version for line in lines] == list(range(12))
    assert sorted(part.ticket.step for line in lines for part in line.items) == list(range(12))


@pytest.mark.parametrize("spares", [1, 2])
@pytest.mark.parametrize("mode", ["duplicate", "replace"])
@pytest.mark.slow
def test_with_slow_workers_and_spares_every_sample_is_used_once_an_epoch(
    mode: str, spares: int, tmp_path: Path, store: tuple[str, int]
) -> None:
    base = replace(CLASSES, precision="fp32", num_steps=9, model={"norm": True})  # 3 epochs of 37
    spared = served(base, 5, 1, spare_replicas=spares, spare_mode=mode)
    (chief,) = train_in_threads(store, replace(spared, slowed={1: 0.1, 3: 0.1}, folder=tmp_path))
    plan = BatchPlan(num_samples=37, global_size=base.global_size, micro_size=base.micro_size)
    order = SampleOrder(num_samples=37, seed=base.seed)
    lines = list(read_record(tmp_path / "updates.jsonl"))
    for epoch in range(3):
        tickets = [part.ticket for line in lines[3 * epoch : 3 * epoch + 3] for part in line.items]
        spans = [plan.shard_range(ticket.step, ticket.shards[0]) for ticket in tickets]
        assert sorted(index for span in spans for index in order.indices(*span).tolist()) == list(range(37))
    if mode == "duplicate":
        (undisturbed,) = train_in_threads(store, served(base, 5, 1))
        assert [key for key, one in undisturbed.state.items() if not torch.equal(one, chief.state[key])] == []


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
    mode: str, workers: int, devices: int, optimizer: str, store: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Words(optimizer=optimizer, micro_size=2, max_norm=0.05)
    pulled: list[list[bool]] = []
    pull = ParameterServerClient.pull

    def noted(servers: ParameterServerClient, into: Sequence[Tensor | None]) -> int:
        pulled.append([one is None for one in into])
        return pull(servers, into)

    monkeypatch.setattr(ParameterServerClient, "pull", noted)
    ranks = train_in_threads(store, served(case, workers, 2, mode=mode, devices_per_worker=devices))
    assert_close(ranks, alone(case))
    assert {tuple(one) for one in pulled} == {(True, False, False)}


def test_numbers_that_travel_as_bfloat16_train_nearly_the_same(store: tuple[str, int]) -> None:
    case = replace(CLASSES, precision="fp32", rate_scale=0.1)
    expected = alone(case)
    (found,) = train_in_threads(store, served(case, 2, 2, transfer="bf16"))
    for name, tensor in expected.weights.items():
        assert not torch.equal(found.weights[name], tensor)
        torch.testing.assert_close(found.weights[name], tensor, rtol=2.0**-6, atol=2.0**-6 * float(tensor.abs().max()))


@pytest.mark.parametrize(("mode", "workers"), [("sync", 3), ("async", 1)])
def test_an_overflowed_step_is_tried_again_by_all(mode: str, workers: int, store: tuple[str, int]) -> None:
    case = replace(CLASSES, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1, micro_size=8, initial_scale=2.0**24)
    expected = alone(case)
    (found,) = train_in_threads(store, served(case, workers, 1, mode=mode))
    assert found.scale == expected.scale < 2.0**24
    rtol = 2.0**-10  # the same products of 11 bits; the order of summation differs
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=rtol, atol=rtol * float(tensor.abs().max()))


def test_overflows_of_many_workers_lower_one_loss_scale_and_each_step_is_used_once(
    tmp_path: Path, store: tuple[str, int]
) -> None:
    case = replace(CLASSES, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1, num_steps=12, initial_scale=2.0**24)
    case = replace(case, folder=tmp_path, slowed={2: 0.05})
    (found,) = train_in_threads(store, served(case, 3, 1, mode="async"))
    lines = list(read_record(tmp_path / "updates.jsonl"))
    assert sorted(part.ticket.step for line in lines for part in line.items) == list(range(12))
    assert found.scale < 2.0**24
    assert all(tensor.isfinite().all() for tensor in found.weights.values())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_is_not_finite_is_left_out_by_policy(
    mode: str, store: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "Numerics", partial(Numerics, on_nonfinite="skip"))
    batch = stepping._Rank._batch

    def poisoned(rank: Any, indices: list[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(rank, indices)
        return (inputs * torch.nan if 11 in indices else inputs), targets

    monkeypatch.setattr(stepping._Rank, "_batch", poisoned)
    (found,) = train_in_threads(store, served(CLASSES, 2 if mode == "sync" else 1, 1, mode=mode))
    assert all(tensor.isfinite().all() for tensor in found.weights.values())
    torch.testing.assert_close(found.weights, alone(CLASSES).weights, rtol=1e-12, atol=1e-14)


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
