"""A replica whose parameters are sharded over ranks: its own shards as plain tensors, which the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainkit.errors import TrainingError
from trainkit.strategies.base import Batch
from trainkit.strategies.core.optimizer import Updater
from trainkit.strategies.core.replica import JoinNorms, Replica, ReplicaParts, refuse_mismatch
from trainkit.strategies.mesh.sums import Pass
from trainkit.strategies.tensor_shards import ShardedState, TensorShard, region
from trainkit.strategies.tensors.layouts import local_part
from trainkit.strategies.tensors.lazy_state import name_in, read_slice, shape_of


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """The part of a tensor that one rank holds: a rectangle of the full tensor, possibly empty.

    Example:
        >>> ShardSlice(offset=(2, 0), size=(2, 3), shape=(4, 3), is_written=True).region
        (slice(2, 4, None), slice(0, 3, None))
    """

    offset: tuple[int, ...]
    """Start of the part in the full tensor, dim by dim."""
    size: tuple[int, ...]
    """Shape of the part."""
    shape: tuple[int, ...]
    """The shape of the full tensor."""
    is_written: bool
    """Whether this rank writes the part and counts it in sums; exactly one of the ranks with the same part does."""

    @classmethod
    def of(cls, tensor: Tensor, *, is_first: bool) -> Self:
        """Return the part of a tensor on this rank.

        Args:
            tensor: a DTensor, sharded or replicated over its mesh; or a plain one, full on every rank.
            is_first: whether this is the first of the ranks that hold copies outside of the tensor's mesh; for a plain
                tensor, of all ranks.
        """
        if not isinstance(tensor, DTensor):
            whole = tuple(tensor.shape)
            return cls(offset=(0,) * len(whole), size=whole, shape=whole, is_written=is_first)
        coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        offset, size, firsts = [0] * tensor.dim(), list(tensor.shape), [is_first]
        for place in _order(tensor.placements):
            placement, ranks, here = tensor.placements[place], tensor.device_mesh.size(place), coordinate[place]
            dim = getattr(placement, "dim", None)
            if dim is None:
                firsts.append(here == 0)
                continue
            length = -(-size[dim] // ranks)  # as in torch.chunk: the last parts are short, or empty
            start = min(length * here, size[dim])
            offset[dim], size[dim] = offset[dim] + start, min(length, size[dim] - start)
        return cls(offset=tuple(offset), size=tuple(size), shape=tuple(tensor.shape), is_written=all(firsts))

    @property
    def region(self) -> tuple[slice, ...]:
        """Region of the part in the full tensor."""
        return region(self.offset, self.size)

    @property
    def is_empty(self) -> bool:
        """Whether the part is empty."""
        return 0 in self.size

    def piece(self, part: Tensor) -> TensorShard:
        """Return the part as a shard for a checkpoint."""
        return TensorShard(tensor=part.detach(), offset=self.offset, shape=self.shape)

    def take(self, whole: Tensor) -> Tensor:
        """Return a copy of the part of a full tensor; a tensor of another shape is not sharded and returned
        unchanged.
        """
        return whole[self.region].clone() if tuple(whole.shape) == self.shape else whole


def _order(placements: tuple[Any, ...]) -> list[int]:
    """Return the mesh axes in the order in which they shard: an axis that shards the parts of another one comes
    last.
    """
    return sorted(range(len(placements)), key=lambda place: hasattr(placements[place], "split_factor"))


def joined_norms(cuts: Sequence[ShardSlice], device: torch.device, group: dist.ProcessGroup | None = None) -> JoinNorms:
    """Return a function that combines norms of shards into norms of full tensors, over a group; None: all ranks."""
    counts = [float(cut.is_written) for cut in cuts]

    @lru_cache(maxsize=4)
    def on_device(places: tuple[int, ...], like: tuple[torch.dtype, torch.device]) -> tuple[Tensor, Tensor]:
        """Return (present gradients,) their indices, and 1 for those counted here: copied to the device once."""
        dtype, here = like
        written = torch.tensor([counts[place] for place in places], dtype=dtype, device=here)
        return torch.tensor(places, device=device), written

    def join(norms: Tensor, places: Sequence[int], order: float) -> Tensor:
        """Return (number of present gradients,) their norms; collective, without synchronisation with the device."""
        found = torch.zeros(len(cuts), dtype=norms.dtype, device=device)
        chosen, written = on_device(tuple(places), (norms.dtype, norms.device))
        if order == float("inf"):  # values that are not finite must remain, and a maximum may drop a NaN
            found[chosen] = torch.where(torch.isfinite(norms), norms, order).to(device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
            return found[chosen]
        found[chosen] = (norms**order * written).to(device)
        dist.all_reduce(found, group=group)
        joined: Tensor = found[chosen] ** (1 / order)
        return joined

    return join


class ShardedReplica(Replica):
    """The parts of a model on one rank.

    `params` and `masters` are this rank's parts of the trainable parameters, as plain tensors in the memory of the
    model's own parameters: the optimizer, its kernels and the update are those of a whole replica. A single rank shards
    nothing and has a whole replica.

    Args:
        cuts: the slice of each parameter, trainable or not; empty if the replica is whole.
        expect: called before each pass.
        reload: called when parameters were replaced, so that the model frees gathered copies.
    """

    def __init__(
        self,
        parts: ReplicaParts,
        *,
        cuts: Mapping[str, ShardSlice],
        expect: Callable[[Pass], None] | None = None,
        reload: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(parts)
        self.cuts = dict(cuts)
        self.owners = dict(parts.held.model.named_parameters())
        """The model's own parameters, which get the gradients of backward, by canonical name."""
        self.expect, self.reload = expect or (lambda _pass: None), reload or (lambda: None)
        self.stand_in: Batch = None
        """A batch for steps in which this rank has none but must take part in collectives."""

    def restricted(self, names: Container[str], stepper: Updater) -> Self:
        """Return a replica of the same parts of a model that computes and updates some of its parameters."""
        parts = self._restricted_parts(names, stepper)
        if self.cuts:
            cuts = [self.cuts[name] for name in parts.held.params]
            parts = replace(parts, join_norms=joined_norms(cuts, self.device))
        return type(self)(parts, cuts=self.cuts, expect=self.expect, reload=self.reload)

    @property
    def counted_parts(self) -> Mapping[str, bool] | None:
        """Whether this rank counts its part of each parameter in sums over ranks; None if it holds them unsharded."""
        return {name: self.cuts[name].is_written for name in self.params} if self.cuts else None

    @cached_property
    def reduced(self) -> list[nn.Parameter]:
        """The parameters whose gradients the reducer sums: those of the model, which backward reaches."""
        return [self.owners[name] for name in self.reduced_names]

    def whole(self, name: str, grad: Tensor) -> Tensor:
        """Return the whole gradient of a parameter, gathered from the ranks of `shard`; collective."""
        like = self.owners[name]
        if not isinstance(like, DTensor):
            return grad
        part = DTensor.from_local(
            grad.to(self.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
        return part.full_tensor()

    def agree_on_used(self, found: Sequence[bool]) -> None:
        """Store which parameters get gradients on any rank, the first time; collective then.

        Args:
            found: whether each parameter got one here, in the order of `params`.
        """
        if not self.used:
            rows = self.data_ranks.gather(torch.tensor(found, dtype=torch.int64))
            self.set_exchange(used=torch.stack(rows).amax(0).bool().tolist(), sparse={})

    def set_stand_in(self, batch: Batch) -> None:
        """Store a batch for steps in which this rank has none."""
        self.stand_in = batch

    def take_grads(self) -> list[Tensor | None]:
        """Return the parts of the gradients since the last call; None for a parameter without."""
        if not self.cuts or self.masters_apart:
            return super().take_grads()
        grads = [self.owners[name].grad for name in self.params]
        frozen = self.guard.frozen
        if late := [name for name, owner in self.owners.items() if name in frozen and owner.grad is not None]:
            # set in a forward pass, on the gathered parameter: the shard keeps its flag
            raise TrainingError(
                self.guard.refusal(f"requires_grad of {', '.join(sorted(late)[:5])} was changed to True")
            )
        for name in self.params:
            self.owners[name].grad = None
        return [None if grad is None else local_part(grad) for grad in grads]

    def refuse_changed_params(self, step: int, *, flags: bool = True) -> None:
        """Raise if code of the user has changed parameters; gathered ones stand in their places for a while."""
        if self.guard.change(flags=flags) is not None:
            self.reload()
        super().refuse_changed_params(step, flags=flags)

    def swap_averages(self) -> bool:
        """Exchange parameters and their averages, and free gathered copies of the parameters."""
        found = super().swap_averages()
        self.reload()
        return found

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts of all parameters, trainable or not, for a checkpoint."""
        held = self.masters
        return {name: held[name] if name in held else local_part(self.owners[name]) for name in self.cuts}


def sharded_pieces(replica: ShardedReplica) -> ShardedState:
    """Return the tensors that this rank writes to a checkpoint: its shards, and, if it is the owner, the unsharded
    tensors.
    """
    found: dict[str, tuple[TensorShard, ...]] = {}
    for name, part in replica.parts.items():
        _add(found, f"param/{name}", part, replica.cuts[name], replica.is_rank0)
    for key, tensor in replica.stepper.state(replica.masters).items():
        _add(found, key, tensor, replica.cuts[name_in(key)], replica.is_rank0)
    saved = replica.model.state_dict(keep_vars=True)
    for name, buffer in replica.model.named_buffers():
        if replica.is_rank0 and name in saved:
            found[f"buffer/{name}"] = (TensorShard.whole(local_part(buffer)),)
    return found


def restore_pieces(replica: ShardedReplica, tensors: Mapping[str, Tensor]) -> None:
    """Load this rank's parts of the tensors of a checkpoint; no more is read.

    Raises:
        CheckpointError: a parameter or buffer is missing, unknown, or of another shape.
    """
    saved = replica.model.state_dict(keep_vars=True)
    buffers = {f"buffer/{n}": local_part(b) for n, b in replica.model.named_buffers() if n in saved}
    shapes = {f"param/{name}": cut.shape for name, cut in replica.cuts.items()}
    refuse_mismatch({**shapes, **{key: tuple(buffer.shape) for key, buffer in buffers.items()}}, tensors)
    parts = {f"param/{name}": part for name, part in replica.parts.items()}
    with torch.no_grad():
        for key, part in parts.items():
            cut = replica.cuts[name_in(key)]
            part.copy_(read_slice(tensors, key, cut.region))
        for key, buffer in buffers.items():
            buffer.copy_(tensors[key])
    replica.refresh_params()
    replica.stepper.restore(replica.masters, _Local(tensors, replica.cuts))
    replica.reload()


def _add(found: dict[str, tuple[TensorShard, ...]], key: str, part: Tensor, cut: ShardSlice, is_owner: bool) -> None:
    if tuple(part.shape) != cut.size:  # a step count: the same on every rank
        if is_owner:
            found[key] = (TensorShard.whole(part),)
    elif cut.is_written and not cut.is_empty:
        found[key] = (cut.piece(part),)


class _Local(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each reduced to this rank's part on access."""

    def __init__(self, wholes: Mapping[str, Tensor], cuts: Mapping[str, ShardSlice]) -> None:
        self._wholes, self._cuts = wholes, cuts

    def __getitem__(self, key: str) -> Tensor:
        cut = self._cuts.get(name_in(key))
        if cut is None or tuple(shape_of(self._wholes, key)) != cut.shape:  # a step count is not sharded
            return self._wholes[key]
        return read_slice(self._wholes, key, cut.region).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._wholes)

    def __len__(self) -> int:
        return len(self._wholes)
