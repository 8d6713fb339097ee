"""Choose among reducers by timing them on this model's gradients, before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Final

import torch
from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.tensors.layouts import FlatBuffer

_ROUNDS: Final = 5
"""Timed exchanges per candidate, after one that allocates its memory and connections."""


class AutoReducer(Reducer):
    """The fastest of several reducers, the first before `choose` has timed them; in one order on all ranks."""

    def __init__(self, candidates: Mapping[str, Callable[[], Reducer]], collective: Collective) -> None:
        self._candidates, self._collective = dict(candidates), collective
        self._current: Reducer | None = None
        self.chosen: str | None = None
        """The name of the reducer in use; None until `choose`."""
        self._recalled: object = None

    def recall(self, name: object) -> None:
        """Keep the choice of the run that is continued: `choose` takes it if that reducer exists here."""
        self._recalled = name

    def choose(self, packing: FlatBuffer) -> str:
        """Choose the fastest reducer; collective.

        Returns:
            A line about the choice and the reason.
        """
        if isinstance(self._recalled, str) and self._recalled in self._candidates:
            self._use(self._recalled)
            return f"strategy.reduce=auto: {self._recalled}, as this run has chosen before."
        times_s = {name: self._time(make(), packing) for name, make in self._candidates.items()}
        fastest = min(times_s, key=lambda name: times_s[name])
        self._use(fastest)
        size = packing.numel * packing.dtype.itemsize / 2**20
        others = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in times_s.items())
        return f"strategy.reduce=auto: {fastest}. Summing {size:.3g} MiB takes {others}."

    def _use(self, name: str) -> None:
        self.close()
        self.chosen, self._current = name, self._candidates[name]()

    def _time(self, reducer: Reducer, packing: FlatBuffer) -> float:
        """Return the seconds of an exchange: the median over rounds, of the slowest rank, so that all ranks agree."""
        seconds = []
        for _ in range(_ROUNDS + 1):
            self._collective.gather(torch.zeros(1))  # begin together
            begun = time.perf_counter()
            reducer.reduce(_zeros(packing), num_shards=self._collective.num_ranks, packing=packing)
            for part in packing.parts:
                if part.packing.device.type == "cuda":
                    torch.cuda.synchronize(part.packing.device)
            seconds.append(time.perf_counter() - begun)
        reducer.close()
        slowest = torch.cat(self._collective.gather(torch.tensor([median(seconds[1:])], dtype=torch.float64)))
        return float(slowest.max())

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:
        """Return the sums over all ranks, by the reducer in use."""
        return self._reducer.reduce(partials, num_shards=num_shards, packing=packing)

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:
        """Forward the call to the reducer in use."""
        self._reducer.begin_backward(params, is_last=is_last)

    def end_backward(self) -> None:
        """Forward the call to the reducer in use."""
        self._reducer.end_backward()

    @property
    def _reducer(self) -> Reducer:
        if self._current is None:
            self._current = next(iter(self._candidates.values()))()
        return self._current

    def close(self) -> None:
        """Close the reducer in use."""
        if self._current is not None:
            self._current.close()
        self._current = None


def _zeros(packing: FlatBuffer) -> Iterator[tuple[int, Sequence[Tensor | None]]]:
    yield 0, packing.zeros()
