"""Compare two sides, each the runs of one config with several seeds, pair by pair: `trainkit compare`.

A run that diverged has no value: it failed, its metric is not finite, or its loss ended above the first one that it
logged. Its pair does not count, and the side with more of them is never better.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Final, Literal

from trainkit.config.grammar import refusal
from trainkit.config.identity import difference
from trainkit.config.schema import NO_RUN, MonitoredMetric, RunConfig
from trainkit.config.sections import CvConfig
from trainkit.errors import CheckpointError, UnreadableError, listed
from trainkit.files import expect_map, json_value, open_regular, parse_json, read_lines, reporting
from trainkit.report.curves import number
from trainkit.report.numbers import figure
from trainkit.report.schemas import kinds_of
from trainkit.report.schemas.looking import ComparedPair, ComparedSide, PairedComparison
from trainkit.run.folder.run_folder import RunFolder
from trainkit.sweeps.results.job_results import COMPLETE, SWEEP_FILE, JobResult, config_of, read_entries, read_entry
from trainkit.sweeps.results.states import read_state
from trainkit.sweeps.verdict import ALPHA, BUDGET, FEWEST, Verdict, far_pair, resolution_of, verdict

LEDGER: Final = Path("outputs/comparisons.jsonl")
"""Every comparison of this folder, one JSON document a line."""
_ORDER: Final = ("data", "cv", "loader.shuffle", "batch.drop_last")
"""Keys that change which samples a step reads, besides the seed."""
STARTS: Final = "starts"
"""Folder below that of a side with the initial weights that it shares with the other side."""
_WEIGHTS: Final = ("model", "convert", "init_from")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a side."""

    result: JobResult
    cfg: RunConfig

    def value(self, goal: MonitoredMetric) -> float | None:
        """Return its metric; None if it diverged."""
        value = self.result.metrics.get(goal.metric, math.nan)
        if self.result.status not in COMPLETE or not math.isfinite(value):
            return None
        first = math.inf
        with suppress(UnreadableError, ValueError, TypeError, AttributeError):
            line = next(read_lines(self.result.folder / "metrics.jsonl"), b"{}")
            first = number(parse_json(line).get("train/loss")) or math.inf
        return None if goal.metric == "val/loss" and value > first else value

    @property
    def sha256(self) -> str | None:
        """Hash of its weights; None if the run has recorded none."""
        digest = (RunFolder(self.result.folder).read_result() or {}).get("weights_sha256")
        return digest if isinstance(digest, str) else None


@dataclass(frozen=True, kw_only=True)
class Side:
    """The runs of one config with several seeds."""

    name: str
    """As the user gave it: a folder, or overrides."""
    folder: Path
    cfg: RunConfig
    """The config of the first run."""
    runs: tuple[Run, ...] = ()
    state: str = ""
    """`State.sha256` of their training; empty: not recorded."""

    def by_seed(self) -> dict[int, list[Run]]:
        """Return the runs of each seed, one for each fold."""
        seeds = dict.fromkeys(run.cfg.seed for run in self.runs)
        return {seed: [run for run in self.runs if run.cfg.seed == seed] for seed in seeds}


def read_side(name: str) -> Side:
    """Return the runs of a folder: of a run, or of a sweep of seeds.

    A run of a sweep stands for its point: all runs of the sweep that differ from it in seed or fold alone.

    Raises:
        ConfigError: there is no run, or there are those of several points.
    """
    folder = Path(name).expanduser()
    is_run = (folder / "resolved.yaml").is_file()
    base = folder.parent if is_run and (folder.parent / SWEEP_FILE).is_file() else folder
    state = read_state(base)
    alone = is_run and base == folder
    runs = list(_with_configs([read_entry(folder, job=folder.name)])) if alone else ended_runs(base)
    points = [run for run in runs if not is_run or run.result.folder.absolute() == folder.absolute()]
    if not points:
        raise refusal(name, "has not ended." if is_run else f"{NO_RUN} Give the folder of a run or of a sweep.")
    # runs that differ in seed, fold and keys that change no result
    point = _of_any_seed(points[0].cfg)
    alike = [run for run in runs if not any(item.matters for item in difference(point, _of_any_seed(run.cfg)))]
    if others := [run for run in points if run not in alike]:
        rule = f"holds several points. Give a run of each: {points[0].result.folder} {others[0].result.folder}"
        raise refusal(name, rule)
    alike.sort(key=lambda run: (run.cfg.seed, run.cfg.cv.fold or 0))
    return Side(name=name, folder=folder, cfg=alike[0].cfg, runs=tuple(alike), state=state.sha256 if state else "")


