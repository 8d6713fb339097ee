"""Each stage runs the model's own forward pass, in which the blocks of other stages do not compute.

Code between blocks runs on every stage, as it is written. A block of an earlier stage returns what that stage has sent,
and zeros where no later stage needs the result. The call of the first block of the next stage ends the pass.

The values that cross a boundary are known from forward passes on fake tensors, which have shapes and no memory. A
tensor that a later stage uses is sent where a block has returned it, or at the block that gets it; code in between
computes from those.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from trainkit.errors import Problem, TrainingError, named_first_line
from trainkit.numerics.generators import GeneratorStates
from trainkit.numerics.randomness import noting_keys
from trainkit.objectives.base import Loss, Supervised, loss_in
from trainkit.objectives.fields import split_batch
from trainkit.strategies.base import PlanContext
from trainkit.strategies.maps.syntax import Block
from trainkit.strategies.object_snapshot import ObjectSnapshot, cache_switch, class_name

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, Enum, torch.dtype, torch.device)
_ELSEWHERE: Final = "or use strategy=mirrored."


class CannotCut(Exception):  # noqa: N818 - callers turn it into a problem or an error
    """A model that cannot be cut, with the reason and a sentence about the remedy."""

    def __init__(self, reason: str, *, remedy: str = "Use strategy=fsdp.") -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor that is known in advance."""

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of this kind; on the meta device it takes no memory."""
        return torch.empty(self.size, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)

    def check(self, tensor: Tensor) -> None:
        """Refuse a tensor of another shape: the receiving stage would wait for ever.

        Raises:
            TrainingError: its shape or dtype differs.
        """
        if tuple(tensor.shape) != self.size or tensor.dtype != self.dtype:
            raise TrainingError(
                f"a stage has computed {tuple(tensor.shape)} {tensor.dtype} instead of {self.size} {self.dtype}, as "
                f"without numbers: a block behaves differently there. Use strategy=mirrored."
            )


GIVEN, RETURNED = "given", "returned"
Place = tuple[int, str, int]
"""Number of a call, whether a block is given a tensor or returns it, and the leaf of its arguments or of its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """A tensor that is sent from one stage to the next."""

    number: int
    """Its number among all tensors of the pass."""
    meta: TensorMeta
    places: tuple[Place, ...]
    """Where blocks return it; or, if no earlier one does, where they are given it."""
    is_written: bool
    """Whether later code writes into it: it uses a copy, because a received tensor is a leaf of its graph."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """The calls of blocks in a forward pass for inputs of one shape, and what crosses a boundary before each."""

    blocks: tuple[str, ...]
    """The block of each call."""
    results: tuple[Any, ...]
    """What each call returns, with a `TensorMeta` instead of each tensor."""
    outputs: Any
    """The outputs of the model, in the same form."""
    crossings: tuple[tuple[Crossing, ...] | CannotCut, ...]
    """The tensors that are sent if a stage begins with a call; or why none can."""
    used: Mapping[str, str]
    """Parameters and buffers of blocks that the model's own code uses -> a call after which it does so."""
    writes_inputs: bool
    """Whether the pass writes into the inputs of the model."""
    last_block: str | None
    """The block whose result is the only output tensor of the model, and is not read elsewhere; else None."""

    @property
    def finals(self) -> tuple[TensorMeta, ...]:
        """The tensors among the outputs."""
        return tuple(leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, TensorMeta))

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the outputs of the model with these tensors."""
        leaves, spec = tree_flatten(self.outputs)
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if isinstance(leaf, TensorMeta) else leaf for leaf in leaves], spec)

    def starts(self, stage_of: Mapping[str, int], num_stages: int) -> list[int]:
        """Return the first call of each stage, and the number of calls; stages must not decrease along the blocks."""
        stages = [stage_of[name] for name in self.blocks]
        return [sum(block_stage < stage for block_stage in stages) for stage in range(num_stages + 1)]

    def spans(self, stage_of: Mapping[str, int], num_stages: int) -> list[Span]:
        """Return each stage."""
        return [self.span(first, end) for first, end in pairwise(self.starts(stage_of, num_stages))]

    def span(self, first: int, end: int) -> Span:
        """Return the stage that begins with a call and ends before another."""
        received, sent = self._crossing(first), self._crossing(end)
        return Span(program=self, first=first, end=end, received=received, sent=sent)

    def _crossing(self, call: int) -> tuple[Crossing, ...]:
        crossings = self.crossings[call] if 0 < call < len(self.blocks) else ()
        if isinstance(crossings, CannotCut):
            raise TrainingError(f"the model cannot be cut into stages: {crossings}. {crossings.remedy}")
        return crossings


@dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """A stage of a program."""

    program: Program
    first: int
    end: int
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]

    @property
    def is_last(self) -> bool:
        """Whether the pass ends here."""
        return self.end == len(self.program.blocks)

    @property
    def outputs(self) -> tuple[TensorMeta, ...]:
        """What the stage sends; of the last one, the tensors among the outputs."""
        return self.program.finals if self.is_last else tuple(crossing.meta for crossing in self.sent)


class Blocks(nn.Module):
    """The blocks of a stage, and the tensors that the model owns itself.

    The modules are those of the model; nothing is copied, and the model's own names are unchanged.
    """

    def __init__(self, model: nn.Module, units: Iterable[Block], members: Iterable[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(unit.entries[0] for unit in members)
        inside = {id(tensor) for unit in units for _, tensor in unit.tensors()}
        for number, tensor in enumerate(chain(model.parameters(), model.buffers())):
            if id(tensor) in inside:
                continue
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"owned_{number}", tensor)
            else:
                self.register_buffer(f"owned_{number}", tensor)

    def forward(self, run: Callable[..., tuple[Tensor, ...]], *received: Tensor) -> tuple[Tensor, ...]:
        """Compute a stage; parameters that are sharded are gathered around it."""
        return run(received)


class StageModule(nn.Module):
    """Computes a stage for inputs of one shape.

    Args:
        blocks: the blocks of the stage.
        span: its calls.
        units: all blocks of the model.
        forward: the model's own forward pass.
        device: the device of this stage.
    """

    def __init__(
        self,
        blocks: Blocks,
        span: Span,
        units: Iterable[Block],
        forward: Callable[[Any], Any],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.blocks, self.span = blocks, span
        self._all = {unit.name: unit.entries[0] for unit in units}
        self._forward, self._device = forward, device
        self.inputs: Any = None
        """Inputs of the whole model for the next microbatch; the code of every stage may read them."""

    def set_inputs(self, inputs: Any) -> None:
        """Store the inputs of the whole model for the next microbatch."""
        self.inputs = inputs

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        """Compute the values for the next stage from those of the previous one; the loss if the last block computes
        it.
        """
        arrived = received if self.span.first else ()
        outputs: tuple[Tensor, ...] = self.blocks(self._run, *arrived)
        return outputs

    def _run(self, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        span, inputs = self.span, self.inputs
        if span.program.writes_inputs:
            inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        calls = _Calls(span, received, self._device)
        try:
            with intercepted(self._all, calls.run):
                outputs = self._forward(inputs)
        except _Ended:
            assert not span.is_last
            for crossing in span.sent:
                crossing.meta.check(calls.values[crossing.number])
            # the next stage receives contiguous tensors
            return tuple(calls.values[crossing.number].contiguous() for crossing in span.sent)
        if not span.is_last:
            raise TrainingError(_OTHER_CALLS.format("it ends"))
        leaves = tree_leaves(outputs, is_leaf=lambda leaf: isinstance(leaf, Loss))  # a loss is a tree of its own
        if any(isinstance(leaf, Loss) for leaf in leaves):
            return (loss_in(outputs).loss_sum,)
        return tuple(leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor))


class _Ended(Exception):  # noqa: N818 - no error
    """The first block of the next stage is called."""


_OTHER_CALLS: Final = (
    "the forward pass of the model calls its blocks in another order than without numbers: {}. Use strategy=mirrored."
)


class _Calls:
    """The calls of blocks in one pass of a stage."""

    def __init__(self, span: Span, received: Sequence[Tensor], device: torch.device) -> None:
        pairs = list(zip(span.received, received, strict=True))
        self.values = {crossing.number: tensor.clone() if crossing.is_written else tensor for crossing, tensor in pairs}
        self._span, self._device, self._next, self._inside = span, device, 0, False
        self._replaced = {place: self.values[crossing.number] for crossing, _ in pairs for place in crossing.places}
        self._sent = {place: crossing.number for crossing in span.sent for place in crossing.places}
        self._watched = {place[:2] for place in (*self._replaced, *self._sent)}

    def run(self, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # a block that calls another one
            return inner(*args, **kwargs)
        call, program = self._next, self._span.program
        self._next += 1
        if call > self._span.end:
            raise _Ended  # code of the model has caught it
        if call >= len(program.blocks) or program.blocks[call] != name:
            raise TrainingError(_OTHER_CALLS.format(f"call {call + 1} is of {name}"))
        args, kwargs = self._exchanged(call, GIVEN, (args, kwargs), replaces=call >= self._span.first)
        if call == self._span.end:
            raise _Ended
        if call < self._span.first:
            return self._exchanged(call, RETURNED, tree_map(self._zeros, program.results[call]), replaces=True)
        self._inside = True
        try:
            result = inner(*args, **kwargs)
        finally:
            self._inside = False
        return self._exchanged(call, RETURNED, result, replaces=False)

    def _zeros(self, leaf: Any) -> Any:
        is_tensor = isinstance(leaf, TensorMeta)
        return torch.zeros(leaf.size, dtype=leaf.dtype, device=self._device) if is_tensor else leaf

    def _exchanged(self, call: int, side: str, tree: Any, *, replaces: bool) -> Any:
        """Replace leaves by what was received, and keep those that are sent."""
        if (call, side) not in self._watched:
            return tree
        leaves, spec = tree_flatten(tree)
        for index in range(len(leaves)):
            place = call, side, index
            leaves[index] = self._replaced.get(place, leaves[index]) if replaces else leaves[index]
            if place in self._sent:
                self.values.setdefault(self._sent[place], leaves[index])
        return tree_unflatten(leaves, spec)


@contextmanager
def intercepted(blocks: Mapping[str, nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Let `run(name, forward, *args, **kwargs)` compute each call of a block."""
    before = {block: vars(block).get("forward") for block in blocks.values()}
    for name, block in blocks.items():
        block.forward = partial(run, name, block.forward)
    try:
        yield
    finally:
        for block, forward in before.items():
            if forward is None:
                del block.forward
            else:
                block.forward = forward


