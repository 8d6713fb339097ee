"""Errors of a config that another process raised, such as a worker of a pool, arrive whole."""

from __future__ import annotations

import pickle

import pytest

from trainkit.errors import MISSING, ConfigError, MissingExtraError, Problem

ABSENT = MissingExtraError(key="logger=wandb", package="wandb", extra="wandb")
TWO = ConfigError([Problem(key="seed", value=-1, rule="must not be negative."), Problem(key="a", rule="no such key.")])


@pytest.mark.parametrize("error", [TWO, ABSENT])
def test_an_error_keeps_class_problems_and_text_between_processes(error: ConfigError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.problems) == (type(error), str(error), error.problems)
    assert copy.problems[-1].value is MISSING
