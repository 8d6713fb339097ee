"""Reducers: they sum the tensors of a step over its shards and ranks, most of them as one flat vector.

The gradients are views of the exchanged vector, so no second copy of them is alive. A bucket is a range of the vector:
its gradients are copied there together, and the backend's all-reduce exchanges it while backward computes the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.errors import TrainingError
from trainkit.numerics.batch import LaneNode, LaneSums, owned_nodes, sum_of_ranks
from trainkit.objectives.base import Collective
from trainkit.strategies.flight_recorder import note_exchange
from trainkit.strategies.tensors.layouts import FlatBuffer, in_memory_order, local_part, unsplit

Compression = Literal["none", "bf16", "fp16", "powersgd"]
"""The encoding of exchanged gradients."""
_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Compressor:
    """Sums buckets of gradients over a group, with fewer bytes.

    Args:
        kind: bf16 and fp16 round every gradient to 2 bytes; powersgd sends two low-rank matrices instead of one matrix,
            and adds the error to the next step's gradient.
        powersgd_rank: rank of those matrices.
        powersgd_after: number of first steps whose gradients are sent uncompressed; 2 or more.
        group: the ranks to sum over; None: all of them. PowerSGD sums over all.

    Source: Vogels et al. 2019, arXiv:1905.13727; torch.distributed.algorithms.ddp_comm_hooks.
    """

    last_group: ClassVar[dist.ProcessGroup | None] = None
    """The group of the last exchange, which is kept: a thread of gloo refers to it for some microseconds longer, and
    would have to join itself if it released the last reference ("Resource deadlock avoided": the process aborts).
    """

    def __init__(
        self,
        kind: Compression,
        *,
        powersgd_rank: int = 1,
        powersgd_after: int = 1000,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._dtype, self._group = _DTYPES.get(kind), group
        if kind == "powersgd":
            # Import it here: it imports torch's optimizers, which would slow down every start.
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # noqa: PLC0415

            self._hook = powerSGD_hook.powerSGD_hook
            self._state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=powersgd_rank,
                start_powerSGD_iter=powersgd_after,
                orthogonalization_epsilon=1e-8,  # else a layer whose gradient is zero would become NaN
            )

    def sum(self, part: Tensor, grads: Sequence[Tensor], *, index: int) -> Callable[[], None]:
        """Start to sum a bucket, (numel,), in place; return a function that waits for the sum. Collective."""
        if self._dtype is not None:
            rounded = part.to(self._dtype)
            work = dist.all_reduce(rounded, group=self._group, async_op=True)

            def wait() -> None:
                work.wait()
                part.copy_(rounded)

            return wait
        part.mul_(dist.get_world_size())
        Compressor.last_group = dist.group.WORLD
        # It begins exchanges in callbacks, at unpredictable moments: a later bucket's could be matched with wrong ones
        # of other ranks (gloo then hangs), so this one is waited for.
        summed = self._hook(self._state, _Bucket(part, grads, index)).wait()
        if summed.data_ptr() != part.data_ptr():
            part.copy_(summed)
        return lambda: None

    @property
    def has_state(self) -> bool:
        """Whether an exchange depends on earlier ones: that of PowerSGD does."""
        return self._dtype is None

    @property
    def steps(self) -> int:
        """Number of steps of PowerSGD."""
        return int(self._state.iter) if self.has_state else 0

    def set_steps(self, value: int) -> None:
        """Continue after `value` steps."""
        if self.has_state:
            self._state.iter = value


class _Bucket:
    """The interface of torch's GradBucket, which cannot be constructed in Python."""

    def __init__(self, part: Tensor, grads: Sequence[Tensor], index: int) -> None:
        self._part, self._index = part, index
        self._grads = [in_memory_order(grad) if grad.dim() else grad.view(1) for grad in grads if grad.numel()]

    def buffer(self) -> Tensor:
        return self._part

    def gradients(self) -> list[Tensor]:
        return self._grads

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return True  # called by PowerSGD only, whose bucket is the only one


Sums = Sequence[Tensor | None]
"""A sum for each tensor of a packing; None: zeros."""


