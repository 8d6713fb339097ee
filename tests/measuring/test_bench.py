"""`trainkit bench`: a measurement that changes the weights of its training is caught here alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from tests.measuring.trainings import candidate, config, here
from trainkit.cli import main
from trainkit.config.schema import RunConfig
from trainkit.measuring.bench import bench
from trainkit.measuring.figures import Spread, parts_of
from trainkit.measuring.showing import table_lines
from trainkit.measuring.turns import Target, Turn, measured_config
from trainkit.run.runner import train
from trainkit.verbs.looking.schema import schema_of

SLOW_DATA = "data._target_=tests.measuring.slow.SlowSamples"
SLEEPY = ("model._target_=tests.measuring.slow.Sleepy", SLOW_DATA, "data.ms=0", "batch.global_size=8")


def test_the_choices_take_turns_and_nothing_of_a_turn_is_left() -> None:
    folders, lines = list[Path](), list[str]()

    def start(cfg: RunConfig, folder: Path) -> Turn:
        turn = here(cfg, folder)
        folders.append(folder)
        assert not (folder / "checkpoints").exists()
        assert not (folder / "model").exists()
        return turn

    both = [candidate("a", "optimizer.lr=0.1"), candidate("b", "batch.global_size=16")]
    one, other = bench(both, rounds=2, steps=3, log=lines.append, start=start)
    assert lines == ["round 1 of 2: a", "round 1 of 2: b", "round 2 of 2: a", "round 2 of 2: b"]
    assert [turn.figures["steps"] for turn in (*one.turns, *other.turns)] == [3, 3, 3, 3]
    assert [one.turns[0].figures["samples"], other.turns[0].figures["samples"]] == [3 * 64, 3 * 16]
    assert not any(folder.exists() for folder in folders)


def test_the_parts_of_a_step_add_up_to_the_step() -> None:
    (one,) = bench([candidate("a")], rounds=1, steps=5, start=here)
    parts = parts_of(one.turns[0].figures)
    assert sum(parts.values()) == pytest.approx(one.turns[0].figures["seconds"] / 5)
    assert min(parts[part] for part in ("input", "forward", "backward", "update")) > 0


def test_the_slow_part_of_a_step_is_the_one_that_is_named() -> None:
    reads = (*SLEEPY[:2], "data.ms=1", "model.ms=0", "batch.global_size=8")
    for part, settings in (("input", reads), ("forward", SLEEPY)):
        (one,) = bench([candidate("a", *settings)], rounds=1, steps=3, start=here)
        found = parts_of(one.turns[0].figures)
        assert max(found, key=lambda name: found[name]) == part


def test_a_measured_training_computes_the_same_bits(tmp_path: Path) -> None:
    measured = measured_config(config(), warmup_steps=3, num_steps=4)
    plain = replace(measured, callbacks={})
    with_it, without = train(measured, run_dir=tmp_path / "a"), train(plain, run_dir=tmp_path / "b")
    assert with_it["weights_sha256"] == without["weights_sha256"]
    assert with_it["steps"] == without["steps"] == 7


def test_a_choice_that_fails_is_left_out_and_the_others_go_on() -> None:
    def start(cfg: RunConfig, folder: Path) -> Turn:
        return Turn(figures={}, failure="exit 1: no room") if cfg.seed == 1 else here(cfg, folder)

    one, other = bench([candidate("a", "seed=1"), candidate("b")], rounds=2, steps=1, start=start)
    assert (one.is_measured, one.failure, other.is_measured, len(other.turns)) == (False, "exit 1: no room", True, 2)


def test_turns_without_a_number_of_steps_take_about_two_seconds() -> None:
    asked = list[int]()

    def start(cfg: RunConfig, folder: Path) -> Turn:
        del folder
        asked.append(cfg.callbacks["measurement"]["num_steps"])
        ranks = [dict.fromkeys(("input", "forward", "backward", "exchange", "update"), 0.0)]
        steps = asked[-1]
        return Turn(figures={"steps": steps, "samples": steps, "seconds": 0.1 * steps, "ranks": ranks, "targets": 1.0})

    (one,) = bench([candidate("a")], rounds=1, start=start)
    assert asked == [20, 20]  # two seconds of steps of 0.1 s each
    assert one.cold is not None
    assert len(one.turns) == 1


def test_a_training_ends_once_its_evaluation_has_the_result() -> None:
    points = candidate("a", "eval.every_steps=5", "eval.every_epochs=null")
    (one,) = bench([points], rounds=1, target=Target.of("val/accuracy", 0.2, points.cfg), start=here)
    (two,) = bench([points], rounds=1, target=Target.of("val/loss", -1.0, points.cfg), start=here)
    assert one.until_s is not None
    assert 0 < one.until_s.median <= one.turns[0].figures["trained_s"]
    assert one.turns[0].figures["until"]["value"] >= 0.2
    assert (two.until_s, two.turns[0].figures["trained_steps"]) == (None, 40)
    assert two.turns[0].figures["metric"] > 0


@pytest.mark.long
def test_bench_measures_in_processes_and_keeps_its_folder_alone(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["recipe=null", "steps=30", "strategy=one_device,mirrored", "strategy.replicas=2"]
    assert main(["bench", *keys, "--rounds", "1", "--steps", "3", "--json", "--out", "found"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["version"] == 1
    jsonschema.Draft202012Validator(schema_of("bench")).validate(content)
    assert [one["label"] for one in content["choices"]] == [
        "strategy=one_device", "strategy=mirrored strategy.replicas=2",
    ]  # fmt: skip
    one, two = content["choices"]
    assert (one["replicas"], two["replicas"], len(two["turns"][0]["ranks"])) == (1, 2, 2)
    assert two["parts_s"]["exchange"]["median"] > 0
    assert one["start_s"]["median"] > 0
    assert json.loads((cwd / "found" / "bench.json").read_text()) == content
    assert [path.name for path in cwd.iterdir()] == ["found"]
    assert {path.name for path in (cwd / "found").iterdir()} == {"bench.json", "bench.png"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["seed=1,1", "--rounds", "0", "--until", "val/accuracy", "--steps", "x"],
            ["--rounds=0: ", "--steps=x: ", "--until val/accuracy=0.9", "--steps=x: has no effect", "bench: compares"],
        ),
        (["optimizer.lr=1,2", "--until", "val/acuracy=0.9"], ["Did you mean val/accuracy?"]),
        (
            [
                "strategy=one_device,parameter_server", "strategy.evaluator=true", "cv.folds=3", "resume=auto",
                "eval.every_epochs=null", "--until", "val/loss=0.1",
            ],
            ["cv.folds=3: ", "resume=auto: has no", "--until=val/loss=0.1: no evaluation", "evaluator=true: has no"],
        ),
        (["optimizer.lr=1,2", "steps=4"], ["bench needs 11 or more"]),
        (
            ["strategy=one_device,mirrored", "strategy.replicas=3", "numerics.reproducible=true", "numerics.lanes=2"],
            ["In the point strategy.replicas=3 strategy=mirrored"],
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_runs(
    arguments: list[str], words: list[str], cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "recipe=null", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()[1:]
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert list(cwd.iterdir()) == []


def test_choices_that_a_dropped_key_makes_the_same_are_measured_once(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "recipe=null", "strategy=one_device,mirrored", "strategy.replicas=2,4", "steps=4"]) == 2
    assert "the lists contain strategy=one_device 2 times; it is measured once" in capsys.readouterr().err
    assert list(cwd.iterdir()) == []


@pytest.mark.slow
def test_the_time_of_torch_compile_is_apart() -> None:
    compiled = ("compile.mode=default", "compile.backend=eager")
    one, other = bench([candidate("a"), candidate("b", *compiled)], rounds=1, steps=3, start=here)
    assert one.compile_s == Spread.of([0.0])
    assert other.compile_s is not None
    assert other.first_step_s is not None
    assert 0 < other.compile_s.median < other.first_step_s.median
    assert "of it compiling" in "\n".join(table_lines([one, other]))


def test_a_language_model_has_its_tokens_a_second() -> None:
    text = ("model=gpt", "data=synthetic_tokens", "objective=language_modelling", "batch.global_size=4")
    small = ("model.width=16", "model.num_heads=2", "model.num_layers=1", "model.context=8", "data.context=8")
    (one,) = bench([candidate("a", *text, *small)], rounds=1, steps=2, start=here)
    assert one.turns[0].figures["samples"] == 8
    assert one.turns[0].figures["targets"] == 64
    assert "targets/s" in "\n".join(table_lines([one]))
