"""How many calls of functions an eager step makes: of a small model, they take most of the time.

A step that makes many more calls of functions and is slower without another number is caught here alone.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

import trainkit
from trainkit.cli import main
from trainkit.trainer.events import State

PACKAGE: Final = str(Path(trainkit.__file__).parent)
ENDS: Final = State.advance.__code__
"""Called once a step, after its update."""
MOST: Final = 160
"""155: about 20 count the targets and scale by their number, 12 look for changed settings and hooks of the optimizer,
10 note the versions of the inputs. Before a run did these there were 102.
"""


@contextmanager
def counted(steps: list[int]) -> Iterator[None]:
    """Append to `steps` the calls of trainkit's functions, and their calls into C, of each step inside."""

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "call" and frame.f_code is ENDS:
            steps.append(0)
        elif steps:
            steps[-1] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.mark.slow
def test_an_eager_step_of_a_small_model_makes_few_calls(tmp_path: Path) -> None:
    steps: list[int] = []
    silent = ("callbacks=[]", "logger=[]", "eval.every_epochs=null", "quiet=true")
    with counted(steps):
        assert main(["recipe=digits", "strategy=one_device", "steps=30", f"hydra.run.dir={tmp_path}/run", *silent]) == 0
    assert len(steps) == 30
    assert min(steps[20:-1]) <= MOST  # of a step that neither logs a row, nor asks whether to stop
