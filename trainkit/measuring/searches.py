"""Find the value of one key by turns: the number of data loading processes, or the size of a shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from trainkit.cluster.host import num_cores
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError
from trainkit.files import num_bytes
from trainkit.measuring.bench import Choice, Spread, StartTurn, Turn, measured_config, run_turn, steps_of, turns
from trainkit.measuring.tables import PART_COLUMNS, DataVerdict, Machine, range_text, speed_columns, table
from trainkit.report.numbers import figure, share
from trainkit.report.tables import row_lines
from trainkit.run.estimates.memory import HostMemory, device_memory, verdict_of
from trainkit.run.planning.misfits import refuse_misfits
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.trained.build import meta_model

_FREE: Final = 0.05
"""Up to this share of the input in a step, a training is bound by its model."""
_GAIN: Final = 0.05
"""A number of workers counts as faster if its step is shorter by this share."""
_STEPS: Final = 20
FEWEST_STEPS: Final = 30
"""Steps of a training that are enough to measure it."""


@dataclass(frozen=True, kw_only=True)
class WorkerSearch:
    """The turns that were measured, one number of workers after the other, and the result."""

    choices: tuple[Choice, ...]
    """Each with its number of workers as the label, ascending from 0."""
    num_workers: int
    """The number to use."""
    reason: str

    @property
    def is_loader_bound(self) -> bool:
        """Whether reading in the training process takes a part of its steps."""
        first = self.choices[0]
        return first.is_measured and _input_share(first) > _FREE

    def verdict(self) -> DataVerdict:
        """Return the result for the document."""
        bound: Literal["loader", "model"] = "loader" if self.is_loader_bound else "model"
        return {"bound_by": bound, "num_workers": self.num_workers, "reason": self.reason}

    def lines(self) -> Iterator[str]:
        """Yield the lines of `trainkit bench --data`: the numbers of workers that were measured, and the verdict."""
        measured = [choice for choice in self.choices if choice.is_measured]
        if measured:
            columns = {**speed_columns(measured), **PART_COLUMNS}
            names = ("samples/s", "from .. to", "ratio", "memory", "ms a step", "input")
            yield from table(0, measured, {name: columns[name] for name in names}, title="workers")
            yield ""
        yield from (f"  {choice.label}: failed: {choice.failure}" for choice in self.choices if choice.failure)
        verdict = "bound by its loader" if self.is_loader_bound else "bound by its model"
        yield f"  {verdict if measured else 'not measured'}. loader.num_workers={self.reason}."


def workers_of_plan(plan: RunPlan) -> tuple[int, str]:
    """Return the number of workers for a run that is about to begin, and a note about it."""
    search = search_workers(plan.cfg, num_steps=plan.num_steps, num_ranks=len(plan.tasks))
    return search.num_workers, search.reason


def search_workers(
    cfg: RunConfig,
    *,
    num_steps: int,
    num_ranks: int,
    rounds: int = 1,
    log: Callable[[str], None] = lambda _: None,
    start: StartTurn = run_turn,
) -> WorkerSearch:
    """Measure a training with 0, 1, 2, 4 ... workers per rank, until more workers do not shorten the step.

    The number of workers does not change the results of a training. The search returns the smallest number whose step
    is at most 5 % longer than the shortest.

    Args:
        cfg: a checked config.
        num_steps: steps of the training.
        num_ranks: processes of the training that read data on this host; they share its cores.
        rounds: turns of each number; all after the first are taken in turns.
        log: receives a line when a turn begins.
        start: runs a turn in a folder that does not exist yet.
    """
    if num_steps < FEWEST_STEPS:
        reason = f"0, because a training of {num_steps} steps is too short to measure"
        return WorkerSearch(choices=(Choice(label="0"),), num_workers=0, reason=reason)
    choices = list[Choice]()
    with turns(start, log) as run:

        def measure(choice: Choice) -> None:
            choice.add(run(f"loader.num_workers={choice.label}", _config(cfg, int(choice.label), num_steps)))

        most = max(num_cores() // max(num_ranks, 1), 1)
        for count in (0, *(1 << power for power in range(most.bit_length()))):
            choices.append(Choice(label=str(count)))
            measure(choices[-1])
            if not choices[-1].is_measured or _input_share(choices[-1]) <= _FREE:
                break
            if len(choices) > 1 and _step_s(choices[-1]) > (1 - _GAIN) * min(map(_step_s, choices[:-1])):
                break  # it is no faster than fewer workers
        for choice in choices * (rounds - 1):
            if choice.is_measured:
                measure(choice)
    return _search_result(choices)


def _config(cfg: RunConfig, count: int, num_steps: int) -> RunConfig:
    """Return the config of a turn longer than the batches that workers read during the start."""
    ahead = count * cfg.loader.prefetch
    warmup = min(5 + ahead, num_steps // 3)
    steps = min(max(_STEPS, 3 * ahead), num_steps - warmup)
    loader = replace(cfg.loader, num_workers=count)
    return measured_config(replace(cfg, loader=loader), warmup_steps=warmup, num_steps=steps)


def _step_s(choice: Choice) -> float:
    return choice.step_s.median if choice.is_measured and choice.step_s is not None else float("inf")


def _input_share(choice: Choice) -> float:
    spread = choice.spread("input")
    return 0.0 if spread is None else spread.median / _step_s(choice)


def _search_result(choices: list[Choice]) -> WorkerSearch:
    first, shortest = choices[0], min(map(_step_s, choices))
    if not first.is_measured:
        reason = f"0, because the training could not be measured: {first.failure}"
        return WorkerSearch(choices=tuple(choices), num_workers=0, reason=reason)
    best = next(choice for choice in choices if _step_s(choice) <= (1 + _GAIN) * shortest)
    before = share(_input_share(first))
    if best is first:
        reason = f"0, because reading takes {before} of a step"
        if len(choices) > 1:
            reason += ", and workers do not shorten a step"
    else:
        faster = _step_s(first) / _step_s(best)
        after = share(_input_share(best))
        reason = (
            f"{best.label}: a step is {faster:.1f} times as fast, and reading takes {after} of it instead of {before}"
        )
    return WorkerSearch(choices=tuple(choices), num_workers=int(best.label), reason=reason)


_SHARD_WARMUP: Final = 3
"""Steps at the start of each turn that are not measured."""
_PACE_STEPS: Final = 5
"""Measured steps of the turn that determines the number of steps of the other turns."""
TIE: Final = 0.05
"""Sizes whose speed is within this share of the fastest count as equally fast."""
_SLOWER_IN_A_ROW: Final = 2
"""Number of consecutive sizes slower than the fastest that end the search."""
_KILLED: Final = "SIGKILL"
"""Signal with which the kernel ends a process if memory is exhausted."""

Status = Literal["untried", "measured", "out_of_memory", "too_big", "refused", "failed"]


@dataclass(kw_only=True)
class Size:
    """A size of a shard."""

    micro_size: int
    """Samples of a shard, at most."""
    accumulation: int
    """Shards that a replica computes in a step, at most."""
    status: Status = "untried"
    """measured; out_of_memory: its turn ran out of memory; too_big: not tried, because the plan predicts too much
    memory; refused: the config cannot have it; failed: its turn failed for another reason; untried: the search ended
    before it.
    """
    reason: str | None = None
    """The reason why the size was not measured; null if it was."""
    samples_per_s: Spread | None = None
    """Samples per second over all replicas."""
    step_s: Spread | None = None
    """Seconds of a step."""
    peak_bytes: int | None = None
    """The most memory of a process, in bytes."""
    predicted_bytes: int | None = None
    """The plan's prediction for all processes of the host together, in bytes; null: no prediction."""

    @property
    def speed(self) -> float:
        """Samples per second, the median of its turns; 0 if it was not measured."""
        return 0.0 if self.status != "measured" or self.samples_per_s is None else self.samples_per_s.median