def ended_runs(folder: Path) -> list[Run]:
    """Return the runs below a folder, or of its sweep, that have ended."""
    if read_state(folder) is None:
        return list(_with_configs(read_entries(folder)))
    # a sweep that compare continues forgets its failed jobs
    files = sorted(folder.rglob("result.json"))
    return list(_with_configs(read_entry(file.parent, job=file.parent.name) for file in files))


def _with_configs(entries: Iterable[JobResult]) -> Iterator[Run]:
    """Yield the runs that have reached their end or have failed; one that was interrupted has not."""
    for entry in entries:
        code = (RunFolder(entry.folder).read_result() or {}).get("exit_code", 0)
        has_ended = entry.status.startswith(("finished", "failed", "exit ", "signal "))
        cfg = config_of(entry.folder) if has_ended or (entry.status == "stopped" and code == 0) else None
        if cfg is not None:
            yield Run(result=entry, cfg=cfg)


def _of_any_seed(cfg: RunConfig) -> RunConfig:
    """Return a config without its seed, its fold, and the initial weights that it shares with another side."""
    cv = replace(cfg.cv, fold=None) if cfg.cv.folds else CvConfig()
    return replace(cfg, seed=0, cv=cv, init_from=None if _shares_start(cfg) else cfg.init_from)


def _shares_start(cfg: RunConfig) -> bool:
    return (cfg.init_from or "").endswith(f"/{STARTS}/seed_{cfg.seed}.safetensors")


def compare(
    a: Side,
    b: Side,
    *,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    edits: int = 1,
    delta: float | None = None,
    budget: int = BUDGET,
    same: str = "",
    notes: Sequence[str] = (),
) -> PairedComparison:
    """Return the comparison of two sides over the seeds that both have.

    Args:
        a: the side to compare with.
        b: the side that is judged.
        metric: the metric; None: the loss of the objective.
        mode: whether lower or higher values are better; None: as known of the metric.
        edits: number of comparisons of a series; each gets this share of alpha.
        delta: differences that do not matter.
        budget: pairs in all.
        same: why both are one training, if that is known without a run.
        notes: further remarks.

    Raises:
        ConfigError: no seed is in both, or no run has the metric.
    """
    goal = MonitoredMetric.of(replace(a.cfg.eval, metric=metric or "val/loss", mode=mode))
    runs_a, runs_b = a.by_seed(), b.by_seed()
    seeds = sorted(runs_a.keys() & runs_b.keys())
    if not seeds and not same:
        seeds_of = f"{listed(runs_b, 4)} and {listed(runs_a, 4)}"
        rule = f"has no seed in common with {a.name}: {seeds_of}. Train both with equal seeds."
        raise refusal(b.name, rule)
    metrics = sorted({name for run in (*a.runs, *b.runs) for name in run.result.metrics})
    if goal.metric not in metrics and metrics:
        raise refusal(f"--metric {goal.metric}", f"no run has it. There are: {', '.join(metrics)}.")
    pairs = [_pair(seed, runs_a[seed], runs_b[seed], goal) for seed in seeds]
    alpha = ALPHA / edits
    test, remarks = _answer(pairs, goal, alpha=alpha, delta=delta, budget=budget)
    valid = _valid(pairs)
    remarks = [*notes, *_remarks(a, b, valid, pairs), *remarks]
    if same or (pairs and all(_same_bits(runs_a[seed], runs_b[seed]) for seed in seeds)):
        test = replace(test, answer="the same" if same else "the same bits", low=0.0, high=0.0, more_pairs=0)
        remarks = [*notes, *([same] if same else [])]
    document = PairedComparison(
        version=1,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        a=ComparedSide(name=a.name, folder=str(a.folder), state=a.state, diverged=_diverged(pairs, "a")),
        b=ComparedSide(name=b.name, folder=str(b.folder), state=b.state, diverged=_diverged(pairs, "b")),
        differences=[{**asdict(item), "tag": item.tag.value} for item in _differences(a, b)],  # type: ignore[typeddict-item]
        metric=goal.metric,
        mode=goal.mode,
        answer=test.answer if test.answer != "the same within delta" else f"the same within {figure(delta or 0.0)}",
        difference=None if same or not valid else test.difference,
        interval=[test.low, test.high],
        alpha=alpha,
        more_pairs=test.more_pairs,
        pairs=pairs,
        gain_of_pairing=_gain(valid),
        unpaired=[] if same else [*_unpaired(a, b)],
        remarks=remarks,
        seconds=sum(run.result.seconds or 0.0 for side in (a, b) for run in side.runs if run.cfg.seed in seeds),
        line="",
    )
    return PairedComparison(**{**document, "line": _line(document, len(valid))})


