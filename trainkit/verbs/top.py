"""`trainkit top DIR [--k N]`: the best runs of a sweep, or of any folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, cast

from trainkit.config.schema import Eval
from trainkit.config.watched import Watched
from trainkit.errors import ConfigError, Problem
from trainkit.verbs.call import Call, Flag

__all__ = ["FLAGS", "USAGE", "run"]

USAGE: Final = "DIR"
FLAGS: Final[Mapping[str, Flag]] = {
    "k": Flag(help="how many; all without it", value="N"),
    "metric": Flag(help="what to go by; eval.metric of the runs without it", value="NAME"),
    "mode": Flag(help="which end of it is better: min or max", value="MODE"),
}


def run(call: Call) -> int:
    """Print the leaderboard of a folder; imports no torch."""
    call.only(arguments=1, overrides=False)
    from trainkit.sweeps.leaderboard import Leaderboard, collect  # noqa: PLC0415 - nothing is read to refuse a flag

    folder = Path(call.arguments[0]).expanduser()
    goal, count = _goal(call.flags), _count(call.flags)
    if not folder.is_dir():
        raise _problem(str(folder), "is no folder. Give that of a sweep, or one with runs in it.")
    board = collect(folder, goal)
    if not board.entries:
        raise _problem(str(folder), "holds no run: no result.json below it.")
    if goal is not None and all(board.value(entry) is None for entry in board.entries):
        known = sorted({name for entry in board.entries for name in entry.metrics})
        raise _problem(f"--metric {goal.metric}", f"no run has it. There are: {', '.join(known) or 'none'}.")
    shown: Leaderboard = board if count is None else board.top(count)
    sys.stdout.write(f"{len(shown.entries)} of {len(board.entries)} runs by {board.goal}\n")
    sys.stdout.writelines(f"{line}\n" for line in shown.lines())
    return 0


def _goal(flags: Mapping[str, str]) -> Watched | None:
    metric, mode = flags.get("metric"), flags.get("mode")
    if metric is None:
        if mode is not None:
            raise _problem("--mode", "has no effect without --metric.")
        return None
    if mode not in (None, "min", "max"):
        raise _problem(f"--mode {mode}", "must be min or max.")
    return Watched.of(Eval(metric=metric, mode=cast("Literal['min', 'max'] | None", mode)))


def _count(flags: Mapping[str, str]) -> int | None:
    text = flags.get("k")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise _problem(f"--k {text}", "must be a whole number of at least 1.")
    return int(text)


def _problem(key: str, rule: str) -> ConfigError:
    return ConfigError([Problem(key=key, rule=rule, origin="command line")])
