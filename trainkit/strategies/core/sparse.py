"""Sparse gradients (`nn.Embedding(sparse=True)`): exchanged as the rows that are there, and scaled without the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from trainkit.errors import Problem
from trainkit.objectives.base import Collective

__all__ = ["find_sparse", "gather_sparse", "sparse_figures", "sparse_problems", "with_values"]

_INT32: Final = 2**31


def find_sparse(grads: Sequence[Tensor | None]) -> dict[int, int]:
    """Return the indices of the sparse gradients -> their number of sparse dims (1 for an embedding).

    Example:
        >>> find_sparse([torch.ones(2), None, torch.ones(2, 3).to_sparse(1)])
        {2: 1}
    """
    found = {place: grad.sparse_dim() for place, grad in enumerate(grads) if grad is not None and grad.is_sparse}
    checks = torch.sparse.check_sparse_tensor_invariants
    if found and not checks.is_enabled():  # type: ignore[no-untyped-call]
        checks.disable()  # type: ignore[no-untyped-call] # said outright: torch and its optimizers warn otherwise
    return found


def gather_sparse(grad: Tensor | None, like: Tensor, *, sparse_dim: int, collective: Collective) -> tuple[Tensor, int]:
    """Return the sum of a sparse gradient over the ranks; collective.

    Every rank receives the rows of all and adds equal ones in the order of the ranks, so all end with the same bits.

    Args:
        grad: this rank's sum over its shards, sparse; None where it had none.
        like: the parameter; its shape and device.
        sparse_dim: dims that the indices span.
        collective: the ranks.

    Returns:
        The coalesced sum, and the bytes that this rank sent to each other.
    """
    if grad is None:
        grad = torch.sparse_coo_tensor(
            torch.empty((sparse_dim, 0), dtype=torch.int64, device=like.device),
            torch.empty((0, *like.shape[sparse_dim:]), dtype=like.dtype, device=like.device),
            like.shape,
        )
    own = grad.coalesce()
    narrow = torch.int32 if max(like.shape[:sparse_dim]) < _INT32 else torch.int64
    indices = collective.gather(own.indices().t().to(narrow).contiguous())
    values = collective.gather(own.values())
    total = torch.sparse_coo_tensor(torch.cat(indices).t().long(), torch.cat(values), like.shape).coalesce()
    most = max(len(part) for part in indices)  # shorter ones are sent padded
    row = sparse_dim * narrow.itemsize + values[0][:1].numel() * values[0].element_size() if most else 0
    return total, most * row


def sparse_problems(model: nn.Module, why: str) -> list[Problem]:
    """Embeddings with sparse gradients, for a strategy that cannot take those.

    Args:
        model: perhaps without its numbers.
        why: what becomes of such gradients there: "which are not summed".
    """
    return [
        Problem(key="model", rule=f"{name} has sparse gradients, {why}. Use sparse=False.")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]


def sparse_figures(totals: Mapping[int, Tensor], sent_bytes: int, num_ranks: int) -> dict[str, float]:
    """Return the metrics of what a step saved by exchanging sparse gradients as sparse tensors.

    Args:
        totals: their sums over the ranks.
        sent_bytes: bytes that a rank sent to each other for them.
        num_ranks: ranks of the run.

    Returns:
        `sparse_density`: elements of them that are there, over all; `sparse_saved_mb`: MiB that a rank did not send,
        against an all-reduce of the dense gradients, which sends 2 (n - 1) / n of them.
    """
    dense = sum(total.numel() for total in totals.values())
    dense_bytes = sum(total.numel() * total.element_size() for total in totals.values())
    present = sum(total.values().numel() for total in totals.values())
    saved = 2 * (num_ranks - 1) / num_ranks * dense_bytes - (num_ranks - 1) * sent_bytes
    return {"sparse_density": present / dense, "sparse_saved_mb": saved / 2**20}


def with_values(grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients with the sparse ones coalesced, and the tensors that hold their numbers.

    What is done to the second in place (scaling, clipping) is done to the first; norms over the second are those of
    the whole, since what is not there is zero. Empty ones are left out of it.
    """
    coalesced = [grad.coalesce() if grad is not None and grad.is_sparse else grad for grad in grads]
    held = [grad._values() if grad.is_sparse else grad for grad in coalesced if grad is not None]  # noqa: SLF001
    return coalesced, [values for values in held if values.numel()]