def _pair(seed: int, a: Sequence[Run], b: Sequence[Run], goal: MonitoredMetric) -> ComparedPair:
    """Return the values of a seed, over folds the means, and the hashes of its weights."""
    values = [[run.value(goal) for run in runs] for runs in (a, b)]
    means = [None if None in per_run else fmean(value for value in per_run if value is not None) for per_run in values]
    hashes = [[run.sha256 for run in runs if run.sha256 is not None] for runs in (a, b)]
    return ComparedPair(seed=seed, a=means[0], b=means[1], sha256_a=hashes[0], sha256_b=hashes[1])


def _valid(pairs: Sequence[ComparedPair]) -> list[tuple[float, float]]:
    """Return the values of A and B of the pairs in which neither diverged."""
    return [(pair["a"], pair["b"]) for pair in pairs if pair["a"] is not None and pair["b"] is not None]


def _diverged(pairs: Sequence[ComparedPair], key: Literal["a", "b"]) -> int:
    return sum(pair[key] is None for pair in pairs)


def _answer(
    pairs: Sequence[ComparedPair], goal: MonitoredMetric, *, alpha: float, delta: float | None, budget: int
) -> tuple[Verdict, list[str]]:
    """Return the verdict on pairs, withdrawn where divergences or a tie forbid it, and why it was."""
    valid = _valid(pairs)
    if not valid:
        return Verdict(answer="not distinguishable yet", difference=math.nan, low=-math.inf, high=math.inf), []
    resolution = resolution_of(value for pair in valid for value in pair)
    test = verdict(
        [b - a for a, b in valid],
        alpha,
        lower_is_better=goal.mode == "min",
        resolution=resolution,
        delta=delta,
        budget=budget,
    )
    winner: Literal["a", "b"] = "b" if test.answer == "better" else "a"
    open_again = replace(test, answer="not distinguishable yet", more_pairs=None)
    if test.answer in _DECIDED and _diverged(pairs, winner) > _diverged(pairs, "a" if winner == "b" else "b"):
        text = "has the better values where both end, and is not better, as more of its runs diverged"
        return open_again, [f"{winner.upper()} {text}"]
    is_tie = resolution > 0 and abs(test.difference) <= resolution * 1.001
    if is_tie and test.answer in (*_DECIDED, "not distinguishable yet"):
        return open_again, [f"a tie: the means differ by one step of {goal.metric}, {figure(resolution)}, or less"]
    return test, []


_DECIDED: Final = ("better", "worse")


