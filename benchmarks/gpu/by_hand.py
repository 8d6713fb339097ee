"""Train by a hand-written loop, for comparison: one process, one device, the whole step compiled on a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.workloads import Workload

Step = Callable[[Tensor, Tensor], Tensor]


def step_of(model: nn.Module, workload: Workload, *, compiled: bool) -> Step:
    """Return a function that computes loss and gradients of one part of a batch."""

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=workload.mixed):
            outputs = model(inputs)
        loss: Tensor = functional.cross_entropy(outputs.float().flatten(0, targets.dim() - 1), targets.flatten())
        return loss

    chosen = torch.compile(loss_of) if compiled else loss_of

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = chosen(inputs, targets)
        (loss / workload.parts).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def train(workload: Workload, device: torch.device, *, steps: int, window: int) -> tuple[list[float], int]:
    """Train; return the seconds a step of each window after the first third, and the operations of a step."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" and workload.mixed else "highest")
    torch.backends.cudnn.benchmark = True  # as trainkit does, and in the first turn as in later ones
    model = workload.make_model().to(device)
    inputs, targets = (tensor.to(device) for tensor in workload.make_batch())
    if workload.channels_last:
        model, inputs = model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    counter = FlopCounterMode(display=False)
    with counter:
        step_of(model, workload, compiled=False)(inputs[:2], targets[:2])  # two: batch norm takes no single sample
    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    step = step_of(model, workload, compiled=device.type == "cuda")
    shards = list(zip(inputs.chunk(workload.parts), targets.chunk(workload.parts), strict=True))
    stamps = []
    for number in range(steps):
        for shard in shards:
            step(*shard)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number >= steps // 3 and (number - steps // 3) % window == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())
    step_seconds = [(later - stamp) / window for stamp, later in itertools.pairwise(stamps)]
    return step_seconds, counter.get_total_flops() * len(inputs) // 2
