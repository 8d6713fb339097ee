"""`trainkit find lr`: a rate that belongs to the loss of another step, or one of noise, is caught here alone.
`trainkit find micro_size`: overrides that change the samples of a step are caught here alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest

from tests.measuring.trainings import config, run_training, run_turn
from tests.support.present import present
from tests.support.refusing import Refuse
from trainkit.cli import main
from trainkit.config.schema import RunConfig
from trainkit.errors import NonFiniteError, TrainingError
from trainkit.files import json_value
from trainkit.measuring import range_test as module
from trainkit.measuring import searches
from trainkit.measuring.bench import Turn
from trainkit.measuring.range_test import Divergence, FindLrDocument, LrCurve, SuggestedRate, range_config, range_test
from trainkit.measuring.searches import FindMicroSizeDocument, Size, best_of, search_micro_size, sizes_of, with_size
from trainkit.measuring.tables import header, machine
from trainkit.report.plots import draw_range
from trainkit.run.estimates.memory import HostMemory
from trainkit.run.estimates.this_machine import available_bytes
from trainkit.run.planning.plan import make_plan
from trainkit.trainer.metrics_accumulator import PARTS
from trainkit.verbs.looking.schema import schema_of


def curve_of(loss: list[float], *, ratio: float = 1.2) -> LrCurve:
    return LrCurve.of([(1e-4 * ratio**index, value) for index, value in enumerate(loss)], "range")


def range_of(low: float, high: float, steps: int, *overrides: str) -> LrCurve:
    cfg = config(*overrides)
    return range_test(
        range_config(cfg, low=low, high=high, steps=steps, peak=make_plan(cfg).rate.peak), start=run_training
    )


def test_the_steepest_fall_and_a_tenth_of_the_minimum_are_suggested() -> None:
    falling = [2 - math.tanh((index - 30) / 6) for index in range(60)]
    curve = curve_of([*falling, 2.0, 4.0, 8.0])
    assert curve.steepest == pytest.approx(1e-4 * 1.2**30, rel=0.02)
    assert curve.minimum is not None
    assert 1.2**50 < curve.minimum / 1e-4 < 1.2**60
    assert curve.tenth_of_minimum == pytest.approx(curve.minimum / 10, rel=0.01)


@pytest.mark.parametrize(
    "loss",
    [
        [2.0 + 0.1 * (-1) ** index for index in range(40)],  # noise alone
        [2.0 + 0.1 * index for index in range(40)],  # rises from the first step
        [2.0, 1.0, 0.5],  # too short
        [],
    ],
)
def test_a_loss_that_does_not_fall_suggests_nothing(loss: list[float]) -> None:
    curve = curve_of(loss)
    assert (curve.steepest, curve.minimum, curve.tenth_of_minimum) == (None, None, None)


def test_a_loss_diverges_above_its_first_value_and_four_times_the_least() -> None:
    cases: list[tuple[list[float], list[int]]] = [
        ([2.0, 1.0, 1.0, 1.0, 40.0], [4]),
        ([2.0, 1e-6, 1e-6, 1e-6, 1e-3, 1e-2], []),  # nearly no loss: four times the least is no divergence
        ([-1.0, -2.0, -2.0, -3.0, 90.0], [4]),  # a likelihood
        ([2.0, 3.0, 4.0, 5.0, 6.0], []),
    ]
    for losses, indices in cases:
        divergence = Divergence()
        assert [index for index, loss in enumerate(losses) if divergence.add(loss)] == indices


def test_the_rate_grows_by_a_ratio_and_the_losses_are_those_of_the_training(tmp_path: Path) -> None:
    whole = range_of(1e-6, 1e-4, 12)
    assert [point.lr for point in whole.points] == pytest.approx([1e-6 * 100 ** (step / 11) for step in range(12)])
    assert whole.ended == "range"
    cut = range_of(1e-6, 1e-4, 12, "batch.micro_size=16")
    assert [point.loss for point in cut.points] == pytest.approx([point.loss for point in whole.points])
    assert list(tmp_path.iterdir()) == []


def test_the_test_ends_where_the_loss_diverges_or_is_no_longer_finite() -> None:
    diverged = range_of(1e-4, 100.0, 40, "optimizer=sgd")
    assert diverged.ended in ("diverged", "not_finite")
    assert 10 <= len(diverged.points) < 40
    broken = range_of(1e30, 1e38, 12, "optimizer=sgd")
    assert broken.ended == "not_finite"
    assert all(math.isfinite(point.loss) for point in broken.points)


def test_a_loss_that_is_not_finite_at_the_first_step_is_an_error() -> None:
    with pytest.raises(NonFiniteError, match=r"^the loss is not finite before the first update, at any learning rate"):
        range_of(1e-6, 1.0, 10, "model._target_=tests.measuring.slow.Broken", "~model.hidden")


def test_a_training_that_fails_for_another_reason_is_an_error(tmp_path: Path) -> None:
    def start(cfg: RunConfig, folder: Path) -> Turn:
        del cfg
        return Turn(folder=folder, failure="exit 1: OutOfMemoryError: no room", error="OutOfMemoryError")

    with pytest.raises(TrainingError, match=r"^the range test failed: exit 1: OutOfMemoryError: no room$"):
        range_test(config(), start=start)


def test_the_override_undoes_the_scaling_of_the_learning_rate() -> None:
    curve = curve_of([2 - math.tanh((index - 30) / 6) for index in range(60)])
    rates = [present(SuggestedRate.of(rate, 4.0)) for rate in (curve.steepest, curve.tenth_of_minimum)]
    assert rates[0].override == f"optimizer.lr={rates[0].lr / 4:.3g}"
    content = FindLrDocument(
        **header("x"), global_size=64, min_lr=1e-4, max_lr=1.0, steps=60, ended="range", steepest=rates[0],
        tenth_of_minimum=rates[1], points=curve.points, notes=[],
    )  # fmt: skip
    jsonschema.Draft202012Validator(schema_of("find_lr")).validate(json_value(asdict(content)))
    assert any("after lr_scaling" in line for line in content.lines())


def test_the_curve_is_drawn_also_where_nothing_is_suggested(tmp_path: Path) -> None:
    draw_range(tmp_path / "b.png", title="x", points=[], steepest=None, tenth_of_minimum=None)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_is_printed_and_nothing_is_written_without_out(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.range_test, "__kwdefaults__", {"start": run_training})
    assert main(["find", "lr", "recipe=null", "optimizer=sgd", "--steps", "30", "--min-lr", "1e-4", "--json"]) in (0, 1)
    content = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("find_lr")).validate(content)
    assert (content["min_lr"], content["max_lr"], content["steps"], content["global_size"]) == (1e-4, 10.0, 30, 64)
    assert list(cwd.iterdir()) == []


@pytest.mark.long
def test_a_range_test_runs_in_processes_and_writes_its_folder_alone(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["recipe=digits", "strategy=mirrored", "strategy.replicas=2"]
    assert main(["find", "lr", *keys, "--min-lr", "1e-4", "--out", "found"]) == 0
    printed = capsys.readouterr().out
    content = json.loads((cwd / "found" / "find_lr.json").read_text())
    assert content["ended"] in ("diverged", "not_finite")
    assert 1e-3 < content["steepest"]["lr"] < 1e-1
    assert content["steepest"]["override"] in printed
    assert sorted(path.name for path in (cwd / "found").iterdir()) == ["find_lr.json", "find_lr.png"]
    assert [path.name for path in cwd.iterdir()] == ["found"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["lr", "--steps", "3"], ["--steps=3: must be a whole number, 10 to 100,000."]),
        (["lr", "--min-lr", "x", "--max-lr", "-1"], ["--min-lr=x: ", "--max-lr=-1: "]),
        (["lr", "--min-lr", "20"], ["would go from 20 to 10"]),
        (["rate"], ["finds one of lr, micro_size"]),
        (["lr", "resume=auto"], ["resume=auto: has no effect"]),
        (["lr", "optimizer.lr=0.0"], ["optimizer.lr=0.0: must be above 0"]),
        (["lr", "batch.global_size=5000"], ["Use 1437 or less"]),
        (["lr", "strategy=central_storage", "strategy.mode=async"], ["strategy.mode=async: applies gradients as"]),
        (["lr", "recipe=gan"], ["optimizers: has a learning rate for each of"]),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: list[str], parts: list[str], refuse: Refuse) -> None:
    problems = refuse("find", *arguments, *([] if "recipe=gan" in arguments else ["recipe=null"]))
    assert all(part in problem for part, problem in zip(parts, problems, strict=True)), problems


OUT_OF_MEMORY = Turn(failure="exit 1: OutOfMemoryError: cuda:0 is out of memory.", error="OutOfMemoryError")


def measured(samples_per_s: float) -> Turn:
    shared = {"steps": 1, "samples": 64, "targets": 64.0, "peak_bytes": 1 << 20, "compile_s": 0.0}
    ranks = [dict.fromkeys(PARTS, 0.0)]
    return Turn(figures={**shared, "seconds": 64 / samples_per_s, "ranks": ranks})


def search(
    turns: Mapping[int, Turn], *overrides: str, memory: HostMemory | None = None, rounds: int = 1
) -> tuple[list[Size], list[int]]:
    """Search with these turns of each size; return the sizes that were tried, too."""
    tried = list[int]()

    def start(cfg: RunConfig, folder: Path) -> Turn:
        del folder
        assert cfg.batch.micro_size is not None
        assert (cfg.batch.global_size, cfg.batch.accumulation) == (64, None)
        tried.append(cfg.batch.micro_size)
        return turns[cfg.batch.micro_size]

    cfg = config(*overrides)
    return search_micro_size(cfg, make_plan(cfg), memory=memory, steps=1, rounds=rounds, start=start), tried


def test_the_sizes_make_1_2_4_shards_a_replica() -> None:
    cases: list[tuple[list[str], list[tuple[int, int]]]] = [
        (["batch.micro_size=24"], [(64, 1), (32, 2), (24, 3), (16, 4), (8, 8), (4, 16), (2, 32), (1, 64)]),
        (["batch.global_size=10", "strategy=mirrored", "strategy.replicas=3"], [(4, 1), (2, 2), (1, 4)]),
        (["batch.global_size=2", "strategy=mirrored", "strategy.replicas=2"], [(1, 1)]),
    ]
    for overrides, sizes in cases:
        assert [(size.micro_size, size.accumulation) for size in sizes_of(make_plan(config(*overrides)))] == sizes


def test_a_size_without_memory_is_followed_by_the_next_and_slower_ones_end_the_search() -> None:
    speeds = {32: measured(100), 16: measured(98), 8: measured(90), 4: measured(50)}
    sizes, tried = search({64: OUT_OF_MEMORY, **speeds})
    assert tried == [64, 32, 16, 8, 4]
    best = present(best_of(sizes))
    assert (best.micro_size, [size.status for size in sizes[:2]]) == (16, ["out_of_memory", "measured"])
    assert [size.reason for size in sizes[-2:]] == ["not tried: the larger sizes are slower already"] * 2


def test_a_killed_training_counts_as_one_without_memory_and_another_failure_ends_the_search() -> None:
    killed = Turn(failure="signal 9", error="SIGKILL")
    rank = Turn(failure="exit 1: TrainingError: rank 1 was ended by SIGKILL", error="TrainingError")
    failed = Turn(failure="exit 3: DataError: gone", error="DataError")
    sizes, tried = search({64: killed, 32: rank, 16: failed})
    assert (tried, best_of(sizes)) == ([64, 32, 16], None)
    assert [size.status for size in sizes[:4]] == ["out_of_memory", "out_of_memory", "failed", "untried"]
    assert sizes[3].reason == "not tried: the size above has failed"


def test_a_size_that_the_plan_finds_too_big_is_not_tried() -> None:
    sizes, tried = search({}, "batch.global_size=2", memory=HostMemory(memory_bytes=1 << 20))
    assert (tried, {size.status for size in sizes}) == ([], {"too_big"})
    assert present(sizes[0].reason).endswith("by the plan, this machine has 1 MiB free")
    assert sizes[0].predicted_bytes is not None


def test_a_size_that_the_config_cannot_have_is_not_tried() -> None:
    turns = dict.fromkeys((64, 32, 16, 8, 4), measured(5))
    sizes, tried = search(turns, "model.batch_norm=true")
    assert tried == [64, 32, 16, 8, 4]
    assert [size.status for size in sizes[-2:]] == ["refused", "refused"]  # the last batch has 29 samples
    assert "so that a shard has one, which has no batch statistics" in present(sizes[-1].reason)
    assert present(best_of(sizes)).micro_size == 4


def test_the_overrides_keep_the_global_batch() -> None:
    other = replace(config().batch, global_size=None, micro_size=8, accumulation=8)
    overrides = other.overrides(global_size=64, micro_size=64)
    assert overrides == ("batch.global_size=64", "batch.micro_size=64", "batch.accumulation=null")
    assert make_plan(config(*overrides)).batch == make_plan(with_size(replace(config(), batch=other), 64, 64)).batch


def test_what_was_found_is_shown_and_has_its_schema() -> None:
    sizes, _ = search({64: OUT_OF_MEMORY, 32: measured(100), 16: measured(60), 8: measured(50)})
    content = FindMicroSizeDocument(
        **header("x"), machine=machine(), global_size=64, replicas=1, rounds=1, sizes=sizes, micro_size=32,
        overrides=["batch.micro_size=32"], notes=[],
    )  # fmt: skip
    jsonschema.Draft202012Validator(schema_of("find_micro_size")).validate(json_value(asdict(content)))
    lines = list(content.lines())
    assert lines[1] == "          32                 2        100  100 .. 100           100 %   1 MiB"
    assert "  4, 2, 1: not tried: the larger sizes are slower already" in lines
    assert lines[-1] == "  batch.micro_size=32"


DEFAULTS = dict(searches.search_micro_size.__kwdefaults__ or {})


@pytest.mark.slow
def test_sizes_are_measured_by_trainings_of_the_config(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(searches.search_micro_size, "__kwdefaults__", {**DEFAULTS, "start": run_turn})
    assert main(["find", "micro_size", "recipe=null", "steps=3", "batch.global_size=4", "--steps", "2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("find_micro_size")).validate(content)
    assert content["sizes"][0]["status"] == "measured"
    assert content["overrides"] == [f"batch.micro_size={content['micro_size']}"]
    assert list(cwd.iterdir()) == []


def test_the_memory_that_is_free_is_read_from_the_system(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    7 kB\n")
    assert available_bytes(meminfo) == 7 * 1024
    assert available_bytes(tmp_path / "absent") > 1 << 20