class Reducer(ABC):
    """Sums the tensors of a step over its shards and ranks.

    The step calls `begin`, `begin_backward` and `end_backward` around each of its backward passes, `add` for what a
    lane (or all shards of this rank) gave, and `finish`.
    A replica that exchanges nothing (`Replica.exchanges`) calls none of them.
    """

    lanes: int | None = None
    """Number of lanes of the order of summation; None: this rank's shards form one sum."""
    compressor: Compressor | None = None
    """Exchanges gradients in fewer bytes, with a loss of precision; None: they are exchanged as they are."""

    def begin(self, packing: FlatBuffer, *, num_shards: int) -> None:  # noqa: ARG002 - for the order of lanes
        """Begin the sum of a step; an interrupted one is forgotten.

        Args:
            packing: shapes and dtype of each tensor.
            num_shards: number of shards of the step, over all ranks.
        """
        self._sums: Sums = [None] * len(packing.shapes)

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:  # noqa: B027 - most keep no gradients
        """Announce a backward pass of this rank.

        A reducer may take the gradients as they are computed, and exchange those of the last pass, which are final. For
        a gradient that it has taken, `param.grad` becomes a view of its own memory, or None.

        Args:
            params: parameters whose gradients it sums, in the order of the packing; the same in every pass.
            is_last: whether this is the last pass of this rank in the step.
        """

    def end_backward(self) -> None:  # noqa: B027
        """Announce that the pass has ended."""

    def has_taken(self, index: int) -> bool:  # noqa: ARG002 - most take none
        """Return whether the reducer has taken a gradient of this step."""
        return False

    def add(self, lane: int, sums: Sums) -> None:  # noqa: ARG002 - without lanes there is one sum, or none
        """Take the sums of this rank over the shards of a lane, in the order of `lane_order`; without lanes, over all.

        Tensors that `begin_backward` let the reducer take count by what it took.
        """
        self._sums = sums

    @abstractmethod
    def finish(self) -> Sums:
        """Return the sums over all shards of the step, the same on every rank, valid until `begin`; collective."""

    def close(self) -> None:  # noqa: B027 - most hold none
        """Release resources other than tensors; not collective."""


class LocalReducer(Reducer):
    """Returns the sums that autograd accumulated."""

    def finish(self) -> Sums:
        """Return the sums of this rank."""
        sums, self._sums = self._sums, ()
        return sums


class PerDeviceReducer(Reducer):
    """Sums the tensors of each device of a replica with a separate reducer, one device after the other.

    No gradient leaves its device, and no device holds a vector of all gradients. The exchanges begin when backward has
    ended: the devices of two ranks may finish their buckets in different orders, and every rank must exchange in the
    same order.

    Args:
        make: function that makes a reducer; called once for each place that holds tensors, in the same order on every
            rank.
    """

    def __init__(self, make: Callable[[], Reducer]) -> None:
        self._make = make
        self._reducers: list[Reducer] = []

    def begin(self, packing: FlatBuffer, *, num_shards: int) -> None:
        """Begin the sum of each device."""
        super().begin(packing, num_shards=num_shards)
        self._parts = packing.parts
        while len(self._reducers) < len(self._parts):
            self._reducers.append(self._make())
        for reducer, part in zip(self._reducers, self._parts, strict=True):
            reducer.begin(part.packing, num_shards=num_shards)

    def finish(self) -> Sums:
        """Return the sums over all ranks, each tensor on its device. A rank without shards adds zeros."""
        sums, self._sums = self._sums, ()
        totals = []
        for reducer, part in zip(self._reducers, self._parts, strict=True):
            reducer.add(0, part.chosen(sums))
            totals.append(reducer.finish())
        return unsplit(self._parts, totals)

    def close(self) -> None:
        """Close the reducers of all devices."""
        for reducer in self._reducers:
            reducer.close()
        self._reducers.clear()


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
        >>> [(bucket.first, bucket.last, bucket.is_tail) for bucket in buckets]
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
    return max((packing.offsets[bucket.last] - packing.offsets[bucket.first] for bucket in buckets), default=0)


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
            grad_buckets = [bucket for bucket in self.buckets if not bucket.is_tail]
            self._grad_ranges = [range(bucket.first, min(bucket.last, packing.num_grads)) for bucket in grad_buckets]
            self._bucket_of = {index: number for number, indices in enumerate(self._grad_ranges) for index in indices}
        self._filled = [False] * len(self.views)  # the content of the vector belongs to an earlier step
        self._params: Sequence[Tensor] | None = None

    def begin_backward(self, params: Sequence[Tensor], *, is_last: bool) -> None:
        """Collect the gradients of the next backward pass."""
        if len(self._grad_ranges) > 1:
            if not self._hooks:
                self._hooks = [
                    param.register_post_accumulate_grad_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]
                    for index, param in enumerate(params)
                ]
            self._missing = list(map(set, self._grad_ranges))
        self._params, self._is_last = params, is_last

    def end_backward(self) -> None:
        """Collect the gradients of buckets that did not become full: of the only bucket, or of those with unused
        parameters.

        After the last pass, new gradients stay in their memory: `fill_rest` copies them together with the buffers.
        """
        self.collect(leaves_new=self._is_last)

    def collect(self, *, leaves_new: bool) -> None:
        """Collect the gradients of the pass that has ended."""
        for indices in self._grad_ranges:
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
                self._take(self._grad_ranges[number])
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
            if leaves_new and not is_apart and not self._filled[index]:
                continue
            param.grad = None if is_apart else view
            part = local_part(grad)
            if is_apart and self._filled[index]:
                view.add_(part.to(view.device))
                continue
            views.append(view)
            grads.append(part)
            self._filled[index] = True
        if grads:
            torch._foreach_copy_(views, grads)

    def has_taken(self, index: int) -> bool:
        """Return whether the vector holds a gradient."""
        return self._filled[index]

    def on_full(self, number: int) -> None:
        """Receive the number of a bucket whose final gradients are in the vector, during the last backward pass."""

    def fill_rest(self) -> None:
        """Copy the remaining tensors into the vector: buffers, the counted weight, and missing gradients."""
        rest = [index for index, filled in enumerate(self._filled) if not filled]
        FlatBuffer.fill([self.views[index] for index in rest], [self._sums[index] for index in rest])
        self._filled = [True] * len(self._filled)

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
        for together in dict.fromkeys(together for together, _ in members):
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
        buffer = flat.to("cpu", copy=True) if sends_from_host(flat.device) else flat
        slices = buffer.tensor_split(self._num_ranks)
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
        if buffer is not flat:
            flat.copy_(buffer)


