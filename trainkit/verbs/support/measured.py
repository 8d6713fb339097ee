"""Functions shared by the verbs that measure trainings: refusals, the folder of the results, progress lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cluster.local import VARIABLE, detect
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.values import path_rule
from trainkit.errors import Problem
from trainkit.verbs.support.call import Call

if TYPE_CHECKING:
    from trainkit.config.composition import Composition


def problem_of(key: str, rule: str, value: str | None = None) -> Problem:
    """Return a problem of the command line.

    Example:
        >>> str(problem_of("--steps", "must be 1 or more.", "0"))
        '--steps=0: must be 1 or more. (command line)'
    """
    if value is None:
        return Problem(key=key, rule=rule, origin=COMMAND_LINE)
    return Problem(key=key, value=value, rule=rule, origin=COMMAND_LINE)


def out_problems(call: Call) -> Iterator[Problem]:
    """Yield the problem of `--out`: an invalid path, a file, or a folder with files."""
    out = call.flags.get("out")
    if out is not None and (rule := path_rule(out) or _occupied(Path(out).expanduser())):
        yield problem_of("--out", rule, out)


def _occupied(path: Path) -> str | None:
    if path.is_dir() and any(path.iterdir()):
        return "is a folder with files. Give a new one."
    return "is a file. Give a folder." if path.exists() and not path.is_dir() else None


def launch_problems(verb: str, what: str) -> Iterator[Problem]:
    """Yield a problem if a launcher has started several processes like this one: each would measure `what`."""
    launch = detect(os.environ)
    if launch is not None and launch.num_ranks > 1:
        rule = (
            f"this is one of {launch.num_ranks} processes that {launch.kind} started, and each would {what}. "
            f"Start {verb} without the launcher ({VARIABLE}=none)."
        )
        yield problem_of(verb, rule)


def training_problems(verb: str, composition: Composition) -> Iterator[Problem]:
    """Yield the problems of a config that is not one training on this machine."""
    if composition.asks_for_folds:
        value = composition.values["cv"]["folds"]
        yield composition.problem("cv.folds", "starts several trainings. Give cv.fold too.", value=value)
    if composition.submits_single_runs:
        rule = f"passes runs to another system, and {verb} measures this machine. Leave it out."
        yield problem_of("cluster", rule)
    if (resumed := composition.values["resume"]) is not None:
        rule = f"has no effect: {verb} trains from the start. Leave it out, or load weights with init_from=CHECKPOINT."
        yield composition.problem("resume", rule, value=resumed)


@contextmanager
def result_folder(verb: str, out: str | None) -> Iterator[Path]:
    """Create the folder of the results; if it is empty at the end of the block, remove it, unless it existed before.

    Raises:
        StorageError: it cannot be created. TerminatedError, HangupError: a stop signal was received.
    """
    from datetime import datetime  # noqa: PLC0415 - not for --help

    from trainkit.run.signals import raised_stops  # noqa: PLC0415 - not for --help
    from trainkit.storage import reporting  # noqa: PLC0415 - imports torch
    from trainkit.trainer.ownership import new_folder  # noqa: PLC0415 - the same

    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path("outputs") / verb / stamp if out is None else Path(out).expanduser()
    was_there = out is not None and folder.exists()
    with reporting(folder):
        if out is None:
            folder = new_folder(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
    try:
        with raised_stops():
            yield folder
    finally:
        if not was_there:
            with suppress(OSError):
                folder.rmdir()  # not if it contains any file


def line_printer(verb: str) -> Callable[[str], None]:
    """Return a function that prints a progress line of a verb to standard error."""

    def print_line(message: str) -> None:
        sys.stderr.write(f"{verb}: {message}\n")
        sys.stderr.flush()

    return print_line
