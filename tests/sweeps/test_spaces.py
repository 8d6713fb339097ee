"""The points of a sweep: a draw outside its interval, or one that changes with the number of trials, is caught here."""

from __future__ import annotations

import pytest

from tests.support.refusing import refused
from trainkit.config.compose import Composer
from trainkit.sweeps.spaces import request as drawing
from trainkit.sweeps.spaces.request import read_request


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def refused_point(composer: Composer, *arguments: str) -> list[str]:
    return refused(lambda: read_request(composer, arguments).points)


def test_keys_that_are_zipped_move_together_beside_a_plain_grid(composer: Composer) -> None:
    rates, widths = "optimizer.lr=tag(zip,range(1,3))", "model.hidden=tag(zip,choice([64],[256]))"
    assert composer.points([rates, "optimizer=tag(zip,choice(sgd,adamw))", "seed=1,2", widths, "epochs=1"]) == [
        ["optimizer.lr=1", "optimizer=sgd", "seed=1", "model.hidden=[64]", "epochs=1"],
        ["optimizer.lr=1", "optimizer=sgd", "seed=2", "model.hidden=[64]", "epochs=1"],
        ["optimizer.lr=2", "optimizer=adamw", "seed=1", "model.hidden=[256]", "epochs=1"],
        ["optimizer.lr=2", "optimizer=adamw", "seed=2", "model.hidden=[256]", "epochs=1"],
    ]


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("+seed=3", "seed=1,2"), ["seed: is given twice"]),
        (("seed=range(5,1)",), ["seed=range(5,1): is an empty sweep"]),
        (("seed=range(0,1,0)",), ["step other than 0"]),
        (("seed=tag(zap,choice(1,2))",), ["Did you mean zip?"]),
        (("seed=tag(zip,choice(1,2))",), ["no other key has the tag"]),
        (("seed=tag(zip,choice(1,2))", "steps=tag(zip,choice(1,2,3))"), ["has 3 values, and seed"]),
        (("optimizer.lr=interval(0.1,1)",), ["needs a sweeper that searches"]),
        (
            ("seed=tag(log,choice(1,2))", "optimizer.lr=tag(log,interval(0,1))"),
            ["log goes with an interval", "an interval above 0"],
        ),
        (("optimizer.lr=tag(zip,interval(0.1,1))",), ["zip goes with listed values"]),
        (("optimizer.lr=interval(1,0.1)",), ["the low end, 1, is not below the high end, 0.1"]),
        (("hydra/sweeper=rndom", "seed=1,2"), ["Did you mean random?"]),
        (("sweep.name=a,b",), ["sweep.name=a,b: "]),
        (("hydra/sweeper=random",), ["sweep.trials: needs", "has nothing to search"]),
        (("hydra/sweeper=basic", "seed=tag(zip,choice(1,2))", "steps=tag(zip,choice(1,2))"), ["vary keys together"]),
    ],
)
def test_what_cannot_be_searched_is_refused_by_its_key(
    composer: Composer, arguments: tuple[str, ...], keys: list[str]
) -> None:
    problems = refused_point(composer, *arguments)
    assert all(key in problem for key, problem in zip(keys, problems, strict=True)), problems


def test_the_error_of_an_absent_optuna_names_the_command_that_installs_it(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainkit.errors.find_spec", lambda name: None)
    (problem,) = refused_point(composer, "hydra/sweeper=optuna", "sweep.trials=3", "seed=1,2")
    assert 'pip install "optuna' in problem


def drawn(composer: Composer, *arguments: str, trials: int) -> list[list[str]]:
    return drawing.sample(composer.space(arguments), trials=trials, seed=7)


def test_random_points_lie_in_their_space_and_follow_the_log(composer: Composer) -> None:
    rates = [
        float(line.partition("=")[2])
        for (line,) in drawn(composer, "optimizer.lr=tag(log,interval(0.0001,1))", trials=2000)
    ]
    assert all(0.0001 <= rate <= 1 for rate in rates)
    # Half of the draws of a logarithm lie below its middle, 0.01; the share of 2,000 has a deviation of 0.011.
    assert abs(sum(rate < 0.01 for rate in rates) / 2000 - 0.5) < 5 * 0.0112


def test_whole_numbers_have_both_ends_of_their_interval(composer: Composer) -> None:
    assert {line for (line,) in drawn(composer, "seed=int(interval(1,3))", trials=60)} == {"seed=1", "seed=2", "seed=3"}


def test_more_trials_keep_the_first_ones_and_zipped_keys_together(composer: Composer) -> None:
    arguments = ("seed=tag(zip,choice(1,2))", "epochs=tag(zip,choice(1,2))", "optimizer.lr=interval(0,1)")
    ten = drawn(composer, *arguments, trials=10)
    assert drawn(composer, *arguments, trials=4) == ten[:4]
    assert {(line[0], line[1]) for line in ten} == {("seed=1", "epochs=1"), ("seed=2", "epochs=2")}
    assert len({line[2] for line in ten}) == 10