def _line(comparison: PairedComparison, counted: int) -> str:
    """Return the answer in one line."""
    answer, metric = comparison["answer"], comparison["metric"]
    if answer == "not distinguishable yet" and counted:
        more = comparison["more_pairs"]
        answer += f": about {more} more pair{'' if more == 1 else 's'}" if more else ""
    pairs = f"{counted} pair{'' if counted == 1 else 's'}"
    if answer == "the same":
        return answer
    if answer == "the same bits":
        return f"{answer}  equal SHA-256 of the weights, {len(comparison['pairs'])} pairs"
    if comparison["difference"] is None:
        return f"{answer}  every pair has a run that diverged"
    mean = f"{answer}  {metric} {figure(comparison['difference'])}"
    if counted < FEWEST:
        return f"{mean}, {pairs}: nothing is concluded from fewer than {FEWEST}"
    low, high = (figure(bound) for bound in comparison["interval"] if bound is not None)
    where = {"val": ", this validation set", "test": ", this test set"}.get(metric.partition("/")[0], "")
    return f"{mean} [{low}, {high}], {100 * (1 - comparison['alpha']):.5g} % at any look, {pairs}{where}"


def lines_of(comparison: PairedComparison) -> Iterator[str]:
    """Yield the comparison as lines: the sides, the differing keys by tag, the pairs, and the answer."""
    for name in ("a", "b"):
        side: ComparedSide = comparison[name]
        yield f"{name.upper()}  {side['name']}" + (f"  {side['folder']}" if side["folder"] != side["name"] else "")
    width = max((len(item["key"]) for item in comparison["differences"]), default=0)
    for item in comparison["differences"]:
        yield f"  {item['tag']:<9}  {item['key']:<{width}}  {item['left']} -> {item['right']}"
    if not comparison["differences"]:
        yield "  no key differs"
    if comparison["pairs"]:
        yield f"  {'seed':>6}  {'A':>10}  {'B':>10}  {'B - A':>11}"
    for pair in comparison["pairs"]:
        a, b = pair["a"], pair["b"]
        cells = ["diverged" if value is None else figure(value) for value in (a, b)]
        gap = "" if a is None or b is None else figure(b - a)
        yield f"  {pair['seed']:>6}  {cells[0]:>10}  {cells[1]:>10}  {gap:>11}"
    if (gain := comparison["gain_of_pairing"]) is not None:
        times = "more" if gain < 1 else "less"
        yield f"  pairing: the difference varies {figure(max(gain, 1 / gain))} times {times} than that of unequal seeds"
    yield from (f"  pairing is broken: {text}" for text in comparison["unpaired"])
    yield from (f"  {text}" for text in comparison["remarks"])
    yield comparison["line"]


def record(comparison: PairedComparison, ledger: Path = LEDGER) -> None:
    """Add a comparison to the ledger, in one write: others may add theirs meanwhile."""
    with reporting(ledger.parent):
        ledger.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(json_value(comparison), ensure_ascii=False) + "\n"
        with open_regular(ledger, "ab", follow=True, buffering=0) as file:
            file.write(line.encode())


_KINDS: Final = kinds_of(PairedComparison)


def recorded(ledger: Path = LEDGER) -> list[PairedComparison]:
    """Return the comparisons of the ledger, the first one first; lines that are none are skipped."""
    rows = []
    with suppress(UnreadableError):
        for line in read_lines(ledger) if ledger.exists() else ():
            with suppress(ValueError):
                row = expect_map(parse_json(line), _KINDS)
                rows += [row] if row["version"] == 1 else []
    return rows  # type: ignore[return-value]


def _differences(a: Side, b: Side) -> list[Any]:
    """Return the differing keys of two sides without those of the seed and of the place of a run."""
    differences = difference(*(_of_any_seed(side.cfg) for side in (a, b)))
    return [item for item in differences if item.key not in ("name", "sweep.name")]


def _gain(valid: Sequence[tuple[float, float]]) -> float | None:
    """Return the variance of a difference of unequal seeds over that of pairs; None: unknown."""
    if len(valid) < FEWEST:
        return None
    a, b = zip(*valid, strict=True)
    paired = variance([later - earlier for earlier, later in valid])
    return (variance(a) + variance(b)) / paired if paired > 0 else None


