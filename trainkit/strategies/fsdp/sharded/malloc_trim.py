"""Return freed memory to the system, on CPUs."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

__all__ = ["give_freed_memory_back"]

_M_MMAP_THRESHOLD: Final = -3  # a constant of malloc.h
_LARGE: Final = 2**20


def give_freed_memory_back() -> bool:
    """Make this process return large blocks of memory as soon as they are freed; return whether the C library supports
    it.

    Gathered parameters are allocated and freed all the time. After glibc has freed a block once, it keeps blocks of
    that size on its heap from then on, up to 32 MiB, and the heap fragments: a rank's memory grows far beyond what it
    needs. A fixed threshold costs new pages for every block above it.

    Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGE) == 1
