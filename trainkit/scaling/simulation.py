"""Simulate the updates of a training: replicas, links, servers, spares, staleness, kills and restarts."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from trainkit.scaling.closed_forms import ring_all_reduce_s
from trainkit.scaling.distributions import Floats, StepTimes

Late = Literal["cancel", "replace", "duplicate"]
"""Handling of work that an update did not need: stopped at once; finished and discarded, while other shards took its
place; or finished and discarded, while an idle worker repeated it.
"""

_BLOCK: Final = 4096
_WARMUP: Final = 0.1
"""Share of the first updates that means ignore, until the workers are no longer synchronised."""


Action = Callable[[], None]


class EventLoop:
    """Run actions in the order of their simulated times; equal times in the order in which they were scheduled.

    Example:
        >>> loop, seen = EventLoop(), []
        >>> loop.schedule(2.0, lambda: seen.append(loop.now))
        >>> loop.schedule(1.0, lambda: seen.append(loop.now))
        >>> loop.run(lambda: False)
        >>> seen
        [1.0, 2.0]
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Simulated seconds since the start."""
        self._events: list[tuple[float, int, Action]] = []
        self._scheduled = 0

    def schedule(self, delay_s: float, action: Action) -> None:
        """Run an action `delay_s` simulated seconds from now."""
        self._scheduled += 1
        heapq.heappush(self._events, (self.now + delay_s, self._scheduled, action))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run the scheduled actions until `is_over()`, or until none is left."""
        while self._events and not is_over():
            self.now, _, action = heapq.heappop(self._events)
            action()


@dataclass(kw_only=True)
class FifoLink:
    """A link that transfers messages one after another; a later message waits for the earlier ones.

    With random arrivals and messages of one size this is the queue M/D/1.
    """

    loop: EventLoop
    latency_s: float = 0.0
    busy_s: float = 0.0
    """Seconds of transfers so far."""
    waited_s: float = 0.0
    """Seconds that messages waited for earlier ones, in sum."""
    _free_at: float = field(default=0.0, init=False)

    def send(self, transfer_s: float, then: Action, *, least_s: float = 0.0) -> None:
        """Call `then` when a message has arrived.

        Args:
            transfer_s: seconds for which the message occupies the link.
            then: the receiver.
            least_s: seconds that the sender's own link needs; the message arrives no sooner.
        """
        start = max(self.loop.now, self._free_at)
        self._free_at = start + transfer_s
        self.busy_s += transfer_s
        self.waited_s += start - self.loop.now
        end = max(self._free_at, self.loop.now + least_s)
        self.loop.schedule(end + self.latency_s - self.loop.now, then)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The input of a simulation."""

    workers: int
    compute: StepTimes
    """Seconds of one shard on one worker."""
    num_bytes: float = 0.0
    """Bytes of all gradients, and of all variables."""
    bandwidth: float = 1.25e9
    """Bytes per second of a replica's link, in each direction."""
    latency_s: float = 0.0
    hidden_s: float = 0.0
    """Seconds of an all-reduce that are hidden behind computing."""
    update_s: float = 0.0
    """Seconds of an update, during which no work is assigned."""
    servers: int = 0
    """Parameter servers; 0: a ring all-reduce among the replicas."""
    server_bandwidth: float = 1.25e9
    """Bytes per second of a server's link, in each direction."""
    is_async: bool = False
    spares: int = 0
    late: Late = "replace"
    shards: int | None = None
    """Shards of an update; without it one for each worker that is not a spare."""
    staleness_bound: int | None = None
    """Asynchronous: updates by which a worker may be ahead of the slowest."""
    drop_above: int | None = None
    """Asynchronous: a gradient of larger staleness is discarded."""
    slow_workers: int = 0
    slow_factor: float = 1.0
    """Factor of the compute times of slow workers."""
    mtbf_s: float | None = None
    """Mean seconds between two kills of one worker; None for no kills. For servers: a ring restarts as a whole."""
    restart_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The result of a simulation, without its first updates."""

    update_s: Floats
    """Seconds between consecutive updates: (updates,) float64."""
    staleness: NDArray[np.int64]
    """Updates between reading and applying, of each applied gradient of an asynchronous training."""
    computed: int
    """Number of computed shards, including discarded ones."""
    discarded: int
    kills: int
    link_load: float
    """Share of the time in which the busier direction of a server's link transferred."""

    @property
    def mean_s(self) -> float:
        """Mean seconds of an update."""
        return float(self.update_s.mean())


