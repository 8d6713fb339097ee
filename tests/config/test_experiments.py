"""A recipe or a choice that wins over `experiment=NAME`, a file of the user's, is caught here alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.config.conftest import Refuse, Write
from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.composition import Composition

SMALL = """\
# @package _global_

# to execute this experiment run:
# trainkit --config-dir conf experiment=small
defaults:
  - override /model: mine
  - override /optimizer: sgd
  - override /callbacks: [progress]

seed: 12345
steps: 6
model: {hidden: [5]}
optimizer: {lr: 0.02}
"""
MINE = "_target_: trainkit.models.Mlp\nin_features: 64\nhidden: [4]\nout_features: 10\n"
OVER_DIGITS = "defaults:\n  - override /recipe: digits\nsteps: 3\nname: short\n"


@pytest.fixture
def composed(write_conf: Write) -> Callable[..., Composition]:
    """Compose and check with the experiments `small` and `vision/short`."""
    files = {"experiment/small": SMALL, "model/mine": MINE, "experiment/vision/short": OVER_DIGITS}
    folder = write_conf({f"{name}.yaml": text for name, text in files.items()})

    def run(*arguments: str) -> Composition:
        return checked(compose(arguments, config_dirs=[folder]))

    return run


def test_an_experiment_is_composed_over_the_defaults(composed: Callable[..., Composition]) -> None:
    found = composed("experiment=small")
    values = found.values
    assert (values["seed"], values["steps"], values["epochs"], values["name"]) == (12345, 6, None, "small")
    assert (values["model"]["hidden"], values["optimizer"]["lr"]) == ([5], 0.02)
    assert (values["recipe"], values["eval"]["metric"], list(values["callbacks"])) == (None, None, ["progress"])
    assert found.notes == ()


def test_the_command_line_wins_over_an_experiment_and_its_choices(composed: Callable[..., Composition]) -> None:
    found = composed("experiment=small", "seed=1", "optimizer=adam")
    assert (found.values["seed"], found.values["optimizer"]["lr"]) == (1, 0.001)
    (note,) = found.notes
    assert note.startswith("optimizer=adam replaces sgd: the keys that the experiment set in optimizer are dropped")


def test_an_experiment_wins_over_a_recipe_that_it_names(composed: Callable[..., Composition]) -> None:
    values = composed("experiment=vision/short").values
    assert (values["steps"], values["epochs"], values["recipe"], values["name"]) == (3, None, "digits", "short")
    assert (values["optimizer"]["lr"], values["eval"]["metric"]) == (0.01, "val/accuracy")
    # a recipe of the command line lies below the experiment too
    both = composed("experiment=small", "recipe=digits")
    assert (both.values["optimizer"]["lr"], both.values["warmup"]["epochs"]) == (0.02, 1)
    assert "the experiment replaces mlp: the keys that the recipe set in model are dropped with it" in " ".join(
        both.notes
    )


def test_an_experiment_without_a_folder_says_where_it_belongs(refuse: Refuse) -> None:
    (problem,) = refuse("experiment=small")
    assert problem.startswith("experiment: there is no such folder of choices. Write DIR/experiment/NAME.yaml")
