"""`trainkit bench strategy=a,b OVERRIDES`: measure the same training with several choices, in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from trainkit.cluster.local import VARIABLE, launch_problems
from trainkit.config.composition import Composition, Level
from trainkit.config.grammar import COMMAND_LINE, refusal, replacing
from trainkit.errors import ConfigError, Problem
from trainkit.measuring.bench import WARMUP_STEPS, Candidate, Target, bench
from trainkit.measuring.searches import FEWEST_STEPS, search_workers, workers_of_plan
from trainkit.measuring.tables import BenchDocument, bench_document, table_lines
from trainkit.redaction import redacted_argument
from trainkit.run.planning.notes import plan_all_points
from trainkit.run.planning.plan import make_plan, with_workers
from trainkit.verbs.support.call import Call
from trainkit.verbs.support.measured import (
    Results,
    line_printer,
    measure,
    out_problems,
    training_problems,
)

_print_line: Final = line_printer("bench")


def run(call: Call) -> int:
    """Measure and print; return 0 if every choice was measured, 1 if one failed."""
    wrong = list(problems(call))
    points = _points(call, wrong)
    wrong += [] if points is None else dict.fromkeys(_choice_problems(call, points))
    if wrong or points is None:
        raise ConfigError(wrong)
    candidates = _candidates(points, fewest=FEWEST_STEPS if "data" in call.flags else WARMUP_STEPS + 1)
    work = _measured_data if "data" in call.flags else _measured
    return measure(call, "bench", partial(work, call, points, candidates))


def _measured(call: Call, points: Sequence[Composition], candidates: Sequence[Candidate]) -> Results:
    """Measure the choices."""
    target = None
    if "until" in call.flags:
        metric, _, text = call.flags["until"].partition("=")
        target = Target.of(metric, float(text), points[0].cfg)
    rounds, steps = call.flags.get("rounds") or (3 if target is None else 1), call.flags.get("steps")
    results = bench(candidates, rounds=rounds, steps=steps, target=target, log=_print_line)
    notes = [note for point in points for note in point.notes]
    if not any(result.spread("joules_per_sample") for result in results):
        on_gpu = any(turn.figures.get("device") == "cuda" for result in results for turn in result.turns)
        missing = "NVML reports none here: pip install nvidia-ml-py" if on_gpu else "no device here reports it"
        notes.append(f"energy is not measured: {missing}.")
    content = bench_document(results, command=call.command, rounds=rounds, notes=notes, target=target)
    is_failed = not all(result.is_measured for result in results)
    return _results(content, table_lines(results, target=target), is_failed=is_failed)


def _measured_data(call: Call, points: Sequence[Composition], candidates: Sequence[Candidate]) -> Results:
    """Measure numbers of data loading processes, and find the one to use."""
    plan, rounds = make_plan(candidates[0].cfg), call.flags.get("rounds") or 1
    ranks = len(plan.tasks)
    search = search_workers(plan.cfg, num_steps=plan.num_steps, num_ranks=ranks, rounds=rounds, log=_print_line)
    notes, verdict = points[0].notes, search.verdict()
    content = bench_document(search.choices, command=call.command, rounds=rounds, notes=notes, data=verdict)
    return _results(content, search.lines(), is_failed=not search.choices[0].is_measured)


def _results(content: BenchDocument, lines: Iterable[str], *, is_failed: bool) -> Results:
    picture = "bench" if any(choice["samples_per_s"] for choice in content.choices) else None
    title, drawn = content.command, ("choices",)
    return Results(content=content, lines=lines, picture=picture, title=title, drawn=drawn, is_failed=is_failed)


def _points(call: Call, wrong: list[Problem]) -> list[Composition] | None:
    """Compose the choices; None if that adds problems."""
    if "until" in call.flags:
        metric = call.flags["until"].partition("=")[0]
        call = replace(call, overrides=replacing(call.overrides, f"eval.metric={metric}"))
    try:
        return _distinct(call.compose_points())
    except ConfigError as error:
        by_until = {"eval.metric": "--until"} if "until" in call.flags else {}
        wrong += [replace(problem, key=by_until.get(problem.key, problem.key)) for problem in error.problems]
        return None


def _distinct(points: Sequence[Composition]) -> list[Composition]:
    """Return each choice once: a key that a choice does not have is dropped, which can make two choices equal."""
    counts = Counter(_labels(points))
    for label, count in counts.items():
        if count > 1 and len(counts) > 1:
            _print_line(f"the lists contain {label} {count} times; it is measured once")
    return list({tuple(point.overrides): point for point in points}.values())


def problems(call: Call) -> Iterator[Problem]:
    """Yield the problems of the flags and of the launch."""
    until = call.flags.get("until")
    if until is not None:
        if _number(until) is None:
            yield call.problem("until", "must be a metric and its value: --until val/accuracy=0.9.")
        if "steps" in call.flags:
            yield call.problem("steps", "has no effect with --until: a training runs until its result.")
    if "data" in call.flags:
        for name in call.flags.keys() & {"steps", "until"}:
            yield call.problem(name, "has no effect with --data.")
    yield from out_problems(call)
    yield from launch_problems("bench", "measure every choice", f"bench without the launcher ({VARIABLE}=none)")


def _number(until: str) -> float | None:
    metric, _, text = until.partition("=")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if metric and abs(value) < float("inf") else None


def _choice_problems(call: Call, points: Sequence[Composition]) -> Iterator[Problem]:
    """Yield the problems of the choices together, and those of each choice that cannot be measured."""
    if "data" in call.flags:
        if len(points) > 1:
            yield call.problem(
                "data", f"measures one training, and the lists contain {len(points)}. Give each key one value."
            )
        if points[0].origin("loader.num_workers").level is Level.command_line:
            rule = "has no effect with --data, which finds its value. Leave it out."
            yield points[0].problem("loader.num_workers", rule, value=points[0].values["loader"]["num_workers"])
    elif len(points) == 1:
        rule = "compares choices, and no key has several. Give a key a list: strategy=one_device,mirrored."
        yield Problem(key="bench", rule=rule, origin=COMMAND_LINE)
    for point in points:
        yield from training_problems("bench", point)
        if point.values["strategy"].get("evaluator"):
            rule = "has no effect: bench measures a training without its evaluator. Leave it out."
            yield point.problem("strategy.evaluator", rule, value=True)
        evaluations = point.values["eval"]
        if "until" in call.flags and evaluations["every_steps"] is evaluations["every_epochs"] is None:
            rule = "no evaluation comes before the end of the training. Give eval.every_steps or eval.every_epochs."
            yield call.problem("until", rule)


def _candidates(points: Sequence[Composition], *, fewest: int) -> list[Candidate]:
    """Plan every choice before the first one starts, with a number instead of `loader.num_workers=auto`.

    Raises:
        ConfigError: the problems of all plans, or a training of fewer steps.
    """
    candidates, lengths = [], plan_all_points(points)
    if min(lengths) < fewest:
        rule = f"the training has {min(lengths)}, and bench needs {fewest} or more. Give steps=100, or more epochs."
        raise refusal("steps", rule)
    for label, point, length in zip(_labels(points), points, lengths, strict=True):
        cfg = point.cfg
        if cfg.loader.num_workers == "auto":
            plan, note = with_workers(make_plan(cfg), workers_of_plan)
            _print_line(note)
            cfg = replace(cfg, loader=plan.cfg.loader)
        candidates.append(Candidate(label=label, cfg=cfg, num_steps=length))
    return candidates


def _labels(points: Sequence[Composition]) -> list[str]:
    """Return the arguments in which each choice differs from the others."""
    common = set.intersection(*(set(point.overrides) for point in points))
    labels = (" ".join(redacted_argument(line) for line in point.overrides if line not in common) for point in points)
    return [label or "the training" for label in labels]