@dataclass(kw_only=True, eq=False)
class _TensorRecord:
    """A tensor of a recorded pass."""

    tensor: Tensor
    """Kept alive, so that no other tensor gets its id."""
    number: int
    born: int
    """The number of calls that had begun when it was made."""
    sources: Sequence[_TensorRecord] | None = None
    """The tensors of blocks from which the model's own code has made it; None: a block has made it."""
    places: list[Place] = field(default_factory=list)
    last: int = -1
    """The number of calls that had begun when it was used last."""
    last_between: int = -1
    """The same for uses by the model's own code."""

    @property
    def of_blocks(self) -> Sequence[_TensorRecord]:
        """The tensors of blocks on which it depends."""
        return (self,) if self.sources is None else self.sources


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of blocks in one pass on fake tensors, and what uses their results.

    Args:
        model: the model.
        units: its blocks.
        tensors: its parameters and buffers, without data.
        inputs: its inputs, without data.
        instead: what each call returns, if blocks do not compute; None: they do.
        device: the device to compute on.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Block],
        tensors: Mapping[str, Tensor],
        inputs: Any,
        *,
        instead: Sequence[Any] | None,
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._tensors, self._instead, self._device = model, tensors, instead, device
        self._units = units
        self._state: _PythonState
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._in_blocks = {name for unit in units for name, _ in unit.tensors()}
        self._records: dict[int, _TensorRecord] = {}
        self._free = {id(leaf): leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        """Tensors that depend on no block; kept alive, so that no other tensor gets their ids."""
        self._inputs = {_storage(leaf) for leaf in self._free.values()}
        self._of_storage: dict[int, list[_TensorRecord]] = {}
        """Storage that depends on blocks since it was written -> the tensors of blocks."""
        self._writes: list[tuple[int, int, bool]] = []
        """(storage, calls that had begun, whether code between blocks writes)."""
        self._calls: list[str] = []
        self._results: list[Any] = []
        self._block: str | None = None
        self._used: dict[str, str] = {}
        self.trail: list[Any] = []
        """What the code between blocks does."""

    def run(self, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call of a block."""
        if self._block is not None:
            return inner(*args, **kwargs)
        call = len(self._calls)
        self._refuse_generator(f"the block {name} is given", (args, kwargs))
        self.trail.append((name, _constants((args, kwargs))))
        if self._instead is not None:
            self._calls.append(name)
            self._block = name
            stand_in = tree_map(self._without_numbers, self._instead[call]) if call < len(self._instead) else None
            self._block = None
            return stand_in
        self._state.before_block(name, (args, kwargs))
        self._calls.append(name)
        self._pass(call, GIVEN, (args, kwargs))
        self._block = name
        result = inner(*args, **kwargs)
        self._block = None
        self._state.after_block(name)
        _refuse_objects(f"the block {name} returns", result)
        self._pass(call, RETURNED, result)
        self._results.append(tree_map(_meta_of, result))
        return result

    def _without_numbers(self, leaf: Any) -> Any:
        return leaf.empty(self._device).clone() if isinstance(leaf, TensorMeta) else leaf

    def begin(self) -> None:
        """Begin the pass, in which `run` computes the calls of blocks."""
        self._state = _PythonState(self._model, self._units)

    def end(self) -> None:
        """Refuse what the model's own code has changed; called when its forward has ended."""
        for name, tensor in chain(self._model.named_parameters(), self._model.named_buffers()):
            if name in self._tensors and name not in self._in_blocks and tensor is not self._tensors[name]:
                raise CannotCut(f"its own code replaces the tensor {name}")
        self._state.at_the_end()

    def _pass(self, call: int, side: str, tree: Any) -> None:
        for index, leaf in enumerate(tree_leaves(tree)):
            if isinstance(leaf, Tensor) and (record := self._record_of(leaf)) is not None:
                record.places.append((call, side, index))
                record.last = max(record.last, call + (side == GIVEN))

    def _refuse_generator(self, where: str, tree: Any) -> None:
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves(tree)):
            raise CannotCut(
                f"{where} a torch.Generator, which each stage would have for itself",
                remedy=f"Draw from torch's own generator, {_ELSEWHERE}",
            )

    def _record_of(self, tensor: Tensor) -> _TensorRecord | None:
        """Return the record of a tensor that depends on blocks; None for any other."""
        if id(tensor) not in self._records and (sources := self._of_storage.get(_storage(tensor))) is not None:
            self._add_record(tensor, sources)  # a view that was made before its memory was written
        return self._records.get(id(tensor))

    def _add_record(self, tensor: Tensor, sources: Sequence[_TensorRecord] | None) -> _TensorRecord:
        record = _TensorRecord(tensor=tensor, number=len(self._records), born=len(self._calls), sources=sources)
        self._records[id(tensor)] = record
        return record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record what it uses, makes and writes."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # as `tensor.device`, which fake tensors ask each other for
            return func(*args, **kwargs)
        num_calls, between = len(self._calls), self._block is None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.ops.aten.equal.default and id(tensors[0]) in self._names:
            return False  # a recomputed block asks it of its buffers: each counts as updated
        if between:
            self._record_between(func, args, kwargs, tensors)
        sources: dict[int, _TensorRecord] = {}
        for tensor in tensors:
            if (record := self._record_of(tensor)) is not None:
                record.last = max(record.last, num_calls)
                record.last_between = num_calls if between else record.last_between
                sources.update({source.number: source for source in record.of_blocks})
        result = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        for tensor in (*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), *written):
            if id(tensor) in self._names or id(tensor) in self._records:
                continue
            if sources or not between:
                self._add_record(tensor, list(sources.values()) if between else None)
            else:
                self._free[id(tensor)] = tensor
        for tensor in written:
            self._writes.append((_storage(tensor), num_calls, between))
            if between and self._names.get(id(tensor)) is not None:
                raise CannotCut(
                    f"its own code writes into {self._names[id(tensor)]} between its blocks",
                    remedy=f"Move the tensor and that code into a block, {_ELSEWHERE}",
                )
            if (record := self._records.get(id(tensor))) is not None:
                self._of_storage[_storage(tensor)] = list(record.of_blocks)
        return result

    def _record_between(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        """Note an operation of the model's own code."""
        self._refuse_generator(f"its own code gives {func}", (args, kwargs))
        self.trail.append((str(func), _constants((args, kwargs))))
        for tensor in tensors:
            name = self._names.get(id(tensor))
            if name in self._in_blocks:
                self._used[name] = self._calls[-1] if self._calls else "its inputs"
            if name is None and is_fake(tensor) and id(tensor) not in self._free and self._record_of(tensor) is None:
                raise CannotCut(
                    "its own code uses a tensor of an earlier pass, which an attribute or an object has kept",
                    remedy=f"Return it from the block that creates it, {_ELSEWHERE}",
                )

    def program(self, outputs: Any) -> Program:
        """Return what was recorded."""
        _refuse_objects("it returns", outputs)
        count = len(self._calls)
        finals = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        records = [record for leaf in finals if (record := self._record_of(leaf)) is not None]
        alone = len(finals) == len(records) == 1 and records[0].last_between < 0 and len(records[0].places) == 1
        last = records[0].places[0][0] if alone else None
        for record in records:
            record.last = record.last_between = count
        return Program(
            blocks=tuple(self._calls),
            results=tuple(self._results),
            outputs=tree_map(_meta_of, outputs),
            crossings=tuple(map(self._crossings, range(count))),
            used=self._used,
            writes_inputs=any(storage in self._inputs for storage, _, _ in self._writes),
            last_block=self._calls[last] if last is not None and isinstance(self._results[last], TensorMeta) else None,
        )

    def _crossings(self, call: int) -> tuple[Crossing, ...] | CannotCut:
        """Return what is sent if a stage begins with a call; or why that is impossible."""
        crossings: dict[int, Crossing] = {}
        storages: dict[int, int] = {}
        for record in self._records.values():
            if not record.born <= call < record.last:
                continue
            sent = [(record, places)] if (places := self._sent_at(record, call)) else []
            if not sent and record.sources is not None:
                sent = [(source, self._sent_at(source, call, RETURNED)) for source in record.sources]
            if not sent or not all(places for _, places in sent):
                return CannotCut(
                    f"code after {self._calls[call - 1]} and code after {self._calls[call]} use a tensor that no block "
                    "returns as it is",
                    remedy="Return it from a block, write the model without operations in place, or use strategy=fsdp.",
                )
            for source, places in sent:
                is_written = any(storage == _storage(source.tensor) and at > call for storage, at, _ in self._writes)
                crossings[source.number] = Crossing(
                    number=source.number, meta=_meta_of(source.tensor), places=tuple(places), is_written=is_written
                )
                storages[source.number] = _storage(source.tensor)
        written = [storages[crossing.number] for crossing in crossings.values() if crossing.is_written]
        if any(list(storages.values()).count(storage) > 1 for storage in written):
            return CannotCut(
                f"code after {self._calls[call]} writes in place into a tensor of which {self._calls[call - 1]} and "
                "later blocks use several views",
                remedy=f"Write the model without the in-place operation, {_ELSEWHERE}",
            )
        return tuple(crossings.values())

    def _sent_at(self, record: _TensorRecord, call: int, side: str | None = None) -> list[Place]:
        """Return where the model meets a tensor that is sent before a call, as it is then."""
        storage = _storage(record.tensor)
        returned = [place for place in record.places if place[1] == RETURNED and place[0] < call]
        again = [at for written, at, between in self._writes if written == storage and between and at <= call]
        if returned and not any(at > returned[0][0] for at in again):  # the code in between would write again
            return returned
        passed = [place for place in record.places if place[1] == GIVEN]
        if side is None and record.last_between <= call and any(at <= call for at, _, _ in passed):
            return passed
        return []


def is_fake(value: Any) -> bool:
    """Return whether a value is a tensor of a recorded pass, which has no data."""
    return type(value).__name__ == "FakeTensor"  # importing the class would slow every start


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - fake tensors have no address


def _meta_of(leaf: Any) -> Any:
    return TensorMeta(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _refuse_objects(subject: str, tree: Any) -> None:
    """Refuse objects in a result that other stages would not get."""
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise CannotCut(
                f"{subject} an object of the class {class_name(leaf)}, which is not sent to other stages",
                remedy=f"Use tensors and numbers, in tuples, lists or dicts, {_ELSEWHERE}",
            )


def _constants(tree: Any) -> tuple[str, list[str]]:
    leaves, spec = tree_flatten(tree)
    return str(spec), [_constant(leaf) for leaf in leaves]


def _constant(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    text = repr(leaf)
    return type(leaf).__qualname__ if " at 0x" in text else text


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors into which an operation writes."""
    arguments = {**dict(zip((arg.name for arg in func._schema.arguments), args, strict=False)), **kwargs}  # noqa: SLF001
    names = [arg.name for arg in func._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]  # noqa: SLF001
    written = tree_leaves([arguments.get(name) for name in names])
    return [leaf for leaf in written if isinstance(leaf, Tensor)]


class _PythonState:
    """The Python objects of a model in one pass: a change would be seen by the stage alone that makes it."""

    def __init__(self, model: nn.Module, units: Sequence[Block]) -> None:
        inside = {id(module) for unit in units for entry in unit.entries for module in entry.modules()}
        self._outside = ObjectSnapshot(pair for pair in model.named_modules() if id(pair[1]) not in inside)
        self._owners = {unit.name: unit.owners for unit in units}
        self._blocks = {name: ObjectSnapshot(owners) for name, owners in self._owners.items()}
        self._model = model

    def before_block(self, name: str, arguments: Any) -> None:
        """Refuse changes of a block by others, and store its arguments."""
        for path, kind in self._blocks[name].changed():
            raise CannotCut(
                f"{path} ({kind}) of the block {name} is changed outside of the block",
                remedy=f"Pass it as an argument, {_ELSEWHERE}",
            )
        self._arguments = ObjectSnapshot([("", arguments)])

    def after_block(self, name: str) -> None:
        """Refuse changes of a block to its arguments: other stages have their own."""
        if (kind := self._arguments.changed_class()) is not None:
            switch = cache_switch(self._model)
            raise CannotCut(
                f"the block {name} changes the {kind} among its arguments, of which each stage has its own",
                remedy=f"Return what it adds, {_ELSEWHERE}" if switch is None else f"Use {switch}.",
            )
        self._blocks[name] = ObjectSnapshot(self._owners[name])

    def at_the_end(self) -> None:
        """Refuse changes by the model's own code, which every stage runs."""
        for path, kind in self._outside.changed():
            raise CannotCut(
                f"its own code changes {path} ({kind}), and every stage runs that code",
                remedy=f"Compute it from the inputs, move it into a block, {_ELSEWHERE}",
            )
        for name in self._blocks:
            self.before_block(name, ())


def trace(
    model: nn.Module,
    units: Sequence[Block],
    inputs: Any,
    *,
    device: torch.device,
    autocast: AbstractContextManager[Any],
    grad: bool = True,
) -> Program:
    """Record the calls of a model's blocks without computing data; the model is unchanged.

    The code between blocks must do the same if no block computes: the second of two passes shows it.

    Args:
        model: the model, possibly (partly) on the meta device.
        units: the blocks of the model, from `blocks_to_cut`.
        inputs: the arguments of the model: tensors, or tuples, lists and dicts of them; only their shapes matter.
        device: the device to compute on.
        autocast: the context of its forward pass.
        grad: whether its forward pass is followed by a backward pass.

    Raises:
        CannotCut: the model needs data during the pass, or its code depends on what blocks do to Python objects.
    """
    with autocast:
        first, outputs = _pass(model, units, inputs, None, device=device, grad=grad)
        program = first.program(outputs)
        second, _ = _pass(model, units, inputs, program.results, device=device, grad=grad)
    if first.trail != second.trail:
        pairs = zip(first.trail, second.trail, strict=False)
        index = next((i for i, (left, right) in enumerate(pairs) if left != right), len(first.trail))
        names = [name for name, _ in first.trail[:index] if name in program.blocks]
        raise CannotCut(
            f"its own code after {names[-1] if names else 'its inputs'} does something else in each pass, or where "
            "that block is on another stage",
            remedy=f"Compute it from the inputs and from what blocks return, {_ELSEWHERE}",
        )
    return program


def _pass(
    model: nn.Module,
    units: Sequence[Block],
    inputs: Any,
    instead: Sequence[Any] | None,
    *,
    device: torch.device,
    grad: bool,
) -> tuple[_Recorder, Any]:
    # Slow to import, and needed only with stages.
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    def without_numbers(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, Tensor) else leaf

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # compiled code runs eagerly
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        attributes, host = ObjectSnapshot(model.named_modules()), GeneratorStates()
        stack.callback(attributes.restore)
        stack.callback(host.restore)
        logger = logging.getLogger("torch._subclasses.fake_tensor")  # the error already reports the failure
        stack.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tensors = {
            name: torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
            )
            for name, tensor in chain(model.named_parameters(), model.named_buffers())
        }
        shaped = tree_map(without_numbers, inputs)
        recorder = _Recorder(model, units, tensors, shaped, instead=instead, device=device)
        stack.callback(model.register_forward_hook(lambda *_: recorder.end()).remove)
        stack.enter_context(noting_keys(lambda _set_key: None))
        stack.enter_context(intercepted({unit.name: unit.entries[0] for unit in units}, recorder.run))
        recorder.begin()
        try:
            with recorder:
                outputs = functional_call(model, tensors, (shaped,))
        except CannotCut:
            raise
        except Exception as error:
            reason = named_first_line(error).rstrip(".")
            if instead is None:
                raise CannotCut(reason) from error
            raise CannotCut(
                f"its own code needs what a block does beside what it returns ({reason})",
                remedy=f"Return it from the block, {_ELSEWHERE}",
            ) from error
        if host.moved():
            raise CannotCut(
                "its forward draws from Python's random or NumPy, which are keyed by shard and not by block"
            )
        return recorder, outputs


_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, tuple[Program, ...] | list[Problem]]] = WeakKeyDictionary()


