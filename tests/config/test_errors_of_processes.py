"""An error of another process that arrives without its problems or its exit code is caught here alone."""

from __future__ import annotations

import pickle

import pytest

from trainkit.errors import MISSING, ConfigError, MissingExtraError, PeerError, Problem, TrainkitError

ABSENT = MissingExtraError(key="logger=wandb", package="wandb", extra="wandb")
TWO = ConfigError([Problem(key="seed", value=-1, rule="must not be negative."), Problem(key="a", rule="no such key.")])


@pytest.mark.parametrize("error", [TWO, ABSENT])
def test_an_error_keeps_class_problems_and_text_between_processes(error: ConfigError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.problems) == (type(error), str(error), error.problems)
    assert copy.problems[-1].value is MISSING


def test_an_error_keeps_its_exit_code_and_notes_between_processes() -> None:
    error: TrainkitError = PeerError("rank 1 failed", exit_code=3)
    error.add_note("after step 7")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.exit_code, copy.__notes__) == (PeerError, "rank 1 failed", 3, ["after step 7"])
