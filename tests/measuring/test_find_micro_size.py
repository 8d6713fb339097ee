"""`trainkit find micro_size`: overrides that change the samples of a step are caught here alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from tests.measuring.trainings import config, here
from trainkit.cli import main
from trainkit.config.schema import RunConfig
from trainkit.measuring import micro_sizes as module
from trainkit.measuring.find_showing import size_document, size_lines
from trainkit.measuring.micro_sizes import (
    MicroSizeSearch,
    overrides_for,
    search_micro_size,
    sizes_of,
    with_size,
)
from trainkit.measuring.turns import Turn
from trainkit.run.estimates.this_machine import available_bytes
from trainkit.run.estimates.verdict import HostMemory
from trainkit.run.planning.plan import make_plan
from trainkit.trainer.phase_clock import PARTS
from trainkit.verbs.looking.schema import schema_of

OUT_OF_MEMORY = Turn(figures={}, failure="exit 1: OutOfMemoryError: cuda:0 is out of memory.", error="OutOfMemoryError")


def measured(samples_per_s: float) -> Turn:
    shared = {"steps": 1, "samples": 64, "targets": 64.0, "peak_bytes": 1 << 20, "compile_s": 0.0}
    ranks = [dict.fromkeys(PARTS, 0.0)]
    return Turn(figures={**shared, "seconds": 64 / samples_per_s, "ranks": ranks})


def search(
    turns: Mapping[int, Turn], *overrides: str, memory: HostMemory | None = None, rounds: int = 1
) -> tuple[MicroSizeSearch, list[int]]:
    """Search where each size ends its turns so; returns the sizes that were tried, too."""
    tried = list[int]()

    def start(cfg: RunConfig, folder: Path) -> Turn:
        del folder
        assert cfg.batch.micro_size is not None
        assert (cfg.batch.global_size, cfg.batch.accumulation) == (64, None)
        tried.append(cfg.batch.micro_size)
        return turns[cfg.batch.micro_size]

    cfg = config(*overrides)
    found = search_micro_size(cfg, make_plan(cfg), memory=memory, steps=1, rounds=rounds, start=start)
    return found, tried


def test_the_sizes_make_1_2_4_shards_a_replica() -> None:
    cases: list[tuple[list[str], list[tuple[int, int]]]] = [
        (["batch.micro_size=24"], [(64, 1), (32, 2), (24, 3), (16, 4), (8, 8), (4, 16), (2, 32), (1, 64)]),
        (["batch.global_size=10", "strategy=mirrored", "strategy.replicas=3"], [(4, 1), (2, 2), (1, 4)]),
        (["batch.global_size=2", "strategy=mirrored", "strategy.replicas=2"], [(1, 1)]),
    ]
    for overrides, sizes in cases:
        assert [(one.micro_size, one.accumulation) for one in sizes_of(make_plan(config(*overrides)))] == sizes


def test_a_size_without_memory_is_followed_by_the_next_and_slower_ones_end_the_search() -> None:
    speeds = {32: measured(100), 16: measured(98), 8: measured(90), 4: measured(50)}
    found, tried = search({64: OUT_OF_MEMORY, **speeds})
    assert tried == [64, 32, 16, 8, 4]
    assert found.best is not None
    assert (found.best.micro_size, [one.status for one in found.sizes[:2]]) == (16, ["out_of_memory", "measured"])
    assert [one.reason for one in found.sizes[-2:]] == ["not tried: the larger sizes are slower already"] * 2


def test_a_killed_training_counts_as_one_without_memory_and_another_failure_ends_the_search() -> None:
    killed = Turn(figures={}, failure="signal 9", error="SIGKILL")
    rank = Turn(figures={}, failure="exit 1: TrainingError: rank 1 was ended by SIGKILL", error="TrainingError")
    gone = Turn(figures={}, failure="exit 3: DataError: gone", error="DataError")
    found, tried = search({64: killed, 32: rank, 16: gone})
    assert (tried, found.best) == ([64, 32, 16], None)
    assert [one.status for one in found.sizes[:4]] == ["out_of_memory", "out_of_memory", "failed", "untried"]
    assert found.sizes[3].reason == "not tried: the size above has failed"


def test_a_size_that_the_plan_finds_too_big_is_not_tried() -> None:
    found, tried = search({}, "batch.global_size=2", memory=HostMemory(memory_bytes=1 << 20))
    assert (tried, {one.status for one in found.sizes}) == ([], {"too_big"})
    assert found.sizes[0].reason.endswith("by the plan, this machine has 1 MiB free")
    assert found.sizes[0].needs is not None


def test_a_size_that_the_config_cannot_have_is_not_tried() -> None:
    turns = dict.fromkeys((64, 32, 16, 8, 4), measured(5))
    found, tried = search(turns, "model.batch_norm=true")
    assert tried == [64, 32, 16, 8, 4]
    assert [one.status for one in found.sizes[-2:]] == ["refused", "refused"]  # the last batch has 29 samples
    assert "so that a shard has one, which has no batch statistics" in found.sizes[-1].reason
    assert found.best is not None
    assert found.best.micro_size == 4


def test_further_rounds_take_the_measured_sizes_in_turns() -> None:
    turns = {64: OUT_OF_MEMORY, 32: measured(100), 16: measured(60), 8: measured(50)}
    _, tried = search(turns, rounds=2)
    assert tried == [64, 32, 16, 8, 32, 16, 8]


def test_the_overrides_keep_the_global_batch() -> None:
    found, _ = search({64: measured(100), 32: measured(90), 16: measured(50)})
    cfg = config()
    assert overrides_for(cfg, found) == ("batch.micro_size=64",)
    other = replace(cfg, batch=replace(cfg.batch, global_size=None, micro_size=8, accumulation=8))
    words = overrides_for(other, found)
    assert words == ("batch.global_size=64", "batch.micro_size=64", "batch.accumulation=null")
    assert make_plan(config(*words)).batch == make_plan(with_size(other, 64, 64)).batch


def test_what_was_found_is_shown_and_has_its_schema() -> None:
    found, _ = search({64: OUT_OF_MEMORY, 32: measured(100), 16: measured(60), 8: measured(50)})
    content = size_document(found, command="x", rounds=1, overrides=["batch.micro_size=32"], notes=[])
    jsonschema.Draft202012Validator(schema_of("find_micro_size")).validate(content)
    lines = list(size_lines(found, ["batch.micro_size=32"]))
    assert lines[1] == "          32                 2        100  100 .. 100           100 %   1 MiB"
    assert "  4, 2, 1: not tried: the larger sizes are slower already" in lines
    assert lines[-1] == "  batch.micro_size=32"


DEFAULTS = dict(module.search_micro_size.__kwdefaults__ or {})


def test_sizes_are_measured_by_trainings_of_the_config(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.search_micro_size, "__kwdefaults__", {**DEFAULTS, "start": here})
    assert main(["find", "micro_size", "recipe=null", "steps=3", "batch.global_size=4", "--steps", "2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("find_micro_size")).validate(content)
    assert content["sizes"][0]["status"] == "measured"
    assert content["overrides"] == [f"batch.micro_size={content['micro_size']}"]
    assert list(cwd.iterdir()) == []


def test_the_memory_that_is_free_is_read_from_the_system(tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 9 kB\nMemAvailable:    7 kB\n")
    assert available_bytes(told) == 7 * 1024
    assert available_bytes(tmp_path / "absent") > 1 << 20
