"""User code with one planted fault, for the tests of which rank a run names.

TRAINKIT_TEST_FAULT="killed:1:3"        what happens, on which rank, in which step
TRAINKIT_TEST_FAULT_AT="callback"       where, instead of in the model: for models that a strategy cuts
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.end_to_end.hanging import keeps_the_interpreter, waits_for_ever
from trainkit.trainer.events import Callback, Run

FAULT = "TRAINKIT_TEST_FAULT"
PLACE = "TRAINKIT_TEST_FAULT_AT"


def _rank() -> int:
    return int(os.environ.get("TRAINKIT_RANK", os.environ.get("RANK", "-1")))  # the parent runs the model too


def _fault() -> tuple[str, int, int]:
    kind, rank, step = os.environ[FAULT].split(":")
    return kind, int(rank), int(step)


def _eat_memory() -> None:
    blocks = []
    while True:
        blocks.append(bytearray(os.urandom(1 << 20)) * 32)


def _exchange() -> None:
    dist.all_reduce(torch.ones(5))


ACTIONS: dict[str, Callable[[], object]] = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exited 0": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "out of memory": _eat_memory,
    "GIL held": keeps_the_interpreter,
    "sleep": waits_for_ever,
}


class Net(nn.Module):
    """A linear model; its fault is planted in the forward of one step."""

    def __init__(self, features: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 2)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            if PLACE not in os.environ:
                fail_at(self.calls)
            self.calls += 1
        outputs: Tensor = self.linear(inputs)
        return outputs


class Fault(Callback):
    """Fails at the end of the planted step."""

    def step_end(self, run: Run, outcome: object) -> None:
        del outcome
        if PLACE in os.environ:
            fail_at(run.state.step)


def fail_at(current: int) -> None:
    """Do what is planted for this step and rank."""
    kind, rank, step = _fault()
    is_here = rank == _rank()
    if current != step:
        return
    if (kind, is_here) in (("extra collective", True), ("missing collective", False)):
        _exchange()
    elif is_here and kind == "raised 'peer'":
        raise RuntimeError("the peer table is broken: connection reset by peer")
    elif is_here and kind == "raised":
        raise ValueError("bad batch 17")
    elif is_here and kind in ACTIONS:
        ACTIONS[kind]()


class Points(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """64 points; on one rank the loader hangs at the sample that is read after some others."""

    splits = ("train",)

    def __init__(self, split: str) -> None:
        self.inputs = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
        self.reads = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        kind, rank, step = _fault()
        self.reads += 1
        if kind == "loader hang" and rank == _rank() and self.reads > 2 * step:
            waits_for_ever()
        return self.inputs[index], int(self.inputs[index].sum() > 0)
