"""Compress gradients: bf16 and fp16 here, PowerSGD with torch's own hook for DistributedDataParallel.

The hook averages; sums are needed here, so a bucket is multiplied by the number of ranks first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.strategies.tensors.layouts import in_memory_order

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

    held_group: ClassVar[dist.ProcessGroup | None] = None
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
        Compressor.held_group = dist.group.WORLD
        # It begins exchanges in callbacks, at unpredictable moments: a later bucket's could be matched with wrong ones
        # of other ranks (gloo then hangs), so this one is waited for.
        summed = self._hook(self._state, _Bucket(part, grads, index)).wait()
        if summed.data_ptr() != part.data_ptr():
            part.copy_(summed)
        return lambda: None

    @property
    def steps(self) -> int:
        """Number of steps of PowerSGD."""
        return int(self._state.iter) if self._dtype is None else 0

    def set_steps(self, value: int) -> None:
        """Continue after `value` steps."""
        if self._dtype is None:
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
