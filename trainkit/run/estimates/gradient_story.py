"""Trace what happens to each gradient in a step without data: sums over ranks, factors, and the division by the count
of targets.

Events are attached to regions of memory. They follow a gradient through copies, views and sums of equal stories, and
end where it is used otherwise: in a product of matrices, in a norm of a layer. Values are not read, except numbers on
the way from the loss.
"""

# ruff: noqa: SLF001 - names of operations and identities of storages, as in `fake_run`

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

from trainkit.run.estimates.fake_run import Watch, asks_for_device, group_ranks, in_backward, reduction_of
from trainkit.strategies.base import GradientListener, UpdateTensors

_NUMBERS: Final = count()
_MOST_NUMBERS: Final = 64
"""Elements of the largest tensor of losses and counts that all ranks gather, to add them up."""
_COPIES: Final = frozenset(
    (
        "copy", "clone", "_to_copy", "cat", "stack", "_chunk_cat", "chunk_cat", "split_with_sizes_copy", "lift_fresh",
        "contiguous", "wait_tensor", "constant_pad_nd",
    )
)  # fmt: skip
"""Operations whose result has the elements of their inputs."""
_FILLS: Final = frozenset(["full", "full_like", "new_full", "scalar_tensor", "ones_like", "ones", "fill"])

_CREATIONS: Final = _FILLS | {"zero", "zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"}
"""Operations whose result has no element of their inputs."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened to a tensor."""

    kind: str
    """`sum`, `scatter` (a sum of which a rank keeps a part), `part` (a number of a rank that all gather), `factor`,
    `count` (divided by a count), `mixed`.
    """
    ranks: tuple[int, ...] = ()
    """The ranks of a sum; those that are summed into a count, group by group."""
    op: str = "sum"
    factor: float | None = None
    number: int = field(default_factory=lambda: next(_NUMBERS))
    """Two events with the same number are one."""

    @property
    def signature(self) -> tuple[Any, ...]:
        """Kind, ranks, operation and factor, without the number of the call."""
        return self.kind, self.ranks, self.op, self.factor


Events = frozenset[Event]
_NONE: Final[Events] = frozenset()


def tally(events: Iterable[Event]) -> Counter[tuple[Any, ...]]:
    """Return how often each signature occurs."""
    return Counter(event.signature for event in events)


@dataclass(frozen=True, kw_only=True)
class GradientStory:
    """The story of one gradient up to its update."""

    events: tuple[Event, ...]
    counts: tuple[tuple[Event, ...], ...]
    """Of each count by which it is divided, the sums over ranks."""
    num_elements: int
    """Elements of this rank's part."""


