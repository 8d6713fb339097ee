"""Find the size of a shard that trains fastest, with the same samples per step: `trainkit find micro_size`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError
from trainkit.measuring.bench import StartTurn, scratch_folder
from trainkit.measuring.figures import Choice
from trainkit.measuring.turns import measured_config, run_turn
from trainkit.run.estimates.memory import device_memory
from trainkit.run.estimates.verdict import HostMemory, Verdict, verdict_of
from trainkit.run.planning.memory import meta_model
from trainkit.run.planning.misfits import refuse_misfits
from trainkit.run.planning.notes import model_notes
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.storage import num_bytes

_WARMUP_STEPS: Final = 3
"""Steps at the start of each turn that are not measured."""
_PACE_STEPS: Final = 5
"""Measured steps of the turn that determines the number of steps of the other turns."""
_FEWEST_STEPS: Final = 10
_MOST_STEPS: Final = 100_000
_TURN_S: Final = 2.0
"""Intended duration of the measured steps of the first size, unless the user gives their number."""
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


@dataclass(kw_only=True)
class _Search:
    """A search in progress."""

    cfg: RunConfig
    plan: RunPlan
    folder: Path
    memory: HostMemory | None
    steps: int | None
    log: Callable[[str], None]
    start: StartTurn
    turns: int = field(default=0, init=False)

    def refuse(self, size: Size) -> None:
        """Mark a size that the config cannot have, or for which the host is predicted to have too little memory."""
        try:
            needs = self._predicted(size)
        except ConfigError as error:
            size.status, size.reason = "refused", str(error.problems[0])
            return
        if needs is not None:
            size.needs = needs.needs
            if needs.fits is False:
                size.status = "too_big"
                size.reason = (
                    f"needs {num_bytes(needs.needs)} by the plan, {needs.name} has {num_bytes(needs.has)} free"
                )

    def _predicted(self, size: Size) -> Verdict | None:
        cfg = with_size(self.cfg, self.plan.batch.global_size, size.micro_size)
        plan = make_plan(cfg, num_gpus=self.plan.context.num_gpus, splits=self.plan.components.datasets)
        model = meta_model(plan.cfg)
        refuse_misfits(plan, model)
        model_notes(plan, model)
        if self.memory is None:
            return None
        plan = plan.resolved(lambda: model)
        return verdict_of(plan, device_memory(plan, model, evaluates=False), self.memory)  # turns evaluate nothing

    def measure(self, size: Size) -> None:
        """Measure a size for one more turn."""
        if self.steps is None:
            self.log(f"warm-up: batch.micro_size={size.micro_size}")
            if (pace := self._turn(size, _PACE_STEPS, counts=False)) is None:
                return
            self.steps = min(max(_FEWEST_STEPS, round(_TURN_S / max(pace, 1e-6))), _MOST_STEPS)
        self.log(f"batch.micro_size={size.micro_size}")
        self._turn(size, self.steps)

    def _turn(self, size: Size, steps: int, *, counts: bool = True) -> float | None:
        """Run a turn; return the seconds of a step, None if it failed."""
        self.turns += 1
        cfg = with_size(self.cfg, self.plan.batch.global_size, size.micro_size)
        length = _WARMUP_STEPS + steps + 1  # a training that reaches its last step is evaluated
        if self.plan.num_steps < length:
            cfg = replace(cfg, steps=length, epochs=None)
        turn = self.start(
            measured_config(cfg, warmup_steps=_WARMUP_STEPS, num_steps=steps), self.folder / str(self.turns)
        )
        if turn.failure:
            lacks_memory = turn.error in ("OutOfMemoryError", _KILLED) or _KILLED in turn.failure
            size.status = "out_of_memory" if lacks_memory else "failed"
            size.reason = turn.failure
            return None
        if counts:
            size.choice.add(turn)
            size.status = "measured"
        figures = turn.figures
        return float(figures["seconds"]) / max(int(figures["steps"]), 1)


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
    with scratch_folder() as folder:
        search = _Search(cfg=cfg, plan=plan, folder=folder, memory=memory, steps=steps, log=log, start=start)
        for place, size in enumerate(sizes):
            search.refuse(size)
            if size.status == "untried":
                search.measure(size)
            if size.status == "failed" or _only_slower(sizes[: place + 1]):
                why = "the size above has failed" if size.status == "failed" else "the larger sizes are slower already"
                for rest in sizes[place + 1 :]:
                    rest.reason = f"not tried: {why}"
                break
        for _ in range(rounds - 1):
            for size in sizes:
                if size.status == "measured":
                    search.measure(size)
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
