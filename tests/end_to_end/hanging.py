"""Functions that do not return, each in another way."""

from __future__ import annotations

import ctypes
import time


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
