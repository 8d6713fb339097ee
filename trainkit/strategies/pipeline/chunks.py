"""A stage that knows its microbatches: keys, buffers and time belong to each of them, in whatever order they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from trainkit.strategies.pipeline.tracing.program import Program, StageProgram
from trainkit.strategies.pipeline.tracing.stage_module import StageModule

__all__ = ["BusyTimer", "Chunk", "ChunkStage"]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A microbatch: a shard of the step, or a repeat of one that only fills the schedule."""

    shard: int
    inputs: tuple[Tensor, ...]
    """The tensors among the model's inputs."""
    targets: Any
    share: float
    """Its samples over the step's."""
    counts: bool = True
    """False for a repeat: it leaves no trace."""


class BusyTimer:
    """Seconds that this rank computes; on devices that compute beside the host they mean nothing."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside."""
        start = time.perf_counter()
        yield
        self.busy_s += time.perf_counter() - start


class MicrobatchHooks:
    """What a stage does around each microbatch; see `PipelineReplica`."""

    clock: BusyTimer

    def before_forward(self, chunk: Chunk) -> None:
        """Keys and buffers of its shard."""
        raise NotImplementedError

    def after_forward(self, chunk: Chunk, stage: int) -> None:
        """Read the buffers that it left."""
        raise NotImplementedError

    def after_backward(self) -> None:
        """Take the gradients that it left, where they are summed apart."""
        raise NotImplementedError


class ChunkStage(PipelineStage):
    """A stage of `torch.distributed.pipelining` for inputs of one shape.

    Shapes are given, so that torch runs no forward pass to find them: that would spoil batch statistics.

    Args:
        segment: computes it.
        stage: its number.
        stretch: what is received and sent.
        program: knows the shapes of those.
        num_stages: stages there are.
        device: where it computes.
        group: the ranks of the replica.
        around: what happens around each microbatch.
        autocast: makes the context of a forward pass.
    """

    def __init__(
        self,
        segment: StageModule,
        stretch: StageProgram,
        program: Program,
        *,
        stage: int,
        num_stages: int,
        device: torch.device,
        group: ProcessGroup,
        around: MicrobatchHooks,
        autocast: Callable[[], Any],
    ) -> None:
        received = stretch.received if stage else tuple(range(program.num_inputs))
        super().__init__(
            segment,
            stage,
            num_stages,
            device,
            input_args=tuple(_described(program, number) for number in received),
            output_args=tuple(_described(program, number) for number in stretch.sent),
            group=group,
        )
        self._segment, self._around, self._autocast = segment, around, autocast
        self.microbatches: Sequence[Chunk] = ()
        """Those of the step to come."""

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],  # noqa: ARG002 - every rank has the inputs itself
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,  # noqa: ARG002 - torch's signature; no output is merged
    ) -> Any:
        """The forward pass of one microbatch."""
        chunk = self.microbatches[fwd_chunk_id]
        with self._around.clock.running(), _unwrapped():
            self._around.before_forward(chunk)
            self._segment.inputs = chunk.inputs
            with self._autocast():
                outputs = super().forward_one_chunk(fwd_chunk_id, chunk.inputs, kwargs, save_forward_output=False)
            self._around.after_forward(chunk, self.stage_index)
        return outputs

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """The backward pass of one microbatch, or that of its inputs alone."""
        with self._around.clock.running(), _unwrapped():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward=full_backward, last_backward=last_backward)
            # Sent as they lie in memory, and received as tensors without gaps.
            found = self.bwd_cache.get(bwd_chunk_id, ())
            self.bwd_cache[bwd_chunk_id] = tuple(None if grad is None else grad.contiguous() for grad in found)
            self._around.after_backward()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The rest of a backward pass that was split."""
        with self._around.clock.running(), _unwrapped():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
            self._around.after_backward()


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise what the model raised, not torch's account of it."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


def _described(program: Program, number: int) -> Tensor:
    shape = program.shapes[number]
    wants_gradient = number >= program.num_inputs and (shape.dtype.is_floating_point or shape.dtype.is_complex)
    return shape.empty(torch.device("meta")).requires_grad_(wants_gradient)
