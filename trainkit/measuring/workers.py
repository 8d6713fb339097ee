"""Find how many data loading processes a training needs: `trainkit bench --data`, `loader.num_workers=auto`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from trainkit.cluster.host import num_cores
from trainkit.config.schema import RunConfig
from trainkit.measuring.bench import StartTurn, scratch_folder
from trainkit.measuring.figures import Choice
from trainkit.measuring.turns import measured_config, run_turn
from trainkit.report.numbers import share
from trainkit.run.planning.plan import RunPlan

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
    with scratch_folder() as folder:

        def turn(choice: Choice, number: int) -> None:
            log(f"loader.num_workers={choice.label}")
            place = folder / f"{choice.label}_{number}"
            choice.add(start(_config(cfg, int(choice.label), num_steps), place))

        for count in _counts(num_cores() // max(num_ranks, 1)):
            found.append(Choice(label=str(count)))
            turn(found[-1], 0)
            if not found[-1].is_measured or _input_share(found[-1]) <= _FREE or _gains_nothing(found):
                break
        for number in range(1, rounds):
            for choice in found:
                if choice.is_measured:
                    turn(choice, number)
    return _judged(found)


def _counts(most: int) -> Iterator[int]:
    yield 0
    count = 1
    while count <= max(most, 1):
        yield count
        count *= 2


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


def _gains_nothing(found: list[Choice]) -> bool:
    """Return whether the last number of workers shortened the step compared with the previous ones."""
    return len(found) > 1 and _step_s(found[-1]) > (1 - _GAIN) * min(map(_step_s, found[:-1]))


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
