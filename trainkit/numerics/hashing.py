"""Integer hashing: the one source of order and randomness.

It is the splitmix64 finalizer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), chained
over integers. docs/numbers.md describes it in full, so that anyone can derive a run's sample order by hand.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """Scramble 64 bits, one to one.

    Example:
        >>> hex(mix64(0))
        '0xe220a8397b1dcdaf'
    """
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def mix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply `mix64` to every element; uint64 arithmetic wraps where the scalar form masks."""
    values = values + np.uint64(_GAMMA)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def hash64(*parts: int) -> int:
    """Hash integers, in order, to 64 bits.

    Example:
        >>> hash64(1, 2) != hash64(2, 1)
        True
    """
    state = 0
    for part in parts:
        state = mix64(state ^ (part & _MASK))
    return state


def key32(*parts: int) -> int:
    """Hash integers to the 32 bits that a CPU generator of torch keeps of its seed."""
    return hash64(*parts) & 0xFFFFFFFF


def name_id(name: str) -> int:
    """Return a name as 64 bits: the first 8 bytes of its BLAKE2b digest, little-endian."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