def programs_of(model: nn.Module, units: Sequence[Block], context: PlanContext) -> tuple[Program, ...] | list[Problem]:
    """Return the programs of a model for two samples, in training and in evaluation; or the problems why it cannot be
    cut.

    Args:
        model: the model, possibly on the meta device.
        units: its blocks, from `blocks_to_cut`.
        context: provides a sample of the training data; without one, the result is empty.
    """
    sample = context.sample
    if sample is None:
        return ()
    hooks = ("_backward_hooks", "_backward_pre_hooks")  # have no public names
    for name, module in model.named_modules():
        if any(getattr(module, hook) for hook in hooks):
            rule = f"{name} has a backward hook, which a pipeline does not call. Use strategy=fsdp."
            return [Problem(key="model", rule=rule)]
    cached = _KNOWN.get(model)
    if cached is None or cached[0] is not sample:
        batch, objective = context.collate([sample, sample], [0, 0]), context.objective
        inputs = (objective.split_batch(batch) if isinstance(objective, Supervised) else split_batch(batch))[0]
        _KNOWN[model] = cached = sample, _trace_both_modes(model, units, inputs)
    return cached[1]


def _trace_both_modes(model: nn.Module, units: Sequence[Block], raw_inputs: Any) -> tuple[Program, ...] | list[Problem]:
    # The model here is in float32, for any precision of the run.
    inputs = tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        raw_inputs,
    )
    modes = {module: module.training for module in model.modules()}
    run = partial(trace, model, units, inputs, device=torch.device("cpu"), autocast=nullcontext())
    try:
        training = run()
        model.eval()
        return training, run(grad=False)
    except CannotCut as error:
        return [Problem(key="model", rule=f"cannot be cut into stages: {error}. {error.remedy}")]
    finally:
        for module, mode in modes.items():  # parents before their children, which may differ
            module.train(mode)
