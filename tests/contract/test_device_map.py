"""A device map is the training of one device, and so are replicas that span several devices each; here on the CPU.

A map that is written out is always computed by the way that several devices take; only `auto` on one device spares
itself the way. An activation or a gradient that is brought to the wrong device of a map, or a gradient in the second
place of a replica that is not summed with that of the other replicas is caught here alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from tests.contract.checks import alone, assert_bits, assert_close, assert_reference
from tests.contract.running import run, weights
from tests.contract.stepping import Case, Frozen, Trained, oracle, run_rank, train
from tests.contract.test_optimizers import Match
from tests.contract.test_updates import Words
from tests.support import reference, second_device
from tests.support.pool import Member, Pool
from tests.support.second_device import fetch
from trainkit.errors import ConfigError, TrainingError
from trainkit.strategies.base import PlanContext
from trainkit.strategies.device_map import DeviceMap
from trainkit.strategies.model_transforms import ModelTransforms
from trainkit.strategies.reducers.options import Reduce

pytestmark = pytest.mark.pairwise

CLASSES = Case(task="classes", global_size=16, micro_size=16)
TOKENS = Case(task="tokens", global_size=8, micro_size=8)


def mapped(case: Case) -> Case:
    device_map = {"0": "cpu", "rest": "cpu"} if case.task == "classes" else {"embed": "cpu", "rest": "/cpu:0"}
    return replace(case, strategy="device_map", settings={"map": device_map})


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
    (rank,) = assert_bits(train(pool, mapped(base)), expected)
    assert list(rank.state) == list(expected.state)


@pytest.mark.slow
def test_a_run_evaluates_and_saves_what_one_device_does(tmp_path: Path) -> None:
    fixed = ("model=net", "model.dropout=0.2", "data=points", "batch.global_size=16", "optimizer=adamw", "steps=4")
    expected = run(tmp_path / "one", *fixed)
    result = run(tmp_path / "two", *fixed, "strategy=device_map", "strategy.map={0-1:cpu,rest:cpu}")
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["metrics"] == expected["metrics"]
    assert result["fingerprint"] == expected["fingerprint"]


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
    (expected,), (actual,) = train(pool, base), train(pool, mapped(base))
    assert [key for key, tensor in expected.state.items() if not torch.equal(tensor, fetch(actual.state[key]))] == []


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("numerics.reproducible=true",)], ids=["free", "lanes"])
def test_a_run_on_the_cpu_and_a_gpu_is_that_of_one_device(more: tuple[str, ...], tmp_path: Path) -> None:
    fixed = ("model=net", "model.norm=true", "data=points", "batch.global_size=16", "batch.micro_size=5",
             "optimizer=sgd", "steps=8", "clip.max_norm=0.1", *more)  # fmt: skip
    expected = run(tmp_path / "one", *fixed, "strategy.device=cpu")
    result = run(tmp_path / "two", *fixed, "strategy=device_map", "strategy.map={0-1:cpu,rest:0}")
    torch.testing.assert_close(weights(result), weights(expected), rtol=1e-12, atol=1e-14)
    assert result["metrics"]["val/loss"] == pytest.approx(expected["metrics"]["val/loss"], rel=1e-12)


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


SPREAD_CLASSES, SPREAD_TOKENS = replace(CLASSES, micro_size=4), replace(TOKENS, micro_size=2)
MAPS: dict[str, dict[str, int]] = {
    "classes": {"0": 0, "rest": 1},
    "tokens": {"embed": 0, "head": 0, "rest": 1},  # tied: both names of the weight are in one place
    "gpt": {"embed": 0, "head": 0, "blocks": 1},
    "duel": {"generator": 0, "discriminator": 1},
}


def spread(case: Case, replicas: int = 2, strategy: str = "mirrored", **settings: Any) -> Case:
    groups = [["cpu", "cpu"]] * replicas
    return replace(case, strategy=strategy, settings={"devices": groups, "map": MAPS[case.task], **settings})


# 37 points in batches of 16 and 5, 29 sequences in batches of 8 and 5: the last batch of an epoch is short
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("base", [SPREAD_CLASSES, SPREAD_TOKENS], ids=["classes", "tokens"])
def test_two_replicas_of_two_devices_take_the_steps_of_the_reference(
    base: Case, optimizer: str, accumulation: int, pool: Pool
) -> None:
    micro_size = -(-base.global_size // (2 * accumulation))
    case = spread(replace(base, optimizer=optimizer, micro_size=micro_size, max_norm=0.05, resume_at=4))
    ranks = assert_reference(train(pool, case), case)
    assert len(ranks) == 2
    assert min(ranks[0].norms) > 0.05


# shards of 6 and 5 for three replicas: one has none in a short batch, and batch statistics are in the exchange too
@pytest.mark.parametrize("reduce", get_args(Reduce)[1:])  # auto is one of them
def test_every_reducer_sums_what_is_in_several_places(reduce: str, pool: Pool) -> None:
    for base in (replace(SPREAD_CLASSES, micro_size=6, model={"norm": True}), SPREAD_TOKENS):
        case = spread(base, 3, "multi_worker_mirrored", reduce=reduce)
        ranks = assert_reference(train(pool, case), case)
        assert_bits(ranks, ranks[0])


@pytest.mark.parametrize(
    "base",
    [
        replace(
            SPREAD_CLASSES, precision="fp32", reproducible=True, micro_size=3, model={"norm": True, "dropout": 0.3}
        ),
        replace(SPREAD_TOKENS, precision="fp32", reproducible=True, micro_size=3, optimizer="adamw", resume_at=4),
    ],
    ids=["classes", "tokens"],
)
def test_a_reproducible_training_ends_in_the_bits_of_one_device(base: Case, pool: Pool) -> None:
    expected = alone(base)
    for replicas in (1, 2, 3):
        assert_bits(train(pool, spread(base, replicas)), expected)


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        (replace(SPREAD_CLASSES, precision="bf16", optimizer="adamw"), {}),
        (replace(SPREAD_CLASSES, precision="fp16_mixed", rate_scale=0.1, max_norm=0.1), {}),
        (replace(SPREAD_CLASSES, precision="fp32", model={"dropout": 0.3}), {"compression": "bf16"}),
        (replace(SPREAD_CLASSES, precision="fp32"), {"bucket_mb": 0}),
    ],
    ids=["masters", "scaled", "compressed", "one bucket"],
)
def test_a_place_more_changes_no_bit_of_two_replicas(base: Case, settings: dict[str, Any], pool: Pool) -> None:
    plain = train(pool, replace(base, strategy="mirrored", settings={"replicas": 2, **settings}))
    for expected, actual in zip(plain, train(pool, spread(base, **settings)), strict=True):
        assert_bits([actual], expected)


@pytest.mark.parametrize("task", ["functional_dropout", "two_views"])
def test_models_and_objectives_that_draw_draw_as_one_device_does(task: str, pool: Pool) -> None:
    base = Case(task=task, global_size=16, micro_size=4, num_steps=4, rate_scale=0.3)
    settings = spread(SPREAD_CLASSES).settings | {"map": {"rest": 1}}
    assert_close(train(pool, replace(base, strategy="mirrored", settings=settings)), alone(base), atol=1e-13)


def test_a_place_may_hold_frozen_parameters_alone(pool: Pool) -> None:
    base = Frozen(global_size=16, micro_size=4, max_norm=0.05)
    assert_close(train(pool, spread(base)), alone(base))


def test_the_networks_of_two_optimizers_may_be_on_two_devices(pool: Pool) -> None:
    base = Match(micro_size=2, max_norm=0.3, num_steps=4)
    expected = alone(base)
    for rank in assert_close(train(pool, spread(base)), expected, atol=1e-12):
        assert rank.norms == pytest.approx(expected.norms, rel=1e-12)


def test_sparse_gradients_are_summed_beside_those_of_a_place(pool: Pool) -> None:
    base = Words(optimizer="plain_sgd", micro_size=2, max_norm=0.05)
    assert_close(train(pool, spread(base, map={"embed": 0, "head": 1})), alone(base), atol=1e-13)


def test_blocks_that_are_compiled_and_recomputed_train_as_the_reference_does(pool: Pool) -> None:
    shaping = ModelTransforms(recompute="full", compile_mode="default", backend="aot_eager")
    case = spread(Case(task="gpt", global_size=8, micro_size=2, max_norm=0.05, num_steps=3, shaping=shaping))
    assert_reference(train(pool, case), case)


def test_a_map_that_does_not_fit_the_model_is_refused_where_it_is_placed(pool: Pool) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.map: no device for 2\.weight, 2\.bias\. Add 2: DEVICE"):
        train(pool, spread(SPREAD_CLASSES, 1, map={"0": 0}))


def test_replicas_that_placed_a_block_differently_are_refused(pool: Pool) -> None:
    ranks = pool.run("tests.contract.test_device_map.misplaced", spread(SPREAD_CLASSES), num_ranks=2)
    refused = "the parameter 0.weight is on device 1 of its replica on rank 1, and on device 0 on rank 0. "
    assert [text.startswith(refused) for text in ranks] == [True, True]


def misplaced(member: Member, case: Case) -> str:
    """What a rank says where the second one has a map of its own; run by the pool."""
    device_map = {"0": 1, "rest": 0} if member.rank else {"0": 0, "rest": 1}
    try:
        run_rank(member, replace(case, settings=case.settings | {"map": device_map}))
    except TrainingError as error:
        torch.distributed.destroy_process_group()
        return str(error)
    return "nothing"


def on_two_devices(member: Member, case: Case) -> Trained:
    """One rank of a case whose replicas have two devices; run by the pool."""
    with second_device.two_devices():
        trained = run_rank(member, case)
        devices = {key: tensor.device.type for key, tensor in trained.state.items() if key.startswith("param/")}
        assert {key.split("/")[1][0]: kind for key, kind in devices.items()} == {"0": "meta", "2": "cpu"}
        return replace(trained, state={key: fetch(tensor) for key, tensor in trained.state.items()})


@pytest.mark.parametrize(("optimizer", "reduce"), [("sgd", "backend"), ("adamw", "to_one_device")])
def test_gradients_stay_on_their_device(optimizer: str, reduce: str, pool: Pool) -> None:
    case = spread(replace(SPREAD_CLASSES, optimizer=optimizer, max_norm=0.05), reduce=reduce)
    assert_reference(pool.run("tests.contract.test_device_map.on_two_devices", case, num_ranks=2), case)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "on_both",
    [replace(mapped(CLASSES), settings={"map": {"0": 0, "rest": "cpu"}}), spread(CLASSES, devices=[[0, "cpu"]])],
    ids=["map", "replica"],
)
def test_a_gpu_and_the_cpu_train_as_the_reference(on_both: Case, optimizer: str, pool: Pool) -> None:
    base = replace(on_both, optimizer=optimizer, micro_size=3, max_norm=0.05, resume_at=4)
    (rank,) = train(pool, base)
    assert {tensor.device.type for tensor in rank.state.values()} == {"cpu", "cuda"}
    assert reference.differences({name: tensor.cpu() for name, tensor in rank.weights.items()}, oracle(base)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [[[0, "cpu"], [1, "cpu"]], [[0, 1], [2, 3]]], ids=["gpu and cpu", "two gpus"])
def test_replicas_of_several_gpus_train_as_the_reference(devices: list[list[Any]], pool: Pool) -> None:
    needed = 1 + max(name for group in devices for name in group if name != "cpu")
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")
    case = spread(replace(SPREAD_CLASSES, max_norm=0.05, resume_at=4), devices=devices)
    for rank in train(pool, case):
        weights = {name: tensor.cpu() for name, tensor in rank.weights.items()}
        assert reference.differences(weights, oracle(case)) == []
