"""A replica whose parameters are cut over ranks: its own parts as plain tensors, which the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from trainkit.strategies.base import Batch
from trainkit.strategies.core.optimizer import optimizer_state
from trainkit.strategies.core.replica import Replica, ReplicaParts, refuse_mismatch
from trainkit.strategies.fsdp.sharded.shard_geometry import ShardSlice, local_part
from trainkit.strategies.tensors.lazy_state import name_in, read_slice, shape_of
from trainkit.strategies.tensors.sharded import ShardedState, TensorShard

__all__ = ["ShardedReplica", "restore_pieces", "sharded_pieces"]


class ShardedReplica(Replica):
    """What of a model is on one rank.

    `params` and `masters` are the parts of the trainable parameters that are here, as plain tensors in the memory of
    the model's own parameters: the optimizer, its kernels and the update are those of a whole replica. Where nothing
    is cut (a single rank), it is one.

    Args:
        parts: what every replica has.
        cuts: where each parameter's part lies, trainable or not; empty where the replica is whole.
        expect: called before a shard with whether it is the last of this rank and step.
        reload: called when parameters were replaced, where the model may hold what it has gathered of them.
    """

    def __init__(
        self,
        parts: ReplicaParts,
        *,
        cuts: Mapping[str, ShardSlice],
        expect: Callable[[bool], None] | None = None,
        reload: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(parts)
        self.cuts = dict(cuts)
        self.owners = dict(parts.held.model.named_parameters())
        """The model's own parameters, which backward gives their gradients, by canonical name."""
        self.expect, self.reload = expect or _ignore_last, reload or _keep
        self.stand_in: Batch = None
        """A batch for a rank that has none in a step, and must take part in the exchanges of the others."""

    def set_stand_in(self, batch: Batch) -> None:
        """Keep a batch for steps in which this rank has none."""
        self.stand_in = batch

    def take_grads(self) -> list[Tensor | None]:
        """Take the parts of the gradients that came since the last call; None for a parameter without."""
        if not self.cuts or self.masters_apart:
            return super().take_grads()
        grads = [self.owners[name].grad for name in self.params]
        for name in self.params:
            self.owners[name].grad = None
        return [None if grad is None else local_part(grad) for grad in grads]

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts of all parameters, trainable or not, as they are saved."""
        held = self.masters
        return {name: held[name] if name in held else local_part(self.owners[name]) for name in self.cuts}


def _ignore_last(is_last: bool) -> None:
    del is_last


def _keep() -> None:
    return


def sharded_pieces(replica: ShardedReplica) -> ShardedState:
    """Return what this rank writes to a checkpoint: its shards, and, if it is the owner, the unsharded tensors."""
    found: dict[str, tuple[TensorShard, ...]] = {}
    for name, part in replica.parts.items():
        _add(found, f"param/{name}", part, replica.cuts[name], replica.is_rank0)
    for key, tensor in optimizer_state(replica.stepper.optimizer, replica.masters).items():
        _add(found, key, tensor, replica.cuts[name_in(key)], replica.is_rank0)
    saved = replica.model.state_dict(keep_vars=True)
    for name, buffer in replica.model.named_buffers():
        if replica.is_rank0 and name in saved:
            found[f"buffer/{name}"] = (TensorShard.whole(local_part(buffer)),)
    return found


def restore_pieces(replica: ShardedReplica, tensors: Mapping[str, Tensor]) -> None:
    """Take this rank's parts of the tensors of a checkpoint; no more of one is asked for than that part.

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
    if tuple(part.shape) != cut.size:  # a count of steps: the same on every rank
        if is_owner:
            found[key] = (TensorShard.whole(part),)
    elif cut.is_written and not cut.is_empty:
        found[key] = (cut.piece(part),)


class _Local(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each cut to this rank's part when it is asked for."""

    def __init__(self, wholes: Mapping[str, Tensor], cuts: Mapping[str, ShardSlice]) -> None:
        self._wholes, self._cuts = wholes, cuts

    def __getitem__(self, key: str) -> Tensor:
        cut = self._cuts.get(name_in(key))
        if cut is None or tuple(shape_of(self._wholes, key)) != cut.shape:  # a count of steps is no cut one
            return self._wholes[key]
        return read_slice(self._wholes, key, cut.region).clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._wholes)

    def __len__(self) -> int:
        return len(self._wholes)
