"""How many processes load data: a resumed run that is measured again is caught here alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jsonschema
import pytest

import trainkit
from tests.measuring.slow import Sleepy, SlowSamples
from tests.measuring.trainings import config
from trainkit.cli import main
from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import ConfigError
from trainkit.measuring import workers
from trainkit.measuring.figures import Choice
from trainkit.measuring.showing import data_lines
from trainkit.measuring.turns import Turn
from trainkit.measuring.workers import WorkerSearch, search_workers
from trainkit.run.equivalence.running import bare
from trainkit.run.planning.workers import refuse_open_workers
from trainkit.trainer.phase_clock import PARTS
from trainkit.verbs.looking.schema import schema_of

VAIN = ", and workers do not shorten a step"


def search(
    step_ms: Mapping[int, tuple[float, float]], monkeypatch: pytest.MonkeyPatch, *, ranks: int = 1
) -> WorkerSearch:
    """Search where a step with some number of workers takes so many milliseconds, and its input so many of them."""
    monkeypatch.setattr(workers, "num_cores", lambda: 8)

    def start(cfg: RunConfig, folder: Path) -> Turn:
        del folder
        assert isinstance(cfg.loader.num_workers, int)
        if cfg.loader.num_workers not in step_ms:
            return Turn(figures={}, failure="exit 2: cannot")
        whole, read = step_ms[cfg.loader.num_workers]
        parts = {**dict.fromkeys(PARTS, 0.0), "input": read / 1e3}
        rest = {"targets": 8.0, "peak_bytes": 1 << 20, "compile_s": 0.0}
        return Turn(figures={"steps": 1, "samples": 8, "seconds": whole / 1e3, "ranks": [parts], **rest})

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
    found = search(step_ms, monkeypatch)
    assert (len(found.choices), found.reason, found.is_loader_bound) == (tried, reason, bound)
    assert str(found.num_workers) == reason[0]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search({0: (40, 36), 1: (20, 16), 2: (10, 8), 4: (5, 4)}, monkeypatch, ranks=4)  # of 8 cores
    assert [one.label for one in found.choices] == ["0", "1", "2"]


def test_the_verdict_stands_below_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list(data_lines(search({0: (40, 30), 1: (10, 0.1)}, monkeypatch)))
    assert lines[1:3] == [
        "        0        200  200 .. 200   1.00   1 MiB         40   75 %",
        "        1        800  800 .. 800   4.00   1 MiB         10    1 %",
    ]
    assert lines[-1].startswith("  bound by its loader. loader.num_workers=1: a step is 4.0 times as fast")


def test_a_run_chooses_its_workers_and_a_resumed_one_keeps_them(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = iter((0, 1))
    monkeypatch.setattr(
        workers,
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "3", "optimizer.lr=1,2"], ["--steps: has no effect", "--data: measures one training"]),
        (["loader.num_workers=2", "loader.cache=false"], ["loader.num_workers=2: has no effect"]),
        (["steps=20"], ["bench needs 30 or more"]),
    ],
)
def test_bad_input_of_the_search_is_refused(
    arguments: list[str], words: list[str], cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--data", "recipe=null", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()[1:]
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert list(cwd.iterdir()) == []


def test_the_verdict_as_json_has_its_schema(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = WorkerSearch(choices=(Choice(label="0", failure="exit 2"),), num_workers=0, reason="0, because")
    monkeypatch.setattr(workers, "search_workers", lambda *_, **__: found)
    assert main(["bench", "--data", "recipe=null", "steps=40", "--json", "--out", "found"]) == 1
    content = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema_of("bench")).validate(content)
    assert content["data"] == {"bound_by": "model", "num_workers": 0, "reason": "0, because"}
    assert [path.name for path in (cwd / "found").iterdir()] == ["bench.json"]
