"""Choose among reducers before the first step: by a rule if one is known, else by timing exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.reducers.choices import ChoiceCache
from trainkit.strategies.tensors.layouts import FlatBuffer, TensorPlaces

_LIMIT_S: Final = 0.08
"""Time limit of all timed exchanges together; a started exchange is completed."""
_MOST_ROUNDS: Final = 5
_MOST_BYTES: Final = 4 << 20
"""Bytes of a timed exchange: for a large model, a part of the gradients suffices to rank the reducers."""
_ALIKE: Final = 1.2
"""A reducer that is slower than the fastest by less than this factor counts as equally fast."""


@dataclass(frozen=True)
class Rule:
    """The reducer that is known to be the fastest for these ranks, without timing."""

    name: str
    otherwise: str
    """The reducer to use if there is an obstacle."""
    obstacle: Callable[[int], str | None]
    """Returns the reason why the ranks cannot use it for an exchange of this many bytes, or None; collective."""


class AutoReducer(Reducer):
    """One of several reducers, the same on all ranks: that of a rule, or the fastest one.

    Of reducers whose times differ by less than 20 %, the first is chosen, so that a small disturbance decides nothing.

    Args:
        candidates: the reducers by name, the preferred one first.
        collective: sums small tensors over the ranks.
        cache: earlier choices on this machine; that of rank 0 counts.
        rule: names the reducer; None: exchanges are timed.
    """

    def __init__(
        self,
        candidates: Mapping[str, Callable[[], Reducer]],
        collective: Collective,
        *,
        cache: ChoiceCache | None = None,
        rule: Rule | None = None,
    ) -> None:
        self._candidates, self._collective, self._cache, self._rule = dict(candidates), collective, cache, rule
        self._current: Reducer | None = None
        self.kept: str | None = None
        """The reducer that a run continues with wherever it can; None: the rule decides again."""
        self._recalled: object = None

    def recall(self, name: object) -> None:
        """Store the choice of the resumed run: `choose` takes it if that reducer exists here."""
        self._recalled = name

    def choose(self, packing: FlatBuffer) -> str | None:
        """Choose a reducer: that of the continued run, else by rule, else that of this machine, else the fastest.

        Collective.

        Returns:
            A line about the choice and the reason; None where the rule decides.
        """
        if isinstance(self._recalled, str) and self._recalled in self._candidates:
            self._keep(self._recalled)
            return f"strategy.reduce=auto: {self._recalled}, as this run has chosen before."
        if self._rule is not None:
            return self._follow(self._rule, packing)
        names = list(self._candidates)
        shape = self._shape(packing)
        if (known := self._known(shape, names)) is not None:
            self._keep(known)
            return f"strategy.reduce=auto: {known}, as this machine has chosen before."
        sample = _sample(packing)
        times_s = {name: self._time(make(), sample) for name, make in self._candidates.items()}
        limit = min(times_s.values()) * _ALIKE
        chosen = next(name for name in names if times_s[name] <= limit)
        self._keep(chosen)
        if self._cache is not None and self._collective.rank == 0:
            self._cache.keep(shape, chosen)
        size = sample.numel * sample.dtype.itemsize / 2**20
        others = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in times_s.items())
        return f"strategy.reduce=auto: {chosen}. Summing {size:.3g} MiB takes {others}."

    def _follow(self, rule: Rule, packing: FlatBuffer) -> str | None:
        why = rule.obstacle(packing.numel * packing.dtype.itemsize)
        self._use(rule.name if why is None else rule.otherwise)
        return None if why is None else f"strategy.reduce=auto: {rule.otherwise}, because {why}."

    def _shape(self, packing: FlatBuffer) -> str:
        """Return a description of the exchange and the number of ranks."""
        places = "" if packing.places is None else f" at {len(packing.parts)} places"
        kind = f"{packing.numel} {str(packing.dtype).removeprefix('torch.')} on {packing.device.type}{places}"
        return f"{kind}, {self._collective.num_ranks} ranks, {' '.join(self._candidates)}"

    def _known(self, shape: str, names: Sequence[str]) -> str | None:
        """Return the earlier choice of rank 0's machine for a shape; collective."""
        found = None
        if self._cache is not None and self._collective.rank == 0:
            found = self._cache.find(shape, names)
        place = torch.tensor([-1 if found is None else names.index(found)])
        first = int(self._collective.gather(place)[0])
        return None if first < 0 else names[first]

    def _keep(self, name: str) -> None:
        self.kept = name
        self._use(name)

    def _use(self, name: str) -> None:
        self.close()
        self._current = self._candidates[name]()

    def _time(self, reducer: Reducer, packing: FlatBuffer) -> float:
        """Return the seconds of an exchange: the median over rounds, of the slowest rank, so that all ranks agree.

        The first round, which allocates memory and connections, does not count.
        """
        rounds: list[float] = []
        spent_s = 0.0
        limit_s = _LIMIT_S / len(self._candidates)
        while len(rounds) < 2 or (len(rounds) <= _MOST_ROUNDS and spent_s < limit_s):
            begun = time.perf_counter()
            reducer.reduce(_zeros(packing), num_shards=self._collective.num_ranks, packing=packing)
            for part in packing.parts:
                if part.packing.device.type == "cuda":
                    torch.cuda.synchronize(part.packing.device)
            own = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            rounds.append(float(torch.cat(self._collective.gather(own)).max()))  # they begin the next one together
            spent_s += rounds[-1]
        reducer.close()
        return median(rounds[1:])

    def reduce(self, partials: Partials, *, num_shards: int, packing: FlatBuffer) -> Sequence[Tensor | None]:
        """Return the sums over all ranks, by the reducer in use."""
        if self._current is None:
            self.choose(packing)
        assert self._current is not None
        return self._current.reduce(partials, num_shards=num_shards, packing=packing)

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:
        """Forward the call to the reducer in use."""
        if self._current is not None:
            self._current.begin_backward(params, is_last=is_last)

    def end_backward(self) -> None:
        """Forward the call to the reducer in use."""
        if self._current is not None:
            self._current.end_backward()

    def close(self) -> None:
        """Close the reducer in use."""
        if self._current is not None:
            self._current.close()
        self._current = None


def _sample(packing: FlatBuffer) -> FlatBuffer:
    """Return a layout of one tensor for each place of another one, of a limited size."""
    parts, most = packing.parts, _MOST_BYTES // packing.dtype.itemsize
    shapes = [torch.Size([min(part.packing.numel, most)]) for part in parts]
    if packing.places is None:
        return FlatBuffer(shapes, packing.dtype, packing.device)
    places = sorted(set(packing.places.places))
    return FlatBuffer(
        shapes,
        packing.dtype,
        packing.device,
        places=TensorPlaces(places=tuple(places), devices=packing.places.devices),
    )


def _zeros(packing: FlatBuffer) -> Iterator[tuple[int, Sequence[Tensor | None]]]:
    yield 0, packing.zeros()
