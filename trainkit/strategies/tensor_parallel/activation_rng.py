"""Random numbers for sharded activations: each rank draws for its own part, with a different key.

All ranks of a replica enter a block with the same key, so that they draw the same numbers for full activations. Between
a module with sharded outputs and the one that sums them, equal numbers would drop the same positions of every part:
there each rank draws with its own key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainkit.numerics.hashing import mix64, name_id

__all__ = ["ActivationRngRegions"]


class ActivationRngRegions:
    """Sets the keys of the default generators on entering and leaving sharded activations.

    Only the last key is stored between calls: a recomputed block uses the same keys again.

    Args:
        place: position of this rank in its replica.
        devices: the devices whose generators the model uses (the CPU's is always included).
        draws: whether the model may draw random numbers; if not, nothing is done.
    """

    def __init__(self, *, place: int, devices: Sequence[torch.device], draws: bool) -> None:
        self._place = place
        self._generators = [torch.default_generator] if draws else []
        if draws:
            self._generators += [torch.cuda.default_generators[d.index or 0] for d in devices if d.type == "cuda"]
        self._inside: tuple[int, int] | None = None  # the key inside, and the one before

    def enter(self, name: str) -> None:
        """Set this rank's key, because activations are sharded from here on."""
        for generator in self._generators[:1]:
            before = generator.initial_seed()
            if self._inside is None or before != self._inside[0]:
                inside = mix64(mix64(before ^ name_id(name)) ^ (self._place + 1)) & 0xFFFFFFFF
                self._inside = inside, before
                self._set(inside)

    def leave(self, name: str) -> None:
        """Set a common key, because activations are full again: every rank draws the same, but other numbers than
        before.
        """
        for generator in self._generators[:1]:
            if self._inside is not None and generator.initial_seed() == self._inside[0]:
                self._set(mix64(self._inside[1] ^ name_id(name)) & 0xFFFFFFFF)

    def _set(self, key: int) -> None:
        for generator in self._generators:
            generator.manual_seed(key)
