"""The common part of datasets that are in memory as tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """Tensors of one length, of which each sample has one row; a derived class says their shapes and dtypes."""

    _arrays: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)

    def _keep(self, *arrays: Tensor) -> None:
        """Keep the tensors of all samples: the inputs, and the targets if there are any."""
        object.__setattr__(self, "_arrays", arrays)

    def __len__(self) -> int:
        """Return the number of samples in this split."""
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return a sample: its row of each tensor."""
        return tuple(array[index] for array in self._arrays)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of all samples."""
        return self._arrays