def sizes_of(plan: RunPlan) -> list[Size]:
    """Return the sizes to try, from the largest: 1, 2, 4 ... shards per replica, and the size of the config.

    A shard of each size is within one sample of all others of a full step.

    Args:
        plan: the plan of a run; its global batch and its number of replicas do not change.
    """
    total, replicas = plan.batch.global_size, plan.num_replicas
    sizes = {plan.batch.micro_size}
    shards = 1
    while shards * replicas < 2 * total:
        sizes.add(-(-total // (shards * replicas)))
        shards *= 2
    counts = {size: math.ceil(total / size) for size in sorted(sizes, reverse=True)}
    return [Size(micro_size=size, accumulation=math.ceil(count / replicas)) for size, count in counts.items()]


def with_size(cfg: RunConfig, global_size: int, micro_size: int) -> RunConfig:
    """Return a config with another size of its shards, and the same samples per step."""
    return replace(cfg, batch=replace(cfg.batch, global_size=global_size, micro_size=micro_size, accumulation=None))


def _refuse(size: Size, cfg: RunConfig, plan: RunPlan, memory: HostMemory | None) -> None:
    """Mark a size that the config cannot have, or for which the host is predicted to have too little memory."""
    cfg = with_size(cfg, plan.batch.global_size, size.micro_size)
    try:
        plan = make_plan(cfg, num_gpus=plan.context.num_gpus, splits=plan.components.datasets)
        model = meta_model(plan.cfg)
        refuse_misfits(plan, model)
        model_notes(plan, model)
    except ConfigError as error:
        size.status, size.reason = "refused", str(error.problems[0])
        return
    if memory is None:
        return
    plan = plan.resolved(lambda: model)
    verdict = verdict_of(plan, device_memory(plan, model, evaluates=False), memory)  # turns evaluate nothing
    size.predicted_bytes = verdict.needs
    if verdict.fits is False:
        size.status = "too_big"
        size.reason = f"needs {num_bytes(verdict.needs)} by the plan, {verdict.name} has {num_bytes(verdict.has)} free"


def _config_of(size: Size, cfg: RunConfig, plan: RunPlan, steps: int) -> RunConfig:
    """Return the config of a turn of a size."""
    cfg = with_size(cfg, plan.batch.global_size, size.micro_size)
    length = _SHARD_WARMUP + steps + 1  # a training that reaches its last step is evaluated
    if plan.num_steps < length:
        cfg = replace(cfg, steps=length, epochs=None)
    return measured_config(cfg, warmup_steps=_SHARD_WARMUP, num_steps=steps)


def _has_failed(size: Size, turn: Turn) -> bool:
    """Return whether a turn of a size has failed, and keep the reason."""
    if turn.failure:
        lacks_memory = turn.error in ("OutOfMemoryError", _KILLED) or _KILLED in turn.failure
        size.status, size.reason = "out_of_memory" if lacks_memory else "failed", turn.failure
    return bool(turn.failure)


def search_micro_size(
    cfg: RunConfig,
    plan: RunPlan,
    *,
    memory: HostMemory | None = None,
    rounds: int = 1,
    steps: int | None = None,
    log: Callable[[str], None] = lambda _: None,
    start: StartTurn = run_turn,
) -> list[Size]:
    """Measure a training with ever smaller shards, until they are slower; the samples of a step stay the same.

    The largest size comes first; if it runs out of memory, the next one follows. Two sizes in a row that are slower
    than the fastest end the search. The result is the smallest size whose speed is at most 5 % below the fastest: it
    needs the least memory.

    Args:
        cfg: a checked config.
        plan: the plan of this config.
        memory: memory of the host, against which each size is planned before it is tried; None: each is tried.
        rounds: turns of each size; all after the first are taken in turns.
        steps: measured steps of a turn; None: as many as take two seconds with the first size that is measured.
        log: receives a line when a turn begins.
        start: runs a turn in a folder that does not exist yet.
    """
    sizes = sizes_of(plan)
    choices = {size.micro_size: Choice(label=str(size.micro_size)) for size in sizes}
    with turns(start, log) as run:

        def measure(size: Size) -> None:
            nonlocal steps
            about, choice = f"batch.micro_size={size.micro_size}", choices[size.micro_size]
            if steps is None:
                pace = run(f"warm-up: {about}", _config_of(size, cfg, plan, _PACE_STEPS))
                if _has_failed(size, pace):
                    return
                steps = steps_of(pace)
            turn = run(about, _config_of(size, cfg, plan, steps))
            if not _has_failed(size, turn):
                choice.add(turn)
                size.status, size.peak_bytes = "measured", choice.peak_bytes
                size.samples_per_s, size.step_s = choice.samples_per_s, choice.step_s

        for index, size in enumerate(sizes):
            _refuse(size, cfg, plan, memory)
            if size.status == "untried":
                measure(size)
            if size.status == "failed" or _only_slower(sizes[: index + 1]):
                why = "the size above has failed" if size.status == "failed" else "the larger sizes are slower already"
                for smaller in sizes[index + 1 :]:
                    smaller.reason = f"not tried: {why}"
                break
        for size in sizes * (rounds - 1):
            if size.status == "measured":
                measure(size)
    return sizes


def _only_slower(sizes: Sequence[Size]) -> bool:
    """Return whether the last measured sizes are all slower than the fastest."""
    speeds = [size.speed for size in sizes if size.status == "measured"]
    last = speeds[-_SLOWER_IN_A_ROW:]
    return len(speeds) > _SLOWER_IN_A_ROW and all(speed < (1 - TIE) * max(speeds) for speed in last)


def best_of(sizes: Sequence[Size]) -> Size | None:
    """Return the smallest of the sizes that are as fast as the fastest; None: none was measured."""
    fastest = max((size.speed for size in sizes), default=0.0)
    return next((size for size in reversed(sizes) if fastest and size.speed >= (1 - TIE) * fastest), None)


@dataclass(frozen=True, kw_only=True)
class FindMicroSizeDocument:
    """The result of `trainkit find micro_size`."""

    version: int
    """The version of this document."""
    command: str
    """The command, without secrets."""
    date: str
    """When the measurement ended, with the time zone."""
    machine: Machine
    """The machine of the measurement."""
    global_size: int
    """Samples per step, the same for every size."""
    replicas: int
    """Replicas with shards of their own."""
    rounds: int
    """Turns of each size."""
    sizes: list[Size]
    """The sizes, from the largest."""
    micro_size: int | None
    """The size to use; null: none was measured."""
    overrides: list[str]
    """The overrides with which the training has this size."""
    notes: list[str]
    """Notes for the user."""

    def lines(self) -> Iterator[str]:
        """Yield the sizes that were measured, the others by their reasons, and the overrides."""
        measured = [size for size in self.sizes if size.status == "measured"]
        if measured:
            fastest = max(size.speed for size in measured)
            columns: dict[str, Callable[[Size], str]] = {
                "micro size": lambda size: str(size.micro_size),
                "shards a replica": lambda size: str(size.accumulation),
                "samples/s": lambda size: figure(size.speed),
                "from .. to": lambda size: range_text(size.samples_per_s),
                "of the fastest": lambda size: share(size.speed / fastest),
                "memory": lambda size: num_bytes(size.peak_bytes or 0),
            }
            if any(size.predicted_bytes is not None for size in measured):
                columns["planned for the host"] = lambda size: num_bytes(size.predicted_bytes or 0)
            yield from row_lines([*columns], [[cell(size) for cell in columns.values()] for size in measured])
            yield ""
        others = [size for size in self.sizes if size.status != "measured"]
        words = [("out of memory: " if size.status == "out_of_memory" else "") + str(size.reason) for size in others]
        for reason in dict.fromkeys(words):
            sizes = (str(size.micro_size) for size, word in zip(others, words, strict=True) if word == reason)
            yield f"  {', '.join(sizes)}: {reason}"
        if self.micro_size is None:
            yield "  No size could be measured."
            return
        yield (
            f"  {self.micro_size}: the smallest size within {share(TIE)} of the fastest; "
            f"{self.global_size:,} samples a step, as before."
        )
        yield f"  {' '.join(self.overrides)}"
