"""A forward pass as a list of calls, cut into stretches that run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from trainkit.errors import TrainingError

__all__ = ["Modes", "ParamRef", "Program", "RecordedCall", "StageProgram", "TensorMeta", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that is an input of the model, or that a call has made."""

    number: int


@dataclass(frozen=True, slots=True)
class ParamRef:
    """A parameter or buffer that the model's own code between its blocks uses, by canonical name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is known of a value beforehand."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this shape; on the meta device it takes no memory."""
        return torch.empty(self.size, dtype=self.dtype, device=device)

    def check(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor of another shape: the stage that waits for it would wait for ever.

        Raises:
            TrainingError: it has another one.
        """
        if tuple(tensor.shape) != self.size or tensor.dtype != self.dtype:
            raise TrainingError(
                f"a stage has computed {tuple(tensor.shape)} {tensor.dtype} where its trace says {self.size} "
                f"{self.dtype}: a block does something else than when it was traced. Use strategy=mirrored."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Modes:
    """The modes of torch that a call is made in."""

    grad: bool
    """Whether what the call does is kept for backward."""
    device_type: str
    autocast: torch.dtype | None
    """The dtype of autocast on that type of device; None where it is off."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set the modes for the calls inside."""
        autocast = torch.autocast(self.device_type, dtype=self.autocast, enabled=self.autocast is not None)
        with torch.set_grad_enabled(self.grad), autocast:
            yield


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedCall:
    """One call: of a block, or of a function of torch by the model's own code."""

    block: str | None = None
    """The block's name; None for a function."""
    function: Callable[..., Any] | None = None
    args: Any = ()
    """Arguments, with a `Value` or `Held` in the place of each tensor."""
    kwargs: Any = field(default_factory=dict)
    outputs: Any = None
    """What it gives, likewise."""
    modes: Modes | None = None
    """The modes that the model's own code has set around it (`torch.no_grad`); None: those of the forward pass."""

    def reads(self) -> Iterator[Value | ParamRef]:
        """The tensors among its arguments."""
        yield from _tensors((self.args, self.kwargs))

    def makes(self) -> Iterator[Value]:
        """The tensors it gives."""
        yield from (one for one in _tensors(self.outputs) if isinstance(one, Value))


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProgram:
    """The calls of one stage."""

    calls: tuple[RecordedCall, ...]
    received: tuple[int, ...]
    """Values that come from the stage before, by number."""
    sent: tuple[int, ...]
    """Values that go on to the next stage; from the last one, the tensors of the outputs."""
    copied: frozenset[int] = frozenset()
    """Those received that the stage writes into: it gets copies, for what has arrived is a leaf of its graph."""

    def held(self) -> set[str]:
        """Tensors of the model that calls between blocks use."""
        return {one.name for call in self.calls for one in call.reads() if isinstance(one, ParamRef)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """What a model does with inputs of one shape."""

    calls: tuple[RecordedCall, ...]
    num_inputs: int
    """Tensors among the inputs: the values 0 to `num_inputs - 1`."""
    outputs: Any
    """What the model gives, with a `Value` in the place of each tensor."""
    shapes: dict[int, TensorMeta]
    """Number of a value -> its shape."""
    written: dict[int, frozenset[int]] = field(default_factory=dict)
    """Place of a call -> the values whose memory it writes into."""
    storages: dict[int, int] = field(default_factory=dict)
    """Number of a value -> its memory: views of one tensor have one."""

    def blocks(self) -> list[str]:
        """The blocks in the order in which they run."""
        return [call.block for call in self.calls if call.block is not None]

    def finals(self) -> tuple[int, ...]:
        """The numbers of the tensors that the model gives, each once."""
        return tuple(dict.fromkeys(one.number for one in _tensors(self.outputs) if isinstance(one, Value)))

    def shared_memory(self) -> Iterator[list[int]]:
        """The calls that must be on one stage because of memory, by place: a tensor that is sent is a copy.

        One of them writes into a memory that later calls know under several names, views of one tensor that the others
        make; or into an input of the model, which each stage has by itself, and which the others read.
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
        """The stage of each call; what runs between blocks belongs to the block before it."""
        stages, now = [], 0
        for call in self.calls:
            now = now if call.block is None else stage_of[call.block]
            stages.append(now)
        return stages

    def cut(self, stage_of: dict[str, int], num_stages: int) -> list[StageProgram]:
        """The stretch of each stage; stages must not decrease along the blocks.

        The model's inputs are not sent on: every rank of a replica has them.
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