class Story(Watch):  # type: ignore[no-untyped-call]
    """A watch that attaches to gradients what happens to them, and listens to the update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._regions: dict[weakref.ref[torch.UntypedStorage], list[tuple[int, int, Events]]] = {}
        self._scales: dict[weakref.ref[torch.UntypedStorage], float | None] = {}
        self._summed_counts: dict[int, tuple[Event, ...]] = {}
        self.gradients: dict[str, GradientStory] = {}
        self.seeds: set[float | None] = set()
        """The factors with which losses begin backward; None: unknown."""
        self.received: Counter[int] = Counter()
        """Rank -> elements that were received from it."""
        self.sent: Counter[int] = Counter()
        self.lost: Counter[str] = Counter()
        """Operations that lost the events of a summed tensor: nothing is known about its update."""

    def begin(self) -> None:
        """Forget what was recorded in earlier steps."""
        super().begin()
        self.seeds, self.gradients = set(), {}
        for counter in (self.received, self.sent, self.lost):
            counter.clear()

    @property
    def listener(self) -> GradientListener:
        """The watch itself."""
        return self

    def wants(self, step: int) -> bool:  # noqa: ARG002 - each of the few steps
        """Return True."""
        return True

    def take(self, step: int, tensors: UpdateTensors) -> None:  # noqa: ARG002 - the last one counts
        """Read the stories of the gradients of an update."""
        for name, grad in tensors.grads.items():
            events = tuple(self._of(grad))
            counts = tuple(self._summed_counts[event.number] for event in events if event.kind == "count")
            self.gradients[name] = GradientStory(events=events, counts=counts, num_elements=grad.numel())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and let stories follow."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented or asks_for_device(func) or not self.is_own:
            return result
        if func.namespace in ("c10d", "_c10d_functional"):
            self._exchanged(func, args, result)
        elif self._regions or self._scales or in_backward() or func._schema.name.split("::")[1] in _FILLS:
            self._followed(func, args, kwargs or {}, result)
        return result

    def _forget(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        super()._forget(key)
        self._regions.pop(key, None)
        self._scales.pop(key, None)

    def _key(self, tensor: Tensor) -> weakref.ref[torch.UntypedStorage]:
        storage = tensor.untyped_storage()
        self.see(storage)
        return weakref.ref(storage)

    def _of(self, tensor: Tensor) -> Events:
        """Return the events of a whole tensor, and `mixed` for each event of a part of it."""
        regions = self._regions.get(weakref.ref(tensor.untyped_storage()))
        if not regions or not tensor.numel():
            return _NONE
        start, end = _span(tensor)
        covered: Counter[Event] = Counter()
        for low, high, events in regions:
            size = min(high, end) - max(low, start)
            if size > 0:
                covered.update(dict.fromkeys(events, size))
        whole = frozenset(event for event, size in covered.items() if size == end - start)
        return whole | frozenset(Event(kind="mixed") for size in covered.values() if size != end - start)

    def _put(self, tensor: Tensor, events: Events, *, adds: bool = False) -> None:
        """Set the events of a tensor, or add them to its own."""
        if not tensor.numel() or tensor.layout is not torch.strided or tensor.is_meta:
            return
        self._put_span(self._key(tensor), _span(tensor), events, adds=adds)

    def _put_span(
        self, key: weakref.ref[torch.UntypedStorage], span: tuple[int, int], events: Events, *, adds: bool = False
    ) -> None:
        """Set the events of a range of bytes, or add them."""
        start, end = span
        if not events and key not in self._regions:
            return
        regions, inside = list[tuple[int, int, Events]](), list[tuple[int, int, Events]]()
        for low, high, earlier in self._regions.get(key, ()):
            regions += [(a, b, earlier) for a, b in ((low, min(high, start)), (max(low, end), high)) if a < b]
            inside += [(max(low, start), min(high, end), earlier)] if max(low, start) < min(high, end) else []
        position = start
        for low, high, earlier in sorted(inside, key=lambda region: region[0]) if adds else ():
            regions += [(position, low, events)] if position < low else []
            regions.append((low, high, earlier | events))
            position = high
        if position < end:
            regions.append((position, end, events))
        self._regions[key] = [region for region in regions if region[2]]
        if not self._regions[key]:
            del self._regions[key]

    def _exchanged(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Pass events through a collective."""
        name = func._schema.name.split("::")[1].strip("_")
        tensors = list(_tensors(args[0]))
        if name in ("send", "recv"):
            counter = self.sent if name == "send" else self.received
            counter[self.peer(args)] += sum(tensor.numel() for tensor in tensors)
            return
        if name in ("wait_tensor", "wrap_tensor_autograd"):
            self._put(result, self._of(args[0]))
            return
        outs = list(_tensors(result))
        if "reduce" not in name:
            for tensor in outs if func.namespace == "_c10d_functional" else tensors:
                if name != "broadcast":
                    self._put(tensor, _NONE)
            if name == "allgather":  # of numbers, which are then added up
                before = frozenset(_with_sums(self._of(next(_tensors(args[1])))))
                for rank, tensor in zip(group_ranks(args), tensors, strict=True):
                    if tensor.numel() <= _MOST_NUMBERS:
                        self._put(tensor, before | {Event(kind="part", ranks=(rank,))})
            return
        ranks, op = reduction_of(args)
        scatters = "scatter" in name
        event = frozenset([Event(kind="scatter" if scatters else "sum", ranks=tuple(ranks), op=op)])
        if not scatters and func.namespace == "c10d":
            for tensor in tensors:
                self._put(tensor, event, adds=True)
            return
        inputs = tensors if func.namespace != "c10d" else list(_tensors(args[1]))
        if len(inputs) == len(tensors) == 1 and inputs[0].numel() == len(ranks) * tensors[0].numel():
            self._put_scattered(inputs[0], tensors[0], event, ranks)
            return
        before = self._merged([self._of(tensor) for tensor in inputs])
        for tensor in outs if func.namespace != "c10d" else tensors:
            self._put(tensor, before | event)

    def _put_scattered(self, source: Tensor, out: Tensor, event: Events, ranks: Sequence[int]) -> None:
        """Give the result of a reduce-scatter the events of this rank's part, range by range."""
        (start, end), (first, _) = _span(source), _span(out)
        size = (end - start) // len(ranks)
        start += size * list(ranks).index(dist.get_rank())
        self._put(out, event)
        for low, high, events in self._regions.get(self._key(source), ()):
            span = max(low, start) - start + first, min(high, start + size) - start + first
            if span[0] < span[1]:
                self._put_span(self._key(out), span, events | event)

    def _put_chunks(self, tensors: Sequence[Tensor], num_chunks: int, out: Tensor) -> None:
        """Give the vector that fully_shard sends the events of its gradients: a row of parts for each rank."""
        width, start = out.element_size(), _span(out)[0]
        sizes = [-(-tensor.shape[0] // num_chunks) * (tensor.numel() // tensor.shape[0]) * width for tensor in tensors]
        stories = [self._of(tensor) for tensor in tensors]
        for _ in range(num_chunks):
            for size, events in zip(sizes, stories, strict=True):
                self._put_span(self._key(out), (start, start + size), events)
                start += size

    def _merged(self, stories: Sequence[Events], *, is_number: bool = False) -> Events:
        """Return the events of a sum or a concatenation: all stories must be equal, except those of numbers."""
        first = stories[0] if stories else _NONE
        if all(story == first or tally(story) == tally(first) for story in stories[1:]):
            return first
        if is_number or any(event.kind == "part" for story in stories for event in story):
            return first.union(*stories)
        return first | {Event(kind="mixed")}

    def _followed(  # noqa: PLR0912 - one case for each kind of operation
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Pass events through an operation of this rank alone."""
        name: str = func._schema.name.split("::")[1]
        base = name.rstrip("_").removeprefix("_foreach_")
        written = list(_written(func, args, kwargs))
        written_ids = {id(tensor) for tensor in written}
        leaves = list(_tensors((args, kwargs)))
        inputs = [leaf for leaf in leaves if id(leaf) not in written_ids]
        self._scaled(base, args, leaves, result, written)
        if not self._regions:
            return
        storages = {leaf.untyped_storage()._cdata for leaf in leaves if _is_plain(leaf)}
        outs = written or [
            leaf for leaf in _tensors(result) if _is_plain(leaf) and leaf.untyped_storage()._cdata not in storages
        ]
        if not outs:
            return
        if base == "chunk_cat" and args[1] == 0:
            self._put_chunks(args[0], args[2], outs[0])
        elif base in ("mul", "div"):
            rows = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            event = self._factor(base, args[1], rows)
            for source, out in zip(rows, outs, strict=False):
                events = self._of(source) if isinstance(source, Tensor) else _NONE
                if out.numel() == 1 and not events and isinstance(args[1], Tensor):  # a number made of a count
                    self._put(out, self._of(args[1]))
                else:
                    self._put(out, events | event)
        elif base == "add" and isinstance(args[0], (list, tuple)):
            others = args[1] if isinstance(args[1], (list, tuple)) else [None] * len(args[0])
            for source, other, out in zip(args[0], others, outs, strict=False):
                self._put(out, self._merged([self._of(source), *([] if other is None else [self._of(other)])]))
        elif base == "add":
            stories = [self._of(term) for term in args[:2] if isinstance(term, Tensor)]
            self._put(outs[0], self._merged(stories, is_number=outs[0].numel() == 1))
        elif base == "copy" and len(written) > 1:
            for source, out in zip(args[1], written, strict=True):
                self._put(out, self._of(source))
        elif base in _COPIES:
            stories = [self._of(leaf) for leaf in inputs if _is_plain(leaf)]
            for out in outs:
                self._put(out, self._merged(stories))
        else:
            before = frozenset[Event]().union(*(self._of(leaf) for leaf in leaves if _is_plain(leaf)))
            for out in outs:
                keeps = out.numel() <= 1 and base not in _CREATIONS
                self._put(out, before if keeps else _NONE)
            if before and self.phase == "reduce" and base not in _CREATIONS:
                self.lost[base] += 1

    def _factor(self, base: str, operand: Any, rows: Sequence[Any]) -> Events:
        """Return the event of a product with a number, or with a count that was summed over ranks."""
        if isinstance(operand, (list, tuple)):
            operand = operand[0] if operand else 1.0
        if not isinstance(operand, Tensor):
            number = float(operand) if base == "mul" else 1 / float(operand) if operand else float("inf")
            return _NONE if number == 1.0 else frozenset([Event(kind="factor", factor=number)])
        if operand.numel() != 1 or not any(isinstance(row, Tensor) and row.numel() >= 1 for row in rows):
            return _NONE
        counted = tuple(event for event in _with_sums(self._of(operand)) if event.kind in ("sum", "scatter"))
        scale = self._scales.get(weakref.ref(operand.untyped_storage()))
        if counted:
            event = Event(kind="count")
            self._summed_counts[event.number] = counted
            return frozenset([event])
        if scale is None or scale == 1.0 or in_backward():  # there it begins a gradient
            return _NONE
        return frozenset([Event(kind="factor", factor=scale)])

    def _scaled(
        self, base: str, args: Sequence[Any], leaves: Sequence[Tensor], result: Any, written: Sequence[Tensor]
    ) -> None:
        """Track the factor of the loss up to backward, with which its gradient begins."""
        out = next(_tensors(result), None)
        if base in _FILLS and out is not None and out.numel() == 1 and out.is_floating_point():
            numbers = (float(value) for value in reversed(args) if isinstance(value, (int, float)))
            self._scales[self._key(out)] = next(numbers, 1.0)
            return
        scaled = [leaf for leaf in leaves if leaf.numel() and _is_plain(leaf) and self._key_of(leaf) in self._scales]
        if not scaled or out is None:
            return
        if _is_plain(out) and out.untyped_storage()._cdata in {leaf.untyped_storage()._cdata for leaf in scaled}:
            if written:  # it is overwritten
                self._scales.pop(self._key(out), None)
            return
        seed = number = self._scales[self._key_of(scaled[0])]
        if out.numel() == 1 and base in ("mul", "div", "neg", "_to_copy", "clone"):
            others = [arg for arg in args if arg is not scaled[0] and not isinstance(arg, (torch.dtype, str))]
            for arg in others[:1] if base in ("mul", "div") else ():
                scale = float(arg) if isinstance(arg, (int, float)) else self._scales.get(self._key_of(arg))
                number = None if scale is None or seed is None else seed * scale if base == "mul" else seed / scale
            self._scales[self._key(out)] = -number if base == "neg" and number is not None else number
        elif in_backward():
            self.seeds.add(seed)

    def _key_of(self, tensor: Tensor) -> weakref.ref[torch.UntypedStorage]:
        return weakref.ref(tensor.untyped_storage())


def _with_sums(events: Events) -> Iterator[Event]:
    """Yield events, with one sum in the place of the parts of ranks that were added up."""
    yield from (event for event in events if event.kind != "part")
    if ranks := sorted(rank for event in events if event.kind == "part" for rank in event.ranks):
        yield Event(kind="sum", ranks=tuple(ranks))


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and (isinstance(tensor, FakeTensor) or not tensor.is_meta)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + int(last) + 1) * tensor.element_size()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)
