"""All-reduce through shared memory: for CPU processes of one host, at the speed of a copy.

Every rank packs its gradients into its own slot; each sums one slice of all slots, in the order of the ranks; each
copies the whole result. There are two barriers per step: all slots are written, all slices are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.objectives.base import Collective
from trainkit.strategies.reducers.shared_segment import SharedMemorySegment
from trainkit.strategies.tensors.flat_buffer import FlatBuffer

__all__ = ["SharedMemoryTransport"]


class SharedMemoryTransport:
    """Sums over the ranks of one host through memory that all have mapped.

    Args:
        collective: the ranks; used once, to share the memory.
        timeout_s: seconds to wait for another rank in an exchange.
    """

    def __init__(self, collective: Collective, *, timeout_s: float) -> None:
        self._collective, self._timeout_s = collective, timeout_s
        self._segment: SharedMemorySegment | None = None

    def vector(self, packing: FlatBuffer) -> Tensor:
        """Return the slot of this rank; collective at the first call, which allocates the memory."""
        if self._segment is None:
            self._segment = SharedMemorySegment(self._collective, numel=packing.numel, dtype=packing.dtype)
            self._own = torch.empty(packing.numel, dtype=packing.dtype)
            size = -(-packing.numel // self._collective.num_ranks)
            start = min(self._collective.rank * size, packing.numel)
            length = min(size, packing.numel - start)
            self._parts = [slot.narrow(0, start, length) for slot in self._segment.slots]
            self._total = self._segment.total.narrow(0, start, length)
        return self._segment.slots[self._collective.rank]

    def sum(self, flat: Tensor) -> Tensor:  # noqa: ARG002 - `flat` is the slot
        """Return the sum over all ranks, in this rank's own memory; collective.

        Raises:
            TrainingError: a rank has ended or does not arrive; names it.
        """
        segment = self._segment
        assert segment is not None
        segment.barrier(self._timeout_s)  # all slots are written
        torch.add(self._parts[0], self._parts[1], out=self._total)
        for part in self._parts[2:]:
            self._total.add_(part)
        segment.barrier(self._timeout_s)  # all slices are summed; no slot is read from here on
        # The next exchange overwrites the total only after its first barrier, when all have copied this one. It is
        # copied because clipping and unscaling write into gradients.
        return self._own.copy_(segment.total)

    def close(self) -> None:
        """Mark this rank as gone for the others, and release the memory."""
        if self._segment is not None:
            self._segment.close()
            del self._parts, self._total
            self._segment = None
