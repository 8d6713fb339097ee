"""A fold that is trained twice or not at all, and points of a sweep on unlike folds, are caught here alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

import trainkit
from trainkit.errors import ConfigError
from trainkit.verbs.running.train import expand_folds, refuse_open_folds
from trainkit.verbs.support.call import Call


def overrides(*given: str) -> tuple[str, ...]:
    return expand_folds(Call(overrides=("recipe=null", *given))).overrides[1:]


def refused(call: Callable[..., object], *arguments: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_folds_become_a_key_that_is_swept() -> None:
    assert overrides("cv.folds=5") == ("cv.folds=5", "cv.fold=range(5)")
    assert overrides("cv.folds=2", "optimizer.lr=0.1,0.2") == ("cv.folds=2", "optimizer.lr=0.1,0.2", "cv.fold=range(2)")


@pytest.mark.parametrize("given", [(), ("cv.folds=5", "cv.fold=1"), ("cv.folds=5", "cv.fold=1,2"), ("cv.folds=1",)])
def test_a_run_that_names_its_fold_or_has_none_stays_as_it_is(given: tuple[str, ...]) -> None:
    assert overrides(*given) == given


def test_sweeps_whose_points_would_have_other_folds_are_refused(tmp_path: Path) -> None:
    assert refused(overrides, "cv.folds=3,5")[0].startswith("cv.folds: must be one number")
    assert refused(overrides, "cv.folds=3", "hydra/sweeper=optuna")[0].startswith("hydra/sweeper: optuna learns from")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "folds.yaml").write_text("# @package _global_\ncv: {folds: 3}\n")
    point = trainkit.compose(["recipe=folds"], config_dirs=[tmp_path])
    assert refused(refuse_open_folds, [point])[0].startswith("cv.folds=3: only some points of the sweep use it.")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["cv.folds=1"], ["cv.folds=1: must be at least 2."]),
        (["cv.folds=3", "cv.fold=3"], ["cv.fold=3: there are cv.folds=3, counted from 0. Use 2 or less."]),
        (
            ["cv.fold=3", "cv.seed=1"],
            ["cv.fold=3: has no effect without cv.folds.", "cv.seed=1: has no effect without cv.folds."],
        ),
    ],
)
def test_bad_folds_are_problems_before_anything_runs(given: list[str], told: list[str]) -> None:
    assert [line.removesuffix(" (command line)") for line in refused(trainkit.compose, given)] == told


def test_python_trains_one_fold_at_a_time() -> None:
    (line,) = refused(trainkit.train, trainkit.compose(["cv.folds=3"]))
    assert line.startswith("cv.folds=3: starts a run per fold")
