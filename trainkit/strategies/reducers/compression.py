"""Compress gradients with torch's own hooks for DistributedDataParallel, called with trainkit's buckets.

The hooks average; sums are needed here, so a bucket is multiplied by the number of ranks first. For bf16 and fp16 that
cancels their division exactly if the number is a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch.distributed as dist
from torch import Tensor

from trainkit.strategies.tensors.layouts import in_memory_order

Compression = Literal["none", "bf16", "fp16", "powersgd"]
"""The encoding of exchanged gradients."""


class Compressor:
    """Sums buckets of gradients over the default group, with fewer bytes.

    Args:
        kind: bf16 and fp16 round every gradient to 2 bytes; powersgd sends two low-rank matrices instead of one matrix,
            and adds the error to the next step's gradient.
        powersgd_rank: rank of those matrices.
        powersgd_after: number of first steps whose gradients are sent uncompressed; 2 or more.

    Source: Vogels et al. 2019, arXiv:1905.13727; torch.distributed.algorithms.ddp_comm_hooks.
    """

    held_group: ClassVar[dist.ProcessGroup | None] = None
    """The group of the last exchange, which is kept: a thread of gloo refers to it for some microseconds longer, and
    would have to join itself if it released the last reference ("Resource deadlock avoided": the process aborts).
    """

    def __init__(self, kind: Compression, *, powersgd_rank: int = 1, powersgd_after: int = 1000) -> None:
        self.takes_buckets = kind != "powersgd"
        """Whether an exchange may start before the previous one has ended. PowerSGD's hook begins exchanges in
        callbacks, at unpredictable moments: concurrent exchanges could be matched with wrong ones of other ranks (gloo
        then hangs).
        """
        # Import them here: they import torch's optimizers, which would slow down every start.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: PLC0415

        self._state: powerSGD_hook.PowerSGDState | None = None
        hook: Any = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}.get(kind)
        if kind == "powersgd":
            hook = powerSGD_hook.powerSGD_hook
            self._state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=powersgd_rank,
                start_powerSGD_iter=powersgd_after,
                orthogonalization_epsilon=1e-8,  # else a layer whose gradient is zero would become NaN
            )
        self._hook = hook

    def sum(self, part: Tensor, grads: Sequence[Tensor], *, index: int) -> Callable[[], None]:
        """Start to sum a bucket, (numel,), in place; return a function that waits for the sum. Collective."""
        part.mul_(dist.get_world_size())
        future = self._hook(self._state, _Bucket(part, grads, index))

        def wait() -> None:
            summed = future.wait()
            if summed.data_ptr() != part.data_ptr():
                part.copy_(summed)

        if self.takes_buckets:
            return wait
        Compressor.held_group = dist.group.WORLD
        wait()
        return lambda: None

    @property
    def steps(self) -> int:
        """Number of steps of PowerSGD."""
        return int(self._state.iter) if self._state is not None else 0

    def set_steps(self, value: int) -> None:
        """Continue after `value` steps."""
        if self._state is not None:
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
