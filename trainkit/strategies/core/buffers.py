"""Buffers that the forward pass updates, for example the running statistics of batch normalisation.

Each shard starts from the step's buffers; their values after its forward pass are weighted by its share of the samples
and summed like a gradient. Momentum thus acts once per step, for any number of shards.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class StepBuffers:
    """The buffers of a model through the shards of a step.

    Buffers that no forward pass updates cost nothing. `watch` finds the updated ones in a forward pass, by torch's
    version counters; the ranks agree on them and pass them to `settle`.

    Args:
        dtype: of their sums.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.names = tuple(name for name, _ in model.named_buffers())
        self._all = [_owner(model, name) for name in self.names]
        self._chosen = self._all
        self._dtype = dtype
        self._start: list[Tensor] = []
        self._sums: list[Tensor] | None = None
        self._in_step = False

    @contextmanager
    def watch(self) -> Iterator[list[float]]:
        """Run a forward pass inside; the list then holds 1.0 for each buffer that it updated, in the order of `names`.

        The buffers are restored afterwards.
        """
        self.begin_step()
        before = self.versions()
        changed: list[float] = []
        yield changed
        changed.extend(self.changed_since(before))
        self.reset()

    def versions(self) -> list[tuple[int, int]]:
        """Return the versions of the buffers, for `changed_since` to compare with."""
        return [(id(tensor), tensor._version) for tensor in self.tensors()]  # noqa: SLF001 - has no public name

    def changed_since(self, before: Sequence[tuple[int, int]]) -> list[float]:
        """Return 1.0 for each buffer that a forward pass has updated since `versions` and the start of the step."""
        # Values too: torch's batch normalisation updates its statistics without counting a version.
        differs = [not torch.equal(tensor, start) for tensor, start in zip(self.tensors(), self._start, strict=True)]
        after = self.versions()
        return [float(old != new or moved) for old, new, moved in zip(before, after, differs, strict=True)]

    def settle(self, changed: Sequence[float]) -> None:
        """Keep only the buffers that a forward pass updates, on any rank; also in the middle of a step."""
        kept = [place for place, flag in enumerate(changed) if flag]
        if self._start:
            self._start = [self._start[place] for place in kept]
        if self._sums is not None:
            self._sums = [self._sums[place] for place in kept]
        self._chosen = [self._all[place] for place in kept]

    def settle_like(self, other: StepBuffers) -> None:
        """Keep the same buffers as those of another copy of the model."""
        chosen = {id(place) for place in other._chosen}
        self._chosen = [own for own, its in zip(self._all, other._all, strict=True) if id(its) in chosen]

    def in_all_places(self, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the sum for each buffer that a forward pass updates, in the order of `names`; None for the others."""
        found = dict(zip(map(id, self._chosen), sums, strict=True))
        return [found.get(id(place)) for place in self._all]

    def shapes(self) -> list[torch.Size]:
        """Return the shapes of the tensors that `take` returns."""
        return [tensor.shape for tensor in self.tensors()]

    def begin_step(self) -> None:
        """Store the values that every shard of the step starts from."""
        self._start = [tensor.detach().clone() for tensor in self.tensors()]
        self._sums = None
        self._in_step = True

    def end_forward(self, share: float, within: Container[nn.Module] | None = None) -> None:
        """Read the buffers after a forward pass; before backward, which may recompute it.

        Args:
            share: this shard's samples over the step's.
            within: the modules that it ran; None: all.
        """
        if not self._chosen:
            return
        # Integers (counters) are summed as shares of what they advanced by; those add up to the advance.
        parts = [
            (tensor.detach() if start.is_floating_point() else tensor - start).to(self._dtype)
            * (share if within is None or owner in within else 0.0)
            for tensor, start, (owner, _) in zip(self.tensors(), self._start, self._chosen, strict=True)
        ]
        if self._sums is None:
            self._sums = parts
        else:
            torch._foreach_add_(self._sums, parts)

    def reset(self) -> None:
        """Restore the values of the start of the step; by `.data`, so that a later backward pass still works."""
        for tensor, start in zip(self.tensors(), self._start, strict=True):
            tensor.data.copy_(start)

    def recover(self) -> None:
        """Undo the changes of an interrupted step; does nothing between steps."""
        if self._in_step:
            self.reset()
            self._sums, self._in_step = None, False

    def take(self) -> list[Tensor]:
        """Return the sums over the shards since the last call; zeros if there was none."""
        sums, self._sums = self._sums, None
        if sums is None:
            return [torch.zeros_like(start, dtype=self._dtype) for start in self._start]
        return sums

    def became_nonfinite(self, sums: Sequence[Tensor | None]) -> list[Tensor]:
        """Return () flags, one a device: whether a buffer that was finite is not finite in the sums over all shards."""
        pairs = zip(self._start, sums, strict=True)
        both = [(start, total) for start, total in pairs if total is not None and start.is_floating_point()]
        both = [(start, total) for start, total in both if total.numel()]
        flags = []
        for device in {total.device for _, total in both}:
            here = [(start, total) for start, total in both if total.device == device]
            before = torch.stack(_largest([start for start, _ in here]))
            after = torch.stack(_largest([total for _, total in here]))
            flags.append((torch.isfinite(before) & ~torch.isfinite(after)).any())
        return flags

    def finish(self, sums: Sequence[Tensor | None]) -> None:
        """Set the buffers to the sums over all shards and ranks, for the next step."""
        for tensor, start, total in zip(self.tensors(), self._start, sums, strict=True):
            if total is None:
                continue
            tensor.data.copy_(total if start.is_floating_point() else start + total.round().to(start.dtype))
        self._in_step = False

    def tensors(self) -> list[Tensor]:
        """Return the current values of the buffers that a forward pass updates."""
        # Looked up each time: a module may put a new tensor in a buffer's place.
        return [tensor for owner, name in self._chosen if (tensor := owner._buffers[name]) is not None]  # noqa: SLF001


def _largest(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch._foreach_norm(tensors, float("inf"))  # noqa: SLF001 - what torch's own clipping calls


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
