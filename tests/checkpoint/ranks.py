"""Ranks that hold a state in pieces, each doing its part of a save; run by the pool."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from tests.support.pool import Member
from trainkit.errors import CheckpointError
from trainkit.strategies.collectives import GroupCollective
from trainkit.strategies.tensor_shards import ShardedState, TensorShard, gather_full
from trainkit.trainer import failpoints
from trainkit.trainer.checkpoint import saving
from trainkit.trainer.checkpoint.saving import Saver
from trainkit.trainer.checkpoint.tensors import sha256_of_pieces
from trainkit.trainer.manifest import Retention


def state() -> dict[str, Tensor]:
    """What the ranks hold together."""
    weight = torch.arange(10.0).reshape(5, 2)
    return {
        "param/b": torch.tensor([1.5, 2.5]).to(torch.bfloat16),
        "param/w": weight,
        "buffer/count": torch.tensor(7),
        "optimizer/momentum/w": weight.double() / 3,
        "buffer/nothing": torch.empty(0, 4),
    }


def pieces_of(member: Member, scale: float = 1.0) -> ShardedState:
    """What a rank has of it: the last holds nothing, and the second has two pieces of the weight."""
    full = {name: (tensor * scale).to(tensor.dtype) for name, tensor in state().items()}
    if member.rank == 0:
        names = ("param/b", "buffer/count", "buffer/nothing")
        return {**{name: [TensorShard.whole(full[name])] for name in names}, "param/w": [_rows(full["param/w"], 1, 3)]}
    if member.rank == 1:
        weight, momentum = full["param/w"], full["optimizer/momentum/w"]
        return {
            "param/w": [_rows(weight, 0, 1), _rows(weight, 3, 5)],
            "optimizer/momentum/w": [TensorShard.whole(momentum)],
        }
    return {"param/w": ()}


def _rows(tensor: Tensor, start: int, stop: int) -> TensorShard:
    return TensorShard(tensor=tensor[start:stop], offset=(start, 0), shape=tuple(tensor.shape))


def group_of(member: Member) -> GroupCollective:
    """The ranks of the task."""
    return GroupCollective(rank=member.rank, num_ranks=member.num_ranks, device=torch.device("cpu"))


def assemble(member: Member) -> tuple[dict[str, Tensor], str]:
    """The whole state, and the hash of its weights."""
    pieces = pieces_of(member)
    return gather_full(pieces, group_of(member)), sha256_of_pieces(pieces, group_of(member))


def save_twice(member: Member, root: Path, background: bool) -> list[int]:
    """Two checkpoints, of which the first goes; what changes after the call is not saved."""
    retention = Retention(keep_last=1, keep_best=0)
    saver = Saver(root, group_of(member), retention=retention, background=background)
    for step in (1, 2):
        pieces = pieces_of(member, scale=float(step))
        saver.save(step=step, pieces=pieces, meta={"position": step, "rank": member.rank}, metric=0.5)
        for parts in pieces.values():
            for piece in parts:
                piece.tensor.zero_()
    return [checkpoint.step for checkpoint in saver.close()]


def save_and_poll(member: Member, root: Path) -> int:
    """Save beside the training, and say how often one had to look until the checkpoint stood."""
    saver = Saver(root, group_of(member))
    saver.save(step=3, pieces=pieces_of(member), meta={})
    looks = 1
    while not group_of(member).sum(torch.tensor([len(saver.finished())])):
        looks += 1
    saver.finished()  # nothing is under way: no exchange
    return looks


def fail(member: Member, root: Path, rank: int, failure: str) -> str:
    """A save that fails on one rank; what each is told."""
    saver = Saver(root, group_of(member))
    saver.save(step=1, pieces=pieces_of(member), meta={})
    saver.wait()
    if member.rank == rank:
        failpoints.ARMED = failpoints.parse(f"rank={rank},phase=save,action={failure}")
    try:
        saver.save(step=2, pieces=pieces_of(member), meta={})
        saver.wait()
    except (CheckpointError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        failpoints.ARMED = ()
    return "saved"


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 64 KiB: a real refusal by the system, half a file written."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def fill_the_disk(member: Member, root: Path) -> str:
    """The files of rank 1 are small, and no rank asks before: half of a part is written."""
    pieces = {f"param/{member.rank}": [TensorShard.whole(torch.zeros(1 << 16))]}
    saver, limit = Saver(root, group_of(member)), small_files() if member.rank == 1 else nullcontext()
    try:
        with limit, mock.patch.object(saving, "lacking", return_value=None):
            saver.save(step=2, pieces=pieces, meta={})
            saver.close()
    except CheckpointError as error:
        return str(error)
    return "saved"
