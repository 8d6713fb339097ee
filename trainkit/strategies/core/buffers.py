"""Sum the buffers of a model, which a forward pass changes in addition to computing gradients.

Buffers are, for example, the running statistics of batch normalisation. Each shard starts from the step's buffers;
their values after its forward pass are weighted by its share of the samples and summed like a gradient. Momentum thus
acts once per step, for any number of shards.

State per sample (`sample_dims` of a module) is not averaged: the shards of a step write different parts of it, and the
changes of all shards are added to the values of the start.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigError, Problem

_T = TypeVar("_T")


class BufferGroup:
    """Buffers of one device and dtype, and their values at the start of a step.

    An operation on all of them is one launch, for any number of buffers.

    Args:
        indices: indices of the buffers among all that a forward pass updates.
        tensors: their values at the start of a step; copied.
        is_added: whether the changes of all shards are added up, as for counters (integers) and state per sample.

    Example:
        >>> group = BufferGroup([0, 2], [torch.ones(2), torch.zeros(())])
        >>> group.start.tolist(), [tuple(tensor.shape) for tensor in group.starts]
        ([1.0, 1.0, 0.0], [(2,), ()])
    """

    def __init__(self, indices: list[int], tensors: Sequence[Tensor], *, is_added: bool = False) -> None:
        self.indices, self.is_added = indices, is_added
        self.start = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        """(elements,) the values at the start of the step."""
        parts = self.start.split_with_sizes([tensor.numel() for tensor in tensors])
        self.starts = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        """The same values as views, one tensor per buffer."""

    def begin_step(self, tensors: Sequence[Tensor]) -> None:
        """Store the values of the buffers."""
        torch._foreach_copy_(self.starts, list(tensors))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors inside of a vector, without a copy."""
        unflatten = torch._utils._unflatten_dense_tensors  # noqa: SLF001 - as DDP does
        views: tuple[Tensor, ...] = unflatten(flat, self.starts)  # type: ignore[no-untyped-call]
        return list(views)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors of one dtype, one per buffer, as one copied vector."""
        flat = tensors[0].new_empty(self.start.numel())
        torch._foreach_copy_(self.views(flat), list(tensors))
        return flat

    def advanced(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return (elements,) the values of the buffers in a dtype; for integers (counters) and state per sample, their
        increments.

        Weighted increments add up to the increment, like weighted values to the value.
        """
        flat = self.joined(tensors)
        if not flat.is_floating_point():
            return flat.sub_(self.start).to(dtype)
        return flat.to(dtype).sub_(self.start) if self.is_added else flat.to(dtype)

    def write(self, tensors: Sequence[Tensor], totals: Sequence[Tensor | None]) -> None:
        """Set buffers to sums over all shards and ranks; None leaves a buffer as it is."""
        pairs = [(tensor, total) for tensor, total in zip(tensors, totals, strict=True) if total is not None]
        if not pairs:
            return
        values = [total for _, total in pairs]
        is_float = self.start.is_floating_point()
        if self.is_added or not is_float:
            starts = [start for start, total in zip(self.starts, totals, strict=True) if total is not None]
            group = BufferGroup([], starts)
            flat = torch.cat([total.reshape(-1) for total in values])
            flat = (
                (group.start + flat).to(group.start.dtype) if is_float else group.start + flat.round_().to(group.start)
            )
            values = group.views(flat)
        torch._foreach_copy_([tensor for tensor, _ in pairs], values)


def holds_samples(owner: nn.Module, leaf: str) -> bool:
    """Return whether a module declares a buffer of its own as state per sample, in `sample_dims`."""
    return getattr(owner, "sample_dims", {}).get(leaf) is not None


def sample_dims_of(model: nn.Module) -> dict[str, int | None]:
    """Return the dim of the samples of each buffer that a module declares in `sample_dims`; None: it has none.

    Raises:
        ConfigError: a declared name is not a buffer of its module, or the buffer has no such dim.

    Example:
        >>> class Memory(nn.Module):
        ...     sample_dims = {"state": 1}
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("state", torch.zeros(2, 8, 4))
        >>> sample_dims_of(nn.Sequential(Memory()))
        {'0.state': 1}
    """
    dims: dict[str, int | None] = {}
    for path, module in model.named_modules():
        for leaf, dim in getattr(module, "sample_dims", {}).items():
            buffer = dict(module.named_buffers(recurse=False)).get(leaf)
            rule = f"{type(module).__name__}.sample_dims has {leaf!r}: {dim!r}, and "
            if buffer is None:
                raise ConfigError([Problem(key="model", rule=f"{rule}the module has no buffer of this name.")])
            if dim is not None and (type(dim) is not int or not 0 <= dim < buffer.dim()):
                rule += f"the shape of the buffer is {tuple(buffer.shape)}. Name one of its dims, from 0, or None."
                raise ConfigError([Problem(key="model", rule=rule)])
            dims[f"{path}.{leaf}" if path else leaf] = dim
    return dims


