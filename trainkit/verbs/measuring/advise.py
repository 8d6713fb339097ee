"""`trainkit advise OVERRIDES --devices 8 --hardware h100_sxm`: find the best valid way to train, by its plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Final

from trainkit.cluster.host import count_gpus, num_cores
from trainkit.config.grammar import COMMAND_LINE
from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import ConfigError, Problem
from trainkit.storage import num_bytes
from trainkit.verbs.support.call import DATA_FLAGS, JSON_FLAG, Call, Flag, declared_for
from trainkit.verbs.support.measured import line_printer

if TYPE_CHECKING:
    from trainkit.advising.advice import Advice, Goal, Planner, Tried, Way
    from trainkit.config.composition import Composition
    from trainkit.report.schemas.looking import AdviceDocument, AdvisedWay

USAGE: Final = "[OVERRIDES]"
FLAGS: Final[Mapping[str, Flag]] = {
    "devices": Flag(
        help="the largest number of devices to use; those of this machine without it",
        value="N",
        least=1,
        most=MOST_PROCESSES,
    ),
    "hardware": Flag(help="a choice of the group hardware; this without it", value="CHOICE"),
    "for": Flag(help="time, the shortest step; cost, the fewest device seconds; memory; time without it", value="GOAL"),
    **DATA_FLAGS,
    "json": JSON_FLAG,
}
_LONGEST: Final = 110
"""Largest number of characters of a reason in the table; `--json` has all."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The flags of a call."""

    devices: int | None
    hardware: tuple[str, ...]
    """The override that names the hardware; empty if the config names it."""
    goal: Goal


def run(call: Call) -> int:
    """Print the advice; return 2 if no way can be chosen."""
    request = _checked(call)
    from trainkit.advising.advice import Planner, advise, try_family  # noqa: PLC0415 - imports torch
    from trainkit.run.estimates.hardware import hardware_of  # noqa: PLC0415 - the same

    def compose(overrides: Sequence[str]) -> Composition:
        other = replace(call, overrides=(*call.overrides, *overrides, *request.hardware))
        return other.compose(may_lack=None if "open-data" in call.flags else "data")

    base = compose(())
    try:
        hardware, data = hardware_of(base.cfg, line_printer("advise")), declared_for(call, base.cfg)
    except ConfigError as error:
        raise base.with_origins(error) from error
    if hardware is None:
        rule = "needs the hardware to plan for. Name it: --hardware this, --hardware h100_sxm."
        raise ConfigError([Problem(key="hardware", value="none", rule=rule, origin=COMMAND_LINE)])
    planner = Planner(
        compose=compose,
        hardware=hardware,
        devices=request.devices or count_gpus() or (num_cores() if hardware.whole_host else 1),
        splits=None if data is None else data.splits,
        knows_length=data is None or data.knows_length,
    )
    families = planner.families(base)

    def attempt(way: Way) -> Tried:
        _progress(f"planning {' '.join(way.overrides)}")
        return planner.try_way(way, base, request.goal)

    found = [one for family in families for one in try_family(family, attempt, request.goal)]
    _progress("")
    if all(one.figures is None for one in found):  # the config is invalid
        planner.figures(families[0][0].overrides)
    advice = advise(found, request.goal)
    if "json" in call.flags:
        from trainkit.report.json_output import print_json  # noqa: PLC0415 - for --json only

        print_json(_document(call, request, advice, planner))
    else:
        _show(call, request, advice, planner, base.cfg.name, notes=() if data is None else data.notes)
    return 0 if advice.best else 2


def _checked(call: Call) -> _Request:
    """Return the flags.

    Raises:
        ConfigError: every problem of the command line.
    """
    call.check_arity()
    from trainkit.advising.advice import GOALS  # noqa: PLC0415 - not for --help

    problems, flags = [*call.number_problems(FLAGS)], call.flags
    goal = next((one for one in GOALS if one == flags.get("for", "time")), None)
    if goal is None:
        rule = f"must be one of {', '.join(GOALS)}."
        problems.append(Problem(key="--for", value=flags["for"], rule=rule, origin=COMMAND_LINE))
    chosen = [word for word in call.overrides if word.startswith("hardware=")]
    if chosen and "hardware" in flags:
        rule = "is given together with --hardware. Give one of the two."
        problems.append(Problem(key=chosen[0], rule=rule, origin=COMMAND_LINE))
    if problems or goal is None:
        raise ConfigError(problems)
    hardware = () if chosen else (f"hardware={flags.get('hardware', 'this')}",)
    return _Request(devices=call.number("devices"), hardware=hardware, goal=goal)


