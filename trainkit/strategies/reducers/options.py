"""Choose the reducer of gradients by the options of the user; with `auto`, by a rule or by a timing of exchanges.

The timing takes place before the first step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Final, Literal

import torch
from torch import Tensor

from trainkit.cluster.host import host_id
from trainkit.cluster.tasks import Task
from trainkit.errors import Problem
from trainkit.fields import at_least, maths, placement, speed
from trainkit.objectives.base import Collective
from trainkit.strategies.base import PlanContext
from trainkit.strategies.reducers.backend import BackendReducer
from trainkit.strategies.reducers.base import Partials, Reducer
from trainkit.strategies.reducers.choices import ChoiceCache
from trainkit.strategies.reducers.compression import Compression, Compressor
from trainkit.strategies.reducers.flat import HierarchicalReducer, ReduceThenBroadcastReducer, RingReducer
from trainkit.strategies.reducers.shared_memory import SharedMemoryReducer, shared_memory_obstacle
from trainkit.strategies.tensors.layouts import FlatBuffer, TensorPlaces

Reduce = Literal["backend", "shared_memory", "ring", "hierarchical", "to_one_device", "auto"]
"""The reducers that sum gradients over the ranks."""
_LIMIT_S: Final = 0.08
"""Time limit of all timed exchanges together; a started exchange is completed."""
_MOST_ROUNDS: Final = 5
_MOST_BYTES: Final = 4 << 20
"""Bytes of a timed exchange: for a large model, a part of the gradients suffices to rank the reducers."""
_ALIKE: Final = 1.2
"""A reducer that is slower than the fastest by less than this factor counts as equally fast."""


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """The options of summing gradients over ranks."""

    reduce: Annotated[Reduce, placement] = "auto"
    """The reducer of gradients; auto: shared_memory for CPU processes of one host, over several hosts the fastest of a
    short timing, else backend."""
    bucket_mb: Annotated[float, at_least(0), speed] = 25.0
    """MiB of gradients that the backend exchanges at once while backward computes the others; 0: all at the end."""
    compression: Annotated[Compression, maths(neutral="none")] = "none"
    """Send gradients as bfloat16 or float16, or each as two thin matrices (powersgd): fewer bytes, and a different
    result.
    """
    powersgd_rank: Annotated[int, at_least(1), maths(neutral=1)] = 1
    """Width of PowerSGD's matrices: a larger width is more exact and sends more bytes."""
    powersgd_after: Annotated[int, at_least(2), maths(neutral=1000)] = 1000
    """Steps whose gradients PowerSGD sends uncompressed, before it begins."""
    allow_unused: Annotated[bool, placement] = False
    """Whether parameters may get no gradient; they are then excluded from the exchange. False: an error names them."""

    def reduction_problems(self, context: PlanContext, tasks: Callable[[], Sequence[Task]]) -> list[Problem]:
        """Return problems of combined reducers, compression and modes; pure."""
        if context.numerics.reproducible:
            return self._beside_lanes()
        found = [*self._reduce_problems(context, tasks), *self._compression_problems(context)]
        if context.optimizers and self.compression == "powersgd":
            rule = "supports one exchange per step, and with optimizers there may be several."
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        return found

    def _beside_lanes(self) -> list[Problem]:
        rule = "does not work with numerics.reproducible=true, whose order of summation is fixed. Leave one out."
        chosen = {"reduce": (self.reduce, ("auto", "backend")), "compression": (self.compression, ("none",))}
        return [
            Problem(key=f"strategy.{key}", value=value, rule=rule)
            for key, (value, free) in chosen.items()
            if value not in free
        ]

    def _reduce_problems(self, context: PlanContext, tasks: Callable[[], Sequence[Task]]) -> list[Problem]:
        found = []
        if self.reduce == "shared_memory":
            hosts = context.launch.num_hosts if context.launch is not None else 1
            if hosts > 1:
                rule = f"reaches the processes of one host, and there are {hosts}. Use backend, hierarchical or auto."
                found.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
            elif any(task.device != "cpu" for task in tasks()):
                rule = "sums in the memory of the host, and the replicas are on GPUs. Use backend."
                found.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
            elif not sys.platform.startswith("linux"):
                rule = f"needs Linux, and this is {sys.platform}. Use backend."
                found.append(Problem(key="strategy.reduce", value=self.reduce, rule=rule))
        if self.reduce not in ("backend", "auto") and self.bucket_mb != ReductionOptions.bucket_mb:
            rule = f"has no effect with strategy.reduce={self.reduce}: only backend sends buckets."
            found.append(Problem(key="strategy.bucket_mb", value=self.bucket_mb, rule=rule))
        return found

    def _compression_problems(self, context: PlanContext) -> list[Problem]:
        found = []
        if self.compression != "none" and self.reduce not in ("backend", "auto"):
            rule = f"is done by the backend, and strategy.reduce={self.reduce}. Use strategy.reduce=backend."
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        if self.compression != "powersgd":
            for key in ("powersgd_rank", "powersgd_after"):
                if getattr(self, key) != getattr(ReductionOptions, key):
                    rule = "has no effect without strategy.compression=powersgd."
                    found.append(Problem(key=f"strategy.{key}", value=getattr(self, key), rule=rule))
            return found
        kept = "what one such step loses would stay in its error feedback for good. Use bf16 or none."
        if context.precision == "fp16_mixed":
            rule = f"cannot leave out a step that overflows, as precision=fp16_mixed does: {kept}"
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        if context.numerics.leaves_out:
            rule = f"cannot leave out a step, as numerics.on_nonfinite={context.numerics.on_nonfinite} does: {kept}"
            found.append(Problem(key="strategy.compression", value=self.compression, rule=rule))
        return found

    @property
    def bucket_bytes(self) -> int:
        """Gradients of this many bytes are copied into the vector of the exchange together; 0: all after backward."""
        return int(self.bucket_mb * 2**20) if self.compression != "powersgd" else 0

    def known_reducer(self, *, num_ranks: int, num_hosts: int, on_gpus: bool) -> Reduce | None:
        """Return the reducer of these ranks; None: auto times exchanges, between CPU processes of several hosts.

        With auto: `backend` on GPUs, where it exchanges while backward computes, for a single rank, and if a key sets
        buckets or compression. CPU processes of one host sum in shared memory, on Linux.

        Example:
            >>> auto = ReductionOptions()
            >>> auto.known_reducer(num_ranks=2, num_hosts=1, on_gpus=True)
            'backend'
            >>> auto.known_reducer(num_ranks=4, num_hosts=2, on_gpus=False) is None
            True
        """
        if self.reduce != "auto":
            return self.reduce
        is_asked_for = self.compression != "none" or self.bucket_mb != ReductionOptions.bucket_mb
        if on_gpus or num_ranks == 1 or is_asked_for:
            return "backend"
        if num_hosts > 1:
            return None
        return "shared_memory" if sys.platform.startswith("linux") else "backend"

    def planned_reducer(self, context: PlanContext, tasks: Sequence[Task]) -> Reduce | None:
        """Return the reducer of a planned run; None: a timing decides; pure."""
        return self.known_reducer(
            num_ranks=len(tasks),
            num_hosts=1 if context.launch is None else context.launch.num_hosts,
            on_gpus=any(task.device != "cpu" for task in tasks),
        )

    def exchange_copies(self, reducer: Reduce | None, num_ranks: int) -> float:
        """Return the number of copies of all gradients that a reducer needs in addition to its vector; None: of any
        reducer; pure.
        """
        # ring: a slice that receives; shared_memory: a part of the total.
        beside = 1 / num_ranks if reducer in (None, "ring", "shared_memory") else 0
        # Two bytes instead of four; PowerSGD: the error, and the gradients to compare with.
        compressed = {"none": 0, "bf16": 1, "fp16": 1, "powersgd": 2}
        return beside + compressed[self.compression]

    def reducer_of(
        self,
        collective: Collective,
        *,
        timeout_s: float,
        on_gpus: bool,
        wrapped: Callable[[Callable[[], Reducer]], Callable[[], Reducer]] = lambda make: make,
    ) -> Reducer:
        """Return the reducer of the ranks of a process group; collective.

        Args:
            collective: gathers small tensors over the ranks.
            timeout_s: seconds to wait for another rank.
            on_gpus: whether any gradient is on a GPU.
            wrapped: returns the factory to use in the place of one.
        """
        hosts = [int(mark) for mark in torch.cat(collective.gather(torch.tensor([host_id()])))]
        makers = {name: wrapped(make) for name, make in self._makers(collective, hosts, timeout_s).items()}
        known = self.known_reducer(num_ranks=collective.num_ranks, num_hosts=len(set(hosts)), on_gpus=on_gpus)
        if self.reduce != "auto" or known == "backend":
            assert known is not None
            return makers[known]()
        if known is None:
            del makers["shared_memory"]
            if len(set(hosts)) == len(hosts):
                del makers["hierarchical"]
            return AutoReducer(makers, collective, cache=ChoiceCache())
        obstacle = partial(shared_memory_obstacle, collective)
        return AutoReducer(makers, collective, rule=Rule(known, otherwise="backend", obstacle=obstacle))

    def _makers(
        self, collective: Collective, hosts: Sequence[int], timeout_s: float
    ) -> dict[str, Callable[[], Reducer]]:
        """Return a factory for each reducer."""
        rank = collective.rank
        return {
            "backend": self._backend,
            "shared_memory": lambda: SharedMemoryReducer(collective, timeout_s=timeout_s),
            "ring": lambda: RingReducer(collective),
            "hierarchical": lambda: HierarchicalReducer(hosts, rank=rank, timeout_s=timeout_s),
            "to_one_device": ReduceThenBroadcastReducer,
        }

    def _backend(self) -> BackendReducer:
        compressor = None
        if self.compression != "none":
            compressor = Compressor(
                self.compression, powersgd_rank=self.powersgd_rank, powersgd_after=self.powersgd_after
            )
        return BackendReducer(bucket_mb=self.bucket_mb, compressor=compressor)


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