def simulate(scene: Scene, *, updates: int, seed: int = 0) -> Simulated:
    """Simulate `updates` updates.

    Example:
        >>> scene = Scene(workers=8, compute=StepTimes(mean_s=0.1, form="constant"), num_bytes=1e8)
        >>> round(simulate(scene, updates=20).mean_s, 3)  # 0.1 s and a ring of 0.14 s
        0.24
    """
    simulation = _Simulation(scene, updates, np.random.default_rng(seed))
    return simulation.run()


@dataclass(slots=True, eq=False)
class _Item:
    """One shard assigned to one worker."""

    shard: int
    read: int = 0
    """The version of the variables that it is computed from."""


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    factor: float
    item: _Item | None = None
    finished: int = 0


@dataclass
class _Simulation:
    scene: Scene
    updates: int
    rng: np.random.Generator
    loop: EventLoop = field(default_factory=EventLoop)
    version: int = 0
    computed: int = 0
    discarded: int = 0
    kills: int = 0
    _times: list[float] = field(default_factory=list)
    _staleness: list[int] = field(default_factory=list)
    _num_results: int = 0
    _next_shard: int = 0
    _is_exchanging: bool = False
    _drawn: deque[float] = field(default_factory=deque)
    _holders: dict[int, list[_Worker]] = field(default_factory=dict)
    """Shard that the next update needs -> the workers that compute it."""
    _repeats: int = 0
    """Workers that compute a shard that another worker computes as well."""

    def __post_init__(self) -> None:
        scene = self.scene
        self._shards = scene.shards or scene.workers - scene.spares
        slow = scene.workers - scene.slow_workers
        self._workers = [_Worker(place, scene.slow_factor if place >= slow else 1.0) for place in range(scene.workers)]
        self._idle = deque(self._workers)
        self._finished = Counter({0: scene.workers})
        self._push = FifoLink(loop=self.loop, latency_s=scene.latency_s)
        self._pull = FifoLink(loop=self.loop, latency_s=scene.latency_s)
        self._occupied_s = scene.num_bytes / (scene.servers * scene.server_bandwidth) if scene.servers else 0.0
        self._own_s = scene.num_bytes / scene.bandwidth if scene.servers else 0.0
        ring = (scene.workers, scene.num_bytes, scene.bandwidth, scene.latency_s)
        ring_s = 0.0 if scene.servers else max(ring_all_reduce_s(*ring) - scene.hidden_s, 0.0)
        self._pause_s = ring_s + scene.update_s

    def run(self) -> Simulated:
        for worker in self._workers:
            self._plan_kill(worker)
        self._assign()
        self.loop.run(lambda: len(self._times) >= self.updates)
        first = int(len(self._times) * _WARMUP)
        load = max(self._push.busy_s, self._pull.busy_s) / self.loop.now if self.loop.now else 0.0
        return Simulated(
            update_s=np.diff(np.asarray([0.0, *self._times]))[first:],
            staleness=np.asarray(self._staleness[int(len(self._staleness) * _WARMUP) :], np.int64),
            computed=self.computed,
            discarded=self.discarded,
            kills=self.kills,
            link_load=min(load, 1.0),
        )

    def _assign(self) -> None:
        """Give work to idle workers, if there is any."""
        if self._is_exchanging:
            return
        for _ in range(len(self._idle)):
            worker = self._idle.popleft()
            item = self._choose(worker)
            if item is None:
                self._idle.append(worker)
                if not self.scene.is_async:
                    return  # there is no work for the other workers either
            else:
                self._start(worker, item)

    def _choose(self, worker: _Worker) -> _Item | None:
        scene = self.scene
        if scene.is_async:
            bound = scene.staleness_bound
            is_ahead = bound is not None and worker.finished - min(self._finished) > bound
            return None if is_ahead else self._fresh()
        in_progress = self._num_results + len(self._holders)
        if in_progress < self._shards + (0 if scene.late == "duplicate" else scene.spares):
            return self._fresh()
        if scene.late == "duplicate" and self._holders and self._repeats < scene.spares:
            self._repeats += 1
            return _Item(min(self._holders, key=lambda shard: len(self._holders[shard])))
        return None

    def _fresh(self) -> _Item:
        self._next_shard += 1
        return _Item(self._next_shard)

    def _start(self, worker: _Worker, item: _Item) -> None:
        """Read the variables, compute, send the gradient."""
        worker.item = item
        if not self.scene.is_async:
            self._holders.setdefault(item.shard, []).append(worker)

        def computed() -> None:
            if worker.item is item:
                self.computed += 1
                self._transfer(self._push, partial(self._finish, worker, item))

        def has_read() -> None:
            item.read = self.version
            self.loop.schedule(self._draw() * worker.factor, computed)

        self._transfer(self._pull, has_read)

    def _transfer(self, link: FifoLink, then: Callable[[], None]) -> None:
        if self.scene.servers:
            link.send(self._occupied_s, then, least_s=self._own_s)
        else:
            then()

    def _finish(self, worker: _Worker, item: _Item) -> None:
        if worker.item is not item:
            return  # cancelled or killed
        worker.item = None
        self._idle.append(worker)
        if self.scene.is_async:
            self._count_finished(worker)
            self._apply(item)
        elif item.shard in self._holders:
            self._accept(item)
        else:
            self.discarded += 1
        self._assign()

    def _count_finished(self, worker: _Worker) -> None:
        self._finished[worker.finished] -= 1
        if not self._finished[worker.finished]:
            del self._finished[worker.finished]
        worker.finished += 1
        self._finished[worker.finished] += 1

    def _apply(self, item: _Item) -> None:
        """Make an update of one gradient, unless it is too stale."""
        staleness = self.version - item.read
        if self.scene.drop_above is not None and staleness > self.scene.drop_above:
            self.discarded += 1
            return
        self._staleness.append(staleness)
        self._update()

    def _accept(self, item: _Item) -> None:
        """Accept a result; the last one that an update needs triggers the update."""
        self._repeats -= len(self._holders.pop(item.shard)) - 1
        self._num_results += 1
        if self._num_results < self._shards:
            return
        if self.scene.late == "cancel":
            for worker in (one for holders in self._holders.values() for one in holders):
                worker.item = None
                self._idle.append(worker)
                self.discarded += 1
        self._num_results = self._repeats = 0
        self._holders.clear()
        if self._pause_s:
            self._is_exchanging = True
            self.loop.schedule(self._pause_s, self._exchanged)
        else:
            self._update()

    def _exchanged(self) -> None:
        self._is_exchanging = False
        self._update()
        self._assign()

    def _update(self) -> None:
        self.version += 1
        self._times.append(self.loop.now)

    def _draw(self) -> float:
        if not self._drawn:
            self._drawn.extend(self.scene.compute.draw(self.rng, _BLOCK).tolist())
        return self._drawn.popleft()

    def _plan_kill(self, worker: _Worker) -> None:
        if self.scene.mtbf_s is not None:
            self.loop.schedule(float(self.rng.exponential(self.scene.mtbf_s)), partial(self._kill, worker))

    def _kill(self, worker: _Worker) -> None:
        """Lose a worker and its work item; another worker computes the shard."""
        self.kills += 1
        item, worker.item = worker.item, None
        if item is None:
            self._idle.remove(worker)
        elif item.shard in self._holders:
            holders = self._holders[item.shard]
            holders.remove(worker)
            if holders:
                self._repeats -= 1
            else:
                del self._holders[item.shard]
        self.loop.schedule(self.scene.restart_s, partial(self._restart, worker))
        self._assign()

    def _restart(self, worker: _Worker) -> None:
        self._idle.append(worker)
        self._plan_kill(worker)
        self._assign()
