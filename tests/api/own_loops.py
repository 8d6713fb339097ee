"""Loops of a user's own, in processes of the pool."""

import contextlib
import os
from functools import partial
from unittest import mock

import trainkit
from tests.launchers.joining import variables
from tests.support.pool import Member
from trainkit.errors import TrainkitError
from trainkit.trainer.events import Callback, Run


def weights_of_both(member: Member, folder: str, port: int, *overrides: str) -> tuple[str | None, str | None]:
    """Train by the trainer's loop, then by `step` and by its parts in turn; return the hashes of the weights."""
    with mock.patch.dict(os.environ, variables(member, port)), contextlib.chdir(folder):
        expected = trainkit.train(overrides, run_dir="trainer").get("weights_sha256")
        with trainkit.session(overrides, run_dir="loop") as session:
            for _ in session.batches():
                if session.steps % 2:
                    session.step(partial(session.objective.loss))
                else:
                    session.forward_backward()
                    session.update()
        assert session.result is not None
        assert session.result["status"] == "finished"
        return expected, session.result.get("weights_sha256")


def failure_of_a_loop(member: Member, folder: str, port: int, *overrides: str) -> str:
    """Let the loop of rank 1 fail after two steps; return what ends this rank."""
    with mock.patch.dict(os.environ, variables(member, port)), contextlib.chdir(folder):
        try:
            with trainkit.session(overrides, run_dir="loop") as session:
                for _ in session.batches():
                    session.step()
                    if session.rank == 1 and session.steps == 2:
                        raise ValueError("enough")
        except TrainkitError as error:
            return f"{type(error).__name__}: {error}"
    return "finished"


class Ends(Callback):
    """A callback that ends the run in the word of a signal."""

    def step_end(self, run: Run, outcome: object) -> None:
        run.request_stop("stopped")
