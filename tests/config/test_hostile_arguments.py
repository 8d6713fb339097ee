"""Arguments that would recurse, loop, allocate without end or write elsewhere: exit code 2 on every verb."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.cli import main
from trainkit.errors import Problem

BRACKETS = f"model.hidden={'[' * 3000}{']' * 3000}"
NESTED = "model.hidden: nests brackets 3000 deep; 50 is the limit. (command line)"
NAME = "may hold letters, digits, . _ and - only, 200 at most, and not dots alone."
DRAW = "Draw some of them: hydra/sweeper=random sweep.trials=100, with interval(LOW,HIGH)."
TO_FILE = "Put it into a YAML file of your own: --config-dir DIR."


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Run a command in an empty folder; return what is on its screen, which is short, without its first line."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> list[str]:
        assert main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert not list(tmp_path.iterdir()), "nothing is written"
        assert len(lines) <= 40
        assert max(map(len, lines)) < 1500
        return [line.strip() for line in lines[1:]]

    return run


@pytest.mark.parametrize("verb", ["train", "plan", "prove", "explain seed", "-m", "emit slurm", "--cfg job"])
def test_brackets_without_end_are_refused_by_every_verb(refused: Callable[..., list[str]], verb: str) -> None:
    assert refused(*verb.split(), BRACKETS) == [NESTED]


@pytest.mark.parametrize("verb", ["resume", "top --then"])
def test_a_run_takes_no_such_argument_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resolved.yaml").write_text("seed: 3\n")
    (tmp_path / "result.json").write_text('{"status": "finished", "metrics": {"val/loss": 1.0}}')
    assert main([*verb.split(), str(tmp_path), BRACKETS]) == 2
    assert NESTED in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("seed=" + "int(" * 60 + "1" + ")" * 60, "seed: nests brackets 60 deep; 50 is the limit."),
        ("name=" + "x" * 20_000, f"name: has 20,005 characters; 10,000 is the limit. {TO_FILE}"),
        ("seed=" + "9" * 5000, "seed: holds a number of more than 500 digits."),
        ("name='a\x1b[31m'", "name: holds the character \\x1b, which no argument may hold. Remove it."),
        ("name=a\udcff", "name: holds the character \\udcff, which no argument may hold. Remove it."),
        ("name=..", f"name=..: {NAME}"),
        ("name=.", f"name=.: {NAME}"),
        ("name=a/b", f"name=a/b: {NAME}"),
        ("name=/tmp/x", f"name=/tmp/x: {NAME}"),
        ("name=''", f"name=: {NAME}"),
        ("steps=9999999999999999999999", "steps=9999999999999999999999: must fit into 64 bits: less than 2**63."),
        ("batch.global_size=1e30", "batch.global_size=1e+30: must be a whole number or null."),
        ("epochs=1e30", "epochs=1e+30: must be 1,000,000,000,000 or less."),
        ("loader.num_workers=1000000000", "loader.num_workers=1000000000: must be 1,024 or less."),
        ("model=../model/mlp", "model=../model/mlp: no such choice. There are: convnet, gan, gpt, mlp, resnet."),
        ("hydra.run.dir=" + "x" * 300, None),
        ("init_from=" + "x" * 300, None),
    ],
)
def test_an_argument_that_no_run_takes_is_refused(
    refused: Callable[..., list[str]], argument: str, told: str | None
) -> None:
    if told is None:
        key, value = argument.split("=")
        told = str(Problem(key=key, value=value, rule="has a name of 300 bytes; a file system takes 255 at most."))
    assert refused("explain", "seed", argument) in ([f"{told} (command line)"], [told])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("seed=1", "seed=2"), "seed: is given twice: seed=1 and seed=2."),
        (("+seed=1", "seed=2"), "seed: is given twice: +seed=1 and seed=2."),
        (("~init_from", "init_from=a"), "init_from: is given twice: ~init_from and init_from=a."),
        (("model=mlp", "model=gpt"), "model: is given twice: model=mlp and model=gpt."),
        (("batch={micro_size: 3}", "batch.micro_size=4"),
         "batch.micro_size: is given twice: batch={micro_size: 3} and batch.micro_size=4."),
        (("hydra.run.dir=a", "hydra.run.dir=b"), "hydra.run.dir: is given twice: hydra.run.dir=a and hydra.run.dir=b."),
        (("seed=1", "seed=2", "seed=3"), "seed: is given 3 times: seed=1, seed=2 and seed=3."),
        (("logger.w.api_key=k1k1", "logger.w.api_key=k2k2"),
         "logger.w.api_key: is given twice: logger.w.api_key=(redacted) and logger.w.api_key=(redacted)."),
    ],
)  # fmt: skip
def test_a_key_or_group_given_twice_is_refused(
    refused: Callable[..., list[str]], arguments: tuple[str, ...], told: str
) -> None:
    assert f"{told} Give it once. (command line)" in refused("explain", "seed", *arguments)


def test_a_choice_and_a_key_of_it_are_no_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "optimizer.lr", "optimizer=adamw", "optimizer.lr=1"]) == 0
    assert capsys.readouterr().out.startswith("optimizer.lr=1\n")


def test_a_flag_given_twice_is_refused(refused: Callable[..., list[str]]) -> None:
    assert refused("plan", "--world", "2", "--world", "3") == [
        "--world: is given twice: 2 and 3. Give it once. (command line)"
    ]


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        ("mirrored", "replicas"), ("fsdp", "replicas"), ("fsdp", "replicate"), ("tensor_parallel", "degree"),
        ("pipeline", "stages"), ("pipeline", "replicas"), ("local_sgd", "replicas"),
        ("parameter_server", "workers"), ("parameter_server", "servers"), ("parameter_server", "devices_per_worker"),
    ],
)  # fmt: skip
def test_processes_without_number_are_refused_before_they_are_counted_out(
    refused: Callable[..., list[str]], strategy: str, key: str
) -> None:
    told = refused("plan", f"strategy={strategy}", f"strategy.{key}=1000000000")
    assert told == [f"strategy.{key}=1000000000: must be 1,024 or less. (command line)"]


def test_replicas_times_ranks_of_a_pipeline_are_bounded_too(refused: Callable[..., list[str]]) -> None:
    told = refused("plan", "strategy=pipeline", "strategy.replicas=1000", "strategy.stages=1000")
    rule = "1000 replicas of 1000 ranks need 1000000 devices, and one host starts 1,024 processes at most. Use fewer."
    assert told == [f"strategy.replicas=1000: {rule} (command line)"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("plan", "--world", "9" * 5000), "must be a number of GPUs, 1,024 or less. (command line)"),
        (("plan", "--world", "²"), "--world=²: must be a number of GPUs, 1,024 or less. (command line)"),
        (("prove", "--steps", "1000000000"), "must be 1 or more steps, 1,000,000 at most. (command line)"),
        (("emit", "slurm", "--hosts", "1000000000"), "--hosts=1000000000: must be 100,000 or less. (command line)"),
        (("emit", "slurm", "--hosts", "1000", "--processes-per-host", "1000"),
         "--hosts=1000 of 1000 each: are 1,000,000 processes; the limit is 100,000. (command line)"),
        (("plan", "--config-dir", "x" * 5000), "has a name of 5,000 bytes; a file system takes 255 at most."),
        (("resume", "x" * 5000), "has a name of 5,000 bytes; a file system takes 255 at most. (command line)"),
        (("diff", "a\0b", "b"), "a\\x00b: holds a null character, which no path may hold. (command line)"),
        (("plan", "--allow-package", "no_such_package"),
         "--allow-package no_such_package: there is no such package. Install it, or start trainkit in the folder"),
    ],
)  # fmt: skip
def test_a_flag_or_path_out_of_range_is_refused(
    refused: Callable[..., list[str]], flags: tuple[str, ...], told: str
) -> None:
    (line,) = refused(*flags)
    assert told in line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("seed=range(1000000000)",),
         "seed=range(1000000000): lists about 1,000,000,000 values, and 10,000 is the limit."),
        (("seed=range(0,1,0.000000001)",),
         "seed=range(0,1,0.000000001): lists about 1,000,000,000 values, and 10,000 is the limit."),
        (("seed=range(5000)", "epochs=range(1,5001)"),
         "-m: makes 25,000,000 points of all keys together, and 10,000 is the limit."),
    ],
)  # fmt: skip
def test_jobs_without_number_are_refused_before_they_are_counted_out(
    refused: Callable[..., list[str]], arguments: tuple[str, ...], told: str
) -> None:
    assert refused("-m", *arguments) == [f"{told} {DRAW} (command line)"]
    assert refused("prove", "strategy=mirrored", *arguments) == [f"{told} {DRAW} (command line)"]


@pytest.mark.parametrize("sweeper", ["random", "halving"])
def test_trials_without_number_are_refused_before_they_are_drawn(
    refused: Callable[..., list[str]], sweeper: str
) -> None:
    told = refused("-m", f"hydra/sweeper={sweeper}", "sweep.trials=1000000000", "seed=interval(0,10)")
    assert told == ["sweep.trials=1000000000: must be 10,000 or less. (command line)"]


def test_a_range_without_finite_ends_is_refused(refused: Callable[..., list[str]]) -> None:
    assert refused("-m", "seed=range(0,inf)") == ["seed=range(0,inf): a range needs finite numbers. (command line)"]


@pytest.mark.parametrize("subdir", ["../../x", "/x", "."])
@pytest.mark.slow
def test_the_folder_of_a_job_lies_in_that_of_its_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subdir: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "seed=1,2", "epochs=1", "hydra.sweep.dir=sweep", f"hydra.sweep.subdir={subdir}"]) == 2
    rule = "is outside the folder of the sweep, which holds all jobs. Give a path below it."
    assert f"  hydra.sweep.subdir={subdir}: {rule} (command line)" in capsys.readouterr().err
    assert not (tmp_path.parent / "x").exists()


def test_a_model_that_no_memory_holds_is_refused(refused: Callable[..., list[str]]) -> None:
    (told,) = refused("plan", "model.hidden=[4000000000000,4000000000000]")
    assert told.startswith(
        "model: has a parameter that is larger than any memory: Storage size calculation overflowed with sizes"
    )


def test_blocks_without_number_are_refused_before_they_are_built(refused: Callable[..., list[str]]) -> None:
    told = refused("plan", "recipe=shakespeare", "model.num_layers=1000000000", "data.path=x", "data.download=false")
    assert "model.num_layers=1000000000: must be 1,000 or less. (command line)" in told


def test_a_value_that_fills_the_screen_is_cut_and_a_control_character_is_written_out() -> None:
    problem = Problem(key="k", value="a\x1b" + "x" * 1000, rule="is long.")
    assert str(problem) == f"k=a\\x1b{'x' * 198}...(1,002 characters)...{'x' * 100}: is long."
