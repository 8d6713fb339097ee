"""Ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Threaded:
    """One of several ranks, each a thread; shapes must agree, as they must in a process group."""

    def __init__(self, rank: int, num_ranks: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._barrier, self._slots = barrier, slots

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = tensor.clone()
        self._barrier.wait(10)
        gathered = list(self._slots)
        self._barrier.wait(10)
        assert len({(part.shape, part.dtype) for part in gathered}) == 1
        return gathered

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.dtype == torch.float64
        return torch.stack(self.gather(tensor)).sum(0)


def on_ranks(num_ranks: int, work: Callable[[Threaded], Any]) -> list[Any]:
    """What each rank's work gives."""
    barrier, slots = threading.Barrier(num_ranks), [None] * num_ranks
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threaded(rank, num_ranks, barrier, slots))
        except Exception as error:  # noqa: BLE001 - the test looks at what comes back
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
