"""Randomness where activations are cut: each rank draws for its own part, and no two draw the same.

All ranks of a replica enter a block with the same key, so that what they draw for whole activations is the same.
Between a module that gives cut activations and the one that adds them up, that would drop the same places of every
part: there each rank draws by a key of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainkit.numerics.hashing import mix64, name_id

__all__ = ["ActivationRngRegions"]


class ActivationRngRegions:
    """Keys the default generators on the way into, and out of, cut activations.

    Nothing is remembered between calls but the last key: a recomputed block goes through the same keys again.

    Args:
        place: of this rank among those of its replica.
        devices: those whose generators the model draws from (the CPU's is keyed as well).
        draws: whether the model may draw random numbers; if not, nothing is done.
    """

    def __init__(self, *, place: int, devices: Sequence[torch.device], draws: bool) -> None:
        self._place = place
        self._generators = [torch.default_generator] if draws else []
        if draws:
            self._generators += [torch.cuda.default_generators[d.index or 0] for d in devices if d.type == "cuda"]
        self._inside: tuple[int, int] | None = None  # the key inside, and the one before

    def enter(self, name: str) -> None:
        """Activations are cut from here on."""
        for generator in self._generators[:1]:
            before = generator.initial_seed()
            if self._inside is None or before != self._inside[0]:
                inside = mix64(mix64(before ^ name_id(name)) ^ (self._place + 1)) & 0xFFFFFFFF
                self._inside = inside, before
                self._set(inside)

    def leave(self, name: str) -> None:
        """They are whole again: every rank draws alike, and other numbers than before."""
        for generator in self._generators[:1]:
            if self._inside is not None and generator.initial_seed() == self._inside[0]:
                self._set(mix64(self._inside[1] ^ name_id(name)) & 0xFFFFFFFF)

    def _set(self, key: int) -> None:
        for generator in self._generators:
            generator.manual_seed(key)
