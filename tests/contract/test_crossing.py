"""Checkpoints cross: what any strategy saved is what one device would have, and any other continues from it.

A checkpoint that one strategy writes and another one reads with permuted or missing slots is caught here alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.crossing import Crossed, cross
from tests.contract.stepping import Case, oracle
from tests.support.pool import Pool
from trainkit.trainer.checkpoint.tensors import load

LAYERS = {"0": "colwise", "2": "rowwise"}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one_device": ("one_device", {}),
    "mirrored 2": ("mirrored", {"replicas": 2}),
    "fsdp 2": ("fsdp", {"replicas": 2}),
    "device_map": ("device_map", {"map": {"rest": "cpu"}}),
    "mirrored 2, mapped": ("mirrored", {"devices": [["cpu", "cpu"]] * 2, "map": {"0": 0, "rest": 1}}),
    "fsdp 4": ("fsdp", {"replicas": 4}),
    "pipeline 2": ("pipeline", {"stages": 2}),
    "tensor 2": ("tensor_parallel", {"degree": 2, "replicas": 1, "plan": LAYERS}),
    "fsdp 2 x 2": ("fsdp", {"replicas": 4, "replicate": 2}),
    "pipeline 2 x 2": ("pipeline", {"stages": 2, "replicas": 2, "schedule": "gpipe"}),
    "tensor 2 x 2": ("mesh", {"shard": 2, "tensor": 2, "plan": LAYERS}),
}
"""Where the training is placed, in the order in which it goes from one to the next."""

SAVED, LAST = 4, 6
# 37 points in batches of 16: the epoch's last is short. Not AdamW with BatchNorm: see test_strategies.
PLAIN = Case(optimizer="sgd", global_size=16, micro_size=4, num_steps=LAST, model={"width": 8})
BASES = {
    "sgd": PLAIN,
    "sgd, norm": replace(PLAIN, model={"width": 8, "norm": True}),
    "adamw": replace(PLAIN, optimizer="adamw"),
}
# cut layers share no batch statistics; AdamW goes through all places in the test below
CROSSINGS = [(layout, "sgd" if layout.startswith("tensor") else "sgd, norm") for layout in LAYOUTS]

Source = Callable[[str], Path]


def case_of(layout: str, base: Case, **changes: Any) -> Case:
    strategy, settings = LAYOUTS[layout]
    return replace(base, strategy=strategy, settings=settings, **changes)


@pytest.fixture(scope="module")
def source(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The checkpoint of step 4 of one device, by the name of a base."""
    root = tmp_path_factory.mktemp("source")

    def folder(base: str) -> Path:
        target = root / base / f"step_{SAVED:08d}"
        if not target.exists():
            case = replace(BASES[base], num_steps=SAVED)
            cross(pool, case, source=None, target=target.parent, saves_at=SAVED)
        return target

    return folder


@pytest.mark.parametrize(("layout", "base"), CROSSINGS)
def test_every_strategy_saves_the_state_that_one_device_saves_and_continues_from_it(
    layout: str, base: str, source: Source, pool: Pool, tmp_path: Path
) -> None:
    case, checkpoint = case_of(layout, BASES[base]), source(base)
    ranks = cross(pool, case, source=checkpoint, target=tmp_path, saves_at=SAVED)
    expected, actual = load(checkpoint), load(tmp_path / checkpoint.name)
    assert actual.tensors.keys() == expected.tensors.keys()
    assert {name.split("/")[1] for name in actual.tensors if name.startswith("optimizer/")} == {"momentum_buffer"}
    for name, tensor in expected.tensors.items():
        assert actual.tensors[name].dtype is tensor.dtype, name
        assert torch.equal(actual.tensors[name], tensor), name
    assert_continues(ranks, case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_strategy_continues_what_the_one_before_has_trained(
    layout: str, source: Source, pool: Pool, tmp_path: Path
) -> None:
    names = list(LAYOUTS)
    earlier, base = names[names.index(layout) - 1], BASES["adamw"]
    trained = cross(pool, case_of(earlier, base, num_steps=SAVED), source=None, target=tmp_path, saves_at=SAVED)
    checkpoint = tmp_path / f"step_{SAVED:08d}"
    torch.testing.assert_close(load(checkpoint).tensors, load(source("adamw")).tensors, rtol=1e-12, atol=1e-14)
    case = case_of(layout, base)
    ranks = cross(pool, case, source=checkpoint, target=tmp_path / "again", saves_at=SAVED)
    assert {rank.sha256 for rank in ranks} - {None} == {trained[0].sha256}
    assert_continues(ranks, case)


def assert_continues(ranks: list[Crossed], case: Case) -> None:
    expected = oracle(case).losses[SAVED:]
    for rank in ranks:
        assert rank.losses == pytest.approx(expected, rel=1e-12)


def test_a_sharded_training_is_written_by_all_its_ranks(pool: Pool, tmp_path: Path) -> None:
    cross(pool, case_of("fsdp 4", BASES["adamw"], num_steps=1), source=None, target=tmp_path, saves_at=1)
    index = json.loads((tmp_path / "step_00000001" / "index.json").read_text())
    files = [piece["file"] for piece in index["tensors"]["param/0.weight"]["pieces"]]
    assert sorted(files) == [f"rank_{rank:05d}.safetensors" for rank in range(4)]
