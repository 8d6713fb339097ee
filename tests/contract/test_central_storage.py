"""Central storage is the training of one device: threads compute, the variables are in one place.

A copy on another device that computes with variables of the update before, or a sample that a thread uses twice is
caught here alone.
"""

import json
from dataclasses import replace
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.checks import alone, assert_bits, assert_close
from tests.contract.running import run, weights
from tests.contract.stepping import Case, Frozen, oracle, train
from tests.support import reference
from tests.support.pool import Pool
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.central_storage import AsyncCentralExecutor, CentralStorage
from trainkit.strategies.core import copies
from trainkit.strategies.core.copies import ThreadWork
from trainkit.strategies.core.step import ShardStep
from trainkit.strategies.updates.scheduler import PendingUpdate
from trainkit.trainer.checkpoint.tensors import load

pytestmark = pytest.mark.pairwise

CLASSES = Case(task="classes", global_size=16, micro_size=16)


def central(case: Case, threads: int) -> Case:
    return replace(case, strategy="central_storage", settings={"compute_devices": ["cpu"] * threads})


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_reproducible_runs_have_the_bits_of_one_device(threads: int, pool: Pool) -> None:
    model = {"norm": True, "dropout": 0.3}
    base = Case(precision="fp32", optimizer="adamw", reproducible=True, model=model, global_size=20, max_norm=0.5)
    base = replace(base, micro_size=3)
    assert_bits(train(pool, central(base, threads)), alone(base))


@pytest.mark.parametrize(
    "base",
    [
        replace(CLASSES, precision="bf16", optimizer="adamw", micro_size=5),
        replace(CLASSES, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1, micro_size=8),
        replace(CLASSES, precision="fp64", model={"norm": True, "dropout": 0.3}, micro_size=6, resume_at=4),
    ],
    ids=["masters", "scaled", "random"],
)
def test_precision_randomness_and_resume_are_those_of_one_device(base: Case, pool: Pool) -> None:
    (expected,), (found,) = train(pool, base), train(pool, central(base, 2))
    assert found.scale == expected.scale
    # the order of summation differs; what is summed was rounded to 8, 11 and 53 bits
    rtol = {"bf16": 2.0**-7, "fp16_mixed": 2.0**-10, "fp64": 1e-12}[base.precision]
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=rtol, atol=rtol * float(tensor.abs().max()))


def own_memory(param: nn.Parameter, _device: torch.device, *, shares: bool) -> nn.Parameter:
    """As on another device."""
    del shares
    return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)


def test_copies_elsewhere_are_brought_up_to_date_after_every_update(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CLASSES, micro_size=3, model={"norm": True}, resume_at=4)
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
    case = replace(CLASSES, micro_size=4, model={"norm": True})
    (found,) = train(pool, replace(case, strategy="central_storage", settings={"compute_devices": [0, "cpu"]}))
    assert {tensor.device.type for tensor in found.state.values()} == {"cpu"}
    assert reference.differences(found.weights, oracle(case)) == []


def test_every_compute_device_has_a_thread(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def counted(work: ThreadWork, shard: int, batch: object) -> object:
        seen.add((current_thread().name, work.replica.model))
        return ShardStep._shard(work, shard, batch)

    monkeypatch.setattr(ThreadWork, "_shard", counted)
    train(pool, central(replace(CLASSES, micro_size=4, num_steps=1), 3))
    assert len({model for _, model in seen}) == 3
    assert {name.rpartition("_")[0] for name, _ in seen} == {"compute"}


@pytest.mark.slow
def test_ending_it_ends_its_threads_and_gives_torch_its_own_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    overrides = ("data=points", "model=net", "epochs=2", "batch.global_size=8", "batch.micro_size=2")
    expected = run(tmp_path / "one", *overrides)
    found = run(tmp_path / "central", "strategy=central_storage", *overrides)
    assert torch.get_num_threads() == before
    assert found["metrics"]["val/loss"] == pytest.approx(expected["metrics"]["val/loss"], rel=1e-12)
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-12, atol=1e-14)


ASYNC = (
    "strategy=central_storage", "strategy.mode=async", "data=points", "model=net", "epochs=3", "batch.global_size=4",
)  # fmt: skip


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose gradients were applied, in that order."""
    steps, apply = [], AsyncCentralExecutor._apply

    def noted(executor: AsyncCentralExecutor, update: PendingUpdate) -> Any:
        steps.append(update.items[0].ticket.step)
        return apply(executor, update)

    monkeypatch.setattr(AsyncCentralExecutor, "_apply", noted)
    return steps


@pytest.mark.slow
def test_one_thread_that_updates_as_it_comes_is_one_device_to_the_bit(tmp_path: Path, applied: list[int]) -> None:
    expected = run(tmp_path / "one", *ASYNC[2:], "clip.max_norm=0.1")
    found = run(tmp_path / "async", *ASYNC, "strategy.compute_devices=[cpu]", "clip.max_norm=0.1")
    assert found["weights_sha256"] == expected["weights_sha256"]
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
    kept = load(Path(ended["last"])).tensors
    counts = [float(kept[f"optimizer/{slot}/0.weight"]) for slot in ("step", "step@1")]
    assert sum(counts) == 30
    assert min(counts) > 0


@pytest.mark.parametrize("threads", [1, 3])
def test_overflows_of_asynchronous_threads_lower_one_loss_scale(threads: int, pool: Pool) -> None:
    base = replace(CLASSES, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1, initial_scale=2.0**24)
    expected, settings = alone(base), {"compute_devices": ["cpu"] * threads, "mode": "async"}
    (found,) = train(pool, replace(base, strategy="central_storage", settings=settings))
    assert found.scale < 2.0**24
    equal = [key for key, tensor in expected.state.items() if torch.equal(tensor, found.state[key])]
    assert threads > 1 or (found.scale, len(equal)) == (expected.scale, len(expected.state))
    assert all(tensor.isfinite().all() for tensor in found.weights.values())


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
