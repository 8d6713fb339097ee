"""Reducers that sum the flat vector of a step, which is the memory of its gradients.

The gradients are views of the exchanged vector, so no second copy of them is alive. A bucket is a range of the vector:
its gradients are copied there together, and the backend's all-reduce exchanges it while backward computes the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.errors import TrainingError
from trainkit.objectives.base import Collective
from trainkit.strategies.flight_recorder import note_exchange
from trainkit.strategies.reducers.base import Reducer, Sums
from trainkit.strategies.reducers.compression import Compressor
from trainkit.strategies.tensors.layouts import FlatBuffer, local_part

BUCKET_BYTES: Final = 25 * 2**20
"""Bytes from which a bucket is full, by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A range of the packing's tensors that is exchanged together."""

    first: int
    """The index of its first tensor."""
    last: int
    """The index after its last tensor."""
    is_tail: bool = False
    """Whether it contains no gradients, but buffers and the counted weight."""


def cut_into_buckets(packing: FlatBuffer, *, bucket_bytes: int, part_tail: bool) -> tuple[Bucket, ...]:
    """Return the buckets of a packing, in the order in which they are exchanged.

    Gradients become final in about the reverse order of the parameters, and buckets follow that order. All but the last
    have at least `bucket_bytes`.

    Args:
        packing: gradients first, then buffers and the counted weight.
        bucket_bytes: size from which a bucket is full; 0: one bucket.
        part_tail: whether buffers and weight must form a separate bucket; else they join the gradients if those are one
            bucket, which saves an exchange.

    Example:
        >>> import torch
        >>> packing = FlatBuffer([torch.Size([2])] * 4, torch.float32, torch.device("cpu"), num_grads=3)
        >>> buckets = cut_into_buckets(packing, bucket_bytes=16, part_tail=False)
        >>> [(one.first, one.last, one.is_tail) for one in buckets]
        [(1, 3, False), (0, 1, False), (3, 4, True)]
    """
    count, end = len(packing.shapes), packing.num_grads
    buckets: list[Bucket] = []
    for index in reversed(range(packing.num_grads)):
        size = (packing.offsets[end] - packing.offsets[index]) * packing.dtype.itemsize
        if index == 0 or (bucket_bytes and size >= bucket_bytes):
            buckets.append(Bucket(first=index, last=end))
            end = index
    if count == packing.num_grads:
        return tuple(buckets)
    if len(buckets) == 1 and not part_tail:
        return (Bucket(first=0, last=count),)
    return (*buckets, Bucket(first=packing.num_grads, last=count, is_tail=True))


def largest_bucket(model: nn.Module, dtype: torch.dtype, bucket_bytes: float) -> int:
    """Return the elements of the largest bucket of a model's gradients.

    Example:
        >>> largest_bucket(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.float32, 16)
        16
    """
    shapes = [param.shape for param in model.parameters() if param.requires_grad]
    packing = FlatBuffer(shapes, dtype, torch.device("cpu"))
    buckets = cut_into_buckets(packing, bucket_bytes=int(bucket_bytes), part_tail=True)
    return max((packing.offsets[one.last] - packing.offsets[one.first] for one in buckets), default=0)


