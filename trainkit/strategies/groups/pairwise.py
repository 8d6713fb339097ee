"""Send tensors between pairs of ranks, also tensors of GPUs over gloo."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.cluster.host import mig_instances
from trainkit.errors import Problem

Pairs = Sequence[tuple[int, Tensor]]
"""Ranks, each with the tensor that is sent to it or received from it."""


def exchange(sent: Pairs, received: Pairs) -> None:
    """Send tensors to ranks and receive tensors from ranks, in any order; collective, empty tensors are left out.

    Gloo, which ranks on MIG instances use, sends memory of the host alone and ends the process for that of a GPU:
    tensors of a GPU are copied to the host for it, and back.
    """
    out = [(peer, tensor.cpu() if needs_host(tensor.device) else tensor) for peer, tensor in sent if tensor.numel()]
    into = [(peer, tensor, _like_on_host(tensor)) for peer, tensor in received if tensor.numel()]
    operations = [
        *(dist.P2POp(dist.isend, tensor, peer) for peer, tensor in out),
        *(dist.P2POp(dist.irecv, copy, peer) for peer, _, copy in into),
    ]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for _, tensor, copy in into:
        if copy is not tensor:
            tensor.copy_(copy)


def sending_problems(strategy: str, num_gpus: int) -> list[Problem]:
    """Return the problem, on MIG instances, of a strategy whose ranks send tensors of GPUs by torch's own code."""
    if not (num_gpus and mig_instances(os.environ)):
        return []
    rule = (
        "sends tensors between GPUs, which MIG instances cannot: NCCL does not support them, and gloo sends "
        "memory of the host alone. Use whole GPUs, or another strategy."
    )
    return [Problem(key="strategy", value=strategy, rule=rule)]


def needs_host(device: torch.device) -> bool:
    """Return whether the ranks send tensors of a device through the memory of the host."""
    return device.type == "cuda" and f"{device.type}:gloo" in dist.get_backend_config().split(",")


def _like_on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu") if needs_host(tensor.device) else tensor
