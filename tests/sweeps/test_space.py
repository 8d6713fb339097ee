from __future__ import annotations

import pytest

from trainkit.config.compose import Composer
from trainkit.errors import ConfigError
from trainkit.sweeps.spaces import request as drawing
from trainkit.sweeps.spaces.request import read_request


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def refused(composer: Composer, *arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _ = read_request(composer, arguments).points
    return [str(problem).removesuffix(" (command line)") for problem in caught.value.problems]


def test_keys_that_are_zipped_move_together_beside_a_plain_grid(composer: Composer) -> None:
    rates, widths = "optimizer.lr=tag(zip,choice(0.1,0.03))", "model.hidden=tag(zip,choice([64],[256]))"
    assert composer.points([rates, "seed=1,2", widths, "epochs=1"]) == [
        ["optimizer.lr=0.1", "seed=1", "model.hidden=[64]", "epochs=1"],
        ["optimizer.lr=0.1", "seed=2", "model.hidden=[64]", "epochs=1"],
        ["optimizer.lr=0.03", "seed=1", "model.hidden=[256]", "epochs=1"],
        ["optimizer.lr=0.03", "seed=2", "model.hidden=[256]", "epochs=1"],
    ]


def test_groups_are_zipped_too(composer: Composer) -> None:
    assert composer.points(["optimizer=tag(zip,choice(sgd,adamw))", "optimizer.lr=tag(zip,range(1,3))"]) == [
        ["optimizer=sgd", "optimizer.lr=1"],
        ["optimizer=adamw", "optimizer.lr=2"],
    ]


@pytest.mark.parametrize("arguments", [("seed=1,2", "seed=3"), ("+seed=3", "seed=1,2"), ("seed=1,2", "seed=1,2")])
def test_a_key_given_twice_is_refused(composer: Composer, arguments: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        composer.points(arguments)
    first, second = arguments
    assert [str(one) for one in caught.value.problems] == [
        f"seed: is given twice: {first} and {second}. Give it once. (command line)"
    ]


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (("seed=range(5,1)",), ["seed=range(5,1): is an empty sweep: there is nothing to run."]),
        (("data=glob(x*)",), ["data=glob(x*): is an empty sweep: there is nothing to run."]),
        (("seed=range(0,1,0)",), ["seed=range(0,1,0): a range needs a step other than 0."]),
        (
            ("seed=tag(zap,choice(1,2))",),
            ["seed=tag(zap,choice(1,2)): zap: no such tag. Did you mean zip? There are: zip, log."],
        ),
        (
            ("seed=tag(zip,choice(1,2))",),
            ["seed=tag(zip,choice(1,2)): zip varies keys together, and no other key has the tag."],
        ),
        (
            ("seed=tag(zip,choice(1,2))", "steps=tag(zip,choice(1,2,3))"),
            [
                (
                    "steps=tag(zip,choice(1,2,3)): has 3 values, and seed, which varies with it, has 2. Give both "
                    "equally many."
                ),
            ],
        ),
        (
            ("optimizer.lr=interval(0.1,1)",),
            [
                (
                    "optimizer.lr=interval(0.1,1): is a range without steps: it needs a sweeper that searches, "
                    "hydra/sweeper=random or optuna."
                )
            ],
        ),
        (
            ("seed=tag(log,choice(1,2))", "optimizer.lr=tag(log,interval(0,1))"),
            [
                "seed=tag(log,choice(1,2)): log goes with an interval: tag(log,interval(0.001,0.1)).",
                "optimizer.lr=tag(log,interval(0,1)): log needs an interval above 0, and this one starts at 0.",
            ],
        ),
        (
            ("optimizer.lr=tag(zip,interval(0.1,1))",),
            ["optimizer.lr=tag(zip,interval(0.1,1)): zip goes with listed values: tag(zip,choice(1,2))."],
        ),
        (
            ("optimizer.lr=interval(1,0.1)",),
            ["optimizer.lr=interval(1,0.1): is an empty sweep: the low end, 1, is not below the high end, 0.1."],
        ),
        (
            ("hydra/sweeper=rndom", "seed=1,2"),
            [
                "hydra/sweeper=rndom: no such choice. Did you mean random? "  # noqa: ISC004
                "There are: basic, grid, halving, optuna, random."
            ],
        ),
        (("sweep.name=a,b",), ["sweep.name=a,b: is a key of the sweep itself, and takes one value."]),
        (
            ("hydra/sweeper=random",),
            [
                "sweep.trials: needs the number of points that hydra/sweeper=random tries, sweep.trials=20.",
                (
                    "hydra/sweeper=random: has nothing to search: give a key values, model.width=64,128 or "
                    "'seed=interval(0,9)'."
                ),
            ],
        ),
        (
            ("hydra/sweeper=halving", "seed=1,2", "stop_at_step=3"),
            [
                "stop_at_step=3: is set by hydra/sweeper=halving, rung by rung. Leave it out.",
                "hydra/sweeper=halving: has 2 points, fewer than sweep.reduction=3. Give it more points.",
            ],
        ),
        (
            ("hydra/sweeper=halving", "seed=range(9)", "sweep.rungs=4"),
            ["sweep.rungs=4: 9 points leave one job after 2 rungs. Use 3 or less."],
        ),
        (
            ("hydra/sweeper=halving", "optimizer.lr=interval(0.1,1)"),
            [
                (
                    "sweep.trials: needs the number of points of an interval that hydra/sweeper=halving tries, "
                    "sweep.trials=20."
                )
            ],
        ),
        (
            ("hydra/sweeper=basic", "seed=tag(zip,choice(1,2))", "steps=tag(zip,choice(1,2))"),
            ["hydra/sweeper=basic: does not vary keys together: leave it out, or write hydra/sweeper=grid."],
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(
    composer: Composer, arguments: tuple[str, ...], problems: list[str]
) -> None:
    assert refused(composer, *arguments) == problems


def test_the_error_of_an_absent_optuna_names_the_command_that_installs_it(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(composer, "hydra/sweeper=optuna", "sweep.trials=3", "seed=1,2") == [
        'hydra/sweeper=optuna: needs the package optuna. Install it: pip install "optuna>=4.4"'
    ]


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


def test_the_corners_of_a_space_hold_every_value(composer: Composer) -> None:
    space = composer.space(["seed=1,2,3", "optimizer.lr=interval(0.1,1)"])
    assert space.corners() == [
        ["seed=1", "optimizer.lr=0.1"],
        ["seed=2", "optimizer.lr=1.0"],
        ["seed=3", "optimizer.lr=1.0"],
    ]
