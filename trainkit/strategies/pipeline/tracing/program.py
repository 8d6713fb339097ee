"""A forward pass as a list of calls, cut into the programs of stages that run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from trainkit.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that is an input of the model, or the result of a call."""

    number: int


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A parameter or buffer that the model's own code between its blocks uses, by canonical name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The shape and dtype of a value, known in advance."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a tensor of this shape; on the meta device it takes no memory."""
        return torch.empty(self.size, dtype=self.dtype, device=device)

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor of another shape: the receiving stage would wait for ever.

        Raises:
            TrainingError: its shape or dtype differs.
        """
        if tuple(tensor.shape) != self.size or tensor.dtype != self.dtype:
            raise TrainingError(
                f"a stage has computed {tuple(tensor.shape)} {tensor.dtype} instead of {self.size} {self.dtype} as "
                f"traced: a block behaves differently from its trace. Use strategy=mirrored."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Modes:
    """The modes of torch during a call."""

    grad: bool
    """Whether the call is recorded for backward."""
    device_type: str
    autocast: torch.dtype | None
    """The dtype of autocast on that type of device; None if it is off."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set the modes for the block."""
        autocast = torch.autocast(self.device_type, dtype=self.autocast, enabled=self.autocast is not None)
        with torch.set_grad_enabled(self.grad), autocast:
            yield


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedCall:
    """One call: of a block, or of a torch function by the model's own code."""

    block: str | None = None
    """Name of the block; None for a function."""
    function: Callable[..., Any] | None = None
    args: Any = ()
    """Arguments, with a `Value` or `ParamRef` instead of each tensor."""
    kwargs: Any = field(default_factory=dict)
    outputs: Any = None
    """The result, in the same form."""
    modes: Modes | None = None
    """The modes that the model's own code has set for the call (`torch.no_grad`); None: those of the forward pass."""

    def reads(self) -> Iterator[Value | ParamRef]:
        """Yield the tensors among the arguments."""
        yield from _tensors((self.args, self.kwargs))

    def makes(self) -> Iterator[Value]:
        """Yield the tensors of the result."""
        yield from (one for one in _tensors(self.outputs) if isinstance(one, Value))


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProgram:
    """The calls of one stage."""

    calls: tuple[RecordedCall, ...]
    received: tuple[int, ...]
    """Values that are received from the previous stage, by number."""
    sent: tuple[int, ...]
    """Values that are sent to the next stage; from the last one, the tensors of the outputs."""
    copied: frozenset[int] = frozenset()
    """Received values into which the stage writes: it uses copies, because a received tensor is a leaf of its graph."""

    def held(self) -> set[str]:
        """Return the names of the model's tensors that calls between blocks use."""
        return {one.name for call in self.calls for one in call.reads() if isinstance(one, ParamRef)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """The recorded computation of a model for inputs of one shape."""

    calls: tuple[RecordedCall, ...]
    num_inputs: int
    """Number of tensors among the inputs: the values 0 to `num_inputs - 1`."""
    outputs: Any
    """The outputs of the model, with a `Value` instead of each tensor."""
    shapes: dict[int, TensorMeta]
    """Number of a value -> its shape."""
    written: dict[int, frozenset[int]] = field(default_factory=dict)
    """Index of a call -> the values into whose memory it writes."""
    storages: dict[int, int] = field(default_factory=dict)
    """Number of a value -> its memory: views of one tensor share one."""

    def blocks(self) -> list[str]:
        """Return the blocks in the order in which they run."""
        return [call.block for call in self.calls if call.block is not None]

    def finals(self) -> tuple[int, ...]:
        """Return the numbers of the output tensors, without duplicates."""
        return tuple(dict.fromkeys(one.number for one in _tensors(self.outputs) if isinstance(one, Value)))

    def last_block(self) -> str | None:
        """Return the block whose result is the only output tensor of the model, and is not read elsewhere; else
        None.
        """
        finals = self.finals()
        makers = [call for call in self.calls if any(one.number in finals for one in call.makes())]
        read = {one.number for call in self.calls for one in call.reads() if isinstance(one, Value)}
        if len(finals) != 1 or len(makers) != 1 or finals[0] in read or not isinstance(makers[0].outputs, Value):
            return None
        return makers[0].block

    def shared_memory(self) -> Iterator[list[int]]:
        """Yield the indices of calls that must be on one stage because they share memory: a sent tensor is a copy.

        One of them writes into a memory that later calls use under several names, as views of one tensor that the
        others create; or it writes into an input of the model, of which each stage has its own copy, and which other
        calls read.
        """
        uses = [{one.number for one in (*call.reads(), *call.makes()) if isinstance(one, Value)} for call in self.calls]
        for write, numbers in self.written.items():
            later = set(self.finals()).union(*uses[write:])
            for storage in {self.storages[number] for number in numbers}:
                live = {number for number in numbers & later if self.storages[number] == storage}
                inputs = {number for number in live if number < self.num_inputs}
                if len(live) > 1 or inputs:
                    makers = [at for at in range(write) if any(one.number in live for one in self.calls[at].makes())]
                    readers = [at for at in range(write + 1, len(uses)) if uses[at] & inputs]
                    yield [*makers, write, *readers]

    def stages_of_calls(self, stage_of: dict[str, int]) -> list[int]:
        """Return the stage of each call; calls between blocks belong to the previous block."""
        stages, now = [], 0
        for call in self.calls:
            now = now if call.block is None else stage_of[call.block]
            stages.append(now)
        return stages

    def cut(self, stage_of: dict[str, int], num_stages: int) -> list[StageProgram]:
        """Return the program of each stage; stages must not decrease along the blocks.

        The model's inputs are not sent: every rank of a replica has them.
        """
        stages = self.stages_of_calls(stage_of)
        made, read = dict[int, int](), dict[int, int]()
        for call, stage in zip(self.calls, stages, strict=True):
            for value in call.reads():
                if isinstance(value, Value):
                    read[value.number] = stage
            for value in call.makes():
                made.setdefault(value.number, stage)
        finals = self.finals()
        read |= dict.fromkeys(finals, num_stages - 1)
        crossing = [
            tuple(number for number in made if made[number] < stage <= read.get(number, -1))
            for stage in range(num_stages)
        ]
        return [
            StageProgram(
                calls=tuple(call for call, one in zip(self.calls, stages, strict=True) if one == stage),
                received=crossing[stage],
                sent=finals if stage == num_stages - 1 else crossing[stage + 1],
                copied=frozenset(crossing[stage]) & self._written_by(stages, stage),
            )
            for stage in range(num_stages)
        ]

    def _written_by(self, stages: Sequence[int], stage: int) -> frozenset[int]:
        found = [written for place, written in self.written.items() if stages[place] == stage]
        return frozenset().union(*found)


def _tensors(tree: Any) -> Iterator[Value | ParamRef]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Value | ParamRef))