class VectorReducer(Reducer):
    """Sums the vector that holds the gradients of a step over the ranks; subclasses implement `sum`.

    Backward allocates separate memory for each gradient. When the last gradient of a bucket exists, all of them are
    copied into the vector in one operation and their memory is freed: only the vector and one bucket are alive, instead
    of all gradients twice. The copy becomes `param.grad`, to which autograd adds those of later shards. Gradients in
    another dtype than the vector's are added to it here instead, and `param.grad` is None. A rank without a shard adds
    zeros.

    Args:
        bucket_bytes: size from which a bucket is full; 0: one bucket.
    """

    overlaps: ClassVar[bool] = False
    """Whether `on_full` exchanges a bucket during backward."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self._packing: FlatBuffer | None = None
        self._hooks: list[Any] = []

    def begin(self, packing: FlatBuffer, *, num_shards: int) -> None:
        """Begin the sum of a step; collective the first time."""
        super().begin(packing, num_shards=num_shards)
        if self._packing is not packing:
            self.close()
            self._packing, self.flat = packing, self.allocate(packing)
            self.views = packing.views(self.flat)
            self.buckets = cut_into_buckets(
                packing,
                bucket_bytes=self._bucket_bytes,
                part_tail=self.compressor is not None,
            )
            grads = [one for one in self.buckets if not one.is_tail]
            self._grads = [range(one.first, min(one.last, packing.num_grads)) for one in grads]
            self._bucket_of = {index: number for number, indices in enumerate(self._grads) for index in indices}
        self._held = [False] * len(self.views)  # the content of the vector belongs to an earlier step
        self._params: Sequence[Tensor] | None = None

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:
        """Collect the gradients of the next backward pass."""
        if len(self._grads) > 1:
            if not self._hooks:
                self._hooks = [
                    param.register_post_accumulate_grad_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]
                    for index, param in enumerate(params)
                ]
            self._missing = list(map(set, self._grads))
        self._params, self._is_last = params, is_last

    def end_backward(self) -> None:
        """Collect the gradients of buckets that did not become full: of the only bucket, or of those with unused
        parameters.

        After the last pass, new gradients stay in their memory: `fill_rest` copies them together with the buffers.
        """
        self.collect(leaves_new=self._is_last)

    def collect(self, *, leaves_new: bool) -> None:
        """Collect the gradients of the pass that has ended."""
        for indices in self._grads:
            self._take(indices, leaves_new=leaves_new)
        self._params = None

    def _on_gradient(self, index: int, _: Tensor) -> None:
        """Record that a backward pass has computed a gradient."""
        if self._params is None:
            return  # another pass over the same model
        number, exchanges = self._bucket_of[index], self.overlaps and self._is_last
        missing = self._missing[number]
        if index in missing:
            missing.discard(index)
            if not missing:
                self._take(self._grads[number])
                if exchanges:
                    self.on_full(number)
        elif exchanges:  # else `end_backward` collects the other part
            raise TrainingError(
                "a parameter got its gradient in two parts of one backward pass, as reentrant activation checkpointing "
                "does. Use checkpoint(..., use_reentrant=False), or strategy.bucket_mb=0."
            )

    @torch.no_grad()
    def _take(self, indices: range, *, leaves_new: bool = False) -> None:
        """Copy the gradients of a bucket into the vector, or add them to it, and free their own memory."""
        assert self._params is not None
        views: list[Tensor] = []
        grads: list[Tensor] = []
        for index in indices:
            param, view = self._params[index], self.views[index]
            grad = param.grad
            if grad is None or grad is view:
                continue
            is_apart = grad.dtype is not view.dtype or isinstance(grad, DTensor)
            if leaves_new and not is_apart and not self._held[index]:
                continue
            param.grad = None if is_apart else view
            part = local_part(grad)
            if is_apart and self._held[index]:
                view.add_(part.to(view.device))
                continue
            views.append(view)
            grads.append(part)
            self._held[index] = True
        if grads:
            torch._foreach_copy_(views, grads)

    def has_taken(self, index: int) -> bool:
        """Return whether the vector holds a gradient."""
        return self._held[index]

    def on_full(self, number: int) -> None:
        """Receive the number of a bucket whose final gradients are in the vector, during the last backward pass."""

    def fill_rest(self) -> None:
        """Copy the remaining tensors into the vector: buffers, the counted weight, and missing gradients."""
        rest = [index for index, held in enumerate(self._held) if not held]
        FlatBuffer.fill([self.views[index] for index in rest], [self._sums[index] for index in rest])
        self._held = [True] * len(self._held)

    def finish(self) -> Sums:
        """Return the sums over all ranks: views of the vector."""
        self.fill_rest()
        self._sums = ()
        self.sum(self.flat)
        return self.views

    def allocate(self, packing: FlatBuffer) -> Tensor:
        """Return the vector for this rank's part, (numel,); the same one for all steps, since new memory costs page
        faults.
        """
        return packing.empty()

    @abstractmethod
    def sum(self, flat: Tensor) -> None:
        """Replace every rank's vector by the sum of all, equal bits on all ranks; collective."""

    def close(self) -> None:
        """Remove the hooks from the parameters, and release the vector."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._packing is not None:
            self._packing = None
            del self.flat, self.views


class BackendReducer(VectorReducer):
    """The backend's all-reduce (NCCL, gloo) in buckets; fastest, without a fixed order of summation.

    It is always a SUM: converting an average back to a sum would lose bits. In the last backward pass of a step a
    bucket is exchanged as soon as it is full and all previous ones have been started: the same order on every rank.

    Args:
        bucket_bytes: size from which a bucket is full; 0: one exchange after backward.
        compressor: exchanges gradients in fewer bytes, with a loss of precision.
        group: the ranks to sum over; None: all of them.
    """

    overlaps = True

    def __init__(
        self,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        compressor: Compressor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(bucket_bytes)
        self.compressor, self._group = compressor, group

    def begin(self, packing: FlatBuffer, *, num_shards: int) -> None:
        """Begin the sum of a step."""
        super().begin(packing, num_shards=num_shards)
        self.full: set[int] = set()
        self.waits: list[Callable[[], Any]] = []

    def on_full(self, number: int) -> None:
        """Exchange the bucket when all before it have been started."""
        self.full.add(number)
        self.advance()

    def advance(self) -> None:
        """Exchange full buckets whose predecessors have been started."""
        while len(self.waits) in self.full:
            self.launch(self.buckets[len(self.waits)])

    def launch(self, bucket: Bucket) -> None:
        """Start the exchange of a bucket."""
        assert self._packing is not None
        part = self.flat[self._packing.offsets[bucket.first] : self._packing.offsets[bucket.last]]
        if self.compressor is None or bucket.is_tail:
            work = dist.all_reduce(part, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
            assert work is not None
            self.waits.append(work.wait)
        else:
            grads = self.views[bucket.first : bucket.last]
            self.waits.append(self.compressor.sum(part, grads, index=len(self.waits)))

    def sum(self, flat: Tensor) -> None:  # noqa: ARG002 - the buckets are of `flat`
        """Start the exchanges of the remaining buckets, and wait for all."""
        self.full.update(range(len(self.buckets)))
        self.advance()
        for wait in self.waits:
            wait()


class ReduceThenBroadcastReducer(VectorReducer):
    """Reduce to the first rank, then broadcast. Useful when it has the fastest link.

    Args:
        group: the ranks to sum over; None: all of them.

    Source: tf.distribute.ReductionToOneDevice.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = group

    def sum(self, flat: Tensor) -> None:
        """Sum over the ranks, in place; collective."""
        dist.reduce(flat, group_dst=0, op=dist.ReduceOp.SUM, group=self._group)
        dist.broadcast(flat, group_src=0, group=self._group)


