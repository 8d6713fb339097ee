"""Functions that do not return, each in another way."""

from __future__ import annotations

import ctypes
import time

from torch import Tensor, nn


def waits_for_ever() -> None:
    """Sleep, and let other threads run."""
    time.sleep(1 << 20)


def loops_for_ever() -> None:
    """Compute without an end."""
    while True:
        pass


def keeps_the_interpreter() -> None:
    """Lock a mutex twice in C, without releasing the GIL; signals do not end it, as they would a sleep."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


class Looping(nn.Linear):
    """A classifier of the digits whose pass number 11 does not return."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Classify, or loop."""
        self.passes += 1
        if self.passes > 10:
            loops_for_ever()
        return super().forward(inputs.flatten(1))
