"""A rank of a contract case with the bytes of its tensors counted."""

from __future__ import annotations

from tests.contract.stepping import Case, _Rank, run_rank
from tests.support.pool import Place
from tests.support.storages import Counting


def bytes_of_rank(place: Place | None, case: Case) -> tuple[int, int]:
    """(when the last update began, the most of the step before it) of one rank, or of one device."""
    with Counting() as counting:
        run_rank(place, case)
    return counting.lasting, counting.peak


def bytes_of_start(place: Place | None, case: Case) -> int:
    """The most while one rank, or one device, builds its model and keeps its part."""
    with Counting() as counting:
        _Rank(place, case).setup(0).close()
    return counting.most
