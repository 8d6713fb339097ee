"""Find the value of one key by turns: the number of data loading processes, or the size of a shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from trainkit.cluster.host import num_cores
from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError
from trainkit.files import num_bytes
from trainkit.measuring.bench import Choice, StartTurn, Turn, measured_config, run_turn, steps_of, turns
from trainkit.report.numbers import share
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

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        bound = "loader" if self.is_loader_bound else "model"
        return {"bound_by": bound, "num_workers": self.num_workers, "reason": self.reason}


def workers_of_plan(plan: RunPlan) -> tuple[int, str]:
    """Return the number of workers for a run that is about to begin, and a note about it."""
    found = search_workers(plan.cfg, num_steps=plan.num_steps, num_ranks=len(plan.tasks))
    return found.num_workers, found.reason


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
    found = list[Choice]()
    with turns(start, log) as run:

        def measure(choice: Choice) -> None:
            choice.add(run(f"loader.num_workers={choice.label}", _config(cfg, int(choice.label), num_steps)))

        most = max(num_cores() // max(num_ranks, 1), 1)
        for count in (0, *(1 << power for power in range(most.bit_length()))):
            found.append(Choice(label=str(count)))
            measure(found[-1])
            if not found[-1].is_measured or _input_share(found[-1]) <= _FREE:
                break
            if len(found) > 1 and _step_s(found[-1]) > (1 - _GAIN) * min(map(_step_s, found[:-1])):
                break  # it is no faster than fewer workers
        for choice in (one for _ in range(1, rounds) for one in found):
            if choice.is_measured:
                measure(choice)
    return _judged(found)


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
    part = choice.part_s("input")
    return 0.0 if part is None else part.median / _step_s(choice)


def _judged(found: list[Choice]) -> WorkerSearch:
    first, shortest = found[0], min(map(_step_s, found))
    if not first.is_measured:
        reason = f"0, because the training could not be measured: {first.failure}"
        return WorkerSearch(choices=tuple(found), num_workers=0, reason=reason)
    best = next(one for one in found if _step_s(one) <= (1 + _GAIN) * shortest)
    before = share(_input_share(first))
    if best is first:
        reason = f"0, because reading takes {before} of a step"
        if len(found) > 1:
            reason += ", and workers do not shorten a step"
    else:
        faster = _step_s(first) / _step_s(best)
        after = share(_input_share(best))
        reason = (
            f"{best.label}: a step is {faster:.1f} times as fast, and reading takes {after} of it instead of {before}"
        )
    return WorkerSearch(choices=tuple(found), num_workers=int(best.label), reason=reason)


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
    """One size of a shard."""

    micro_size: int
    """Samples of a shard, at most."""
    accumulation: int
    """Shards that a replica computes in a step, at most."""
    choice: Choice
    """The measurements of its turns."""
    status: Status = "untried"
    """measured; out_of_memory: its turn ran out of memory; too_big: not tried, because the plan predicts too much
    memory; refused: the config cannot have it; failed: its turn failed for another reason; untried: the search ended
    before it.
    """
    reason: str = ""
    """Reason why it was not measured; empty if it was."""
    needs: int | None = None
    """Bytes that the plan predicts for all processes of a host together; None: not predicted."""

    @property
    def speed(self) -> float:
        """Samples per second, the median of its turns; 0 if it was not measured."""
        found = self.choice.samples_per_s
        return found.median if self.status == "measured" and found is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class MicroSizeSearch:
    """The sizes of a search, from the largest, and the one to use."""

    global_size: int
    """Samples per step, the same for every size."""
    num_replicas: int
    sizes: tuple[Size, ...]
    best: Size | None
    """The smallest of the sizes that are as fast as the fastest; None: none was measured."""


def sizes_of(plan: RunPlan) -> list[Size]:
    """Return the sizes to try, from the largest: 1, 2, 4 ... shards per replica, and the size of the config.

    A shard of each size is within one sample of all others of a full step.

    Args:
        plan: the plan of a run; its global batch and its number of replicas do not change.
    """
    total, replicas = plan.batch.global_size, plan.num_replicas
    found = {plan.batch.micro_size}
    shards = 1
    while shards * replicas < 2 * total:
        found.add(-(-total // (shards * replicas)))
        shards *= 2
    counts = {size: math.ceil(total / size) for size in sorted(found, reverse=True)}
    return [
        Size(micro_size=size, accumulation=math.ceil(count / replicas), choice=Choice(label=str(size)))
        for size, count in counts.items()
    ]


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
    found = verdict_of(plan, device_memory(plan, model, evaluates=False), memory)  # turns evaluate nothing
    size.needs = found.needs
    if found.fits is False:
        size.status = "too_big"
        size.reason = f"needs {num_bytes(found.needs)} by the plan, {found.name} has {num_bytes(found.has)} free"


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
) -> MicroSizeSearch:
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
    with turns(start, log) as run:

        def measure(size: Size) -> None:
            nonlocal steps
            about = f"batch.micro_size={size.micro_size}"
            if steps is None:
                pace = run(f"warm-up: {about}", _config_of(size, cfg, plan, _PACE_STEPS))
                if _has_failed(size, pace):
                    return
                steps = steps_of(pace)
            turn = run(about, _config_of(size, cfg, plan, steps))
            if not _has_failed(size, turn):
                size.choice.add(turn)
                size.status = "measured"

        for place, size in enumerate(sizes):
            _refuse(size, cfg, plan, memory)
            if size.status == "untried":
                measure(size)
            if size.status == "failed" or _only_slower(sizes[: place + 1]):
                why = "the size above has failed" if size.status == "failed" else "the larger sizes are slower already"
                for rest in sizes[place + 1 :]:
                    rest.reason = f"not tried: {why}"
                break
        for size in (one for _ in range(rounds - 1) for one in sizes):
            if size.status == "measured":
                measure(size)
    return MicroSizeSearch(
        global_size=plan.batch.global_size, num_replicas=plan.num_replicas, sizes=tuple(sizes), best=_best(sizes)
    )


def _only_slower(sizes: Sequence[Size]) -> bool:
    """Return whether the last measured sizes are all slower than the fastest."""
    speeds = [size.speed for size in sizes if size.status == "measured"]
    last = speeds[-_SLOWER_IN_A_ROW:]
    return len(speeds) > _SLOWER_IN_A_ROW and all(speed < (1 - TIE) * max(speeds) for speed in last)


def _best(sizes: Sequence[Size]) -> Size | None:
    fastest = max((size.speed for size in sizes), default=0.0)
    return next((size for size in reversed(sizes) if fastest and size.speed >= (1 - TIE) * fastest), None)


def overrides_for(cfg: RunConfig, found: MicroSizeSearch) -> tuple[str, ...]:
    """Return the overrides with which a config has the size that was found, and the same samples per step."""
    if found.best is None:
        return ()
    return cfg.batch.overrides(global_size=found.global_size, micro_size=found.best.micro_size)
