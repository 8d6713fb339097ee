"""The schedules of microbatches: torch's classes, the number of microbatches that each accepts, and its bubble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


def several_a_rank(schedule: ScheduleName) -> bool:
    """Return whether a rank may have several stages."""
    return schedule in ("interleaved", "zero_bubble")


def padded_microbatches(schedule: ScheduleName, count: int, num_ranks: int) -> int:
    """Return the number of microbatches for a schedule: `count` or a few more, which are repetitions without effect.

    Interleaved and zero-bubble schedules process their microbatches in equal rounds of at least one per rank.

    Example:
        >>> [padded_microbatches("interleaved", count, 2) for count in (1, 2, 3, 5)]
        [1, 2, 3, 6]
    """
    if not several_a_rank(schedule):
        return count
    while count % max(1, count // num_ranks):
        count += 1
    return count


def ideal_bubble(schedule: ScheduleName, count: int, *, num_ranks: int, stages_a_rank: int) -> float:
    """Return the fraction of a step that each rank waits, for equal stages and no communication time.

    With p ranks, m microbatches and v stages per rank: (p - 1) / (v m + p - 1). A zero-bubble schedule computes weight
    gradients, a third of the work, during the gaps: (p - 1) / (3 v m + p - 1).

    Example:
        >>> ideal_bubble("1f1b", 9, num_ranks=4, stages_a_rank=1)
        0.25

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2023, arXiv:2401.10241, section 3.
    """
    work = stages_a_rank * count * (3 if schedule == "zero_bubble" else 1)
    return (num_ranks - 1) / (work + num_ranks - 1)


def most_in_flight(schedule: ScheduleName, count: int, *, place: int, num_ranks: int, stages_a_rank: int) -> int:
    """Return the largest number of microbatches in flight on a rank, counted over all of its stages together.

    GPipe keeps all. 1F1B begins with as many forward passes as there are ranks from this one on; an interleaved
    schedule with 2 (p - 1 - place) + (v - 1) p more than one, each of one of its v stages.

    Example:
        >>> [most_in_flight("1f1b", 8, place=place, num_ranks=4, stages_a_rank=1) for place in range(4)]
        [4, 3, 2, 1]

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; torch.distributed.pipelining.schedules.
    """
    if schedule == "gpipe" or (schedule == "1f1b" and count < num_ranks):
        return count
    if not several_a_rank(schedule):
        return min(count, num_ranks - place)
    padded = padded_microbatches(schedule, count, num_ranks)
    chunks = min(padded * stages_a_rank, 2 * (num_ranks - 1 - place) + (stages_a_rank - 1) * num_ranks + 1)
    return -(-chunks // stages_a_rank)


def make_schedule(
    schedule: ScheduleName, stages: Sequence[PipelineStage], count: int, loss: Callable[[Any, Any], Any]
) -> Any:
    """Create torch's schedule for a number of microbatches; it does not scale gradients.

    1F1B with fewer microbatches than stages is GPipe: all forward passes come before the first backward pass.
    """
    from torch.distributed import pipelining  # noqa: PLC0415 - slow to import, and needed only by ranks with stages

    if schedule == "interleaved":
        return pipelining.ScheduleInterleaved1F1B(list(stages), count, loss_fn=loss, scale_grads=False)
    if schedule == "zero_bubble":
        return pipelining.ScheduleInterleavedZeroBubble(list(stages), count, loss_fn=loss, scale_grads=False)
    (stage,) = stages
    if schedule == "1f1b" and count >= stage.num_stages:
        return pipelining.Schedule1F1B(stage, count, loss_fn=loss, scale_grads=False)
    return pipelining.ScheduleGPipe(stage, count, loss_fn=loss, scale_grads=False)
