"""An argument that recurses, allocates without end or writes outside of its folder is caught here alone: code 2."""

from pathlib import Path

import pytest

from tests.config.conftest import Refuse
from trainkit.cli import main
from trainkit.errors import Problem

BRACKETS = f"model.hidden={'[' * 3000}{']' * 3000}"
NESTED = "model.hidden: nests brackets 3000 deep; 50 is the limit. (command line)"
LONG = "has a name of 300 bytes; a file system takes 255 at most."


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((BRACKETS,), NESTED),
        (("name=" + "x" * 20_000,), "name: has 20,005 characters; 10,000 is the limit."),
        (("seed=" + "9" * 501,), "seed: holds a number of more than 500 digits."),
        (("name='a\x1b[31m'",), "name: holds the character \\x1b"),
        (("steps=9999999999999999999999",), "steps=9999999999999999999999: must fit into 64 bits"),
        (("epochs=1e30",), "epochs=1e+30: must be 1,000,000,000,000 or less."),
        (("hydra.run.dir=" + "x" * 300,), str(Problem(key="hydra.run.dir", value="x" * 300, rule=LONG))),
        (("strategy=mirrored", "strategy.replicas=1025"), "strategy.replicas=1025: must be 1,024 or less."),
        (
            ("strategy=pipeline", "strategy.replicas=1000", "strategy.stages=1000"),
            "strategy.replicas=1000: 1000 replicas of 1000 ranks need 1000000 devices",
        ),
        (("model.hidden=[4000000000000,4000000000000]",), "model: has a parameter that is larger than any memory"),
        (("--world", "²"), "--world=²: must be a whole number, 0 to 1,024."),
        (("--world", "2", "--world", "3"), "--world=2: is given twice, also as 3."),
        (("+seed=1", "seed=2"), "seed: is given twice: +seed=1 and seed=2."),
        (("batch={micro_size: 3}", "batch.micro_size=4"), "batch.micro_size: is given twice: batch={micro_size: 3} "),
        (("logger.w.api_key=k1k1", "logger.w.api_key=k2k2"), "logger.w.api_key: is given twice: logger.w.api_key=(r"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_an_argument_without_bound_is_refused_on_one_screen(
    refuse: Refuse, arguments: tuple[str, ...], told: str
) -> None:
    problems = refuse("plan", "recipe=null", *arguments)
    assert max(map(len, problems)) < 1500
    assert problems[0].startswith(told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("seed=range(1000000000)",), "seed=range(1000000000): lists about 1,000,000,000 values, and 10,000 is"),
        (("seed=range(5000)", "epochs=range(1,5001)"), "-m: makes 25,000,000 points of all keys together"),
        (("seed=range(0,inf)",), "seed=range(0,inf): a range needs finite numbers."),
        (("hydra/sweeper=random", "sweep.trials=10001", "seed=interval(0,10)"), "sweep.trials=10001: must be 10,000"),
    ],
)
def test_a_sweep_without_number_is_refused_before_it_is_counted_out(
    refuse: Refuse, arguments: tuple[str, ...], told: str
) -> None:
    (problem,) = refuse("-m", "recipe=null", *arguments)
    assert problem.startswith(told)


@pytest.mark.slow
def test_the_folder_of_a_job_lies_in_that_of_its_sweep(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=1,2", "epochs=1", "hydra.sweep.dir=sweep", "hydra.sweep.subdir=../x"]) == 2
    assert "  hydra.sweep.subdir=../x: is outside the folder of the sweep" in capsys.readouterr().err
    assert not (cwd / "x").exists()


def test_a_command_about_a_run_takes_no_brackets_without_end_either(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cwd / "resolved.yaml").write_text("seed: 3\n")
    (cwd / "result.json").write_text('{"status": "finished", "metrics": {"val/loss": 1.0}}')
    for verb in (["resume"], ["top", "--then"]):
        assert main([*verb, ".", BRACKETS]) == 2
        assert NESTED in capsys.readouterr().err


def test_a_choice_and_a_key_of_it_are_no_repetition(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "optimizer.lr", "optimizer=adamw", "optimizer.lr=1"]) == 0
    assert capsys.readouterr().out.startswith("optimizer.lr=1\n")


def test_a_value_that_fills_the_screen_is_cut_and_a_control_character_is_written_out() -> None:
    problem = Problem(key="k", value="a\x1b" + "x" * 1000, rule="is long.")
    assert str(problem) == f"k=a\\x1b{'x' * 198}...(1,002 characters)...{'x' * 100}: is long."