def sends_from_host(device: torch.device) -> bool:
    """Return whether ranks send tensors of a device from the memory of the host.

    Gloo, which ranks on MIG instances use, sends no memory of a GPU to a single rank, and ends the process.
    """
    return device.type == "cuda" and f"{device.type}:gloo" in dist.get_backend_config().split(",")


class DeterministicReducer(Reducer):
    """Sums lanes in the order of the tree (see `numerics.summation`).

    Each rank sums the subtrees that lie completely on it, slices of those partial sums are sent to the ranks that own
    the slices, each sums its slice in the order of the tree, and all slices are gathered.

    Args:
        num_ranks: data ranks, at most `lanes`.
    """

    lanes: int

    def __init__(self, *, lanes: int, rank: int, num_ranks: int) -> None:
        self.lanes = lanes
        self._rank, self._num_ranks = rank, num_ranks

    def begin(self, packing: FlatBuffer, *, num_shards: int) -> None:
        """Begin the sum of a step."""
        self._parts, self._num_shards = packing.parts, num_shards
        self._lane_sums = LaneSums(_add_each, num_lanes=self.lanes, num_shards=num_shards)

    def add(self, lane: int, sums: Sums) -> None:
        """Add the sums of a lane to those of its sibling, if both exist."""
        vectors = [part.packing.pack(part.chosen(sums)) for part in self._parts]
        self._lane_sums.push(LaneNode(lane, self.lanes), vectors)

    def finish(self) -> Sums:
        """Return the sums over all lanes, in the order of the tree."""
        of_nodes, totals = self._lane_sums.take(), []
        for number, part in enumerate(self._parts):
            vectors = [of_node[number] for of_node in of_nodes]
            total = vectors[0] if self._num_ranks == 1 else self._exchange(vectors, part.packing)
            totals.append(part.packing.views(total.add_(0.0)))  # the sign of zero does not depend on the ranks
        return unsplit(self._parts, totals)

    def _exchange(self, vectors: list[Tensor], packing: FlatBuffer) -> Tensor:
        ranks, lanes, shards = self._num_ranks, self.lanes, self._num_shards
        nodes = [owned_nodes(rank=rank, num_ranks=ranks, num_lanes=lanes, num_shards=shards) for rank in range(ranks)]
        size = -(-packing.numel // ranks)
        padded = [nn.functional.pad(vector, (0, size * ranks - vector.numel())).view(ranks, size) for vector in vectors]
        sent = torch.cat(padded, dim=1).view(-1) if vectors else packing.empty()[:0]
        received = sent.new_empty(sum(map(len, nodes)), size)
        splits = [len(owned) * size for owned in nodes]
        dist.all_to_all_single(received.view(-1), sent, splits, [len(vectors) * size] * ranks)
        of_ranks = [rows.unbind() for rows in torch.split(received, [len(owned) for owned in nodes])]
        total = sum_of_ranks(Tensor.add_, of_ranks, num_lanes=lanes, num_shards=shards)
        gathered = sent.new_empty(size * ranks)
        dist.all_gather([*gathered.view(ranks, size).unbind()], total)
        return gathered[: packing.numel]


def _add_each(totals: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Add the vectors of one sum to those of another, in place."""
    return [total.add_(other) for total, other in zip(totals, others, strict=True)]
