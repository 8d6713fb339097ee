"""The user's own strategies: one right, one wrong in the classic way."""

from dataclasses import dataclass
from typing import Any

from trainkit.strategies.data_parallel.strategy import Mirrored
from trainkit.strategies.reducers.vector import Reducer


@dataclass(frozen=True, kw_only=True)
class Pair(Mirrored):
    """Mirrored, on two processes unless said otherwise."""

    replicas: int = 2


class _MeanOfMeans(Reducer):
    """Averages over the replicas what each averaged over its own shards, though one may have had more of them."""

    lanes = None

    def __init__(self, inner: Any, rank: int, num_ranks: int) -> None:
        self._inner, self._rank, self._num_ranks = inner, rank, num_ranks

    def begin(self, packing: Any, *, num_shards: int) -> None:
        own_shards = len(range(self._rank, num_shards, self._num_ranks))
        self._factor = num_shards / (max(own_shards, 1) * self._num_ranks)
        self._inner.begin(packing, num_shards=num_shards)

    def add(self, lane: int, sums: Any) -> None:
        self._inner.add(lane, [None if total is None else total * self._factor for total in sums])

    def finish(self) -> Any:
        return self._inner.finish()


@dataclass(frozen=True, kw_only=True)
class Wrong(Pair):
    """Takes a mean of means."""

    def make_reducer(self, collective: Any, numerics: Any) -> Any:
        return _MeanOfMeans(super().make_reducer(collective, numerics), collective.rank, collective.num_ranks)
