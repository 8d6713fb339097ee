"""`trainkit advise OVERRIDES --devices 8 --hardware h100_sxm`: find the best valid way to train, by its plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Any, Final

from trainkit.advising.advice import NOT_TRIED, Advice, Planner, TriedWay, Way, advise, try_family
from trainkit.cluster.host import count_gpus, num_cores
from trainkit.config.composition import Composition
from trainkit.config.grammar import refusal
from trainkit.errors import ConfigError
from trainkit.files import num_bytes
from trainkit.report.json_output import print_json
from trainkit.report.tables import print_rows, print_summary
from trainkit.run.estimates.hardware import hardware_of
from trainkit.verbs.support.call import Call, declared_for
from trainkit.verbs.support.measured import line_printer

_LONGEST: Final = 110
"""Largest number of characters of a reason in the table; `--json` has all."""


def run(call: Call) -> int:
    """Print the advice; return 2 if no way can be chosen."""
    goal, hardware_keys = call.flags.get("for", "time"), _hardware(call)

    def compose(overrides: Sequence[str]) -> Composition:
        other = replace(call, overrides=(*call.overrides, *overrides, *hardware_keys))
        return other.compose(may_lack=None if "open-data" in call.flags else "data")

    base = compose(())
    try:
        hardware, data = hardware_of(base.cfg, line_printer("advise")), declared_for(call, base.cfg)
    except ConfigError as error:
        raise base.with_origins(error) from error
    if hardware is None:
        rule = "needs the hardware to plan for. Name it: --hardware this, --hardware h100_sxm."
        raise refusal("hardware", rule)
    planner = Planner(
        compose=compose,
        hardware=hardware,
        devices=call.flags.get("devices") or count_gpus() or (num_cores() if hardware.whole_host else 1),
        splits=None if data is None else data.splits,
        knows_length=data is None or data.knows_length,
    )
    families = planner.families(base)

    def attempt(way: Way) -> TriedWay:
        _progress(f"planning {' '.join(way.overrides)}")
        return planner.try_way(way, base, goal)

    tried_ways = [tried for family in families for tried in try_family(family, attempt, goal)]
    _progress("")
    if all(tried.figures is None for tried in tried_ways):  # the config is invalid
        planner.figures(families[0][0].overrides)
    advice = advise(tried_ways, goal)
    if "json" in call.flags:
        print_json(_document(call, advice, planner))
    else:
        _show(call, advice, planner, base.cfg.name, notes=() if data is None else data.notes)
    return 0 if advice.best else 2


def _hardware(call: Call) -> tuple[str, ...]:
    """Return the override that names the hardware; empty if the config names it.

    Raises:
        ConfigError: both name it.
    """
    chosen = [word for word in call.overrides if word.startswith("hardware=")]
    if chosen and "hardware" in call.flags:
        raise refusal(chosen[0], "is given together with --hardware. Give one of the two.")
    return () if chosen else (f"hardware={call.flags.get('hardware', 'this')}",)


def _progress(text: str) -> None:
    """Replace the progress line, on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _command(call: Call, tried: TriedWay, planner: Planner, verb: str) -> str:
    """Return the command that plans a way, or that trains it for an empty verb."""
    words = [*call.overrides, *tried.overrides]
    if verb == "plan":
        words += _hardware(call)
        words += ["--world", str(planner.num_gpus)] if planner.num_gpus else []
        words += ["--open-data"] if "open-data" in call.flags else []
        words += [f"--num-samples={call.flags['num-samples']}"] if "num-samples" in call.flags else []
    return call.printed(verb, words)


def _show(call: Call, advice: Advice, planner: Planner, name: str, *, notes: Sequence[str]) -> None:
    rows = {"for": call.flags.get("for", "time"), "hardware": f"up to {planner.devices} x {planner.hardware.name}"}
    best = advice.best
    if best is None:
        rows["best"] = "none: see the reasons below"
    else:
        rows["best"] = _command(call, best, planner, "plan")
        rows["train"] = _command(call, best, planner, "")
        if len(advice.ranking) > 1:
            rows["runner-up"] = _command(call, advice.ranking[1], planner, "plan")
    print_summary(f"advice for {name}", rows, notes=[*notes, *planner.hardware.notes, NOT_TRIED])
    lines = [_row(tried, advice) for tried in _shown(advice)]
    print_rows(("way", "devices", "memory", "time a step", "why"), lines)


def _shown(advice: Advice) -> list[TriedWay]:
    """Return one way per strategy and precision, the best or else the last one, and the second best way."""
    best = {(tried.way.strategy, tried.way.precision): tried for tried in reversed(advice.ranking)}
    others = {(tried.way.strategy, tried.way.precision): tried for tried in advice.others}
    ranked = [tried for tried in advice.ranking if tried in (*advice.ranking[:2], *best.values())]
    return [*ranked, *(tried for kind, tried in others.items() if kind not in best)]


def _row(tried: TriedWay, advice: Advice) -> tuple[str, ...]:
    figures = tried.figures
    way = " ".join(tried.overrides) or "unchanged"
    reason = shorten(advice.reason(tried), _LONGEST, placeholder=" ...")
    if figures is None:
        return way, "", "", "", reason
    time = "" if figures.step_s is None else f"{figures.step_s * 1e3:.3g} ms"
    return way, str(figures.devices), num_bytes(figures.needs), time, reason


def _document(call: Call, advice: Advice, planner: Planner) -> dict[str, Any]:
    """Return the output of `--json`."""
    names = ("fits", "needs", "devices", "step_s")
    ways = [
        {
            "overrides": tried.overrides,
            "command": _command(call, tried, planner, "plan"),
            "reason": advice.reason(tried),
            **{name: getattr(tried.figures, name, None) for name in names},
            "cost": tried.figures and tried.figures.cost_usd,
        }
        for tried in (*advice.ranking, *advice.others)
    ]
    best = [*ways[: len(advice.ranking)], None, None]
    head = {"goal": call.flags.get("for", "time"), "hardware": planner.hardware.name, "devices": planner.devices}
    return {"version": 1, **head, "best": best[0], "runner_up": best[1], "ways": ways}
