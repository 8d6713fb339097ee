"""A pipeline stage that sets up random keys, buffers and timing for each microbatch, in whatever order they are
computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from trainkit.strategies.pipeline.tracing.program import Program, StageProgram
from trainkit.strategies.pipeline.tracing.stage_module import StageModule

if TYPE_CHECKING:
    from trainkit.strategies.pipeline.replica import PipelineReplica

__all__ = ["BusyTimer", "Chunk", "ChunkStage"]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A microbatch: a shard of the step, or a repetition of one that only fills the schedule."""

    shard: int
    inputs: tuple[Tensor, ...]
    """The tensors among the model's inputs."""
    targets: Any
    share: float
    """Its fraction of the step's samples."""
    counts: bool = True
    """False for a repetition, which has no effect on the result."""


class BusyTimer:
    """Measures the seconds that this rank computes; meaningless on devices that compute asynchronously."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    def reset(self) -> None:
        """Begin again at 0 seconds."""
        self.busy_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the time of the block."""
        start = time.perf_counter()
        yield
        self.busy_s += time.perf_counter() - start


class ChunkStage(PipelineStage):
    """A stage of `torch.distributed.pipelining` for inputs of one shape.

    Shapes are given, so that torch runs no forward pass to infer them: that would change batch statistics.

    Args:
        around: called before and after each microbatch.
        autocast: creates the context of a forward pass.
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
        around: PipelineReplica,
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
        self._microbatches: Sequence[Chunk] = ()

    def take(self, microbatches: Sequence[Chunk]) -> None:
        """Compute these microbatches in the next step."""
        self._microbatches = microbatches

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],  # noqa: ARG002 - every rank has the inputs itself
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,  # noqa: ARG002 - torch's signature; no output is merged
    ) -> Any:
        """Run the forward pass of one microbatch."""
        chunk = self._microbatches[fwd_chunk_id]
        with self._around.clock.running(), _unwrapped():
            self._around.before_forward(chunk)
            self._segment.set_inputs(chunk.inputs)
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
        """Run the backward pass of one microbatch, or that of its inputs alone."""
        with self._around.clock.running(), _unwrapped():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward=full_backward, last_backward=last_backward)
            # Tensors are sent in their memory layout, and received as contiguous ones.
            found = self.bwd_cache.get(bwd_chunk_id, ())
            self.bwd_cache[bwd_chunk_id] = tuple(None if grad is None else grad.contiguous() for grad in found)
            self._around.after_backward()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the rest of a split backward pass."""
        with self._around.clock.running(), _unwrapped():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
            self._around.after_backward()


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the exception of the model instead of the one that torch wraps around it."""
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