def _progress(text: str) -> None:
    """Replace the progress line, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _command(call: Call, request: _Request, tried: Tried, planner: Planner, verb: str) -> str:
    """Return the command that plans a way, or that trains it for an empty verb."""
    words = [*call.overrides, *tried.overrides]
    if verb == "plan":
        words += request.hardware
        words += ["--world", str(planner.num_gpus)] if planner.num_gpus else []
        words += [f"--{name}{'=' if text else ''}{text}" for name, text in call.flags.items() if name in DATA_FLAGS]
    return call.printed(verb, words)


def _show(call: Call, request: _Request, advice: Advice, planner: Planner, name: str, *, notes: Sequence[str]) -> None:
    from trainkit.advising.advice import NOT_TRIED  # noqa: PLC0415 - not for --help
    from trainkit.report.tables import print_rows, print_summary  # noqa: PLC0415 - imports rich

    rows = {"for": request.goal, "hardware": f"up to {planner.devices} x {planner.hardware.name}"}
    best = advice.best
    if best is None:
        rows["best"] = "none: see the reasons below"
    else:
        rows["best"] = _command(call, request, best, planner, "plan")
        rows["train"] = _command(call, request, best, planner, "")
        if len(advice.ranking) > 1:
            rows["runner-up"] = _command(call, request, advice.ranking[1], planner, "plan")
    print_summary(f"advice for {name}", rows, notes=[*notes, *planner.hardware.notes, NOT_TRIED])
    lines = [_row(one, advice) for one in _shown(advice)]
    print_rows(("way", "devices", "memory", "time a step", "why"), lines)


def _shown(advice: Advice) -> list[Tried]:
    """Return one way per strategy and precision, the best or else the last one, and the second best way."""
    best = {_kind(one): one for one in reversed(advice.ranking)}
    others = {_kind(one): one for one in advice.others}
    runners_up = advice.ranking[:2]
    ranked = [one for one in advice.ranking if one in runners_up or one is best[_kind(one)]]
    return [*ranked, *(one for kind, one in others.items() if kind not in best)]


def _kind(tried: Tried) -> tuple[str, str]:
    return tried.way.strategy, tried.way.precision


def _row(tried: Tried, advice: Advice) -> tuple[str, ...]:
    figures = tried.figures
    way = " ".join(tried.overrides) or "unchanged"
    reason = shorten(advice.reason(tried), _LONGEST, placeholder=" ...")
    if figures is None:
        return way, "", "", "", reason
    time = "" if figures.step_s is None else f"{figures.step_s * 1e3:.3g} ms"
    return way, str(figures.devices), num_bytes(figures.needs), time, reason


def _document(call: Call, request: _Request, advice: Advice, planner: Planner) -> AdviceDocument:
    """Return the output of `--json`."""
    ranked = advice.ranking
    return {
        "version": 1,
        "goal": request.goal,
        "hardware": planner.hardware.name,
        "devices": planner.devices,
        "best": _way(ranked[0], call, request, advice, planner) if ranked else None,
        "runner_up": _way(ranked[1], call, request, advice, planner) if len(ranked) > 1 else None,
        "ways": [_way(one, call, request, advice, planner) for one in (*ranked, *advice.others)],
    }


def _way(tried: Tried, call: Call, request: _Request, advice: Advice, planner: Planner) -> AdvisedWay:
    figures = tried.figures
    return {
        "overrides": list(tried.overrides),
        "command": _command(call, request, tried, planner, "plan"),
        "reason": advice.reason(tried),
        "fits": None if figures is None else figures.fits,
        "needs": None if figures is None else figures.needs,
        "devices": None if figures is None else figures.devices,
        "step_s": None if figures is None else figures.step_s,
        "cost": None if figures is None else figures.cost_usd,
    }