class HierarchicalReducer(VectorReducer):
    """Reduces to the first rank of each host, all-reduces among those ranks, and broadcasts on each host.

    Args:
        places: (the ranks that sum together, host) of every rank of the run, as arbitrary numbers; construction is
            collective over all of them.

    Source: tf.distribute.HierarchicalCopyAllReduce.
    """

    def __init__(self, places: Sequence[tuple[int, int]], *, rank: int, timeout_s: float) -> None:
        super().__init__()
        members: dict[tuple[int, int], list[int]] = {}
        for other, place in enumerate(places):
            members.setdefault(place, []).append(other)
        timeout = timedelta(seconds=timeout_s)
        # Every rank creates every group in the same order, as torch requires.
        groups = {place: dist.new_group(ranks, timeout=timeout) for place, ranks in members.items()}
        for together in dict.fromkeys(found for found, _ in members):
            leaders = dist.new_group([ranks[0] for place, ranks in members.items() if place[0] == together], timeout)
            if together == places[rank][0]:
                self._leaders = leaders
        self._host, self._leader = groups[places[rank]], members[places[rank]][0]
        self._leads = self._leader == rank

    def sum(self, flat: Tensor) -> None:
        """Sum over all ranks, in place; collective."""
        dist.reduce(flat, dst=self._leader, op=dist.ReduceOp.SUM, group=self._host)
        if self._leads:
            dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=self._leaders)
        dist.broadcast(flat, src=self._leader, group=self._host)


class RingReducer(VectorReducer):
    """Reduce-scatter, then all-gather, each in n - 1 rounds of one slice to the right and one from the left.

    Slice *s* is summed in the order of the ranks from *s* on, by one rank, so all ranks end with equal bits.

    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """

    def __init__(self, collective: Collective, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._rank, self._num_ranks, self._group = collective.rank, collective.num_ranks, group

    def sum(self, flat: Tensor) -> None:
        """Sum over the ranks, in place; collective."""
        note_exchange(flat, group=self._group)
        here = flat.to("cpu", copy=True) if sends_from_host(flat.device) else flat
        slices = here.tensor_split(self._num_ranks)
        received = torch.empty_like(slices[0])  # the first slice is the longest
        right, left = ((self._rank + turn) % self._num_ranks for turn in (1, -1))
        for turn in range(2 * self._num_ranks - 2):
            sent, into = (slices[(self._rank - turn - step) % self._num_ranks] for step in (0, 1))
            adds = turn < self._num_ranks - 1
            target = received[: into.numel()] if adds else into
            of_group = partial(dist.P2POp, group=self._group)
            sends = [of_group(dist.isend, sent, group_peer=right)] if sent.numel() else []
            receives = [of_group(dist.irecv, target, group_peer=left)] if into.numel() else []
            for work in dist.batch_isend_irecv([*sends, *receives]) if sends or receives else ():
                work.wait()
            if adds:
                into.add_(target)
        if here is not flat:
            flat.copy_(here)


def sends_from_host(device: torch.device) -> bool:
    """Return whether ranks send tensors of a device from the memory of the host.

    Gloo, which ranks on MIG instances use, sends no memory of a GPU to a single rank, and ends the process.
    """
    return device.type == "cuda" and f"{device.type}:gloo" in dist.get_backend_config().split(",")
