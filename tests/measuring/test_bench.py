"""`trainkit bench`: a measurement that changes the weights of its training is caught here alone.
How many processes load data: a resumed run that is measured again is caught here alone.
A measurement that is stopped: a process or a folder that it leaves behind is caught here alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import trainkit
from tests.measuring.slow import Sleepy, SlowSamples
from tests.measuring.trainings import candidate, config, run_turn
from tests.support.present import present
from tests.support.refusing import Refuse
from tests.support.waiting import wait_for
from trainkit.cli import main
from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import ConfigError, TerminatedError
from trainkit.measuring import searches
from trainkit.measuring.bench import Choice, Spread, Target, Turn, bench, measured_config, parts_of, scratch_folder
from trainkit.measuring.searches import WorkerSearch, search_workers
from trainkit.measuring.tables import table_lines
from trainkit.prove.proving import bare
from trainkit.run.begin import RunRequest
from trainkit.run.planning.plan import refuse_open_workers
from trainkit.run.runner import train
from trainkit.trainer.metrics_accumulator import PARTS
from trainkit.verbs.looking.schema import schema_of
from trainkit.verbs.measuring import bench as verb

SLOW_DATA = "data._target_=tests.measuring.slow.SlowSamples"
SLEEPY = ("model._target_=tests.measuring.slow.Sleepy", SLOW_DATA, "data.ms=0", "batch.global_size=8")


@pytest.mark.slow
def test_the_choices_take_turns_and_nothing_of_a_turn_is_left() -> None:
    folders, lines = list[Path](), list[str]()

    def start(cfg: RunConfig, folder: Path) -> Turn:
        turn = run_turn(cfg, folder)
        folders.append(folder)
        assert not (folder / "checkpoints").exists()
        assert not (folder / "model").exists()
        return turn

    candidates = [candidate("a", "optimizer.lr=0.1"), candidate("b", "batch.global_size=16")]
    first, second = bench(candidates, rounds=2, steps=3, log=lines.append, start=start)
    assert lines == ["round 1 of 2: a", "round 1 of 2: b", "round 2 of 2: a", "round 2 of 2: b"]
    assert [turn.figures["steps"] for turn in (*first.turns, *second.turns)] == [3, 3, 3, 3]
    assert [first.turns[0].figures["samples"], second.turns[0].figures["samples"]] == [3 * 64, 3 * 16]
    assert not any(folder.exists() for folder in folders)


def test_the_slow_part_of_a_step_is_the_one_that_is_named() -> None:
    reads = (*SLEEPY[:2], "data.ms=1", "model.ms=0", "batch.global_size=8")
    for part, settings in (("input", reads), ("forward", SLEEPY)):
        (choice,) = bench([candidate("a", *settings)], rounds=1, steps=3, start=run_turn)
        parts = parts_of(choice.turns[0].figures)
        assert max(parts, key=lambda name: parts[name]) == part


def test_a_measured_training_computes_the_same_bits(tmp_path: Path) -> None:
    measured = measured_config(config(), warmup_steps=3, num_steps=4)
    plain = replace(measured, callbacks={})
    with_it = train(RunRequest(cfg=measured, run_dir=tmp_path / "a"))
    without = train(RunRequest(cfg=plain, run_dir=tmp_path / "b"))
    assert with_it["weights_sha256"] == without["weights_sha256"]
    assert with_it["steps"] == without["steps"] == 7


def test_a_choice_that_fails_is_left_out_and_the_others_go_on() -> None:
    def start(cfg: RunConfig, folder: Path) -> Turn:
        return Turn(failure="exit 1: no room") if cfg.seed == 1 else run_turn(cfg, folder)

    first, second = bench([candidate("a", "seed=1"), candidate("b")], rounds=2, steps=1, start=start)
    assert (first.is_measured, first.failure) == (False, "exit 1: no room")
    assert (second.is_measured, len(second.turns)) == (True, 2)


def test_turns_without_a_number_of_steps_take_about_two_seconds() -> None:
    num_steps = list[int]()

    def start(cfg: RunConfig, folder: Path) -> Turn:
        del folder
        num_steps.append(cfg.callbacks["measurement"]["num_steps"])
        ranks = [dict.fromkeys(("input", "forward", "backward", "exchange", "update"), 0.0)]
        steps = num_steps[-1]
        return Turn(figures={"steps": steps, "samples": steps, "seconds": 0.1 * steps, "ranks": ranks, "targets": 1.0})

    (choice,) = bench([candidate("a")], rounds=1, start=start)
    assert num_steps == [20, 20]  # two seconds of steps of 0.1 s each
    assert choice.cold is not None
    assert len(choice.turns) == 1


def test_a_training_ends_once_its_evaluation_has_the_result() -> None:
    points = candidate("a", "eval.every_steps=5", "eval.every_epochs=null")
    (choice,) = bench([points], rounds=1, target=Target.of("val/accuracy", 0.2, points.cfg), start=run_turn)
    (two,) = bench([points], rounds=1, target=Target.of("val/loss", -1.0, points.cfg), start=run_turn)
    assert 0 < present(choice.spread("until_s")).median <= choice.turns[0].figures["trained_s"]
    assert choice.turns[0].figures["until"]["value"] >= 0.2
    assert (two.spread("until_s"), two.turns[0].figures["trained_steps"]) == (None, 40)
    assert two.turns[0].figures["metric"] > 0


@pytest.mark.long
def test_bench_measures_in_processes_and_keeps_its_folder_alone(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["recipe=null", "steps=30", "strategy=one_device,mirrored", "strategy.replicas=2"]
    assert main(["bench", *keys, "--rounds", "1", "--steps", "3", "--json", "--out", "found"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["version"] == 1
    jsonschema.Draft202012Validator(schema_of("bench")).validate(content)
    assert [choice["label"] for choice in content["choices"]] == [
        "strategy=one_device", "strategy=mirrored strategy.replicas=2",
    ]  # fmt: skip
    first, two = content["choices"]
    assert (first["replicas"], two["replicas"], len(two["turns"][0]["ranks"])) == (1, 2, 2)
    assert two["parts_s"]["exchange"]["median"] > 0
    assert first["start_s"]["median"] > 0
    assert json.loads((cwd / "found" / "bench.json").read_text()) == content
    assert [path.name for path in cwd.iterdir()] == ["found"]
    assert {path.name for path in (cwd / "found").iterdir()} == {"bench.json", "bench.png"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["seed=1,1", "--until", "val/accuracy", "--steps", "3"],
            ["--until val/accuracy=0.9", "--steps=3: has no effect", "bench: compares"],
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
        (["--data", "--steps", "3", "optimizer.lr=1,2"], ["--steps=3: has no effect", "--data: measures one training"]),
        (["--data", "loader.num_workers=2", "loader.cache=false"], ["loader.num_workers=2: has no effect"]),
        (["--data", "steps=20"], ["bench needs 30 or more"]),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_runs(arguments: list[str], parts: list[str], refuse: Refuse) -> None:
    problems = refuse("bench", "recipe=null", *arguments)
    assert all(part in problem for part, problem in zip(parts, problems, strict=True)), problems


@pytest.mark.slow
def test_choices_that_a_dropped_key_makes_the_same_are_measured_once(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "recipe=null", "strategy=one_device,mirrored", "strategy.replicas=2,4", "steps=4"]) == 2
    assert "the lists contain strategy=one_device 2 times; it is measured once" in capsys.readouterr().err
    assert list(cwd.iterdir()) == []


@pytest.mark.slow
def test_the_time_of_torch_compile_is_apart() -> None:
    compiled = ("compile.mode=default", "compile.backend=eager")
    first, second = bench([candidate("a"), candidate("b", *compiled)], rounds=1, steps=3, start=run_turn)
    assert first.spread("compile_s") == Spread.of([0.0])
    assert 0 < present(second.spread("compile_s")).median < present(second.spread("first_step_s")).median
    assert "of it compiling" in "\n".join(table_lines([first, second]))


def test_a_language_model_has_its_tokens_a_second() -> None:
    text = ("model=gpt", "data=synthetic_tokens", "objective=language_modelling", "batch.global_size=4")
    small = ("model.width=16", "model.num_heads=2", "model.num_layers=1", "model.context=8", "data.context=8")
    (choice,) = bench([candidate("a", *text, *small)], rounds=1, steps=2, start=run_turn)
    assert choice.turns[0].figures["samples"] == 8
    assert choice.turns[0].figures["targets"] == 64
    assert "targets/s" in "\n".join(table_lines([choice]))


VAIN = ", and workers do not shorten a step"


def search(
    step_ms: Mapping[int, tuple[float, float]], monkeypatch: pytest.MonkeyPatch, *, ranks: int = 1
) -> WorkerSearch:
    """Search where a step with some number of workers takes so many milliseconds, and its input so many of them."""
    monkeypatch.setattr(searches, "num_cores", lambda: 8)

    def start(cfg: RunConfig, folder: Path) -> Turn:
        del folder
        assert isinstance(cfg.loader.num_workers, int)
        if cfg.loader.num_workers not in step_ms:
            return Turn(failure="exit 2: cannot")
        whole, read = step_ms[cfg.loader.num_workers]
        parts = {**dict.fromkeys(PARTS, 0.0), "input": read / 1e3}
        totals = {"targets": 8.0, "peak_bytes": 1 << 20, "compile_s": 0.0}
        return Turn(figures={"steps": 1, "samples": 8, "seconds": whole / 1e3, "ranks": [parts], **totals})

    return search_workers(config("loader.cache=false"), num_steps=1000, num_ranks=ranks, start=start)


@pytest.mark.parametrize(
    ("step_ms", "tried", "reason", "bound"),
    [
        ({0: (10, 0.4)}, 1, "0, because reading takes 4 % of a step", False),
        (
            {0: (40, 30), 1: (30, 20), 2: (16, 6), 4: (10.2, 0.2)}, 4,
            "4: a step is 3.9 times as fast, and reading takes 2 % of it instead of 75 %", True,
        ),
        (
            {0: (40, 30), 1: (20, 10), 2: (19.5, 10)}, 3,
            "1: a step is 2.0 times as fast, and reading takes 50 % of it instead of 75 %", True,
        ),
        ({0: (40, 4), 1: (50, 3)}, 2, f"0, because reading takes 10 % of a step{VAIN}", True),
        ({}, 1, "0, because the training could not be measured: exit 2: cannot", False),
    ],
)  # fmt: skip
def test_the_smallest_number_of_workers_wins_whose_steps_are_short(
    step_ms: Mapping[int, tuple[float, float]], tried: int, reason: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = search(step_ms, monkeypatch)
    assert (len(answer.choices), answer.reason, answer.is_loader_bound) == (tried, reason, bound)
    assert str(answer.num_workers) == reason[0]


def test_the_verdict_stands_below_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list(search({0: (40, 30), 1: (10, 0.1)}, monkeypatch).lines())
    assert lines[1:3] == [
        "        0        200  200 .. 200   1.00   1 MiB         40   75 %",
        "        1        800  800 .. 800   4.00   1 MiB         10    1 %",
    ]
    assert lines[-1].startswith("  bound by its loader. loader.num_workers=1: a step is 4.0 times as fast")


@pytest.mark.slow
def test_a_run_chooses_its_workers_and_a_resumed_one_keeps_them(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = iter((0, 1))
    monkeypatch.setattr(
        searches,
        "search_workers",
        lambda *_, **__: WorkerSearch(choices=(), num_workers=next(numbers), reason="measured"),
    )
    keys = ["recipe=null", "steps=6", "loader.cache=false", "loader.num_workers=auto"]
    for more in (["stop_at_step=3"], ["resume=auto", "stop_at_step=5"]):
        trainkit.train([*keys, *more], run_dir="run")
        assert load_resolved("run/resolved.yaml").loader.num_workers == 0
    assert "loader.num_workers=auto: measured" in capsys.readouterr().out
    assert next(numbers) == 1


def test_what_cannot_be_measured_takes_a_number(cwd: Path) -> None:
    auto = config("loader.cache=false", "loader.num_workers=auto")
    refuse_open_workers(config("loader.cache=false", "loader.num_workers=1"))
    with pytest.raises(ConfigError, match=r"loader\.num_workers=auto: is measured by short"):
        refuse_open_workers(auto)
    assert bare(auto, 1).loader.num_workers == 0  # a proof reads in its own process

    class Mine(Sleepy):
        pass

    keys = ["recipe=null", "loader.num_workers=auto"]
    with pytest.raises(ConfigError, match="Give a number: trainkit bench --data finds it"):
        trainkit.train(keys, model=Mine(), data=SlowSamples(), steps=40, quiet=True)
    assert list(cwd.iterdir()) == []


def test_the_verdict_as_json_has_its_schema(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = WorkerSearch(choices=(Choice(label="0", failure="exit 2"),), num_workers=0, reason="0, because")
    monkeypatch.setattr(verb, "search_workers", lambda *_, **__: answer)
    assert main(["bench", "--data", "recipe=null", "steps=40", "--json", "--out", "found"]) == 1
    content = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("bench")).validate(content)
    assert content["data"] == {"bound_by": "model", "num_workers": 0, "reason": "0, because"}
    assert [path.name for path in (cwd / "found").iterdir()] == ["bench.json"]


LONG = (
    "recipe=null", "strategy=mirrored", "strategy.replicas=2", "steps=100000", "optimizer.lr=0.1,0.2",
    "loader.cache=false", "loader.num_workers=1", "--steps", "99000",
)  # fmt: skip


def processes_with(variable: str) -> list[int]:
    """Return the processes that have a variable in their environment."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (process / "environ").read_bytes().decode(errors="replace").split("\0"):
                pids.append(int(process.name))
        except OSError:
            continue
    return pids


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_bench_leaves_no_process_and_no_folder(cwd: Path) -> None:
    scratch = cwd / "scratch"
    scratch.mkdir()
    variable = f"TMPDIR={scratch}"
    process = subprocess.Popen(
        [sys.executable, "-m", "trainkit", "bench", *LONG],
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: [*scratch.glob("trainkit-bench-*/*/run/live/rank_1*")], process)
        process.terminate()
        assert process.wait(300) == 143
        names = (path.name for path in scratch.iterdir())
        assert [name for name in names if not name.startswith("torchinductor_")] == []  # the compiler's own cache
        wait_for(lambda: not processes_with(variable))
        assert [*(cwd / "outputs/bench").iterdir()] == []
    finally:
        for pid in processes_with(variable):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_signal_that_interrupts_the_removal_does_not_prevent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    remove, calls = shutil.rmtree, list[Path]()

    def interrupted(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(TerminatedError), scratch_folder() as folder:
        pass
    assert not folder.exists()
    assert len(calls) == 2
