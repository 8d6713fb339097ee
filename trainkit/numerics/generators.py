"""Hash integers to keys, and seed the default generators of a process with them: those of torch, `random` and NumPy.

The hash is the one source of order and randomness. It is the splitmix64 finalizer (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators"), chained over integers. docs/numbers.md describes it in full, so that
anyone can derive a run's sample order by hand.

User code draws from the generators, in any thread. A thread that sets them and must be the only one to draw from them
holds `GENERATORS_LOCK`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch
from numpy.random import mtrand
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


GENERATORS_LOCK: Final = RLock()
"""Held by a thread while it draws from a default generator of the host."""


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return torch's default generators of some devices, that of the CPU first and always."""
    generators = [torch.default_generator]
    for device in devices:
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


def seed_host(key: int) -> None:
    """Seed the generators of the host: torch's of the CPU, `random` and NumPy (the low 32 bits)."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the generator that a user's own code may use


class GeneratorStates:
    """The states of the generators from which a step may draw: `random`, NumPy, and torch's of some devices.

    Copying and restoring those of `random` and NumPy takes about 75 microseconds.

    Args:
        devices: devices of torch's generators, the CPU always; None: no generator of torch.

    Example:
        >>> before = GeneratorStates([])
        >>> _ = torch.rand(1)
        >>> before.moved(), GeneratorStates([]).moved()
        (True, False)
    """

    def __init__(self, devices: Iterable[torch.device] | None = None) -> None:
        self._torch = [(rng, rng.get_state()) for rng in ([] if devices is None else generators_of(devices))]
        self._python, self._numpy = random.getstate(), _numpy_state()

    def moved(self) -> bool:
        """Return whether any number was drawn since."""
        numpy = _numpy_state()
        # The last two of NumPy's are the normal number that it keeps of a pair: the next call draws nothing else.
        host = random.getstate() != self._python or numpy[2:] != self._numpy[2:]
        return (
            host
            or bool((numpy[1] != self._numpy[1]).any())
            or not all(torch.equal(state, rng.get_state()) for rng, state in self._torch)
        )

    def restore(self) -> None:
        """Set these states again."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002 - the generator that a user's own code may use
        for generator, state in self._torch:
            generator.set_state(state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set the states of `random` and NumPy inside of a `with` block."""
        current = GeneratorStates()
        self.restore()
        try:
            yield
        finally:
            current.restore()


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002 - the generator that a user's own code may use


class Untouched:
    """Seed the default generators for a `with` block, and restore their states at its end.

    Other threads that hold the lock while they draw wait meanwhile. The block costs about 20 microseconds.

    Args:
        seed: seed of the host's generators inside of the block.
        devices: devices whose generators are restored as well; the CPU's always is.

    Example:
        >>> before = torch.default_generator.get_state()
        >>> with Untouched(seed=3):
        ...     _ = torch.rand(2), random.random(), np.random.rand()
        >>> torch.equal(torch.default_generator.get_state(), before)
        True
    """

    def __init__(self, *, seed: int, devices: Iterable[torch.device] = ()) -> None:
        self._seed, self._devices = seed, devices

    def __enter__(self) -> None:
        """Take the lock, save the states and seed."""
        GENERATORS_LOCK.acquire()
        self._torch = [(rng, rng.get_state()) for rng in generators_of(self._devices)]
        self._python = random.getstate()
        # Replacing the generator of np.random takes 0.2 microseconds; copying its state would take 60.
        self._numpy = mtrand.get_bit_generator()
        mtrand.set_bit_generator(_SPARE.pop() if _SPARE else np.random.MT19937())
        seed_host(self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the states and release the lock."""
        _SPARE.append(mtrand.get_bit_generator())
        mtrand.set_bit_generator(self._numpy)
        random.setstate(self._python)
        for generator, state in self._torch:
            generator.set_state(state)
        GENERATORS_LOCK.release()


_SPARE: Final[list[Any]] = []
"""Generators of NumPy that no block uses at the moment."""
