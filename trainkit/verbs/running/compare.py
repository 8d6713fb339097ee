"""`trainkit compare A B`: is B better than A? Paired by seed, and valid at any look."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from trainkit.config.commands import begun_by
from trainkit.config.grammar import COMMAND_LINE, is_override, key_of, refusal, replacing, setting
from trainkit.config.schema import RunConfig
from trainkit.errors import (
    ConfigError,
    HangupError,
    Problem,
    StoppedError,
    TerminatedError,
    TrainkitError,
    UnreadableError,
)
from trainkit.files import read_map
from trainkit.report.numbers import duration
from trainkit.report.schemas.looking import PairedComparison
from trainkit.sweeps.results import pairs
from trainkit.sweeps.results.pairs import STARTS, Side, ended_runs, read_side
from trainkit.sweeps.results.states import State, forget_state, read_state, state_of, write_state
from trainkit.sweeps.screen import TERSE
from trainkit.sweeps.verdict import BUDGET
from trainkit.trainer.ownership import free_name
from trainkit.verbs.support.call import Call

_PAIRS: Final = 5
_ROOT: Final = Path("outputs/compare")
_RESERVED: Final = ("seed", "cv.fold", "sweep.name", "sweep.resume", "hydra.run.dir", "hydra.sweep.dir")
"""Keys that compare sets for each run."""


def run(call: Call) -> int:
    """Compare, print the answer and add it to the ledger; without A and B, print the ledger."""
    if not call.arguments and not call.overrides:
        rows = pairs.recorded()
        call.show({"version": 1, "comparisons": rows}, _table(rows))
        return 0
    _refuse(call)
    sides = [read_side(name) for name in call.arguments]
    flags = {name: value for name, value in call.flags.items() if name in ("metric", "mode", "edits", "delta")}
    judged = partial(pairs.compare, budget=call.flags.get("max-pairs", BUDGET), **flags)
    comparison = judged(*sides) if len(sides) == 2 else _trained(call, sides, judged)
    pairs.record(comparison)
    call.show(comparison, pairs.lines_of(comparison))
    return 0


def _refuse(call: Call) -> None:
    """Refuse arguments and flags that do not go together.

    Raises:
        ConfigError: every such problem.
    """
    folders, sets, problems = call.arguments, call.overrides, []
    if len(folders) > 2 or (len(folders) == 2 and sets):
        rule = "takes two folders, or a folder and key=value, or two sets of key=value and those of both."
        problems.append(Problem(key="compare", value=" ".join(map(str, folders)), rule=rule, origin=COMMAND_LINE))
    if not folders and len(sets) < 2:
        rule = f"is one side. Give A and B: trainkit compare '' {sets[0]}"
        problems.append(Problem(key="compare", value=sets[0], rule=rule, origin=COMMAND_LINE))
    idle = () if not folders else ("pairs", "until-sure", "max-pairs")[: len(folders) + 1]
    if useless := [name for name in idle if name in call.flags]:
        rule = f"has no effect: the seeds are those of {folders[0]}. Train more seeds of A before the change."
        problems.append(call.problem(useless[0], rule))
    if call.flags.get("pairs", 0) > call.flags.get("max-pairs", 30):
        problems.append(call.problem("pairs", "must not exceed --max-pairs, 30 without it."))
    a, b, shared = ([], [], _split(sets)) if folders else (_split(sets[:1]), _split(sets[1:2]), _split(sets[2:]))
    keys = [[key_of(line) for line in lines] for lines in (a, b, shared)]
    reserved = dict.fromkeys(key for key in (*keys[0], *keys[1], *keys[2]) if key in _RESERVED)
    problems += [Problem(key=key, rule="is set by compare itself.", origin=COMMAND_LINE) for key in reserved]
    if twice := [key for key in keys[2] if key in (*keys[0], *keys[1]) or keys[2].count(key) > 1]:
        rule = "is given for both sides, and again: the first two words are A and B, and all others hold for both."
        problems.append(Problem(key=twice[0], rule=rule, origin=COMMAND_LINE))
    if problems:
        raise ConfigError(problems)


def _split(words: Sequence[str]) -> list[str]:
    """Return the overrides in some words, each of which may hold several.

    Example:
        >>> _split(["optimizer.lr=0.1 model.hidden=[1, 2]", "", "~clip"])
        ['optimizer.lr=0.1', 'model.hidden=[1, 2]', '~clip']
    """
    parts = (re.split(r"\s+(?=\+{0,2}[A-Za-z_][\w./@-]*=|~[A-Za-z_])", word.strip()) for word in words)
    return [text for texts in parts for text in texts if text]


def _trained(call: Call, sides: list[Side], judged: Callable[..., PairedComparison]) -> PairedComparison:
    """Train the missing runs of both sides, of which the first may be a folder, and return their comparison."""
    from trainkit.cluster.host import count_gpus, num_cores  # noqa: PLC0415 - imports torch
    from trainkit.sweeps.launching import SharedWarmStarter  # noqa: PLC0415 - the same
    from trainkit.sweeps.results.starts import shapes_differ, write_start  # noqa: PLC0415 - the same

    most: int = call.flags.get("max-pairs", BUDGET)
    if sides:
        changes = _split(call.overrides)
        overrides = {" ".join(changes) or "as it is now": [*_arguments(sides[0]), *changes]}
        seeds = [run.cfg.seed for run in sides[0].runs]
    else:
        shared = _split(call.overrides[2:])
        overrides = {word or "as it is": [*shared, *_split([word])] for word in call.overrides[:2]}
        seeds = [*range(min(call.flags.get("pairs", _PAIRS), most))]
    trained, start = {}, Path()
    for name, lines in overrides.items():
        cfg = _planned(call, lines)
        state = state_of(cfg)
        grows = bool(sides) and sides[0].cfg.init_from is None is cfg.init_from and shapes_differ(sides[0].cfg, cfg)
        if grows:  # then what A is decides how B starts
            state = replace(state, config=f"{state.config} from {sides[0].cfg.model} of {sides[0].state}")
        side = _side(name, cfg, state)
        start = side.folder / STARTS if grows else start
        init = [f"init_from={start}/seed_${{seed}}.safetensors"] if grows else []
        trained[len(sides)] = ([*lines, *init], state)
        sides.append(side)
    if len(sides) == 1 or sides[0].state == sides[1].state:
        why = "config, sources, data, packages and threads are equal: nothing was run; another placement only rounds"
        why += "" if sides[0].cfg.stop_after is None else "; where stop_after ends a run follows the clock"
        return judged(sides[0], sides[-1], same=why)
    earlier = read_state(sides[0].runs[0].result.folder.parent) if call.arguments else None
    notes = [f"other {part} than A" for part in trained[1][1].differing(earlier) if part != "config"] if earlier else []
    with SharedWarmStarter():
        while True:
            for index, (lines, state) in trained.items():
                for seed in seeds if index == 1 and start.name else ():
                    write_start(sides[0].cfg, sides[1].cfg, seed, start / f"seed_{seed}.safetensors")
                sides[index] = _with_runs(call, sides[index], lines, seeds)
                if absent := sorted({*seeds} - sides[index].by_seed().keys()):
                    text = f"no run of {sides[index].name} has ended with seed {', '.join(map(str, absent))}"
                    notes.append(f"{text}: {sides[index].folder}")
                if changed := [part for part in state_of(sides[index].cfg).differing(state) if part != "config"]:
                    forget_state(sides[index].folder)
                    notes.append(f"{', '.join(changed)} changed while the runs trained: compare again")
            comparison = judged(*sides, notes=[*dict.fromkeys(notes)])
            more = comparison["more_pairs"]
            if "until-sure" not in call.flags or not more or len(seeds) >= most:
                return comparison
            sys.stderr.write(f"{comparison['line']}\n")
            at_once = max(1, count_gpus() or num_cores())
            seeds = [*range(min(most, len(seeds) + min(more, at_once)))]


def _arguments(side: Side) -> list[str]:
    """Return the overrides of the runs of a side, without those that compare sets."""
    result = side.runs[0].result
    arguments: Sequence[str] = result.arguments
    if not arguments:
        try:
            about = read_map(result.folder / "environment.json", {"argv": list}, optional={"begun": dict})
        except UnreadableError as error:
            raise refusal(side.name, f"does not record its command: {error}.") from error
        arguments = [word for word in begun_by(about)[1:] if is_override(word)]
    return [line for line in arguments if key_of(line) not in _RESERVED and not line.startswith(("sweep.", "hydra."))]


def _planned(call: Call, lines: Sequence[str]) -> RunConfig:
    """Return the config of a side as it is planned.

    Raises:
        ConfigError: it has problems, or is several points.
    """
    from trainkit.run.planning.plan import make_plan  # noqa: PLC0415 - imports torch
    from trainkit.verbs.support.points import checked_points  # noqa: PLC0415 - the same

    points = checked_points(lines, call.config_dirs, call.packages)
    if len(points) > 1:
        raise refusal("compare", f"takes one value of each key, and not {len(points)} points. Compare two of them.")
    try:
        return make_plan(points[0].cfg).cfg
    except ConfigError as error:
        raise points[0].with_origins(error) from error


def _side(name: str, cfg: RunConfig, state: State) -> Side:
    """Return a side with the runs in its folder, whose name is a hash of everything that decides them."""
    from trainkit.sweeps.launching import identity  # noqa: PLC0415 - imports torch

    folder = _ROOT / f"{state.sha256[:10]}-{identity(replace(cfg, seed=0))[:6]}"
    if folder.exists() and read_state(folder) != state:  # what changed while they trained
        folder = free_name(folder)
    write_state(folder, state)
    return Side(name=name, folder=folder, cfg=cfg, runs=tuple(ended_runs(folder)), state=state.sha256)


def _with_runs(call: Call, side: Side, lines: Sequence[str], seeds: Sequence[int]) -> Side:
    """Train the seeds that a side lacks; return it with all its runs."""
    from trainkit.sweeps.loop import LOG  # noqa: PLC0415 - for trainings only
    from trainkit.verbs.running.train import sweep  # noqa: PLC0415 - the same

    lacking = sorted({*seeds} - {run.cfg.seed for run in side.runs})
    if not lacking:
        return side
    quiet = [] if any(key_of(line) == "report_page" for line in lines) else ["report_page=false"]
    fixed = (f"seed={','.join(map(str, lacking))}", setting("hydra.sweep.dir", side.folder))
    overrides = replacing([*lines, *quiet], *fixed)
    token = TERSE.set(True)
    try:
        with redirect_stdout(sys.stderr):
            sweep(replace(call, verb="train", arguments=(), flags={}, multirun=True, overrides=overrides))
    except (StoppedError, TerminatedError, HangupError) as error:
        raise type(error)("the comparison was stopped: the same command continues it") from error
    finally:
        TERSE.reset(token)
    if not (runs := ended_runs(side.folder)):
        raise TrainkitError(f"no run of {side.name} has ended. The first one printed into {side.folder}/0/{LOG}.")
    return replace(side, runs=tuple(runs))


def _table(rows: Sequence[PairedComparison]) -> Iterator[str]:
    """Yield the lines of the ledger."""
    if not rows:
        yield "no comparison was made here: outputs/comparisons.jsonl is absent. trainkit compare A B makes one."
    for row in rows:
        sides = " | ".join(row[name]["name"] for name in ("a", "b"))
        yield f"{row['time'][:16]}  {duration(row['seconds'])}  {sides}"
        yield f"    {row['line']}"
