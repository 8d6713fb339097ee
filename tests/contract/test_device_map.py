"""A device map is the training of one device: every step by the way that several devices take, here on the CPU.

An activation or a gradient that is brought to the wrong device of a map is caught here alone.
A map that is written out is always computed that way; only `auto` on one device spares itself the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contract.checks import alone, assert_bits
from tests.contract.running import run, weights
from tests.contract.stepping import Case, oracle, train
from tests.support import reference, second_device
from tests.support.pool import Pool
from tests.support.second_device import fetch
from trainkit.strategies.base import PlanContext
from trainkit.strategies.device_map import DeviceMap

pytestmark = pytest.mark.pairwise

CLASSES = Case(task="classes", global_size=16, micro_size=16)
TOKENS = Case(task="tokens", global_size=8, micro_size=8)


def mapped(case: Case) -> Case:
    given = {"0": "cpu", "rest": "cpu"} if case.task == "classes" else {"embed": "cpu", "rest": "/cpu:0"}
    return replace(case, strategy="device_map", settings={"map": given})


@pytest.mark.parametrize(
    "base",
    [
        replace(CLASSES, precision="bf16", optimizer="adamw", micro_size=5),
        replace(CLASSES, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1),
        replace(CLASSES, precision="fp32", model={"norm": True, "dropout": 0.3}, micro_size=6, resume_at=4),
        replace(TOKENS, precision="fp32", reproducible=True, micro_size=3, optimizer="adamw"),
    ],
    ids=["masters", "scaled", "random", "lanes"],
)
def test_its_bits_are_those_of_one_device(base: Case, pool: Pool) -> None:
    expected = alone(base)
    (found,) = assert_bits(train(pool, mapped(base)), expected)
    assert list(found.state) == list(expected.state)


@pytest.mark.slow
def test_a_run_evaluates_and_saves_what_one_device_does(tmp_path: Path) -> None:
    fixed = ("model=net", "model.dropout=0.2", "data=points", "batch.global_size=16", "optimizer=adamw", "steps=4")
    one = run(tmp_path / "one", *fixed)
    two = run(tmp_path / "two", *fixed, "strategy=device_map", "strategy.map={0-1:cpu,rest:cpu}")
    assert two["weights_sha256"] == one["weights_sha256"]
    assert two["metrics"] == one["metrics"]
    assert two["fingerprint"] == one["fingerprint"]


@pytest.fixture
def two_devices() -> Iterator[None]:
    """The first block of every device map is on a second device."""
    with second_device.two_devices(alone=True):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("reproducible", [False, True], ids=["free", "lanes"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_model_on_two_devices_is_that_of_the_reference(optimizer: str, reproducible: bool, pool: Pool) -> None:
    base = replace(CLASSES, optimizer=optimizer, micro_size=5, max_norm=0.05, resume_at=4, reproducible=reproducible)
    (rank,) = train(pool, mapped(base))
    assert {key: tensor.device.type for key, tensor in rank.state.items() if key.startswith("param/")} == {
        "param/0.weight": "meta",
        "param/0.bias": "meta",
        "param/2.weight": "cpu",
        "param/2.bias": "cpu",
    }
    weights_here = {name: fetch(tensor) for name, tensor in rank.weights.items()}
    assert reference.differences(weights_here, oracle(base)) == []


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    "base",
    [
        replace(CLASSES, precision="bf16", micro_size=5, max_norm=0.05),
        replace(CLASSES, precision="fp32", model={"norm": True, "dropout": 0.3}, micro_size=6, max_norm=0.05),
    ],
    ids=["masters", "random"],
)
def test_two_devices_give_the_bits_of_one(base: Case, pool: Pool) -> None:
    (expected,), (found,) = train(pool, base), train(pool, mapped(base))
    assert [key for key, tensor in expected.state.items() if not torch.equal(tensor, fetch(found.state[key]))] == []


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_gpu_and_the_cpu_train_as_the_reference(optimizer: str, pool: Pool) -> None:
    case = replace(CLASSES, optimizer=optimizer, micro_size=3, max_norm=0.05, resume_at=4, strategy="device_map")
    (rank,) = train(pool, replace(case, settings={"map": {"0": 0, "rest": "cpu"}}))
    assert {tensor.device.type for tensor in rank.state.values()} == {"cpu", "cuda"}
    assert reference.differences({name: tensor.cpu() for name, tensor in rank.weights.items()}, oracle(case)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("numerics.reproducible=true",)], ids=["free", "lanes"])
def test_a_run_on_the_cpu_and_a_gpu_is_that_of_one_device(more: tuple[str, ...], tmp_path: Path) -> None:
    fixed = ("model=net", "model.norm=true", "data=points", "batch.global_size=16", "batch.micro_size=5",
             "optimizer=sgd", "steps=8", "clip.max_norm=0.1", *more)  # fmt: skip
    one = run(tmp_path / "one", *fixed, "strategy.device=cpu")
    two = run(tmp_path / "two", *fixed, "strategy=device_map", "strategy.map={0-1:cpu,rest:0}")
    torch.testing.assert_close(weights(two), weights(one), rtol=1e-12, atol=1e-14)
    assert two["metrics"]["val/loss"] == pytest.approx(one["metrics"]["val/loss"], rel=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed", "fp16_mixed"])
def test_mixed_precision_spans_the_cpu_and_a_gpu(precision: str, tmp_path: Path) -> None:
    result = run(tmp_path, "model=net", "data=points", "steps=4", f"precision={precision}", "strategy=device_map",
                 "strategy.map={0-1:cpu,rest:0}")  # fmt: skip
    assert result["status"] == "finished"
    assert result["metrics"]["val/loss"] < 2.0


def test_the_memory_that_is_planned_is_that_of_the_fullest_device() -> None:
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    context = PlanContext(num_gpus=2)
    half = DeviceMap(map={"0": 0, "1": 1}).estimate_memory(model, context).resident
    assert half == {"0.weight": 42, "0.bias": 7}
    assert sum(DeviceMap(map={"rest": 0}).estimate_memory(model, context).resident.values()) == 49 + 24
