"""`strategy.process_group=always`: a single rank runs the exchanges of several, and trains as one device does.

An exchange of a single rank that scales, rounds or reorders a gradient is caught here alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.contract.running import run, weights
from trainkit.strategies.base import PlanContext
from trainkit.strategies.data_parallel.strategy import Mirrored

RUN = ("recipe=digits", "precision=fp64", "steps=4", "batch.micro_size=16", "eval.every_epochs=null", "quiet=true")
ALONE = ("strategy.replicas=1", "strategy.process_group=always")


def digest(folder: Path, *overrides: str) -> str:
    """A hash of the weights that a run ends with."""
    found = weights(run(folder, *RUN, *overrides))
    return hashlib.sha256(b"".join(found[name].numpy().tobytes() for name in sorted(found))).hexdigest()


@pytest.mark.parametrize(
    "reduce",
    [
        "backend",
        "auto",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("ring", "hierarchical", "to_one_device")),
    ],
)
@pytest.mark.slow
def test_each_reducer_alone_in_its_group_gives_the_bits_of_one_device(tmp_path: Path, reduce: str) -> None:
    alone = digest(tmp_path / "alone", "strategy=mirrored", *ALONE, f"strategy.reduce={reduce}")
    assert alone == digest(tmp_path / "one", "strategy=one_device")
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_exchanges_really_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return all_reduce(*args, **named)

    monkeypatch.setattr(dist, "all_reduce", counted)
    digest(tmp_path / "auto", "strategy=mirrored", "strategy.replicas=1")
    assert calls == []
    digest(tmp_path / "always", "strategy=mirrored", *ALONE)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("sync", "more"),
    [("each", ()), ("last", ()), ("each", ("numerics.reproducible=true", "optimizer.fused=false"))],
    ids=["each", "last", "lanes"],
)
@pytest.mark.slow
def test_fully_sharded_over_one_rank_gives_the_bits_of_one_device(
    tmp_path: Path, sync: str, more: tuple[str, ...]
) -> None:
    more = (*more, "clip.max_norm=0.5")
    alone = digest(tmp_path / "alone", "strategy=fsdp", *ALONE, f"strategy.sync={sync}", *more)
    assert alone == digest(tmp_path / "one", "strategy=one_device", *more)


def test_shared_memory_needs_a_second_replica() -> None:
    (problem,) = Mirrored(replicas=1, process_group="always", reduce="shared_memory").validate(PlanContext())
    assert problem.rule == (
        "needs two replicas or more, and strategy.process_group=always has one. Use strategy.reduce=backend."
    )
