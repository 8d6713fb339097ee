"""Sums and gathers of small tensors and of JSON over the ranks of a run, and the ranks that a task computes with."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.files import parse_json
from trainkit.objectives.base import Collective
from trainkit.strategies.flight_recorder import note_exchange

_T = TypeVar("_T")
_ABORT_S: Final = 2.0
"""Seconds that a failed rank waits for its connections to close."""


def broadcast_values(
    tensor: Tensor, group: dist.ProcessGroup | None = None, device: torch.device | None = None, source: int = 0
) -> None:
    """Overwrite a tensor with the values of one rank of a group, also if their strides differ; collective.

    Backends send tensors in memory order, and NCCL requires contiguous ones.

    Args:
        tensor: a tensor with the same shape and dtype on every rank.
        group: the ranks that take part; None: all.
        device: the device whose tensors they exchange; None: that of the tensor.
        source: the rank within the group that has the values.
    """
    values = tensor.detach()
    buffer = values.contiguous().to(device)
    if buffer.numel():  # gloo takes bytes of any dtype
        dist.broadcast(buffer.reshape(-1).view(torch.uint8), group=group, group_src=source)
    if buffer is not values and dist.get_rank(group) != source:
        values.copy_(buffer)


@dataclass(frozen=True, kw_only=True)
class LocalCollective:
    """The collective of a single rank: a sum is the tensor itself."""

    rank: int = 0
    num_ranks: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a list with only this tensor."""
        return [tensor]


@dataclass(frozen=True, kw_only=True)
class GroupCollective:
    """The ranks of a process group, or the data ranks that they form.

    If several ranks compute one replica, all of them take part and get the same result, but only the tensor of one rank
    per replica counts.
    """

    rank: int
    """Rank of this process; the data rank, if several ranks compute a replica."""
    num_ranks: int
    device: torch.device
    representatives: tuple[int, ...] = ()
    """The rank of the group whose tensor counts for each data rank; empty: every rank is a data rank."""
    group: dist.ProcessGroup | None = None
    """The ranks that take part; None: all of the run."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over ranks, added in rank order; collective.

        Small tensors of one shape only: every rank receives all tensors, which makes the order, and so the bits, the
        same on all ranks and in every run. No sizes are exchanged, so the host does not wait.
        """
        local = tensor.detach().to(self.device)
        note_exchange(local, "sum", group=self.group)
        total = torch.zeros_like(tensor)
        for part in self._of_data_ranks(self._exchange_all(local)):
            total += part.to(tensor.device)
        return total

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of every rank, by rank; shapes may differ in their first dim; collective."""
        local = tensor.detach().to(self.device)
        sizes = self._exchange_all(torch.tensor([local.shape[0] if local.dim() else 1], device=self.device))
        lengths = [int(size.item()) for size in sizes]
        if len(set(lengths)) == 1:
            return [part.to(tensor.device) for part in self._of_data_ranks(self._exchange_all(local))]
        padded = local.new_zeros((max(lengths), *local.shape[1:]))
        padded[: local.shape[0]] = local
        parts = self._of_data_ranks(self._exchange_all(padded))
        return [
            part[:length].to(tensor.device) for part, length in zip(parts, self._of_data_ranks(lengths), strict=True)
        ]

    def _of_data_ranks(self, parts: list[_T]) -> list[_T]:
        return [parts[rank] for rank in self.representatives] if self.representatives else parts

    def _exchange_all(self, tensor: Tensor) -> list[Tensor]:
        contiguous = tensor.contiguous()
        parts = [torch.empty_like(contiguous) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, contiguous, group=self.group)
        return parts


def all_gather_object(content: _T, all_ranks: Collective) -> list[_T]:
    """Gather an object of JSON from every rank, in rank order; collective.

    Example:
        >>> from trainkit.strategies.collectives import LocalCollective
        >>> all_gather_object({"written": True}, LocalCollective())
        [{'written': True}]
    """
    content_bytes = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    return [parse_json(part.cpu().numpy().tobytes()) for part in all_ranks.gather(content_bytes)]


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks that a task computes with; by default only the task itself."""

    data_ranks: Collective = field(default_factory=LocalCollective)
    """Sums of small tensors over the data ranks."""
    all_ranks: Collective = field(default_factory=LocalCollective)
    """Sums of small tensors over all processes."""
    is_joined: bool = False
    """Whether they are connected by torch's default process group, which `close` leaves."""

    def close(self, *, failed: bool) -> None:
        """Leave the process group.

        Args:
            failed: whether to break the connections, so that the other ranks need not wait for this one.
        """
        if not self.is_joined or not dist.is_initialized():
            return
        if not failed:
            dist.destroy_process_group()
            return
        # NCCL and gloo wait for pending exchanges, which may never end
        thread = threading.Thread(target=_abort_groups, name="abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)


def _abort_groups() -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # the others know it already
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - destroying them waits for the other ranks
