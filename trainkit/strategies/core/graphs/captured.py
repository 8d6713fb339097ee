"""Replay the kernels of a compiled graph as one CUDA graph.

The host launches each kernel of a step, which takes it longer than the kernels of a small model take the device. CUDA
records the launches once, and replays them with one call, on the same addresses: of the parameters and slots, and of
buffers into which each new batch is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from trainkit.errors import first_line
from trainkit.strategies.core.graphs.whole import DirectCall

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_WARM_UP: Final = 3
"""Calls of a graph in a row before it is captured: they load kernels and reserve workspaces, which a capture cannot."""

_log = logging.getLogger(__name__)


class Capture(Protocol):
    """Recorded operations of a device."""

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Record the operations of a function without running them; return its outputs, which `replay` fills."""

    def replay(self) -> None:
        """Run the operations again."""


class CudaCapture:
    """A CUDA graph.

    Args:
        pool: the memory pool that it shares with the other graphs of a step, none of which keeps memory between two
            replays but its outputs.

    Source: torch.cuda.CUDAGraph.
    """

    def __init__(self, pool: _POOL_HANDLE) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def record(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Record the kernels of a function; other threads, such as that of the loader, may use the device meanwhile."""
        capture = torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), capture:  # one that fails leaves its stream current
                return run()
        except RuntimeError:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Let the allocator leave the pool: after an error of CUDA at the end of a capture torch does not, and frees no
        memory that several streams have used until the process ends.
        """
        with suppress(RuntimeError):  # it has left the pool
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001 - has no public name
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)  # noqa: SLF001 - as above

    def replay(self) -> None:
        """Launch all kernels, on the current stream."""
        self._graph.replay()


class CapturedCall:
    """A direct call whose operations are recorded once, and replayed.

    Args:
        call: the call.
        leaves: arguments of the call, for their layouts.
        capture: an empty recording.

    Raises:
        RuntimeError: the device refuses the capture, or the call uses tensors of several devices: a replay repeats the
            numbers that a kernel got from the host.
    """

    def __init__(self, call: DirectCall, leaves: Sequence[Tensor], capture: Capture) -> None:
        tensors = call.tensors()
        if len(devices := sorted({str(tensor.device) for tensor in (*tensors, *leaves)})) > 1:
            raise RuntimeError(f"it uses tensors on {' and '.join(devices)}")
        self._call, self._capture = call, capture
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._leaves = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device) for leaf in leaves
        ]
        torch._foreach_copy_(self._leaves, list(leaves))
        self._outputs = capture.record(lambda: call.outputs(self._leaves))

    def is_of(self, call: DirectCall) -> bool:
        """Return whether a call is the recorded one: the same graph on the same tensors, which are where they were."""
        if call is self._call:
            return True
        if not call.is_same_as(self._call) or [tensor.data_ptr() for tensor in call.tensors()] != self._addresses:
            return False
        self._call = call
        return True

    def __call__(self, leaves: Sequence[Tensor]) -> list[Any]:
        """Return the result of the call, in memory that the next replay does not overwrite."""
        torch._foreach_copy_(self._leaves, list(leaves))
        self._capture.replay()
        return self._call.results_of([output.clone() for output in self._outputs])


class CapturingCaller:
    """Makes direct calls, and captures the graph that is called often; the graphs of other layouts are called directly.

    Args:
        make: makes an empty recording.
    """

    def __init__(self, make: Callable[[], Capture]) -> None:
        self._make = make
        self._captured: CapturedCall | None = None
        self._last: DirectCall | None = None
        self._in_a_row = 0
        self._can = True

    def __call__(self, call: DirectCall, leaves: Sequence[Tensor]) -> list[Any]:
        """Make a call."""
        if self._captured is not None and self._captured.is_of(call):
            return self._captured(leaves)
        self._in_a_row = self._in_a_row + 1 if call is self._last else 1
        self._last = call
        if not self._can or self._in_a_row <= _WARM_UP:
            return call(leaves)
        if (captured := self._capture(call, leaves)) is None:  # the error and the memory of its traceback are gone
            return call(leaves)
        self._captured = captured  # only now: CUDA refuses a pool that has lost its last graph
        return captured(leaves)

    def _capture(self, call: DirectCall, leaves: Sequence[Tensor]) -> CapturedCall | None:
        """Capture a call; None if the device refuses it, which is tried once."""
        try:
            return CapturedCall(call, leaves, self._make())
        except RuntimeError as error:
            self._can = False
            warning = "a step cannot be captured, so its kernels are launched one by one"
            _log.warning("compile.cuda_graphs: %s: %s", warning, first_line(error))
            return None
