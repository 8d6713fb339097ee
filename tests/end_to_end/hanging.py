"""A user's model and dataset that stop making progress on one rank, in the way that the environment names.

HANG="1:4:loop"     the rank, its forward pass in training (or its sample, for loader), and the kind
"""

from __future__ import annotations

import ctypes
import os
import time

import torch
from torch import Tensor

from trainkit.models.mlp import Mlp

HANG = "HANG"
KINDS = ("sleep", "loop", "gil", "loader")


def _is_here(kinds: tuple[str, ...], count: int) -> str | None:
    rank, number, kind = os.environ.get(HANG, "-1:0:").split(":")
    here = os.environ.get("TRAINKIT_RANK") == rank and int(number) == count and kind in kinds
    return kind if here else None


def waits_for_ever() -> None:
    """Sleep, and let other threads run."""
    time.sleep(3600)


def loops_for_ever() -> None:
    """Compute without an end."""
    while True:
        pass


def keeps_the_interpreter() -> None:
    """Sleep in C without letting any other thread of Python's run."""
    ctypes.PyDLL(None).sleep(3600)


class Stuck(Mlp):
    """A model whose forward pass does not return, once."""

    passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        kind = _is_here(("sleep", "loop", "gil"), self.passes)
        if kind is not None:
            {"sleep": waits_for_ever, "loop": loops_for_ever, "gil": keeps_the_interpreter}[kind]()
        return super().forward(inputs)


class Samples:
    """Points whose reading does not return, once."""

    num_classes = 2

    def __init__(self, count: int = 64, split: str = "train") -> None:
        self.count, self.reads = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        if _is_here(("loader",), self.reads):
            waits_for_ever()
        return torch.full((5,), float(index)), index % 2