def _same_bits(a: Sequence[Run], b: Sequence[Run]) -> bool:
    """Return whether the weights of a seed are equal, whatever their names: a renamed layer is sorted elsewhere."""
    if len(a) != len(b) or any(run.sha256 is None for run in (*a, *b)):
        return False
    return all(
        left.sha256 == right.sha256
        or (left.result.metrics == right.result.metrics and (bits := _bits(left)) is not None and bits == _bits(right))
        for left, right in zip(a, b, strict=True)
    )


def _bits(run: Run) -> list[str] | None:
    """Return the SHA-256 of each tensor of the written model, sorted; None if there is none."""
    from trainkit.trainer.checkpoint.tensors import TensorFile, bytes_of  # noqa: PLC0415 - imports torch

    with suppress(CheckpointError):
        file = TensorFile.opened(run.result.folder / "model" / "model.safetensors")
        return sorted(hashlib.sha256(bytes_of(file.read(name))).hexdigest() for name in file)
    return None


def _unpaired(a: Side, b: Side) -> Iterator[str]:
    """Yield why runs of one seed begin differently."""
    keys = [item.key for item in _differences(a, b) if item.matters]
    order = [key for key in keys if key.startswith(_ORDER) and key != "cv.fold"]
    if order:
        yield f"another order of samples ({listed(order, 4)})"
    shares = bool(b.runs) and _shares_start(b.runs[0].cfg)
    if not shares and any(key.startswith(_WEIGHTS) for key in keys) and (shapes := _other_shapes(a.runs[0], b.runs[0])):
        yield shapes


def _other_shapes(a: Run, b: Run) -> str:
    """Return which weights of two runs have unequal names or shapes; empty: none."""
    from trainkit.trainer.checkpoint.tensors import TensorFile  # noqa: PLC0415 - imports torch

    try:
        files = [TensorFile.opened(run.result.folder / "model" / "model.safetensors") for run in (a, b)]
    except CheckpointError:
        return "the shapes of the weights are unknown: no model was written (checkpoint.export)"
    shapes = [{name: [*file.kind_of(name)[1]] for name in file} for file in files]
    unequal = [name for name in sorted({*shapes[0], *shapes[1]}) if shapes[0].get(name) != shapes[1].get(name)]
    if not unequal:
        return ""
    texts = [f"{name} {shapes[0].get(name, 'none')} and {shapes[1].get(name, 'none')}" for name in unequal]
    return f"other shapes of weights ({listed(texts, 4)})"


def _remarks(a: Side, b: Side, valid: Sequence[tuple[float, float]], pairs: Sequence[ComparedPair]) -> Iterator[str]:
    """Yield what weakens the answer."""
    gaps, diverged = [later - earlier for earlier, later in valid], [_diverged(pairs, "a"), _diverged(pairs, "b")]
    if b.runs and _shares_start(b.runs[0].cfg):
        yield f"B starts with the weights of A in the first units of each layer: {b.folder / STARTS}"
    if any(diverged):
        yield f"diverged or failed: {diverged[0]} of {len(pairs)} of A, {diverged[1]} of B; these pairs do not count"
    if (index := far_pair(gaps)) is not None:
        far = f"the difference {figure(gaps[index])} lies far from all others"
        yield f"skewed: {far}, so they are not normal, and the interval may miss their mean"
    ended = [[run.result for run in side.runs if run.result.status in COMPLETE] for side in (a, b)]
    lengths = [{result.steps for result in results if result.steps is not None} for results in ended]
    if lengths[0] != lengths[1]:
        yield f"other numbers of steps: {listed(sorted(lengths[0]), 4)} and {listed(sorted(lengths[1]), 4)}"
        if a.cfg.stop_after is not None or b.cfg.stop_after is not None:
            yield "stop_after ends a run by the clock: the speed of each is part of the difference, with all its noise"