def written_indices(before: Tensor, after: Tensor, dim: int) -> Tensor:
    """Return (size of the dim,) bool: the indices of a dim at which a pass has changed a buffer."""
    return (before != after).movedim(dim, 0).unsqueeze(-1).flatten(1).any(1)


def sum_problem(name: str, buffer: Tensor, dtype: torch.dtype) -> Problem | None:
    """Return the problem of a buffer that a forward pass updates, and that a sum over shards in a dtype does not keep.

    Example:
        >>> sum_problem("mean", torch.zeros(2, dtype=torch.float64), torch.float32).rule[:48]
        'buffer mean is float64, and forward changes it: '
    """
    if buffer.is_complex():
        rule = f"buffer {name} holds complex numbers, and forward changes it. Keep torch.view_as_real of it."
    elif buffer.is_floating_point() and buffer.dtype.itemsize > dtype.itemsize:
        rule = f"buffer {name} is float64, and forward changes it: results of shards are added up in float32. Make it "
        rule += "float32, or use precision=fp64."
    else:
        return None
    return Problem(key="model", rule=rule)


class StepBuffers:
    """The buffers of a model through the shards of a step.

    Buffers that no forward pass updates cost nothing. `watch` finds the updated ones in a forward pass, by torch's
    version counters; the ranks agree on them and pass them to `settle`. A ResNet-50 updates 159 buffers, most of a few
    hundred elements: they are read and written as one vector per dtype, in a few launches per shard.

    Args:
        dtype: the dtype of their sums.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.names = tuple(name for name, _ in model.named_buffers())
        self._all = [_owner(model, name) for name in self.names]
        self._chosen = self._all
        self._dtype = dtype
        self._layout: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._groups: list[BufferGroup] = []
        self._sums: list[Tensor] | None = None
        """One vector per group."""
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
        pairs = zip(self.tensors(), self._starts(), strict=True)
        differs = [not torch.equal(tensor, start) for tensor, start in pairs]
        after = self.versions()
        return [float(old != new or moved) for old, new, moved in zip(before, after, differs, strict=True)]

    def settle(self, changed: Sequence[float]) -> None:
        """Keep only the buffers that a forward pass updates, on any rank; also in the middle of a step.

        Raises:
            ConfigError: no sum over shards keeps one of them.
        """
        indices = [index for index, flag in enumerate(changed) if flag]
        for name, (owner, leaf) in ((self.names[index], self._all[index]) for index in indices):
            buffer = owner._buffers[leaf]  # noqa: SLF001 - as in `tensors`
            if buffer is not None and (problem := sum_problem(name, buffer, self._dtype)) is not None:
                raise ConfigError([problem])
        self._chosen = [self._all[index] for index in indices]
        if not self._groups:
            return
        starts, sums = self._starts(), None if self._sums is None else self._unjoined(self._sums)
        self._lay_out([starts[index] for index in indices])
        if sums is not None:
            self._sums = [group.joined(tensors) for group, tensors in self._split([sums[index] for index in indices])]

    def settle_like(self, other: StepBuffers) -> None:
        """Keep the same buffers as those of another copy of the model."""
        chosen_ids = {id(entry) for entry in other._chosen}
        self._chosen = [entry for entry, twin in zip(self._all, other._all, strict=True) if id(twin) in chosen_ids]

    def for_all_names(self, sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the sum for each buffer that a forward pass updates, in the order of `names`; None for the others."""
        sum_of = dict(zip(map(id, self._chosen), sums, strict=True))
        return [sum_of.get(id(entry)) for entry in self._all]

    def updated_names(self) -> list[str]:
        """Return the names of the buffers that a forward pass updates."""
        chosen_ids = set(map(id, self._chosen))
        return [name for name, entry in zip(self.names, self._all, strict=True) if id(entry) in chosen_ids]

    def shapes(self) -> list[torch.Size]:
        """Return the shapes of the tensors that `take` returns."""
        return [tensor.shape for tensor in self.tensors()]

    def begin_step(self) -> None:
        """Store the values from which every shard of the step starts."""
        tensors = self.tensors()
        if [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors] == self._layout:
            for group, part in self._split(tensors):
                group.begin_step(part)
        else:
            self._lay_out(tensors)
        self._sums = None
        self._in_step = True

    @torch.no_grad()
    def end_forward(self, share: float, within: Container[nn.Module] | None = None) -> None:
        """Read the buffers after a forward pass; before backward, which may recompute it.

        Args:
            share: this shard's fraction of the samples of the step.
            within: the modules that the pass ran; None: all.
        """
        if not self._chosen:
            return
        parts = [group.advanced(part, self._dtype) for group, part in self._split(self.tensors())]
        counted = float(share > 0)  # a shard that only takes part in collectives counts nothing
        if within is None:
            torch._foreach_mul_(parts, [counted if group.is_added else share for group in self._groups])
        else:
            shares = [
                (counted if holds_samples(owner, leaf) else share) if owner in within else 0.0
                for owner, leaf in self._chosen
            ]
            for part, (group, group_shares) in zip(parts, self._split(shares), strict=True):
                torch._foreach_mul_(group.views(part), group_shares)
        if self._sums is None:
            self._sums = parts
        else:
            torch._foreach_add_(self._sums, parts)

    def reset(self) -> None:
        """Restore the values of the start of the step; by `.data`, so that a later backward pass still works."""
        for group, part in self._split(self.tensors()):
            torch._foreach_copy_([tensor.data for tensor in part], group.starts)

    def recover(self) -> None:
        """Undo the changes of an interrupted step; does nothing between steps."""
        if self._in_step:
            self.reset()
            self._sums, self._in_step = None, False

    def take(self) -> list[Tensor]:
        """Return the sums over the shards since the last call; zeros if there was none."""
        sums, self._sums = self._sums, None
        if sums is None:
            sums = [torch.zeros_like(group.start, dtype=self._dtype) for group in self._groups]
        return self._unjoined(sums)

    def became_nonfinite(self, sums: Sequence[Tensor | None]) -> list[Tensor]:
        """Return () flags, one per device: whether a buffer that was finite is not finite in the sums over all
        shards.
        """
        pairs = zip(self._starts(), sums, strict=True)
        floats = [(start, total) for start, total in pairs if total is not None and start.is_floating_point()]
        floats = [(start, total) for start, total in floats if total.numel()]
        flags = []
        for device in {total.device for _, total in floats}:
            on_device = [(start, total) for start, total in floats if total.device == device]
            before = torch.stack(_largest([start for start, _ in on_device]))
            after = torch.stack(_largest([total for _, total in on_device]))
            flags.append((torch.isfinite(before) & ~torch.isfinite(after)).any())
        return flags

    @torch.no_grad()
    def finish(self, sums: Sequence[Tensor | None]) -> None:
        """Set the buffers to the sums over all shards and ranks, for the next step."""
        for group, part in self._split(list(zip(self.tensors(), sums, strict=True))):
            group.write([tensor.data for tensor, _ in part], [total for _, total in part])
        self._in_step = False

    def per_sample(self) -> list[Tensor]:
        """Return the current values of the buffers that hold state per sample."""
        return [owner._buffers[leaf] for owner, leaf in self._all if holds_samples(owner, leaf)]  # type: ignore[misc]  # noqa: SLF001

    def tensors(self) -> list[Tensor]:
        """Return the current values of the buffers that a forward pass updates."""
        # Looked up each time: a module may put a new tensor in a buffer's place.
        return [tensor for owner, name in self._chosen if (tensor := owner._buffers[name]) is not None]  # noqa: SLF001

    def _lay_out(self, starts: Sequence[Tensor]) -> None:
        """Group buffers by device and dtype, and store their values at the start of the step."""
        self._layout = [(tensor.shape, tensor.dtype, tensor.device) for tensor in starts]
        groups: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        present = ((owner, leaf) for owner, leaf in self._chosen if owner._buffers[leaf] is not None)  # noqa: SLF001
        for index, ((_, dtype, device), entry) in enumerate(zip(self._layout, present, strict=True)):
            groups.setdefault((device, dtype, holds_samples(*entry)), []).append(index)
        self._groups = [
            BufferGroup(indices, [starts[index] for index in indices], is_added=is_added)
            for (_, _, is_added), indices in groups.items()
        ]

    def _split(self, values: Sequence[_T]) -> list[tuple[BufferGroup, list[_T]]]:
        """Return each group with its part of `values`, which has one value per buffer."""
        return [(group, [values[index] for index in group.indices]) for group in self._groups]

    def _unjoined(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors inside of the groups' vectors, in the order of the buffers."""
        tensors: dict[int, Tensor] = {}
        for group, flat in zip(self._groups, flats, strict=True):
            tensors.update(zip(group.indices, group.views(flat), strict=True))
        return [tensors[index] for index in range(len(tensors))]

    def _starts(self) -> list[Tensor]:
        """Return the values at the start of the step, in the order of the buffers."""
        return self._unjoined([group.start for group in self._groups])


def _largest(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch._foreach_norm(tensors, float("inf"))  # noqa: SLF001 - what torch's own clipping calls


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
