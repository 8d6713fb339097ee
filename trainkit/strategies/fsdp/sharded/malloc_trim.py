"""Giving freed memory back to the system, on CPUs."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

__all__ = ["give_freed_memory_back"]

_M_MMAP_THRESHOLD: Final = -3  # of malloc.h
_LARGE: Final = 2**20


def give_freed_memory_back() -> bool:
    """Let this process return a large block of memory as soon as it is freed; whether its C library can be told so.

    What is gathered comes and goes all the time. glibc takes a block that was freed once for a sign to keep others of
    its size on its heap from then on, up to 32 MiB, and the heap falls to pieces: what a rank takes grows to far
    more than what it holds. A fixed threshold costs fresh pages for every block above it.

    Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGE) == 1
